"""What goes through a network and comes out of it: draws by name, and outputs of any type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesify.weights.placed import PlacedWeights
from bayesify.weights.structured import StructuredWeight

WeightDict = Mapping[str, Tensor]


def stack(*leaves: Any) -> Any:
    """Stack tensors along a new first axis; anything else must be equal in every draw and is kept once."""
    return torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0]


def each(values: WeightDict) -> Iterator[WeightDict]:
    """The draws one by one, without the axis of draws.

    One `unbind` for all of them: indexing each would fill a gradient of the size of all draws per draw.
    """
    if count_draws(values) == 1 or isinstance(values, PlacedWeights):
        yield from (at(values, index) for index in range(count_draws(values)))
        return
    for draw in zip(*(value.unbind(0) for value in values.values()), strict=True):
        yield dict(zip(values, draw, strict=True))


def at(values: WeightDict, index: int | slice) -> WeightDict:
    """One draw (no axis of draws any more) or a slice of draws."""
    if isinstance(values, PlacedWeights) and isinstance(index, int):
        return values.at(index)
    if index == 0 and count_draws(values) == 1:
        return {
            name: value.unbind(0)[0] if isinstance(value, StructuredWeight) else value.squeeze(0)
            for name, value in values.items()
        }
    return {
        name: value.at(index) if isinstance(value, StructuredWeight) else value[index] for name, value in values.items()
    }


def count_draws(values: WeightDict) -> int:
    """Length of the axis of draws."""
    if isinstance(values, PlacedWeights):
        return values.num_draws
    return next(iter(values.values())).shape[0]


def as_tree(output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A network's output as nested dicts, lists and tensors, and the way back to its own type.

    Dataclasses (and Mappings of other types, as Hugging Face's outputs are) are not known to `vmap`.
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        kind = type(output)
        fields = {entry.name: getattr(output, entry.name) for entry in dataclasses.fields(output)}
        missing = {key: None for key, value in fields.items() if value is None}
        present = {key: value for key, value in fields.items() if value is not None}
        return present, lambda tree: kind(**missing, **tree)
    if isinstance(output, Mapping) and type(output) is not dict:
        mapping: Any = type(output)
        return dict(output), lambda tree: mapping(**tree)
    return output, lambda tree: tree


def select_output(output: Any, key: str | int | None) -> Tensor:
    """The tensor among a network's outputs that the likelihood is about.

    Args:
        output: A tensor, or a tuple, dict or dataclass of tensors.
        key: Which entry; if `None`, the only tensor, or the one called `logits`.

    Raises:
        ValueError: If it is not clear which one, or there is none.
    """
    if isinstance(output, Tensor):
        if key is not None:
            raise ValueError(f"output={key!r}, but the network returns a single tensor; give output=None")
        return output
    tree, _ = as_tree(output)
    entries = dict(enumerate(tree)) if isinstance(tree, (tuple, list)) else tree
    if not isinstance(entries, dict):
        raise ValueError(f"the network returns {type(output).__name__}; it must return tensors")
    if key is not None:
        if key not in entries:
            raise ValueError(f"the network's output has no entry {key!r}; it has {list(entries)}")
        chosen = entries[key]
        if not isinstance(chosen, Tensor):
            raise ValueError(f"the network's output {key!r} is {type(chosen).__name__}; name an entry that is a tensor")
        return chosen
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    if "logits" in tensors:
        return tensors["logits"]
    raise ValueError(
        f"the network returns {list(entries)}; say which one the likelihood is about: bayesianize(..., output=...)"
    )
