"""Steps of training as CUDA graphs: draw, network, gradients, guard and optimizer in a single launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.maths.value_checks import deferred_checks
from bayesify.predictor import Batch, Phase
from bayesify.running.cuda_graphs import WARMUP_CALLS, Captured, Captures, side_stream, watch_waits

Run = Callable[[Phase, Batch], None]


class CapturedSteps:
    """Captures a step for each kind of batch (phase, shapes, types) once it has run a few times, and replays it.

    A graph works on fixed memory: a batch is copied to where its graph reads it, and all else that changes between steps must be
    a tensor that changes in place. Steps that wait for the device, or whose batches hold more than tensors, are not
    captured; `reason` says why. Graphs are made again when parameters, buffers or modes of the module move.
    """

    def __init__(self, run: Run, module: nn.Module, generator: torch.Generator) -> None:
        self._run, self._module, self._generator = run, module, generator
        self._captures: Captures[Captured[None]] = Captures()
        self._pool: Any = None
        self._place: Any = None
        self.reason = ""
        self.replayed = 0

    def begin(self) -> None:
        """Begin an epoch: graphs whose tensors or modes are no longer the module's are dropped."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        place = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors)
        modes = tuple(module.training for module in self._module.modules())
        if (place, modes) != self._place:
            self._place = place, modes
            self._captures.clear()
            self._pool = None  # memory of graphs that are gone takes no new ones

    def __call__(self, phase: Phase, batch: Batch) -> None:
        """A step from a batch on any device."""
        device = self._generator.device
        leaves, tree = pytree.tree_flatten((batch.x, batch.y, batch.weights))
        if self.reason or not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
            self.reason = self.reason or "a batch holds more than tensors"
            self._run(phase, batch.to(device))
            return
        tensors = [leaf for leaf in leaves if leaf is not None]
        key = (phase, type(batch), tree, *((leaf.shape, leaf.dtype) if leaf is not None else None for leaf in leaves))
        captured = self._captures.find(key, None, lambda: self._capture(phase, batch))
        self.reason = self._captures.reason
        if captured is not None:
            captured.replay(tensors)
            self.replayed += 1
        elif self.reason:
            self._run(phase, batch.to(device))
        else:
            self._warm_up(phase, batch.to(device), self._captures.calls(key))

    def _warm_up(self, phase: Phase, batch: Batch, count: int) -> None:
        """A step as it is; values are looked at in the first, and waits for the device in the last before a capture."""
        waits: list[str] = []
        with side_stream(), ExitStack() as stack:
            if count > 1:
                stack.enter_context(deferred_checks())
            if count == WARMUP_CALLS:
                waits = stack.enter_context(watch_waits())
            self._run(phase, batch)
        if waits:
            self.reason = f"a step waits for the GPU: {waits[0]}"

    def _capture(self, phase: Phase, batch: Batch) -> Captured[None]:
        device = self._generator.device
        copied = batch.map(lambda leaf: leaf.to(device, copy=True))
        fixed = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor)]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return Captured(lambda: self._run(phase, type(batch)(*copied)), fixed, [self._generator], self._pool)


class FixedRates:
    """Makes an optimizer's learning rates tensors that change in place, where a graph reads them, until it is told to stop."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._capturable = [group.get("capturable") for group in optimizer.param_groups]
        self.begin()

    def begin(self) -> None:
        """Make the rates tensors, also after a state was loaded."""
        for group in self._optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=self._device)
            if "capturable" in group:
                group["capturable"] = True
        for state in self._optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(self._device)

    def plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's `state_dict` with rates as numbers."""
        groups = [
            group | {"lr": float(group["lr"])} | ({"capturable": before} if before is not None else {})
            for group, before in zip(state["param_groups"], self._capturable, strict=True)
        ]
        return state | {"param_groups": groups}

    def end(self) -> None:
        """Give the optimizer back as it came."""
        for group, before in zip(self._optimizer.param_groups, self._capturable, strict=True):
            group["lr"] = float(group["lr"])
            if before is not None:
                group["capturable"] = before


def why_not(device: torch.device, deferred: bool, processes: int, accumulate: int, own_update: bool) -> str:
    """Why steps cannot be captured, before any was tried; empty if they can, or if there is no GPU to capture them on."""
    if device.type != "cuda":
        return "no GPU"
    if own_update:
        return "the method takes its own steps"
    if processes > 1:
        return "several processes train together"
    if accumulate > 1:
        return "gradients of several batches make one step"
    if not deferred:
        return (
            "the optimizer cannot skip a step on the GPU; give a fused one, such as torch.optim.Adam(..., fused=True)"
        )
    return ""
