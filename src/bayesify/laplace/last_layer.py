"""Which layer of a network runs last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesify.execution import Runner, split_rows
from bayesify.weights import Weight


def last_layer(
    runner: Runner, weights: Mapping[str, Weight], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Weights of the module that runs last among those with trainable weights of their own.

    Args:
        runner: The network.
        weights: Its trainable weights by name.
        args: Positional inputs; one example is run.
        kwargs: Keyword inputs.

    Raises:
        ValueError: If no such module was called.
    """
    called: list[nn.Module] = []
    own = [module for module in runner.network.modules() if len(list(module.parameters(recurse=False)))]
    handles = [module.register_forward_hook(lambda module, _, __: called.append(module)) for module in own]
    try:
        runner.call({}, *next(split_rows(args, kwargs, 1)))
    finally:
        for handle in handles:
            handle.remove()
    for module in reversed(called):
        mine = {id(parameter) for parameter in module.parameters()}
        names = [name for name in weights if id(runner.network.get_parameter(name)) in mine]
        if names:
            return names
    raise ValueError("Laplace: no layer with trainable weights was called; name the weights, subset=[...]")
