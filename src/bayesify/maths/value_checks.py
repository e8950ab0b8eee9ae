"""Checks of tensor values, which are impossible while operations are captured, compiled or transformed."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_STATE = threading.local()


def should_check(tensor: Tensor) -> bool:
    """Whether values can be read, which is impossible while a graph is captured or compiled and under a function transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and (getattr(_STATE, "deferred", False) or torch.cuda.is_current_stream_capturing()))


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Context in which values on a GPU are not read, so that the host does not wait. The training step's `Guard` checks the
    results later."""
    before = getattr(_STATE, "deferred", False)
    _STATE.deferred = True
    try:
        yield
    finally:
        _STATE.deferred = before


def transforming() -> bool:
    """Whether a function transform such as `vmap` is active. Hand-written gradients and in-place operations cannot be
    used inside a transform."""
    return torch._C._are_functorch_transforms_active()


def find_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor that contains NaN or infinity; integer, boolean and sparse tensors are skipped."""
    numbers = [(name, value.detach()) for name, value in named if value.is_floating_point() and value.numel()]
    given = [(name, value) for name, value in numbers if value.layout is torch.strided]
    norms = torch._foreach_norm([value for _, value in given]) if given else []
    if not norms or bool(torch.isfinite(torch.stack([norm.to(norms[0].device).float() for norm in norms]).sum())):
        return None  # a finite norm proves that all entries are finite; an overflow is examined below
    finite = torch.stack([torch.isfinite(value).all().to(given[0][1].device) for _, value in given]).tolist()
    return next((name for (name, _), fine in zip(given, finite, strict=True) if not fine), None)
