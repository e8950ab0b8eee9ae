"""Sums over pieces with only one piece in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.signatures import Function


class SumOfPieces(Function):
    """Sum of scalars whose gradients are computed in the forward pass, so that only one piece is in memory at a time.

    `apply(part, pieces, *given)` is the sum over pieces of `part(piece, given)`. If an entry of `given` is a parameter, `part` may
    also read it from its module.
    """

    @staticmethod
    def forward(ctx: Any, part: Callable[[Any, Sequence[Tensor]], Tensor], pieces: list[Any], *given: Tensor) -> Tensor:
        """Compute the sum and its gradients."""
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        total = given[0].new_zeros(())
        slopes = [torch.zeros_like(given[index]) for index in wanted]
        for piece in pieces:
            with torch.set_grad_enabled(bool(wanted)):
                leaves = [tensor if tensor.is_leaf else tensor.detach() for tensor in given]
                for index in wanted:
                    leaves[index].requires_grad_()
                value = part(piece, leaves)
                if wanted:
                    found = torch.autograd.grad(value, [leaves[index] for index in wanted], allow_unused=True)
                    for slope, grad in zip(slopes, found, strict=True):
                        if grad is not None:
                            slope += grad
            total = total + value.detach()
        ctx.wanted, ctx.count = wanted, len(given)
        ctx.save_for_backward(*slopes)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Stored gradients times the incoming gradient."""
        found: list[Tensor | None] = [None] * ctx.count
        for index, slope in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            found[index] = grad * slope
        return None, None, *found


sum_of_pieces: Callable[..., Tensor] = SumOfPieces.apply
