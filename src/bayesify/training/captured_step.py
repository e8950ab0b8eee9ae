"""Training steps as CUDA graphs: draw, network, gradients, guard and optimizer in a single launch."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.maths.torch_versions import structure_key
from bayesify.maths.value_checks import deferred_checks
from bayesify.predictor import Batch, Phase
from bayesify.running.cuda_graphs import WARMUP_CALLS, Captured, Captures, side_stream, watch_waits

Run = Callable[[Phase, Batch], None]

CAPTURE_OPTIONS = ("fused", "capturable")
"""Optimizer options that must be on (if the optimizer has them) so that a graph can contain the optimizer's step."""


class CapturedSteps:
    """Runs the first few steps of each kind of batch (phase, shapes, types) plainly, then captures the step and replays it.

    A graph works on fixed memory. Each batch is copied to the address from which the graph reads. Every other value that changes
    between steps must be a tensor that changes in place. A step is not captured if it waits for the device or if its batch
    contains anything other than tensors; `reason` says why. Graphs are captured again when parameters or buffers move in memory,
    when modes of the module change, or when numeric options of the optimizer change. If numeric optimizer options change in every
    step, capturing stops.
    """

    def __init__(self, run: Run, module: nn.Module, generator: torch.Generator) -> None:
        self._run, self._module, self._generator = run, module, generator
        self._captures: Captures[Captured[None]] = Captures()
        self._pool: Any = None
        self._place: Any = None
        self._options: Any = None
        self._changes = 0  # number of consecutive steps in which options changed
        self.reason = ""
        self.replayed = 0

    def begin(self) -> None:
        """Begin an epoch: drop graphs if the module's tensors have moved or its modes have changed."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        place = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors)
        modes = tuple(module.training for module in self._module.modules())
        if (place, modes) != self._place:
            self._place = place, modes
            self._forget()

    def _forget(self) -> None:
        self._captures.clear()
        self._pool = None  # the memory pool of dropped graphs cannot be used for new graphs

    def __call__(self, phase: Phase, batch: Batch, options: Any = None) -> None:
        """Take a step from a batch on any device. The values of the optimizer's `options` become constants of a graph."""
        device = self._generator.device
        self._changes = self._changes + 1 if options != self._options else 0
        if self._changes:
            self._options = options
            self._forget()
        if self._changes > WARMUP_CALLS:
            self.reason = self.reason or (
                "optimizer options other than the learning rate change in every step (OneCycleLR, for example, "
                "changes momenta unless cycle_momentum=False)"
            )
        leaves, tree = pytree.tree_flatten((batch.x, batch.y, batch.weights))
        if self.reason or not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
            self.reason = self.reason or "a batch contains something other than tensors"
            self._run(phase, batch.to(device))
            return
        tensors = [leaf for leaf in leaves if leaf is not None]
        kinds = ((leaf.shape, leaf.dtype) if leaf is not None else None for leaf in leaves)
        key = (phase, type(batch), structure_key(tree), *kinds)
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
        """Take a plain step. The first plain step also checks values, for example for NaN; later steps leave these checks to the
        guard. The last plain step before a capture checks whether the step waits for the GPU."""
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


class GraphOptimizer:
    """Converts an optimizer to a form whose steps can be captured in a graph. `end` restores the original form.

    Learning rates become tensors that change in place. If a number is assigned as a learning rate, it is copied into
    the tensor of that rate. A plain SGD, Adam or AdamW changes to its fused form (see `has_fused_form`). The fused form takes the
    same steps up to rounding and can skip a step on the device. Momentum buffers of SGD are zeros at the start, which gives the
    same first step as a buffer that the first step creates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._given = [
            {key: group[key] for key in ("lr", *CAPTURE_OPTIONS) if key in group} for group in optimizer.param_groups
        ]
        self._was_plain = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._rates: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Convert the optimizer. Call this method again after a state was loaded."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        self._rates = [torch.tensor(float(group["lr"]), dtype=torch.float32, device=self._device) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group.update({"lr": rate} | {key: True for key in CAPTURE_OPTIONS if key in group})
            is_sgd = isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0
            for parameter in group["params"] if is_sgd else ():
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        if self._was_plain:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._move_counts(self._device)

    def _move_counts(self, device: torch.device) -> None:
        """Move Adam's step counts to `device`, because fused Adam needs them on the device and plain Adam on the CPU."""
        for state in self._optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device)

    def options(self) -> list[Any]:
        """All optimizer options whose values become constants of a graph.

        Learning rates that were assigned since the last call are first copied into the tensors that the graph reads.
        """
        found: list[Any] = []
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
            found += [
                id(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
            ]
        return found

    def plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's `state_dict` as before the conversion: with its options, and with learning rates as numbers."""
        groups = [
            group | given | {"lr": float(group["lr"])}
            for group, given in zip(state["param_groups"], self._given, strict=True)
        ]
        return state | {"param_groups": groups}

    def end(self) -> None:
        """Undo the conversion of the optimizer."""
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            rate = float(group["lr"])
            group.update(given | {"lr": given["lr"].fill_(rate) if isinstance(given["lr"], Tensor) else rate})
        if self._was_plain:
            self._optimizer.__dict__.pop("_step_supports_amp_scaling", None)
            if not any(given.get("capturable") for given in self._given):
                self._move_counts(torch.device("cpu"))


def has_fused_form(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """Whether an optimizer is fused or can be fused. It can be fused if it is one of torch's own optimizers, if its fused steps
    are the same, and if no other form was requested."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return True
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()):
        return False
    if any(group["fused"] is not None or group["foreach"] is not None or group["differentiable"] for group in groups):
        return False
    if any(group.get("dampening", 0) != 0 or isinstance(group["weight_decay"], Tensor) for group in groups):
        return False
    parameters = [parameter for group in groups for parameter in group["params"]]
    return len({one.device for one in parameters}) == 1 and all(one.is_floating_point() for one in parameters)


def why_not(
    device: torch.device, processes: int, accumulate: int, own_update: bool, optimizer: Any, module: nn.Module
) -> str:
    """Reason why steps cannot be captured, if one is known before the first step; otherwise an empty text."""
    reasons = {
        "no GPU": device.type != "cuda",
        "the method takes its own steps": own_update,
        "several processes train together": processes > 1,
        "gradients of several batches make one step": accumulate > 1,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason or has_fused_form(optimizer, module):
        return reason
    return (
        "the optimizer cannot skip a step on the GPU; give a fused optimizer, such as torch.optim.Adam(..., fused=True), or "
        "a plain torch.optim.SGD, Adam or AdamW"
    )
