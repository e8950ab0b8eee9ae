"""One pass of a network that records the inputs of its layers and computes the gradients at their outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.jacobians.rules import Rule
from bayesify.jacobians.second_order import DifferentiableLayers
from bayesify.maths.gamma import as_float
from bayesify.running.runner import Runner, SlowVmap, Vmaps


@dataclass(frozen=True)
class Use:
    """The use of a weight by one module."""

    rule: Rule
    leaf: str


@dataclass
class Application:
    """One call of one layer: the inputs that its rule needs, its output, and the autograd node that continues from the output."""

    rule: Rule
    kept: Tensor
    output: Tensor
    node: Any = None


@dataclass(frozen=True, eq=False)
class Trace:
    """Inputs of a network's layers in one pass over a batch, call by call, and the network's outputs [B, ...]."""

    outputs: Tensor
    applications: list[Application]
    differentiable: bool
    layers: DifferentiableLayers
    vmaps: Vmaps

    @property
    def taps(self) -> list[Tensor]:
        """Outputs of the layers, call by call."""
        return [application.output for application in self.applications]

    def pulled(self, grads: Sequence[Tensor | None]) -> "Pulled":
        """Pair each call with its gradient in `grads`, which has one tensor [K, B, ...] for each entry of `taps`. An item of
        `grads` is `None` if the network's outputs do not depend on that entry of `taps`."""
        pairs = zip(self.applications, grads, strict=True)
        return Pulled([(application, grad) for application, grad in pairs if grad is not None])

    def partial(self) -> set[Rule]:
        """Rules of the layers that were called with fewer or more examples than the network's outputs have."""
        rows = self.outputs.shape[0]
        return {one.rule for one in self.applications if one.kept.shape[0] != rows or one.output.shape[0] != rows}

    @property
    def direct(self) -> bool:
        """Whether the pass traced a single call, whose output is the network's output, so that no backward pass is needed."""
        nodes = [application.node for application in self.applications]
        return len(nodes) == 1 and nodes[0] is not None and nodes[0] is self.outputs.grad_fn

    def pull(self, vectors: Tensor) -> "Pulled":
        """Gradients of `sum(vectors[k, b] * outputs[b])` with respect to the layers' outputs, for each k and b; `vectors` is
        [K, B, ...]."""
        if not self.applications or not self.outputs.requires_grad:
            return Pulled([])
        if self.direct:
            return Pulled([(self.applications[0], vectors.to(self.outputs.dtype))])
        self.layers.pulls = True
        try:
            return self.pulled(self._backward(self.taps, vectors.to(self.outputs.dtype)))
        finally:
            self.layers.pulls = False

    def pull_with(self, vector: Tensor, weights: Sequence[Tensor]) -> "tuple[Pulled, Sequence[Tensor]]":
        """Propagate one vector [B, ...] back to the layers' outputs and, in the same backward pass, to `weights`."""
        taps = self.taps
        grads: Sequence[Tensor | None] = [None] * (len(taps) + len(weights))
        if self.outputs.requires_grad:
            grads = torch.autograd.grad(self.outputs, [*taps, *weights], vector, allow_unused=True)
        inside = [None if grad is None else grad.unsqueeze(0) for grad in grads[: len(taps)]]
        sums = [
            torch.zeros_like(weight) if grad is None else grad
            for weight, grad in zip(weights, grads[len(taps) :], strict=True)
        ]
        return self.pulled(inside), sums

    def _backward(self, taps: list[Tensor], vectors: Tensor) -> Sequence[Tensor | None]:
        def once(vector: Tensor, materialize: bool = False) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(
                self.outputs,
                taps,
                vector,
                retain_graph=True,
                create_graph=self.differentiable,
                allow_unused=True,
                materialize_grads=materialize,
            )

        if len(vectors) == 1:
            return [None if grad is None else grad.unsqueeze(0) for grad in once(vectors[0])]
        # One vector over a batch of images already fills a GPU; a CPU is faster with all vectors at once.
        together = self.differentiable or taps[0].device.type == "cpu" or all(tap.ndim <= 3 for tap in taps)
        if together and "gradients" not in self.vmaps.refused:
            try:
                # `is_grads_batched` would loop internally over most backward kernels.
                run = torch.func.vmap(lambda vector: once(vector, True))
                found: Sequence[Tensor | None] = self.vmaps.run(lambda: run(vectors), "gradients")
                return found
            except (RuntimeError, SlowVmap) as refusal:  # an operation has no batching rule
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
                self.vmaps.refused.add("gradients")
        pieces = [once(vector) for vector in vectors]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*pieces, strict=True)]


class Pulled:
    """K gradients [K, B, ...] at every call of the traced layers, for all or some of the examples.

    Gradients with respect to weights follow from these gradients.
    """

    def __init__(self, found: list[tuple[Application, Tensor]], index: slice | None = None) -> None:
        self._found, self._index = found, index

    def rows(self, index: slice) -> "Pulled":
        """The gradients of some examples. The tensors of a layer are sliced only when they are read."""
        return Pulled(self._found, index)

    def stays_within(self, uses: Sequence[Use], rows: int, total: int) -> bool:
        """Whether all layers that use a weight have one row per example, and have gradient 0 after the first `rows` examples."""
        return all(
            kept.shape[0] == total and g.shape[1] == total and not bool(g[:, rows:].any())
            for _, kept, g in self.of(uses)
        )

    def gradient(self, uses: Sequence[Use], index: Tensor | None = None) -> Tensor | None:
        """Gradient with respect to a weight, summed over its uses: [K, B, *shape], or [K, B, n] for the flat indices `index` [n];
        `None` if the outputs do not depend on the weight."""
        total = None
        for use, kept, g in self.of(uses):
            part = use.rule.dense(use.leaf, kept, g) if index is None else use.rule.columns(use.leaf, kept, g, index)
            total = part if total is None else total + part
        return total

    def sum_of_squares(self, uses: Sequence[Use], size: int, memory: int, index: Tensor | None = None) -> Tensor | None:
        """Squares of the entries of `gradient`, summed over vectors and examples.

        For a linear map that is applied once per example, one product of squared inputs and squared gradients suffices.
        For other layers, gradients are materialized for as many examples at a time as fit into `memory` bytes.
        """
        calls = self.of(uses)
        if not calls:
            return None
        use, kept, g = calls[0]
        if index is None and len(calls) == 1 and use.leaf == "weight":
            factors = use.rule.factors(kept, g)
            if factors is not None and factors[0].shape[1] == 1:  # sums of (g_i a_j)^2
                return (factors[1][:, :, 0].square().sum(0).T @ factors[0][:, 0].square()).reshape(-1)
        rows = max(1, memory // (16 * size * g.shape[0]))
        total = as_float(g).new_zeros(size if index is None else len(index))
        for start in range(0, g.shape[1], rows):
            found = self.rows(slice(start, start + rows)).gradient(uses, index)
            if found is not None:
                total = total + found.reshape(*found.shape[:2], -1).square().sum((0, 1))
        return total

    def of(self, uses: Sequence[Use]) -> list[tuple[Use, Tensor, Tensor]]:
        """For each call of a layer that uses the weight: its `Use`, the inputs that its rule stored, and gradients [K, B, ...]."""
        return [(use, *call) for use in uses for call in self.calls(use.rule)]

    def calls(self, rule: Rule) -> list[tuple[Tensor, Tensor]]:
        """For each call of a layer: the inputs that its rule stored, and the gradients [K, B, ...]."""
        own = [(application.kept, g) for application, g in self._found if application.rule is rule]
        return own if self._index is None else [(kept[self._index], g[:, self._index]) for kept, g in own]


def trace(
    runner: Runner,
    call: Callable[[Runner], Tensor],
    modules: Mapping[nn.Module, Rule],
    *,
    differentiable: bool = False,
    lenient: bool = False,
) -> Trace:
    """Run a network once and keep the inputs of the layers in `modules`, which maps each layer to its rule.

    `call` runs the network through a private runner and returns the outputs. If `differentiable` is true, results can be
    differentiated with respect to the weights. If `lenient` is true, a call that a rule cannot handle is skipped.
    """
    applications: list[Application] = []
    layers = DifferentiableLayers()

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not args:
            return output
        rule, x = modules[module], args[0] if differentiable else args[0].detach()
        try:
            kept = rule.keep(x) if len(x) else x  # a rule cannot handle an empty batch
        except (ValueError, RuntimeError):
            if lenient:
                return output
            raise
        tap = output if output.requires_grad else output.detach().requires_grad_()
        passed_on = tap.clone()  # protects the kept tensor from an in-place operation on the layer's output
        applications.append(Application(rule, kept, tap, passed_on.grad_fn))
        return passed_on

    with torch.inference_mode(False), torch.enable_grad(), runner.hooked(modules, watch) as own, layers:
        outputs = call(own)
    return Trace(outputs, applications, differentiable, layers, own.decisions().vmaps)
