"""Gradients with respect to any weight, example by example, for layers that have no rule in `rules`."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.running.inputs_and_outputs import batch_size, select_output, split_rows
from bayesify.running.modes import twice_differentiable
from bayesify.running.plain_recurrence import PlainRecurrence
from bayesify.running.runner import FILTERS, SLOW_VMAP, Runner

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Inputs = tuple[Args, Kwargs]
"""Positional and keyword inputs of the examples of a batch."""


def example_gradients(
    runner: Runner,
    values: Mapping[str, Tensor],
    args: Args,
    kwargs: Kwargs,
    vectors: Tensor,
    output: str | int | None = None,
) -> dict[str, Tensor]:
    """Gradients of `sum(vectors[k, b] * f(x_b))` with respect to weights, one for each k and each example b: [K, B, *shape].

    `vmap` runs the examples together if possible. For recurrent cells, packed sequences, and networks that `vmap` refuses,
    examples run one at a time. The vectors are [K, B, ...]. A weight that several modules share appears only under its first
    name.
    """

    def run(weights: dict[str, Tensor], inputs: tuple[Any, Any]) -> Tensor:
        return select_output(runner.call(weights, *inputs), output)[0]

    inputs, weights = (args, dict(kwargs)), dict(values)
    with twice_differentiable(runner.network):
        if not any(isinstance(module, nn.RNNCellBase) for module in runner.network.modules()):
            try:
                return _together(run, weights, inputs, vectors)
            except RuntimeError as refusal:
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
        return _one_by_one(run, weights, inputs, vectors)


Run = Callable[[dict[str, Tensor], tuple[Any, Any]], Tensor]
"""Outputs of one example from weights and inputs."""


def _together(run: Run, weights: dict[str, Tensor], inputs: tuple[Any, Any], vectors: Tensor) -> dict[str, Tensor]:
    batch = batch_size(*inputs)
    leaves, structure = pytree.tree_flatten(inputs)
    axes = [0 if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == batch else None for leaf in leaves]
    mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]

    def score(weights: dict[str, Tensor], rows: list[Tensor], vector: Tensor) -> Tensor:
        given = iter(rows)
        filled = [next(given).unsqueeze(0) if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        found = run(weights, pytree.tree_unflatten(filled, structure))
        return (found * vector.to(found.dtype)).sum()

    by_example = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0, 0), randomness="same")
    with FILTERS, PlainRecurrence(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SLOW_VMAP)  # still faster than a loop in Python
        parts = [by_example(weights, mapped, vector) for vector in vectors]
    return {name: torch.stack([part[name] for part in parts]) for name in weights}


def _one_by_one(run: Run, values: dict[str, Tensor], inputs: tuple[Any, Any], vectors: Tensor) -> dict[str, Tensor]:
    differentiable = torch.is_grad_enabled() and any(value.requires_grad for value in values.values())
    weights = {
        name: value if value.requires_grad else value.detach().requires_grad_() for name, value in values.items()
    }
    found: dict[str, list[Tensor]] = {name: [] for name in weights}
    for row, one in enumerate(split_rows(*inputs, 1)):
        with torch.enable_grad():
            outputs = run(weights, one)
        if not outputs.requires_grad:  # this example's outputs do not depend on the weights
            for name, value in weights.items():
                found[name].append(value.new_zeros(len(vectors), *value.shape))
            continue
        grads = [
            torch.autograd.grad(
                outputs,
                list(weights.values()),
                vector.to(outputs.dtype),
                retain_graph=True,
                create_graph=differentiable,
                allow_unused=True,
                materialize_grads=True,
            )
            for vector in vectors[:, row]
        ]
        for place, name in enumerate(weights):
            found[name].append(torch.stack([grad[place] for grad in grads]))
    return {name: torch.stack(parts, dim=1) for name, parts in found.items()}
