"""Gradients by any weight, example by example, for layers without a rule of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.running.kernels import twice_differentiable
from bayesify.running.memory import batch_size
from bayesify.running.outputs import select_output
from bayesify.running.plain_recurrence import PlainRecurrence
from bayesify.running.runner import FILTERS, SLOW_VMAP, Runner


def example_gradients(
    runner: Runner,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    vectors: Tensor,
    output: str | int | None = None,
) -> dict[str, Tensor]:
    """Gradients of `sum(vectors[k, b] * f(x_b))` by weights, for each k and b, by running one example at a time.

    `vmap` runs them together where it can; recurrent cells, packed sequences and what it refuses run in a loop.

    Args:
        runner: The network.
        values: The weights by first name.
        args: Positional inputs of B examples.
        kwargs: Keyword inputs.
        vectors: [K, B, ...].
        output: Which of several outputs.

    Returns:
        By name, [K, B, *shape].
    """
    with twice_differentiable(runner.network):
        if not any(isinstance(module, nn.RNNCellBase) for module in runner.network.modules()):
            try:
                return _together(runner, values, args, kwargs, vectors, output)
            except RuntimeError as refusal:
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
        return _one_by_one(runner, values, args, kwargs, vectors, output)


def _together(
    runner: Runner,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    vectors: Tensor,
    output: str | int | None,
) -> dict[str, Tensor]:
    batch = batch_size(args, kwargs)
    inputs = (args, dict(kwargs))
    leaves, structure = pytree.tree_flatten(inputs)
    axes = [0 if _is_rowwise(leaf, batch) else None for leaf in leaves]
    mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]

    def score(weights: dict[str, Tensor], rows: list[Tensor], vector: Tensor) -> Tensor:
        given = iter(rows)
        filled = [next(given).unsqueeze(0) if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        one_args, one_kwargs = pytree.tree_unflatten(filled, structure)
        found = select_output(runner.call(weights, one_args, one_kwargs), output)
        return (found[0] * vector.to(found.dtype)).sum()

    by_example = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0, 0), randomness="same")
    weights = dict(values)
    with FILTERS, PlainRecurrence(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SLOW_VMAP)  # still faster than a loop in Python
        parts = [by_example(weights, mapped, vector) for vector in vectors]
    return {name: torch.stack([part[name] for part in parts]) for name in weights}


def _one_by_one(
    runner: Runner,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    vectors: Tensor,
    output: str | int | None,
) -> dict[str, Tensor]:
    batch = batch_size(args, kwargs)
    differentiable = torch.is_grad_enabled() and any(value.requires_grad for value in values.values())
    weights = {
        name: value if value.requires_grad else value.detach().requires_grad_() for name, value in values.items()
    }
    found: dict[str, list[Tensor]] = {name: [] for name in weights}
    for row in range(batch):
        one_args, one_kwargs = pytree.tree_map(_take(row, batch), (args, dict(kwargs)))
        with torch.enable_grad():
            outputs = select_output(runner.call(weights, one_args, one_kwargs), output)[0]
        if not outputs.requires_grad:  # no layer of these weights saw this example
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


def _take(row: int, batch: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf[row : row + 1] if _is_rowwise(leaf, batch) else leaf


def _is_rowwise(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch
