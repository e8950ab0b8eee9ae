"""Linearization of a network around the current values of chosen weights, one batch at a time."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from bayesify.jacobians.features import Features, read_features
from bayesify.jacobians.general import Args, Kwargs, example_gradients
from bayesify.jacobians.rules import Rule, rule_for
from bayesify.jacobians.trace import Pulled, Trace, Use, trace
from bayesify.maths.gamma import as_float
from bayesify.running.inputs_and_outputs import (
    batch_size,
    explain_shape_errors,
    kinds_of,
    map_rows,
    select_output,
    split_rows,
    spread_rows,
)
from bayesify.running.memory import CountBytes, count_activation_bytes
from bayesify.running.modes import full_float32, twice_differentiable
from bayesify.running.runner import FILTERS, Runner, SlowVmap
from bayesify.weights.catalog import owner_of

RULE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2}
"""Largest difference, due to rounding, between a layer's rule and automatic differentiation, relative to the largest entry."""

Uses = dict[str, list[Use]]
"""Rules by first name of a weight; a weight with several names has one rule per name."""

NUM_WITNESSES = 6
"""Number of examples on which rules are compared with automatic differentiation, from the first batch with several examples."""


@dataclass(frozen=True)
class Cost:
    """Memory that the derivatives of one example need."""

    activations: float  # bytes of all activations of a pass
    per_vector: float  # bytes that the backward pass of one vector needs
    outputs: int  # number of outputs of the network


@dataclass(frozen=True)
class FeatureCost:
    """Memory that one example needs if all derivatives are functions of the last layer's inputs."""

    activations: float  # approximate number of bytes that a pass without derivatives holds at once
    inputs: int  # number of inputs of the layer
    outputs: int  # number of outputs of the network
    positions: int  # number of positions T at which the layer is applied


class Jacobians:
    r"""Derivatives $J_b = \partial f(x_b) / \partial w$ of a network with respect to chosen weights.

    Linear maps, convolutions, embeddings and normalization layers have rules: one pass records the inputs of such a layer, and
    its derivatives follow from these inputs and the gradients of its outputs. Each rule is compared with automatic
    differentiation on the first batch that has one example, and again on the first batch that has several. A rule does not agree
    if the layer is called in an unusual way, if its weight is also used elsewhere, or if examples are not on the first axis.
    Weights for which no rule agrees are differentiated example by example. If a layer sees only some examples of a batch, its
    weights are also differentiated example by example for that batch.

    Args:
        runner: The network.
        names: The weights, by `named_parameters()` name.
        output: Name or index of the output, if the network has several; see `bayesianize`.

    Raises:
        ValueError: If the network has dropout or batch normalization in training mode, because their outputs are random or mix
            examples.
    """

    def __init__(self, runner: Runner, names: Sequence[str], *, output: str | int | None = None) -> None:
        self.runner = runner
        self.names = tuple(names)
        self.output = output
        self.check_deterministic()
        self._certified: dict[bool, Uses] = {}
        self._costs: dict[Any, Cost] = {}
        self._feature_costs: dict[Any, FeatureCost] = {}
        self._may_end = True  # whether the layer of the weights may be the end of the network
        self._candidates: Uses = {}
        rules: dict[nn.Module, Rule | None] = {}
        for name in names:
            uses = []
            for alias in (name, *runner.weights[name].aliases):
                module, leaf = owner_of(runner.network, alias)
                rule = rules.setdefault(module, rule_for(module))
                uses.append(Use(rule, leaf) if rule is not None else None)
            if None not in uses:
                self._candidates[name] = uses  # type: ignore[assignment]

    def check_deterministic(self) -> None:
        """Raise `ValueError` for layers whose outputs, in the current modes, are random or mix the examples of a batch."""
        check_deterministic(self.runner.network, evaluate=self.runner.evaluate)

    def evaluating(self) -> "Jacobians":
        """Jacobians of the network in evaluation mode."""
        return Jacobians(self.runner.evaluating(), self.names, output=self.output)

    @contextmanager
    def held(self) -> Iterator[Self]:
        """Context manager that yields these Jacobians with one private copy of the network, which all passes in the context
        share. Without this context, each pass makes its own copy."""
        with self.runner.alone() as alone:
            held = copy.copy(self)
            held.runner = alone
            yield held

    def at(
        self, args: Args, kwargs: Kwargs, values: Mapping[str, Tensor] | None = None, *, differentiable: bool = False
    ) -> "Linearization":
        """Run the network over a batch of B examples, given as positional and keyword inputs. Raises `ValueError` if the network
        mixes examples.

        `values` are weights by name, which replace the network's own weights. With `differentiable`, results can be differentiated
        with respect to `values`.
        """
        given = dict(values or {})
        uses = self._known_uses(args, kwargs, given)
        while True:
            passed = trace(self.runner, self._call(given, args, kwargs), _watched(uses), differentiable=differentiable)
            partial = passed.partial()
            if not partial:
                return Linearization(self, uses, passed, given, args, kwargs)
            # A layer was called with only some of these examples, and its rule cannot know which.
            uses = {name: own for name, own in uses.items() if all(use.rule not in partial for use in own)}

    def _known_uses(self, args: Args, kwargs: Kwargs, values: Mapping[str, Tensor]) -> Uses:
        """The rules that agreed with automatic differentiation on the first batch of the same kind (one or several examples).

        The compared examples are spread over the batch, because a single row may be all zeros. A network that sorts its examples
        cannot be detected on sorted examples, so the comparison is repeated in reverse order.
        """
        several = (
            batch_size(args, kwargs) > 1
        )  # one example does not show whether the network reorders or mixes examples
        if several not in self._certified:
            args, kwargs = spread_rows(args, kwargs, NUM_WITNESSES)
            with full_float32() if torch.cuda.is_available() else nullcontext():
                uses = self._agreeing(self._candidates, args, kwargs, values)
                if several:
                    uses = self._agreeing(uses, *map_rows(lambda leaf: leaf.flip(0), args, kwargs), values)
            self._certified[several] = uses
        return self._certified[several]

    def features(self, args: Args, kwargs: Kwargs) -> Features | None:
        """Features of a batch, computed in one plain pass. All derivatives must be functions of the last layer's inputs.

        The result is `None` if the weights do not belong to one linear map or convolution, if the layer is called more than
        once, if its weights are also used elsewhere, or if something is computed from its outputs.
        """
        if not self._may_end:
            return None
        return self._features_by(self._known_uses(args, kwargs, {}), args, kwargs)

    def _features_by(self, uses: Uses, args: Args, kwargs: Kwargs) -> Features | None:
        """`features` with given rules; `None` if the rules do not belong to one layer."""
        own = [use for name in self.names for use in uses.get(name, ())]
        rules = {use.rule for use in own}
        if len(own) == len(self.names) == len(uses) and len(rules) == 1 and own[0].rule.has_factors:
            return read_features(self.runner, self._call({}, args, kwargs, twice=False), own[0].rule)
        return None

    def feature_cost(self, args: Args, kwargs: Kwargs) -> FeatureCost | None:
        """Cost of an example in a pass for `features`, measured once per shape of the inputs; `None` if there are no features."""
        key = tuple(kinds_of(args, kwargs))
        if not self._may_end:
            return None
        if key not in self._feature_costs:
            with CountBytes() as counter:
                found = self._features_by(self._candidates, *next(split_rows(args, kwargs, 1)))
            if found is None or self._known_uses(args, kwargs, {}).keys() != self._candidates.keys():
                self._may_end = False
                return None
            # Without derivatives, most activations are freed immediately.
            peak = float(max(4 * counter.largest, counter.bytes // 12))
            sizes = found.inputs[0].numel(), found.outputs[0].numel(), found.inputs.shape[1]
            self._feature_costs[key] = FeatureCost(peak, *sizes)
        return self._feature_costs[key]

    def run(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Outputs of a batch: [B, ...]."""
        return self._call({}, args, kwargs, twice=False)(self.runner).detach()

    def push(self, args: Args, kwargs: Kwargs, offsets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        r"""Outputs [B, ...] of a batch, and their derivatives $J_b v_s$ [S, B, ...] along S directions v. The S directions are
        given as one tensor per weight: [S, *shape].

        Forward-mode differentiation costs about two passes per direction if `vmap` runs all directions together, and about three
        passes otherwise. The cost does not depend on the number of outputs.
        """
        _load_forward_rules()
        center = self._center()

        def push(along: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            found = torch.func.jvp(lambda weights: self._call(weights, args, kwargs)(self.runner), (center,), (along,))
            return found[0].detach(), as_float(found[1].detach())

        directions = {name: offsets[name].to(center[name]) for name in self.names}
        outputs, changes = self._together("pushes", push, directions)
        return outputs[0], changes

    def pull(self, args: Args, kwargs: Kwargs, vectors: Tensor) -> dict[str, Tensor]:
        r"""The sums $\sum_b v_{sb}^\top J_b$ for S vectors, given as one tensor [S, B, ...]; each vector has the shape of the
        outputs. The result maps weight names to tensors [S, *shape].

        Each vector takes one backward pass. Per-example gradients are not computed.
        """
        run = self._call
        outputs, back, *_ = torch.func.vjp(lambda weights: run(weights, args, kwargs)(self.runner), self._center())

        def pull(vector: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = back(vector.to(outputs.dtype))[0]
            return {name: as_float(value.detach()) for name, value in found.items()}

        found: dict[str, Tensor] = self._together("pulls", pull, vectors)
        return found

    def _center(self) -> dict[str, Tensor]:
        return {name: self.value(name, {}).detach() for name in self.names}

    def _together(self, what: str, function: Callable[[Any], Any], values: Any) -> Any:
        """Apply a function to all entries of the first axis, and stack the results. `vmap` runs all entries together; a
        loop is used if `vmap` fails or is slow."""
        vmaps, count = self.runner.decisions().vmaps, len(pytree.tree_leaves(values)[0])
        if count > 1 and what not in vmaps.refused:
            try:
                return vmaps.run(lambda: torch.func.vmap(function, randomness="same")(values), what)
            except (RuntimeError, ValueError, SlowVmap) as refusal:
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
                vmaps.refused.add(what)
        parts = [function(pytree.tree_map(lambda value, at=at: value[at], values)) for at in range(count)]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *parts)

    def cost(self, args: Args, kwargs: Kwargs) -> Cost:
        """Cost of an example, measured once per shape of the inputs."""
        key = tuple(kinds_of(args, kwargs))
        if key not in self._costs:
            with explain_shape_errors(args, kwargs):
                activations, output = count_activation_bytes(self.runner, args, kwargs)
            outputs = select_output(output, self.output)[:1]
            few_args, few_kwargs = next(split_rows(args, kwargs, 2))
            direct = self.at(few_args, few_kwargs).direct
            per_vector = 4.0 * outputs.numel() * outputs.element_size() if direct else activations
            self._costs[key] = Cost(activations, per_vector, outputs.numel())
        return self._costs[key]

    def _call(
        self, values: Mapping[str, Tensor], args: Args, kwargs: Kwargs, *, twice: bool = True
    ) -> Callable[[Runner], Tensor]:
        """A function that runs the network. If `twice` is true, its kernels can be differentiated twice."""

        def call(runner: Runner) -> Tensor:
            kernels = twice_differentiable(runner.network) if twice else nullcontext()
            with explain_shape_errors(args, kwargs), kernels:
                return select_output(runner.call(values, args, kwargs), self.output)

        return call

    def value(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """Value of a weight: the value in `values`, otherwise the network's own value."""
        return values[name] if name in values else self.runner.network.get_parameter(name)

    def _agreeing(self, uses: Uses, args: Args, kwargs: Kwargs, values: Mapping[str, Tensor]) -> Uses:
        """The rules whose gradients agree with automatic differentiation, for a loss over the first half of the given examples."""
        fixed = {name: value.detach() for name, value in values.items()}
        weights = {name: self.value(name, fixed).detach().clone().requires_grad_() for name in self.names}
        call = self._call({**fixed, **weights}, args, kwargs)
        passed = trace(self.runner, call, _watched(uses), lenient=True)
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(passed.outputs.shape, generator=generator).to(passed.outputs)
        count = passed.outputs.shape[0]
        half = (count + 1) // 2
        vector[half:] = 0
        with torch.no_grad():
            alone = self._call(fixed, *next(split_rows(args, kwargs, 1)))(self.runner)
        _check_apart(passed.outputs.detach(), alone)
        pulled, exact = passed.pull_with(vector, list(weights.values()))
        truth = dict(zip(weights, exact, strict=True))
        del passed
        tolerance = RULE_TOLERANCE.get(next(iter(weights.values())).dtype, 0.1)

        def agrees(name: str, found: Tensor | None) -> bool:
            other = torch.zeros_like(truth[name]) if found is None else found.to(truth[name])
            return bool((other - truth[name]).abs().amax() <= tolerance * truth[name].abs().amax() + 1e-12)

        kept: Uses = {}
        for name, own in uses.items():
            try:
                parts = [pulled.rows(slice(row, row + 1)).gradient(own) for row in range(half)]
                found: Any = None if parts[0] is None else sum(part[0, 0] for part in parts if part is not None)
                right = (found is None or found.shape == truth[name].shape) and agrees(name, found)
                if right and pulled.stays_within(own, half, count):
                    kept[name] = own
            except (RuntimeError, IndexError) as refusal:
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
        general = [name for name in self.names if name not in kept]
        if general:
            first_args, first_kwargs = next(split_rows(args, kwargs, half))
            some = {name: weights[name].detach() for name in general}
            row = vector[:half].unsqueeze(0)
            found_general = example_gradients(
                self.runner, {**fixed, **some}, first_args, first_kwargs, row, self.output
            )
            for name in general:
                if not agrees(name, found_general[name][0].sum(0)):
                    raise ValueError(
                        f"{name}: the derivative of one example's output depends on the other examples of the batch; use a "
                        "network that does not mix examples, and put the batch on the first axis of every input"
                    )
        return kept


def _check_apart(outputs: Tensor, alone: Tensor) -> None:
    tolerance = RULE_TOLERANCE.get(outputs.dtype, 0.1) / 4  # outputs have smaller rounding errors than derivatives
    if not bool((alone[0] - outputs[0]).abs().amax() <= tolerance * outputs[:1].abs().amax() + 1e-6):
        raise ValueError(
            "the network's output for one example depends on the other examples of the batch, or is random; use a network "
            "that does not mix examples, turn off dropout, and put the batch on the first axis of every input"
        )


@dataclass(frozen=True, eq=False)
class Linearization:
    """A network's outputs on a batch and their derivatives; the derivatives use the rules that are valid for this batch."""

    jacobians: Jacobians
    rules: Uses
    passed: Trace
    values: Mapping[str, Tensor]
    args: Args
    kwargs: Kwargs

    @property
    def outputs(self) -> Tensor:
        """Outputs of the network, [B, ...]."""
        return self.passed.outputs

    @property
    def general(self) -> tuple[str, ...]:
        """Weights without a rule, which are differentiated example by example."""
        return tuple(name for name in self.jacobians.names if name not in self.rules)

    @property
    def direct(self) -> bool:
        """Whether the chosen weights are the network's last layer, so that their gradients need no backward pass."""
        return self.passed.direct and not self.general

    def uses(self, name: str) -> Sequence[Use]:
        """Rules for a weight's derivatives, one per name of the weight; empty if the weight has no rule."""
        return self.rules.get(name, ())

    def pull(self, vectors: Tensor) -> "Gradients":
        r"""The products $v_{kb}^\top J_b$ for K vectors [K, B, ...], each with the shape of the outputs."""
        return Gradients(self, self.passed.pull(vectors), vectors)

    def identity(self) -> Tensor:
        """The vectors that give the Jacobian itself, one for each of the O outputs of an example: [O, B, ...]."""
        shape = self.outputs.shape
        size = self.outputs[:1].numel()
        eye = torch.eye(size, dtype=self.outputs.dtype, device=self.outputs.device)
        return eye.reshape(size, 1, *shape[1:]).expand(size, *shape)


class Gradients:
    r"""Gradients $v_{kb}^\top J_b$ for K vectors [K, B, ...] and B examples, for all or chosen entries of a weight."""

    def __init__(self, linearization: Linearization, pulled: Pulled, vectors: Tensor) -> None:
        self._linearization, self._pulled, self._vectors = linearization, pulled, vectors
        self.uses, self._weights = linearization.uses, linearization.jacobians.runner.weights
        self._by_example: dict[str, Tensor] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Number of vectors K and number of examples B."""
        return self._vectors.shape[0], self._vectors.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self._vectors.device

    def dense(self, name: str) -> Tensor:
        """Gradients with respect to every entry of a weight: [K, B, *shape], in float32 or higher precision."""
        uses = self.uses(name)
        if not uses:
            return self._general(name)
        return self._or_zero(self._pulled.gradient(uses), self._weights[name].shape)

    def columns(self, name: str, index: Tensor) -> Tensor:
        """Gradients [K, B, n] with respect to n entries of a weight; `index` [n] contains the flat indices of these entries."""
        uses = self.uses(name)
        if not uses:
            return self._general(name).reshape(*self.shape, -1)[..., index]
        return self._or_zero(self._pulled.gradient(uses, index), index.shape)

    def sum_of_squares(self, name: str, memory: int, index: Tensor | None = None) -> Tensor:
        """Squared gradients with respect to a weight, summed over vectors and examples: [numel], or [n] for `index` [n]."""
        uses = self.uses(name)
        if not uses:
            found = self._general(name).reshape(*self.shape, -1)
            return (found if index is None else found[..., index]).square().sum((0, 1))
        size = self._weights[name].numel
        total = self._pulled.sum_of_squares(uses, size, memory, index)
        return self._or_zero(None, (size if index is None else len(index),))[0, 0] if total is None else total

    def calls(self, name: str) -> list[tuple[Use, Tensor, Tensor]]:
        """For each call of a layer that uses the weight: the `Use` of the weight, the tensor that its rule recorded, and the
        gradients [K, B, ...]."""
        return self._pulled.of(self.uses(name))

    def _general(self, name: str) -> Tensor:
        if not self._by_example:
            point, own = self._linearization, self._linearization.jacobians
            values = {**point.values, **{name: own.value(name, point.values) for name in point.general}}
            inputs = point.args, point.kwargs
            self._by_example = example_gradients(own.runner, values, *inputs, self._vectors, own.output)
        return as_float(self._by_example[name])

    def _or_zero(self, found: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return as_float(self._vectors.new_zeros(*self.shape, *shape)) if found is None else found


@cache
def _load_forward_rules() -> None:
    """Load a torch module early, because torch would load it at the first forward derivative, with an irrelevant warning."""
    with FILTERS, warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._decomp.decompositions_for_jvp")


def _watched(uses: Uses) -> dict[nn.Module, Rule]:
    return {use.rule.module: use.rule for own in uses.values() for use in own}


def check_deterministic(network: nn.Module, *, evaluate: bool = False) -> None:
    """Raise `ValueError` for layers whose outputs are random or mix the examples of a batch.

    If `evaluate` is true, all layers are treated as in evaluation mode.
    """
    for name, module in network.named_modules():
        training = module.training and not evaluate
        if isinstance(module, _BatchNorm) and (training or module.running_mean is None):
            raise ValueError(
                f"layer {name!r}: batch normalization uses the statistics of the batch, which mixes examples; "
                "call net.eval() first, and use layers with track_running_stats=True"
            )
        random = isinstance(module, _DropoutNd) and module.p > 0
        random |= isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
        if random and training:
            raise ValueError(f"layer {name!r}: dropout is active, so outputs are random; call net.eval() first")
