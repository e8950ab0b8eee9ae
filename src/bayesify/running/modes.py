"""Contexts that change modes of torch or attributes of objects, and restore them at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context in which new tensors are trainable even if the caller is in inference mode. The gradient mode does not change."""
    with_grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
        yield


@contextmanager
def full_precision(device: str) -> Iterator[torch.dtype | None]:
    """Turn autocast off and yield its dtype. Autocast suits the network, but a KL in bfloat16 would be wrong by several percent."""
    if not torch.is_autocast_enabled(device):
        yield None
        return
    with torch.autocast(device, enabled=False):
        yield torch.get_autocast_dtype(device)


@contextmanager
def assigned(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of several objects has one value. At the end, each object gets its own value back."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)


@contextmanager
def modes_kept(modules: Iterable[nn.Module], *, evaluate: bool = False) -> Iterator[None]:
    """Restore the mode (train or eval) of each module at the end. With `evaluate`, all are in evaluation mode until then."""
    before = [(module, module.training) for module in modules]
    try:
        for module, mode in before:
            module.training = mode and not evaluate
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context in which torch uses this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
