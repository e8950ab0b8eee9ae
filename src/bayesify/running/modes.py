"""Contexts that turn off torch's inference mode or autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
