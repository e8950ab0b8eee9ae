"""What a user gives a network: inputs in any form, checked, and errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
