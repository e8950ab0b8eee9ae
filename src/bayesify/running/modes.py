"""Modes of torch that must not leak into what is computed or made to stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Tensors made inside are ordinary ones, which can be trained, whatever mode the caller is in; gradients stay on or off."""
    with_grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
        yield


@contextmanager
def full_precision(device: str) -> Iterator[torch.dtype | None]:
    """Autocast, whose type this yields, is for the network: a KL or a factor in bfloat16 would be off by percents."""
    if not torch.is_autocast_enabled(device):
        yield None
        return
    with torch.autocast(device, enabled=False):
        yield torch.get_autocast_dtype(device)
