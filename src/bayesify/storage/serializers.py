"""Which types can be stored, and how each goes to disk and comes back; `storage` does the writing and reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Serializer:
    """How one type goes to disk and comes back.

    Args:
        kind: The class; subclasses are stored by the same rule unless they have their own.
        name: Its name in files.
        config: From an object to plain data.
        state: From an object to its tensors by dotted name.
        fingerprint: From an object to the `fingerprint` of the user's network that it was made from.
        restore: From (network, config, state) to an object; it works on a copy of the network.
        needs_network: Whether the network's code is needed; `load` then asks for a network.
    """

    kind: type
    name: str
    config: Callable[[Any], Any]
    state: Callable[[Any], Mapping[str, Tensor]]
    fingerprint: Callable[[Any], dict[str, str]]
    restore: Callable[[nn.Module, Any, dict[str, Tensor]], Any]
    needs_network: bool = True


SERIALIZERS: dict[str, Serializer] = {}
"""Every type that `save` takes, by its name in files."""


def register_serializer(serializer: Serializer) -> None:
    """Teach `save` and `load` a type.

    Raises:
        ValueError: If the name is taken.
    """
    if serializer.name in SERIALIZERS:
        raise ValueError(f"register_serializer: {serializer.name!r} is taken; give the type another name")
    SERIALIZERS[serializer.name] = serializer


def serializer_for(model: Any) -> Serializer:
    """The rule for an object: that of its class, or of the nearest class it inherits from.

    Raises:
        TypeError: If there is none.
    """
    kinds = {serializer.kind: serializer for serializer in SERIALIZERS.values()}
    for base in type(model).__mro__:
        if base in kinds:
            return kinds[base]
    known = ", ".join(kind.__name__ for kind in kinds)
    raise TypeError(f"save: {type(model).__name__} cannot be stored; known: {known} (see register_serializer)")


def fingerprint(module: nn.Module) -> dict[str, str]:
    """Shape and type of each parameter and buffer of a network by name, and the class of each of its modules."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    kinds = {f"module {path or '(root)'}": type(part).__name__ for path, part in module.named_modules()}
    return {name: describe(tensor.shape, tensor.dtype) for name, tensor in named.items()} | kinds


def describe(shape: torch.Size, dtype: torch.dtype) -> str:
    """Shape and type of a tensor in words, as a fingerprint has them."""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
