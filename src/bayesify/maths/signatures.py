"""Helpers for hand-written gradients: cached signatures, second derivatives, and stacked models on leading axes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """A function with hand-written gradients.

    The signature of `forward` is cached, because torch inspects it at each call, which costs more than a small computation.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        function: Any = cls.forward
        function.__signature__ = inspect.signature(function)

    if TYPE_CHECKING:  # torch's own `apply` has no annotations

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            """The outputs of `forward`."""


def gradients_again(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients, with respect to inputs, of outputs that were computed by torch operations. These gradients can be differentiated
    again. The gradient is `None` for inputs that do not require a gradient."""
    given = [(out.to(grad.dtype), grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    live, through = zip(*((out, grad) for out, grad in given if out.requires_grad), strict=True)
    wanted = [value for value in inputs if value.requires_grad]
    found = iter(torch.autograd.grad(live, wanted, through, create_graph=True, allow_unused=True))
    return [next(found) if value.requires_grad else None for value in inputs]


def leading_axes(info: Any, in_dims: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    """Tensors with the `vmap` axis moved to the front, [R, ...], for functions that accept leading axes. Other values are
    unchanged."""
    return [
        value
        if not isinstance(value, Tensor)
        else value.expand(info.batch_size, *value.shape)
        if axis is None
        else value.movedim(axis, 0)
        for value, axis in zip(values, in_dims, strict=True)
    ]
