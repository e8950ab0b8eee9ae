"""A function-space KL captured as a CUDA graph with its gradient: one launch in place of thousands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.running.cuda_graphs import WARMUP_CALLS, capture, side_stream, watch_waits

Part = Callable[[Any, Sequence[Tensor]], Tensor]


class DivergenceCapture:
    """Calls a scalar function of inputs and of tensors that it is differentiated by, from a CUDA graph where it can.

    The graph holds value and gradient in memory of its own, and results are copied out, so that a replay before the
    backward pass of an earlier one does no harm. A function that waits for the device (a size that depends on values) is
    called as it is. A new graph is captured if buffers, frozen parameters or modes of the module move.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._key: Any = None
        self._count = 0
        self._captured: _Captured | None = None

    def __call__(self, part: Part, inputs: Any, given: Sequence[Tensor]) -> Tensor:
        """`part(inputs, given)`; differentiable by `given`, not by the inputs."""
        leaves = pytree.tree_leaves(inputs)
        if not self._suits(leaves, given):
            return part(inputs, given)
        key = self._describe((*leaves, *given))
        if key != self._key:
            self._key, self._count, self._captured = key, 0, None
        self._count += 1
        if self._count == WARMUP_CALLS + 1:
            self._captured = _capture(part, inputs, given)
        if self._captured is None:
            return part(inputs, given)
        torch._foreach_copy_(self._captured.inputs, leaves)
        found: Tensor = _Replay.apply(self._captured, *given)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "_key": None, "_count": 0, "_captured": None}  # graphs stay where they are

    def _suits(self, leaves: Sequence[Any], given: Sequence[Tensor]) -> bool:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda and not leaf.requires_grad for leaf in leaves):
            return False
        return all(tensor.is_cuda for tensor in given) and not torch.cuda.is_current_stream_capturing()

    def _describe(self, tensors: Sequence[Tensor]) -> Any:
        kept = [*self.module.buffers(), *(one for one in self.module.parameters() if not one.requires_grad)]
        return (
            tuple((one.shape, one.dtype, one.device, one.requires_grad) for one in tensors),
            tuple(one.data_ptr() for one in kept),
            tuple(part.training for part in self.module.modules()),
        )


class _Captured(NamedTuple):
    """A graph, the memory that it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    given: list[Tensor]
    value: Tensor
    slopes: dict[int, Tensor]
    """Gradients by place among the given tensors."""


def _capture(part: Part, inputs: Any, given: Sequence[Tensor]) -> _Captured | None:
    """Nothing if the function waits for the device: a failed capture would leave random numbers in disorder."""
    leaves, form = pytree.tree_flatten(inputs)
    own_leaves = [leaf.clone() for leaf in leaves]
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    places = [place for place, tensor in enumerate(own) if tensor.requires_grad]

    def run() -> tuple[Tensor, dict[int, Tensor]]:
        value = part(pytree.tree_unflatten(own_leaves, form), own)
        found = torch.autograd.grad(value, [own[place] for place in places], allow_unused=True)
        return value.detach(), {place: slope for place, slope in zip(places, found, strict=True) if slope is not None}

    with side_stream():
        run()
        with watch_waits() as waits:
            run()
    if waits:
        return None
    graph, (value, slopes) = capture(run)
    return _Captured(graph, own_leaves, own, value, slopes)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *given: Tensor) -> Tensor:
        torch._foreach_copy_([tensor.detach() for tensor in captured.given], list(given))
        captured.graph.replay()
        ctx.places, ctx.count = list(captured.slopes), len(given)
        ctx.save_for_backward(*(slope.clone() for slope in captured.slopes.values()))
        return captured.value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * ctx.count
        for place, slope in zip(ctx.places, torch._foreach_mul(ctx.saved_tensors, grad), strict=True):
            found[place] = slope
        return None, *found
