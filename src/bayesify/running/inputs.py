"""What a user gives a network: inputs in any form, checked, and errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import check_finite
from bayesify.running.modes import outside_inference_mode


def as_inputs(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs of a network: a tensor, a tuple or list of inputs, or a mapping of keyword inputs."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, (tuple, list)):
        return tuple(x), {}
    return (x,), {}


def check_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for inputs that are arrays of another library, or hold NaN or infinity."""
    for key, value in [*enumerate(args), *kwargs.items()]:
        if len(args) > 1 and isinstance(value, (int, float)) and not isinstance(value, bool) and key == 0:
            raise TypeError("inputs are a list of numbers; give a tensor, torch.tensor([...]) makes one of them")
        if not isinstance(value, Tensor) and hasattr(value, "__array__"):
            raise TypeError(f"inputs are {type(value).__name__}; give tensors, torch.from_numpy(...) makes them")
        if isinstance(value, Tensor) and value.is_floating_point() and should_check(value):
            check_finite(value, "inputs" if key == 0 else f"inputs {key!r}")


def _in_words(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """How many inputs there are and how they were given, where that is not one tensor."""
    if kwargs:
        return f"keyword inputs {', '.join(kwargs)}"
    return f"{len(args)} positional inputs (a tuple or a list of inputs is taken apart: stack a batch into one tensor)"


@contextmanager
def explain_shape_errors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Say in an error about shapes, types or the number of arguments that it is the network's inputs that do not fit."""
    try:
        yield
    except TypeError as error:
        if "argument" not in str(error) or (len(args) == 1 and not kwargs):
            raise
        raise TypeError(f"the network does not take {_in_words(args, kwargs)}: {error}") from error
    except (RuntimeError, IndexError) as error:
        words = ("shape", "size", "dim", "type", "channel", "index out of range")
        if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in words):
            raise
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given = ", ".join(f"shape {tuple(x.shape)} and type {str(x.dtype).removeprefix('torch.')}" for x in tensors)
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if len(args) != 1 or kwargs:
            given += f" ({_in_words(args, kwargs)})"
        raise ValueError(
            f"inputs of {given} do not fit the network: {reason}; give inputs of the shape and type it was made for"
        ) from error


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Examples in a batch: the length of the first input tensor."""
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    kinds = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
    raise ValueError(
        f"predict: no tensor with a batch dimension among the inputs ({kinds}); give at least one, [B, ...]; "
        "of a loader, predict each batch"
    )


def check_lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `ValueError` if inputs have different first lengths: which of them is the batch's is not known."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    lengths = dict.fromkeys(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    if len(lengths) > 1:
        raise ValueError(
            f"predict: inputs have first axes of {' and '.join(map(str, lengths))} entries, so the batch cannot be cut by "
            "examples; give split_batch=False, and the network gets all of it at once"
        )


def split_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Cut a batch into pieces of `rows` examples; inputs that do not have the batch's length go to every piece whole."""
    total = batch_size(args, kwargs)
    for start in range(0, total, rows):

        def cut(leaf: Any, start: int = start) -> Any:
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total:
                return leaf[start : start + rows]
            return leaf

        yield pytree.tree_map(cut, (args, dict(kwargs)))


def spread_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> tuple[Any, dict[str, Any]]:
    """Some examples from all over a batch, those of its halves in turn; inputs that do not have the batch's length stay whole."""
    total = batch_size(args, kwargs)
    count = min(rows, total)
    places = [(total - 1) * place // max(1, count - 1) for place in range(count)]
    middle = (count + 1) // 2
    index = [place for pair in zip_longest(places[middle:], places[:middle]) for place in pair if place is not None]

    def pick(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total else leaf

    found: tuple[Any, dict[str, Any]] = pytree.tree_map(pick, (args, dict(kwargs)))
    return found


class Untouched:
    """Inputs for several passes of a network that may change them in place: each pass sees the same values, the caller's stay.

    One copy serves as long as its tensors' versions do not move.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._given = (args, dict(kwargs))
        self._copy: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs for the next pass."""
        if self._copy is None or any(tensor._version != version for tensor, version in self._versions):
            self._versions = []
            with outside_inference_mode():  # tensors made in inference mode have no version
                args, kwargs = self._given
                if not kwargs and all(type(value) is Tensor for value in args):  # which is seen in less time
                    self._copy = tuple(map(self._clone, args)), {}
                else:
                    self._copy = pytree.tree_map_only(Tensor, self._clone, self._given)
        return self._copy

    def _clone(self, tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        self._versions.append((copied, copied._version))
        return copied
