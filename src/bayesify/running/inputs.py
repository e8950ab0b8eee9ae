"""What a user gives a network: inputs in any form, checked, and errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import check_finite


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
        if not isinstance(value, Tensor) and hasattr(value, "__array__"):
            raise TypeError(f"inputs are {type(value).__name__}; give tensors, torch.from_numpy(...) makes them")
        if isinstance(value, Tensor) and value.is_floating_point() and should_check(value):
            check_finite(value, "inputs" if key == 0 else f"inputs {key!r}")


@contextmanager
def explain_shape_errors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Say in an error of torch's about shapes and types that it is the network's inputs that do not fit."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        words = ("shape", "size", "dim", "type", "channel", "index out of range")
        if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in words):
            raise
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given = ", ".join(f"shape {tuple(x.shape)} and type {str(x.dtype).removeprefix('torch.')}" for x in tensors)
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"inputs of {given} do not fit the network: {reason}; give inputs of the shape and type it was made for"
        ) from error
