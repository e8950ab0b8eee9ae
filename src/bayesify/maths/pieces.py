"""Scalars whose gradients are computed in the forward pass, such as sums over pieces of which only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.signatures import Function

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
