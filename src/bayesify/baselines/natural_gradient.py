"""Base classes of VOGN, IVON and noisy K-FAC, three methods that train a Gaussian posterior with natural gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bayesify.arguments.checks import Count, DataCount, Inputs, NonNegative, Positive, Probability, checked
from bayesify.jacobians.general import example_gradients
from bayesify.jacobians.rules import Rule, rule_for
from bayesify.jacobians.trace import Pulled, trace
from bayesify.likelihoods.objectives import check_example_weights
from bayesify.maths.gamma import as_float
from bayesify.maths.value_checks import find_not_finite
from bayesify.network import BayesianNetwork
from bayesify.posteriors import MeanField, Posterior
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import checked_inputs, each, explain_shape_errors, select_output
from bayesify.running.runner import Runner
from bayesify.training import History, Update, fit
from bayesify.training.arguments import describe_schedule
from bayesify.training.batches import count_examples
from bayesify.weights.catalog import Weight, owner_of

MAX_GRADIENT_BYTES = 64 * 2**20
"""Maximum number of bytes of per-example gradients in memory at once."""


class LayerPass:
    """A forward pass with one draw, and the backward pass that follows; the forward pass stores the inputs of layers.

    `rules` maps names of layers to their rules; the inputs of these layers are stored. The tensors in `weights` belong to one
    draw and have no axis of draws. These tensors become leaves of an autograd graph that ends in `outputs`, [B, ...].
    """

    at_outputs: Tensor  # gradient of the loss at the outputs; set by `pull`
    at_layers: Pulled  # gradients of the loss at the layers; set by `pull`

    def __init__(
        self,
        runner: Runner,
        weights: Mapping[str, Tensor],
        rules: Mapping[str, Rule],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        output: str | int | None,
    ) -> None:
        self.weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
        self.runner, self.inputs, self.output = runner, inputs, output
        self.used: set[str] = set()  # names of the weights on which the loss depends; set by `pull`
        self._trace = trace(
            runner,
            lambda own: select_output(own.call(self.weights, *inputs), output),
            {rule.module: rule for rule in rules.values()},
            lenient=True,
        )
        self.outputs = self._trace.outputs

    def pull(self, loss: Tensor, others: Sequence[Tensor], example_weights: Tensor | None) -> list[Tensor | None]:
        """Gradients of a loss with respect to weights and other tensors. Those at the outputs of layers and network are stored.

        The loss is a weighted sum over examples, with weights [B]. A stored gradient is multiplied by the square root of its
        example's weight, so the squared gradient is multiplied by the weight itself.
        """
        taps = self._trace.taps
        targets = [self.outputs, *taps, *self.weights.values(), *others]
        grads = torch.autograd.grad(loss, targets, allow_unused=True, retain_graph=True)
        inside, outside = grads[: 1 + len(taps)], grads[1 + len(taps) :]
        if example_weights is not None:
            shrink = torch.where(example_weights > 0, example_weights.double().rsqrt(), 0.0)
            inside = tuple(
                grad if grad is None else grad * shrink.to(grad).view(-1, *[1] * (grad.ndim - 1)) for grad in inside
            )
        assert inside[0] is not None
        self.at_outputs = inside[0]
        self.at_layers = self._trace.pulled([None if grad is None else grad.unsqueeze(0) for grad in inside[1:]])
        self.used = {name for name, grad in zip(self.weights, outside, strict=False) if grad is not None}
        return list(outside)

    def pull_vector(self, vector: Tensor) -> Pulled:
        """Gradients of `sum(vector * outputs)` with respect to the layers' outputs. The vector has the shape of the outputs."""
        return self._trace.pull(vector.unsqueeze(0))

    def general_squares(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Squared gradients of weights without a rule, summed over examples, which run one by one. Call `pull` first."""
        runner, weights = self.runner, {name: value.detach() for name, value in self.weights.items()}
        fixed = {
            alias: value
            for name, value in weights.items()
            for alias in (name, *runner.weights[name].aliases)
            if name not in names
        }
        inner = Runner(runner.network, runner.weights, {**runner.point_values, **fixed})
        wanted = {name: weights[name] for name in names}
        found = example_gradients(inner, wanted, *self.inputs, self.at_outputs.unsqueeze(0), self.output)
        return {name: as_float(value[0]).square().sum(0) for name, value in found.items()}


def layer_rules(network: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Rule]:
    """Rules for per-example gradients, keyed by the names of the layers that own some of the weights and have a rule.

    A tied weight has no rule, because its gradient is a sum over layers. Scale and shift of BatchNorm have no rule, because their
    normalized inputs depend on the batch.
    """
    found: dict[str, Rule] = {}
    for name, weight in weights.items():
        path, module = name.rpartition(".")[0], owner_of(network, name)[0]
        if not weight.aliases and not isinstance(module, _BatchNorm) and (rule := rule_for(module)) is not None:
            found.setdefault(path, rule)
    return found


FIT_OPTIONS = frozenset(
    ("validation", "patience", "device", "checkpoint", "callbacks", "seed", "progress", "read_batch")
)
"""Arguments that a trainer's `fit` passes on to `bayesify.fit`."""
Moments = Mapping[str, dict[str, Tensor]]
"""For each kind of moment, a mapping from weight or layer names to tensors."""
Changes = list[tuple[str, Tensor, Tensor]]
"""Names and new values of a posterior's parameters: tuples (name, parameter, new value)."""


class NaturalGradient(ABC):
    r"""A trainer that updates a Bayesian network's Gaussian posterior in place, with natural gradients.

    The trained network stays an ordinary `BayesianNetwork`; prediction, storage and metrics do not depend on how it was trained.
    Adam trains the weights that have no posterior and the parameters of the likelihood. `VOGN` documents the
    arguments. A `kl_weight` below 1 makes the posterior narrower, as if there were more data.
    """

    family: type[Posterior]
    options: ClassVar[tuple[str, ...]] = ()
    """Names of arguments that only this trainer has."""
    fit_options: ClassVar[frozenset[str]] = FIT_OPTIONS

    def __init__(
        self,
        bnn: BayesianNetwork,
        num_data: int | None,
        learning_rate: float,
        momentum: float,
        decay: float,
        num_draws: int,
        kl_weight: float,
        point_learning_rate: float,
    ) -> None:
        owner = type(self).__name__
        for part in bnn.posteriors:
            if type(part) is not self.family:
                remedy = f"make the network with {self.family.__name__}()"
                raise TypeError(f"{owner}: the network has the posterior {type(part).__name__}; {remedy}")
            if isinstance(part, MeanField):
                _check_mean_field(owner, part)
        self.likelihood = bnn.require_likelihood(owner)
        prior = bnn.prior.typical().require_fixed(owner)
        self.prior_precision = {name: 1 / float(value) ** 2 for name, value in prior.std.items()}
        self.bnn, self.num_data = bnn, num_data
        self.learning_rate, self.momentum, self.decay = learning_rate, momentum, decay
        self.num_draws, self.kl_weight, self.point_learning_rate = num_draws, kl_weight, point_learning_rate
        self.history = History()
        others = (*bnn.network.parameters(), *self.likelihood.parameters())
        self._points = [parameter for parameter in others if parameter.requires_grad]

    @checked
    def step(
        self,
        x: Inputs,
        y: Tensor,
        *,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        learning_rate: Positive | None = None,
    ) -> float:
        """Take one step with a batch, in the current mode (train or eval) of the network.

        Args:
            x: Inputs of B examples: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            y: Targets.
            example_weights: Factors on the examples' log-likelihoods, [B].
            generator: Source of randomness.
            learning_rate: Learning rate of this step, for use with schedules; by default the trainer's learning rate.

        Returns:
            Negative log-likelihood per example, averaged over draws.

        Raises:
            ValueError: If N is unknown, inputs do not fit the network, or the loss is not finite. Then nothing changes.
        """
        return self._step(Batch(x, y, example_weights), generator, learning_rate)

    @abstractmethod
    def _step(self, batch: Batch, generator: torch.Generator | None, learning_rate: float | None) -> float:
        """`step` for arguments that were already checked."""

    @abstractmethod
    def arguments_of_fit(self, loader: Iterable[Any], update: TrainerUpdate, options: dict[str, Any]) -> dict[str, Any]:
        """Arguments with which `bayesify.fit` takes this trainer's steps; they include the options that the user gave."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a step changes except the network, as nested data with tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""

    @property
    def effective_data(self) -> float:
        """N divided by `kl_weight`, because a KL with a smaller weight acts like more data."""
        if self.num_data is None:
            remedy = "give num_data=, the size of the whole dataset"
            raise ValueError(f"{type(self).__name__}: the number of training examples is unknown; {remedy}")
        return self.num_data / self.kl_weight

    # -- training --------------------------------------------------------------------------------------------------

    @checked
    def fit(
        self, loader: Iterable[Any], epochs: Count, *, schedule: Callable[[float], float] | None = None, **options: Any
    ) -> Self:
        """Train over a loader, in training mode.

        Args:
            loader: Iterable of batches that can be iterated once per epoch.
            epochs: Number of passes over the data.
            schedule: Function of the completed share of the run, between 0 and 1, that returns a factor on the learning rate.
            options: Further arguments of `bayesify.fit`: validation, patience, checkpoint, seed, progress, `read_batch`, device.

        Returns:
            This object. The trained network is `bnn`, and the values of each epoch are in `history`.

        Raises:
            TypeError: If an option concerns the optimizer of `bayesify.fit`, which this trainer replaces.
        """
        odd = options.keys() - self.fit_options
        if odd:
            remedy = f"its arguments are {', '.join(sorted(self.fit_options))}"
            raise TypeError(f"{type(self).__name__}.fit: {min(odd)} is not an argument of this method's fit; {remedy}")
        if self.num_data is None:
            self.num_data = count_examples(loader, options.get("read_batch"))
        given = self.arguments_of_fit(loader, TrainerUpdate(self, epochs, schedule), options)
        self.history = fit(self.bnn, loader, epochs=epochs, num_data=self.num_data, **given)
        return self

    def config(self) -> dict[str, Any]:
        """All arguments as plain data, except the network."""
        kept = ("learning_rate", "momentum", "decay", "num_draws", "kl_weight", *self.options)
        rates = [self.point_learning_rate] if self._points else []
        own = {"trainer": type(self).__name__, "point_learning_rate": rates}
        return own | {key: getattr(self, key) for key in kept}


class TrainerUpdate(Update):
    """Settings by which `fit` recognizes a checkpoint of the same run: the trainer's arguments, the epochs and the schedule."""

    def __init__(self, trainer: NaturalGradient, epochs: int, schedule: Callable[[float], float] | None) -> None:
        self.trainer, self.epochs, self.schedule, self.rate = trainer, epochs, schedule, trainer.learning_rate

    def identity(self) -> dict[str, Any]:
        schedule = None if self.schedule is None else f"{describe_schedule(self.schedule)} over {self.epochs} epochs"
        return {"update": self.trainer.config() | {"schedule": schedule}}


class LayerwiseTrainer(NaturalGradient):
    r"""A trainer whose steps use the layers' inputs and the per-example gradients at the layers' outputs.

    An example of weight $\omega$ counts as $\omega$ examples. Sums over a batch are weighted, but B and N count rows. A quantity
    per example, such as the damping, is therefore multiplied by the mean example weight over all batches so far.

    `VOGN` documents the arguments. With `antithetic`, draws come in pairs with opposite noise. If the gradient is linear in the
    weights, the noise of the two draws cancels.
    """

    options: ClassVar[tuple[str, ...]] = ("antithetic", "damping")

    @checked
    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
        num_data: DataCount | None = None,
        learning_rate: Positive = 0.1,
        momentum: Probability = 0.9,
        decay: Probability = 0.99,
        damping: NonNegative = 0.0,
        num_draws: Count = 1,
        antithetic: bool = False,
        kl_weight: Positive = 1.0,
        point_learning_rate: Positive = 1e-3,
    ) -> None:
        super().__init__(bnn, num_data, learning_rate, momentum, decay, num_draws, kl_weight, point_learning_rate)
        self.damping, self.antithetic = damping, antithetic
        self.steps, self.mean_weight = 0, 1.0
        self.moments: dict[str, dict[str, Tensor]] = {}
        self._runner, self._rules = Runner(bnn.network, bnn.weights), layer_rules(bnn.network, bnn.weights)
        self._optimizer = torch.optim.Adam(self._points, lr=point_learning_rate) if self._points else None

    def arguments_of_fit(self, loader: Iterable[Any], update: TrainerUpdate, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"update": _LayerwiseSteps(self, update.epochs, update.schedule)}

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, generator: torch.Generator | None, learning_rate: float | None) -> float:
        _ = self.effective_data  # raises if N is unknown
        example_weights = batch.weights
        with torch.no_grad():
            draws = self.bnn.draw(self.num_draws, generator=generator, antithetic=self.antithetic)
        rate = self.learning_rate if learning_rate is None else learning_rate
        gathered: dict[str, dict[str, Tensor]] = {}
        gradient: dict[str, Tensor] = {}
        moved: dict[str, Tensor] = {}
        named, total = enumerate(self._points, 1), 0.0
        # If `fit` estimates the likelihood's noise, skip the noise, because it then has no gradient.
        points = {f"point estimate {number}": point for number, point in named if point.requires_grad}
        for weights in each(draws.weights):
            seen, loss, examples = self._run(weights, batch)
            factor = 1 / (examples * self.num_draws)
            grads = seen.pull(loss, list(points.values()), example_weights)
            for name, grad in zip(seen.weights, grads, strict=False):
                _add(gradient, name, grad, factor, seen.weights[name])
            for name, grad in zip(points, grads[len(seen.weights) :], strict=True):
                if grad is not None:
                    _add(moved, name, grad, factor, grad)
            for kind, values in self.curvature(seen, generator, example_weights).items():
                for name, value in values.items():
                    _add(gathered.setdefault(kind, {}), name, value, 1 / self.num_draws, value)
            total += float(loss.detach()) * factor
        odd = find_not_finite([pair for values in (gradient, moved, *gathered.values()) for pair in values.items()])
        if odd is not None:
            raise ValueError(
                f"{type(self).__name__}: the gradient or curvature of {odd} is not finite, so the step was not taken; lower "
                "the learning rate, or check the network for a root of 0, a logarithm of 0, or a division by 0"
            )
        self._change(gradient, gathered, rate, 1.0 if example_weights is None else float(example_weights.mean()))
        if self._optimizer is not None:
            for name, point in points.items():
                point.grad = moved[name].to(point) if name in moved else None
            self._optimizer.step()
            self._optimizer.zero_grad()
        return total

    def _run(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[LayerPass, Tensor, int]:
        """The forward pass of one draw, the negative log-likelihood summed over examples, and the number of examples."""
        inputs = checked_inputs(batch.x)
        with explain_shape_errors(*inputs):
            seen = LayerPass(self._runner, weights, self.rules(), inputs, self.bnn.output)
        with torch.enable_grad():
            log_prob = self.likelihood.objective(seen.outputs, batch.y, has_draws=False)
            if batch.weights is not None:
                check_example_weights(batch.weights, len(log_prob))
                log_prob = log_prob * batch.weights
            loss = -log_prob.sum()
        if not bool(torch.isfinite(loss)):
            found = f"the loss is {loss.item()}, which is not finite"
            raise ValueError(f"{type(self).__name__}: {found}; lower the learning rate")
        return seen, loss, len(log_prob)

    @torch.no_grad()
    def _change(
        self, gradient: Mapping[str, Tensor], curvature: Moments, learning_rate: float, mean_weight: float
    ) -> None:
        """Update the moments and the posterior, or change nothing if a result is not finite."""
        before = {**vars(self), "moments": {kind: dict(values) for kind, values in self.moments.items()}}
        self.steps += 1
        # Like the moments, the mean weight is a bias-corrected moving average. It is exactly 1 if no batch has weights.
        self.mean_weight += (mean_weight - self.mean_weight) * (1 - self.decay) / (1 - self.decay**self.steps)
        try:
            changed = self.update(gradient, curvature, learning_rate)
            if name := find_not_finite([(name, value) for name, _, value in changed]):
                found = f"this step would make {name} infinite or NaN"
                raise ValueError(f"{type(self).__name__}: {found}; lower the learning rate")
        except Exception:
            vars(self).update(before)
            raise
        for _, parameter, value in changed:
            parameter.copy_(value)

    def rules(self) -> Mapping[str, Rule]:
        """The rules of the layers whose inputs a pass must keep, by module name; by default of all layers that have a rule."""
        return self._rules

    @abstractmethod
    def curvature(self, seen: LayerPass, generator: torch.Generator | None, example_weights: Tensor | None) -> Moments:
        """Observations of the curvature from one draw's backward pass.

        Like the gradient, each observation is a weighted sum over examples, divided by the number of rows.
        """

    @abstractmethod
    def update(self, gradient: Mapping[str, Tensor], curvature: Moments, learning_rate: float) -> Changes:
        """Compute a step of the posterior. Only the moments change; the caller applies the step.

        `gradient` has the gradient of the mean negative log-likelihood per example for each weight name, `curvature` has the
        observations of the curvature, and `learning_rate` is the learning rate of the mean.
        """

    @property
    def row_damping(self) -> float:
        """Damping per row, which is the damping per example times the mean weight of the rows."""
        return self.damping * self.mean_weight

    def average(self, kind: str, name: str, value: Tensor, decay: float, times: int | None = None) -> Tensor:
        """Update the moving average of one moment with an observation, and return the average with Adam's bias correction.

        `times` is the number of updates, including this one; the default is the number of steps.
        """
        known = self.moments.setdefault(kind, {})
        past = known.get(name)
        known[name] = (1 - decay) * value if past is None else past.lerp(value, 1 - decay)
        return known[name] / (1 - decay ** (self.steps if times is None else times))

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": self.moments,
            "steps": self.steps,
            "mean_weight": self.mean_weight,
            "points": self._optimizer.state_dict() if self._optimizer is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = next(self.bnn.posteriors.parameters()).device
        self.moments = pytree.tree_map(lambda value: value.to(device), state["moments"])
        self.steps, self.mean_weight = state["steps"], state["mean_weight"]
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["points"])


class _LayerwiseSteps(TrainerUpdate):
    takes_steps = True

    def take_step(self, batch: Batch, *, generator: torch.Generator, share: float) -> float:
        self.rate = self.trainer.learning_rate * (1.0 if self.schedule is None else self.schedule(share))
        return self.trainer.step(
            batch.x, batch.y, example_weights=batch.weights, generator=generator, learning_rate=self.rate
        )

    @torch.no_grad()
    def after_epoch(self) -> dict[str, float]:
        return {"kl": float(self.trainer.bnn.kl()), "learning_rate": self.rate}

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.state_dict() | {"rate": self.rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.trainer.load_state_dict(state)
        self.rate = state["rate"]


def _add(into: dict[str, Tensor], name: str, value: Tensor | None, factor: float, like: Tensor) -> None:
    term = torch.zeros_like(as_float(like.detach())) if value is None else as_float(value) * factor
    into[name] = into[name] + term if name in into else term


def _check_mean_field(owner: str, part: MeanField) -> None:
    if part.max_std is not None:
        remedy = "leave out max_std=, because the prior already bounds the standard deviations"
        raise ValueError(f"{owner}: MeanField(max_std={part.max_std}) is not supported; {remedy}")
    if part.units != "weight":
        raise ValueError(f"{owner}: units={part.units!r} is not supported; use MeanField(units='weight')")
    if any(part.mean_value.mask(name) is not None for name in part.mean_value):
        raise ValueError(f"{owner}: a pruned posterior cannot be trained; train first, then prune")
