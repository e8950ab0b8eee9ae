"""Whether code may look at the values of tensors: not while operations are captured, compiled or transformed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def should_check(tensor: Tensor) -> bool:
    """Whether values can be looked at: not while a graph is captured or compiled, nor under a function transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def transforming() -> bool:
    """Whether a function transform such as `vmap` is running: hand-written gradients and in-place work must step aside."""
    return torch._C._are_functorch_transforms_active()


def find_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor holds NaN or infinity; integers and booleans never do."""
    given = [(name, value.detach()) for name, value in named if value.is_floating_point() and value.numel()]
    if not given:
        return None
    finite = torch.stack([torch.isfinite(value).all().to(given[0][1].device) for _, value in given]).tolist()
    return next((name for (name, _), fine in zip(given, finite, strict=True) if not fine), None)
