"""A function-space KL and its gradient, captured as a CUDA graph: the GPU work is started by one launch instead of
thousands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.maths.pieces import Found, with_gradients
from bayesify.running.cuda_graphs import Captured, Captures, side_stream, watch_waits

Part = Callable[[Any, Sequence[Tensor]], Tensor]


class DivergenceCapture:
    """Calls a scalar function of inputs and tensors through a CUDA graph if possible. Gradients are computed for the tensors but
    not for the inputs.

    The graph holds the value and the gradient in its own memory, and results are copied out. The graph may therefore be replayed
    before the backward pass of an earlier replay has run. A function that waits for the device, for example because a size
    depends on values, is called without a graph. A new graph is captured if buffers or frozen parameters move in memory, or a
    module changes its mode.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.captures: Captures[Captured[Found]] = Captures(limit=1)

    def __call__(self, part: Part, inputs: Any, given: Sequence[Tensor]) -> Tensor:
        """`part(inputs, given)`, differentiable with respect to `given` but not to the inputs."""
        leaves = pytree.tree_leaves(inputs)
        if not self._suits(leaves, given):
            return part(inputs, given)
        state = self._describe((*leaves, *given))
        captured = self.captures.find("divergence", state, lambda: _capture(part, inputs, given))
        if captured is None:
            return part(inputs, given)

        def replay(given: Sequence[Tensor], wanted: Sequence[int]) -> Found:
            value, slopes = captured.replay([*leaves, *given])
            return value.clone(), {place: slope.clone() for place, slope in slopes.items()}

        return with_gradients(replay, *given)

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


def _capture(part: Part, inputs: Any, given: Sequence[Tensor]) -> Captured[Found]:
    """Capture a function. Functions that wait for the device are detected and refused before the capture, because a
    failed capture corrupts the states of random generators."""
    leaves, form = pytree.tree_flatten(inputs)
    own_leaves = [leaf.clone() for leaf in leaves]
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    places = [place for place, tensor in enumerate(own) if tensor.requires_grad]

    def run() -> Found:
        value = part(pytree.tree_unflatten(own_leaves, form), own)
        found = torch.autograd.grad(value, [own[place] for place in places], allow_unused=True)
        return value.detach(), {place: slope for place, slope in zip(places, found, strict=True) if slope is not None}

    with side_stream():
        run()
        with watch_waits() as waits:
            run()
    if waits:
        raise RuntimeError(f"the function waits for the GPU: {waits[0]}")
    return Captured(run, [*own_leaves, *own])
