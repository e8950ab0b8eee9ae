"""What VOGN, IVON and noisy K-FAC share: steps of natural gradient on a Gaussian posterior, and training by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, DataCount, Inputs, NonNegative, Positive, Probability, checked
from bayesify.baselines.layer_passes import LayerPass, layer_rules
from bayesify.jacobians.rules import Rule
from bayesify.likelihoods.objectives import check_example_weights
from bayesify.maths.gamma import as_float
from bayesify.maths.value_checks import find_not_finite
from bayesify.network import BayesianNetwork
from bayesify.posteriors.common.base import Posterior
from bayesify.posteriors.mean_field import MeanField
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import checked_inputs, each, explain_shape_errors
from bayesify.running.runner import Runner
from bayesify.training.arguments import Update
from bayesify.training.batches import count_examples
from bayesify.training.fitting import fit
from bayesify.training.history import History
from bayesify.training.state import describe_schedule

FIT_OPTIONS = frozenset(
    ("validation", "patience", "device", "checkpoint", "callbacks", "seed", "progress", "read_batch")
)
"""Arguments of `bayesify.fit` that a trainer of its own kind leaves to it."""


class NaturalGradient(ABC):
    r"""A trainer that steps a Bayesian network's Gaussian posterior along its natural gradient, in place.

    The trained network stays an ordinary `BayesianNetwork`: prediction, storage and metrics know nothing of how it was trained.
    Weights that are not under the posterior, and what the likelihood can learn, are trained by Adam along the way. Arguments are
    those of `VOGN`; a `kl_weight` below 1 tempers the posterior, as if there were more data.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork`, or its posterior is of another family.
        ValueError: If an argument is out of range, or the prior is hierarchical.
    """

    family: type[Posterior]
    options: ClassVar[tuple[str, ...]] = ()
    """Choices besides those that all such trainers have."""
    fit_options: ClassVar[frozenset[str]] = FIT_OPTIONS

    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
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
                raise TypeError(
                    f"{owner}: the posterior is {type(part).__name__}; make the network with {self.family.__name__}()"
                )
            self.check_posterior(part)
        self.likelihood = bnn.require_likelihood(owner)
        prior = bnn.prior.typical().require_fixed(owner)
        self.prior_precision = {name: 1 / float(value) ** 2 for name, value in prior.std.items()}
        self.bnn, self.num_data = bnn, num_data
        self.learning_rate, self.momentum, self.decay = learning_rate, momentum, decay
        self.num_draws, self.kl_weight, self.point_learning_rate = num_draws, kl_weight, point_learning_rate
        self.history = History()
        self._points = [
            parameter
            for parameter in (*bnn.network.parameters(), *self.likelihood.parameters())
            if parameter.requires_grad
        ]

    def check_posterior(self, part: Posterior) -> None:  # noqa: B027 (most have no limits)
        """Raise `ValueError` for choices of a posterior of the family that the steps do not serve."""

    @abstractmethod
    def step(
        self,
        x: Inputs,
        y: Tensor,
        *,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        learning_rate: Positive | None = None,
    ) -> float:
        """One step from a batch, in the present mode (train or eval) of the network.

        Args:
            x: Inputs of B examples: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            y: Targets.
            example_weights: Factors on the examples' log-likelihoods, [B].
            generator: Source of randomness.
            learning_rate: In place of the trainer's own, for schedules.

        Returns:
            Negative log-likelihood per example, the mean over draws.

        Raises:
            ValueError: If N is not known, inputs do not fit, or the loss is not finite; nothing is changed then.
        """

    @abstractmethod
    def arguments_of_fit(self, loader: Iterable[Any], update: TrainerUpdate, options: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `bayesify.fit` that make its steps those of this trainer, from the caller's options."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a step changes besides the network, as nested data with tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""

    @property
    def effective_data(self) -> float:
        """N divided by the KL's weight: a tempered posterior is that of more data."""
        if self.num_data is None:
            raise ValueError(f"{type(self).__name__}: give num_data, the number of examples in the whole dataset")
        return self.num_data / self.kl_weight

    # -- training --------------------------------------------------------------------------------------------------

    @checked
    def fit(
        self, loader: Iterable[Any], epochs: Count, *, schedule: Callable[[float], float] | None = None, **options: Any
    ) -> Self:
        """Train over a loader, in training mode.

        Args:
            loader: Iterable of batches that starts again each epoch.
            epochs: Passes over the data.
            schedule: Factor on the learning rate as a function of the share of the run that is done, from 0 to 1.
            options: Further arguments of `bayesify.fit`: validation, patience, checkpoint, seed, progress, `read_batch`, device.

        Returns:
            Itself; the trained network is `bnn`, the numbers of each epoch are in `history`.

        Raises:
            TypeError: If an argument is one of `fit`'s optimizer, which this trainer is itself.
        """
        odd = options.keys() - self.fit_options
        if odd:
            raise TypeError(f"{type(self).__name__}.fit: {min(odd)} is not one of its arguments; see bayesify.fit")
        if self.num_data is None:
            self.num_data = count_examples(loader, options.get("read_batch"))
        given = self.arguments_of_fit(loader, TrainerUpdate(self, epochs, schedule), options)
        self.history = fit(self.bnn, loader, epochs=epochs, num_data=self.num_data, **given)
        return self

    def config(self) -> dict[str, Any]:
        """All choices as plain data, those of the network left out."""
        kept = ("learning_rate", "momentum", "decay", "num_draws", "kl_weight", *self.options)
        rates = [self.point_learning_rate] if self._points else []
        return {"trainer": type(self).__name__, "point_learning_rate": rates} | {
            key: getattr(self, key) for key in kept
        }


class TrainerUpdate(Update):
    """What tells the run of a trainer from others; the epochs and the schedule of its learning rate."""

    def __init__(self, trainer: NaturalGradient, epochs: int, schedule: Callable[[float], float] | None) -> None:
        self.trainer, self.epochs, self.schedule = trainer, epochs, schedule

    def identity(self) -> dict[str, Any]:
        """See `Update`."""
        schedule = None if self.schedule is None else f"{describe_schedule(self.schedule)} over {self.epochs} epochs"
        return {"update": self.trainer.config() | {"schedule": schedule}}


class LayerwiseTrainer(NaturalGradient):
    r"""Steps from what a pass shows at the layers: their inputs, and the gradients of single examples at their outputs.

    An example of weight $\omega$ is $\omega$ examples: sums over a batch have its weights as factors, B and N count rows, and
    whatever is per example, such as the damping, follows the mean weight of the batches so far.

    Arguments are those of `VOGN`. Draws in pairs of opposite noise (`antithetic`) cancel the noise of a gradient linear in the
    weights.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork`, or its posterior is of another family.
        ValueError: If an argument is out of range, or the prior is hierarchical.
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
        super().__init__(
            bnn,
            num_data=num_data,
            learning_rate=learning_rate,
            momentum=momentum,
            decay=decay,
            num_draws=num_draws,
            kl_weight=kl_weight,
            point_learning_rate=point_learning_rate,
        )
        self.damping, self.antithetic = damping, antithetic
        self.steps, self.mean_weight = 0, 1.0
        self.moments: dict[str, dict[str, Tensor]] = {}
        self._runner, self._rules = Runner(bnn.network, bnn.weights), layer_rules(bnn.network, bnn.weights)
        self._optimizer = torch.optim.Adam(self._points, lr=point_learning_rate) if self._points else None

    def arguments_of_fit(self, loader: Iterable[Any], update: TrainerUpdate, options: dict[str, Any]) -> dict[str, Any]:
        """See `NaturalGradient`."""
        return options | {"update": _LayerwiseSteps(self, update.epochs, update.schedule)}

    # -- one step --------------------------------------------------------------------------------------------------

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
        """See `NaturalGradient`."""
        _ = self.effective_data  # known, or an error
        args, kwargs = checked_inputs(x)
        with torch.no_grad():
            draws = self.bnn.draw(self.num_draws, generator=generator, antithetic=self.antithetic)
        rate = self.learning_rate if learning_rate is None else learning_rate
        gathered: dict[str, dict[str, Tensor]] = {}
        gradient: dict[str, Tensor] = {}
        points: list[Tensor | None] = [None] * len(self._points)
        # Not the noise that `fit` finds, which has no gradient.
        moved = [place for place, point in enumerate(self._points) if point.requires_grad]
        total = 0.0
        for weights in each(draws.weights):
            seen, loss, examples = self._run(weights, args, kwargs, y, example_weights)
            factor = 1 / (examples * self.num_draws)
            grads = seen.pull(loss, [self._points[place] for place in moved], example_weights)
            for name, grad in zip(seen.weights, grads, strict=False):
                _add(gradient, name, grad, factor, seen.weights[name])
            for place, grad in zip(moved, grads[len(seen.weights) :], strict=True):
                if grad is not None:
                    before = points[place]
                    points[place] = grad * factor if before is None else before + grad * factor
            for kind, values in self.curvature(seen, generator, example_weights).items():
                for name, value in values.items():
                    _add(gathered.setdefault(kind, {}), name, value, 1 / self.num_draws, value)
            total += float(loss.detach()) * factor
        self._check_finite(gradient, gathered, points)
        self._change(gradient, gathered, rate, 1.0 if example_weights is None else float(example_weights.mean()))
        self._step_points(points)
        return total

    def _run(
        self,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        y: Tensor,
        example_weights: Tensor | None,
    ) -> tuple[LayerPass, Tensor, int]:
        """A pass with one draw, the negative log-likelihood summed over examples, and their number B."""
        with explain_shape_errors(args, kwargs):
            seen = LayerPass(self._runner, weights, self.rules(), args, kwargs, self.bnn.output)
        with torch.enable_grad():
            log_prob = self.likelihood.objective(seen.outputs, y, has_draws=False)
            if example_weights is not None:
                check_example_weights(example_weights, len(log_prob))
                log_prob = log_prob * example_weights
            loss = -log_prob.sum()
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"{type(self).__name__}: the loss is {loss.item()}; lower the learning rate")
        return seen, loss, len(log_prob)

    def _check_finite(
        self, gradient: Mapping[str, Tensor], curvature: Mapping[str, Mapping[str, Tensor]], points: list[Tensor | None]
    ) -> None:
        named = list(gradient.items()) + [pair for values in curvature.values() for pair in values.items()]
        named += [(f"point estimate {index + 1}", grad) for index, grad in enumerate(points) if grad is not None]
        name = find_not_finite(named)
        if name is not None:
            raise ValueError(
                f"{type(self).__name__}: the gradient or curvature of {name} is not finite; the step was not taken (look for a "
                "root, logarithm or quotient at 0 in the network; lower the learning rate)"
            )

    @torch.no_grad()
    def _change(
        self,
        gradient: Mapping[str, Tensor],
        curvature: Mapping[str, Mapping[str, Tensor]],
        learning_rate: float,
        mean_weight: float,
    ) -> None:
        """Bring moments and posterior up to date, all of them or, if a result is not finite, none."""
        before = {**vars(self), "moments": {kind: dict(values) for kind, values in self.moments.items()}}
        self.steps += 1
        # A moving average like those of the moments; exactly 1 where no batch has weights.
        self.mean_weight += (mean_weight - self.mean_weight) * (1 - self.decay) / (1 - self.decay**self.steps)
        try:
            changed = self.update(gradient, curvature, learning_rate)
            name = find_not_finite([(name, value) for name, _, value in changed])
            if name is not None:
                raise ValueError(f"{type(self).__name__}: {name} would not be finite; lower the learning rate")
        except Exception:
            vars(self).update(before)
            raise
        for _, parameter, value in changed:
            parameter.copy_(value)

    def _step_points(self, grads: list[Tensor | None]) -> None:
        if self._optimizer is not None:
            for parameter, grad in zip(self._points, grads, strict=True):
                parameter.grad = None if grad is None else grad.to(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def rules(self) -> Mapping[str, Rule]:
        """Rules of the layers whose inputs a pass must keep, by module name: all that have one."""
        return self._rules

    @abstractmethod
    def curvature(
        self, seen: LayerPass, generator: torch.Generator | None, example_weights: Tensor | None
    ) -> dict[str, dict[str, Tensor]]:
        """What one draw's pass, pulled back, says of the curvature: kinds of moments, each by name.

        Sums over examples times their weights, divided by the number of rows, as the gradient is.
        """

    @abstractmethod
    def update(
        self, gradient: Mapping[str, Tensor], curvature: Mapping[str, Mapping[str, Tensor]], learning_rate: float
    ) -> list[tuple[str, Tensor, Tensor]]:
        """A step of the posterior, which brings the moments up to date and changes nothing else.

        Args:
            gradient: Of the mean negative log-likelihood per example, by weight name.
            curvature: See `curvature`.
            learning_rate: Learning rate of the mean.

        Returns:
            Names, parameters of the posterior, and their new values.
        """

    @property
    def row_damping(self) -> float:
        """The damping, which is per example, for a row of the mean weight: it stands for as many examples."""
        return self.damping * self.mean_weight

    def average(self, kind: str, name: str, value: Tensor, decay: float, times: int | None = None) -> Tensor:
        """A moving average of a kind of moment brought up to date by an observation, and freed of its start at 0 (as Adam does).

        `times`: how often it was brought up to date, this time included; the number of steps by default.
        """
        known = self.moments.setdefault(kind, {})
        past = known.get(name)
        known[name] = (1 - decay) * value if past is None else past.lerp(value, 1 - decay)
        return known[name] / (1 - decay ** (self.steps if times is None else times))

    def state_dict(self) -> dict[str, Any]:
        """All that a step changes besides the network, as nested data with tensors."""
        return {
            "moments": self.moments,
            "steps": self.steps,
            "mean_weight": self.mean_weight,
            "points": self._optimizer.state_dict() if self._optimizer is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        device = next(self.bnn.posteriors.parameters()).device
        moments = dict(state["moments"])
        if "squares" in moments:  # the name in earlier checkpoints
            moments["second_moments"] = moments.pop("squares")
        self.moments = {
            kind: {name: value.to(device) for name, value in values.items()} for kind, values in moments.items()
        }
        self.steps, self.mean_weight = state["steps"], state.get("mean_weight", 1.0)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["points"])


class _LayerwiseSteps(TrainerUpdate):
    """The steps of a trainer as `fit` takes them."""

    takes_steps = True

    def __init__(self, trainer: NaturalGradient, epochs: int, schedule: Callable[[float], float] | None) -> None:
        super().__init__(trainer, epochs, schedule)
        self.rate = trainer.learning_rate

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


def check_mean_field(owner: str, part: Posterior) -> None:
    """Raise `ValueError` for a `MeanField` whose parameters are not the plain means and log standard deviations of all weights."""
    assert isinstance(part, MeanField)
    if part.max_std is not None:
        raise ValueError(f"{owner}: max_std={part.max_std}; leave it out, the prior bounds the standard deviations")
    if part.units != "weight":
        raise ValueError(f"{owner}: units={part.units!r}; use MeanField(units='weight'), whose means it steps itself")
    if any(part.mean_value.mask(name) is not None for name in part.mean_value):
        raise ValueError(f"{owner}: the posterior is pruned; train first, then prune")
