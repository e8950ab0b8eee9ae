"""Several draws in one batch. Each draw has its own rows, and the network, with its caches, runs once for all draws."""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.running.inputs_and_outputs import Args, Kwargs, WeightDict, batch_size
from bayesify.weights.catalog import Weight, owner_of
from bayesify.weights.structured import StructuredWeight


class NotByRows(RuntimeError):
    """Raised if a network uses a drawn weight, or the batch, in a way that does not keep the rows of different draws apart."""


class RowWeight(StructuredWeight):
    r"""S draws of a linear map's weight, [S, *shape]. Draw number s applies to block s of the S B rows of a batch,
    $y_{sb} = W_s x_{sb}$. As a tensor, a `RowWeight` has the shape of one draw."""

    def __new__(cls, draws: Tensor, rows: int) -> Self:
        """Wrap draws."""
        return cls.wrap(draws.shape[1:], draws, (draws,), (rows,))

    def materialize(self) -> Tensor:
        """Always raises `NotByRows`, because no single tensor represents S draws."""
        raise NotByRows("a drawn weight is used by a function other than torch.nn.functional.linear")


@RowWeight.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weights, biases = (part.components_[0] if isinstance(part, RowWeight) else None for part in (weight, bias))
    given: Any = weight if weights is not None else bias
    if isinstance(x, RowWeight) or x.ndim < 2 or (x.shape[0],) != given.static_:
        raise NotByRows(
            f"a linear map with a drawn weight gets a tensor of shape {tuple(x.shape)}, which does not consist of the "
            "rows of the batch"
        )
    parts = x.reshape(len(given.components_[0]), -1, x.shape[-1])  # [S, B ..., d_in]
    found = F.linear(parts, weight) if weights is None else torch.bmm(parts, weights.mT)
    if bias is not None:
        found = found + (bias if biases is None else biases.unsqueeze(1))
    return found.reshape(*x.shape[:-1], -1)


def can_take_rows(network: nn.Module, weights: Mapping[str, Weight]) -> bool:
    """Whether all drawn weights belong to plain linear layers, the only layers that can apply each draw to its own rows."""
    return all(type(owner_of(network, name)[0]).forward is nn.Linear.forward for name in weights)


def as_rows(
    values: WeightDict, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Tensor], tuple[Any, ...], dict[str, Any]]:
    """Weights and inputs for one pass over a batch that contains each example S times. The rows of one draw are adjacent.

    Weights are [S, *shape]. Input tensors whose first axis has another length than the batch are shared by all draws.
    Raises `NotByRows` if an input, such as a cache, is neither a tensor nor a plain value.
    """
    num_draws, examples = len(next(iter(values.values()))), batch_size(args, kwargs)

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.repeat(num_draws, *[1] * (leaf.ndim - 1)) if leaf.ndim and len(leaf) == examples else leaf
        if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            raise NotByRows(f"an input has type {type(leaf).__name__}, which cannot be split into rows")
        return leaf

    own_args, own_kwargs = pytree.tree_map(repeat, (args, dict(kwargs)))
    return {name: RowWeight(value, num_draws * examples) for name, value in values.items()}, own_args, own_kwargs


def split_draws(tree: Any, num_draws: int, rows: int) -> Any:
    """Split outputs [S B, ...] into [S, B, ...] in a tree. Raises `NotByRows` if a tensor has another number of rows."""

    def split(leaf: Tensor) -> Tensor:
        if not leaf.ndim or len(leaf) != rows:
            raise NotByRows(f"an output of shape {tuple(leaf.shape)} does not have one entry per row")
        found: Tensor = leaf.unflatten(0, (num_draws, -1))
        return found

    return pytree.tree_map_only(Tensor, split, tree)
