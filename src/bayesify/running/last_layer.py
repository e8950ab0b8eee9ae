"""Which layer of a network its output comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.running.inputs_and_outputs import select_output, split_rows
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Weight, owner_of


@torch.enable_grad()
def last_layer(
    runner: Runner,
    weights: Mapping[str, Weight],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: str | int | None = None,
    *,
    values: Mapping[str, Tensor] | None = None,
    owner: str = "Laplace",
) -> list[str]:
    """Weights of the linear map that runs last among those that the output depends on.

    Args:
        runner: The network.
        weights: Its trainable weights by name.
        args: Positional inputs; one example is run.
        kwargs: Keyword inputs.
        output: Which of several outputs.
        values: The weights' values; the network's own by default.
        owner: Who says so in an error.

    Raises:
        ValueError: If no linear map was called, or one is used without being called, so that it is not known which is last.
    """
    network = runner.network
    maps = {name: owner_of(network, name)[0] for name, weight in weights.items() if weight.kind == "matrix"}
    parents = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    inside = {id(child): parent for parent in parents for child in parent.modules()}
    owners = {name: inside.get(id(module), module) for name, module in maps.items()}  # attention runs as one layer
    called: list[nn.Module] = []
    unique = {id(module): module for module in owners.values()}
    known = values or {}
    own = {name: known[name] if name in known else network.get_parameter(name) for name in maps}
    given = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
    with runner.alone() as alone:
        for module in unique.values():
            alone.module(module).register_forward_hook(lambda _, __, ___, module=module: called.append(module))
        outputs = select_output(alone.call({**known, **given}, *next(split_rows(args, kwargs, 1))), output)
    reached = _leaves(outputs.grad_fn)
    used = [name for name, value in given.items() if id(value) in reached]
    hidden = [name for name in used if not any(owners[name] is module for module in called)]
    if hidden:
        raise ValueError(
            f"{owner}: {hidden[0]} is used without a call of its layer, so that the last layer is not known; name its weights, "
            f"subset=[{hidden[0]!r}, ...]"
        )
    for module in reversed(called):
        names = [name for name in used if owners[name] is module]
        if names:
            return names
    raise ValueError(f"{owner}: the output depends on no trainable linear map; name the weights, subset=[...]")


def _leaves(node: Any) -> set[int]:
    """Identities of the tensors that a node of the graph of derivatives goes back to; nothing is differentiated for it."""
    found: set[int] = set()
    seen, waiting = {None}, [node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [parent for parent, _ in node.next_functions]
    return found
