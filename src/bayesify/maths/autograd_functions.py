"""Helpers for hand-written gradients: cached signatures, second derivatives, and leading axes for stacked models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
    """Gradients of the outputs of torch operations with respect to inputs. These gradients can be differentiated again. The
    gradient is `None` for inputs that do not require a gradient."""
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


Found = tuple[Tensor, dict[int, Tensor]]
"""A value, and its gradients by the index of the given tensor."""


class _WithGradients(Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[[Sequence[Tensor], Sequence[int]], Found], *given: Tensor) -> Tensor:
        value, slopes = compute(given, [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed])
        ctx.places, ctx.count = list(slopes), len(given)
        ctx.save_for_backward(*slopes.values())
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * ctx.count
        scaled = torch._foreach_mul(ctx.saved_tensors, grad) if ctx.places else ()
        for place, slope in zip(ctx.places, scaled, strict=True):
            found[place] = slope
        return None, *found


with_gradients: Callable[..., Tensor] = _WithGradients.apply
"""`with_gradients(compute, *given)` is the value of a function that also computes its own gradients.

`compute` takes the given tensors and the indices of the tensors that need a gradient.
"""


def sum_of_pieces(part: Callable[[Any, Sequence[Tensor]], Tensor], pieces: list[Any], *given: Tensor) -> Tensor:
    """The sum over pieces of `part(piece, given)`, with only one piece in memory at a time.

    If an entry of `given` is a module's parameter, `part` may also read it from the module.
    """

    def compute(given: Sequence[Tensor], wanted: Sequence[int]) -> Found:
        total = given[0].new_zeros(())
        slopes = {index: torch.zeros_like(given[index]) for index in wanted}
        for piece in pieces:
            with torch.set_grad_enabled(bool(wanted)):
                leaves = [tensor if tensor.is_leaf else tensor.detach() for tensor in given]
                for index in wanted:
                    leaves[index].requires_grad_()
                value = part(piece, leaves)
                found = (
                    torch.autograd.grad(value, [leaves[index] for index in wanted], allow_unused=True) if wanted else ()
                )
            for index, grad in zip(wanted, found, strict=True):
                if grad is not None:
                    slopes[index] += grad
            total = total + value.detach()
        return total, slopes

    return with_gradients(compute, *given)
