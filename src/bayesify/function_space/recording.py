"""A function-space KL recorded as a CUDA graph with its gradient: one launch in place of thousands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

PATIENCE = 3
"""Calls of one kind before a graph is recorded."""

Divergence = Callable[[tuple[Any, ...], Mapping[str, Any]], Tensor]


class Recorder:
    """Calls a differentiable scalar function of inputs and of a module's parameters, from a CUDA graph where it can.

    The graph holds value and gradient, so that a replay before the backward pass of an earlier one does no harm. Where something
    cannot be recorded (a size that depends on values), the function is called as it is.

    Args:
        module: Whose parameters the function depends on. They may change in place; if they move, a new graph is recorded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._key: Any = None
        self._count = 0
        self._recorded: _Recorded | None = None

    def __call__(self, function: Divergence, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The function's value; differentiable by the parameters, not by the inputs."""
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if not self._suits(leaves):
            return function(args, kwargs)
        key = self._describe(leaves)
        if key != self._key:
            self._key, self._count, self._recorded = key, 0, None
        self._count += 1
        if self._recorded is None:
            if self._count != PATIENCE + 1:
                return function(args, kwargs)
            try:
                self._recorded = _Recorded(function, args, kwargs, list(self.module.parameters()))
            except RuntimeError:  # an operation that cannot be recorded; the count says not to try again
                torch.cuda.synchronize()
                return function(args, kwargs)
        return self._recorded(leaves)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "_key": None, "_count": 0, "_recorded": None}  # graphs stay where they are

    def _suits(self, leaves: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda and not leaf.requires_grad for leaf in leaves):
            return False
        return not torch.cuda.is_current_stream_capturing()

    def _describe(self, leaves: Sequence[Tensor]) -> Any:
        kept = [*self.module.parameters(), *self.module.buffers()]
        return (
            tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves),
            tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in kept),
            tuple(part.training for part in self.module.modules()),
        )


class _Recorded:
    """The graph, and the memory that it reads and writes."""

    def __init__(
        self, function: Divergence, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: list[nn.Parameter]
    ) -> None:
        leaves, form = pytree.tree_flatten((args, dict(kwargs)))
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.given = [leaf.clone() for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(self.given, form)

        def run() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            value = function(own_args, own_kwargs)
            return value.detach(), torch.autograd.grad(value, self.parameters, allow_unused=True)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.value, self.slopes = run()

    def __call__(self, leaves: Sequence[Tensor]) -> Tensor:
        torch._foreach_copy_(self.given, list(leaves))
        found: Tensor = _Replay.apply(self, *self.parameters)
        return found


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, *parameters: Tensor) -> Tensor:
        recorded.graph.replay()
        ctx.places = [place for place, slope in enumerate(recorded.slopes) if slope is not None]
        ctx.count = len(parameters)
        ctx.save_for_backward(*(slope.clone() for slope in recorded.slopes if slope is not None))
        return recorded.value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * ctx.count
        scaled = torch._foreach_mul(ctx.saved_tensors, grad)
        for place, slope in zip(ctx.places, scaled, strict=True):
            found[place] = slope
        return None, *found
