"""What VOGN and noisy K-FAC share: steps of natural gradient on a Gaussian posterior, and training by them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.baselines.epochs import run_epochs
from bayesify.baselines.layer_passes import LayerPass
from bayesify.jacobians.rules import Rule, widen
from bayesify.network import BayesianNetwork
from bayesify.posteriors.base import Posterior, check_count, check_positive
from bayesify.running.inputs import as_inputs, check_inputs, explain_shape_errors
from bayesify.running.outputs import each
from bayesify.running.runner import Runner
from bayesify.training.batches import Batch, BatchReader, check_num_data, count_examples, min_examples
from bayesify.training.history import History


class NaturalGradient(ABC):
    """A trainer that steps a Bayesian network's Gaussian posterior along its natural gradient, in place.

    The trained network stays an ordinary `BayesianNetwork`: prediction, storage and metrics know nothing of how it was trained.
    Weights that are not under the posterior, and what the likelihood can learn, are trained by Adam along the way.

    Args:
        bnn: The network, with a likelihood and a fixed prior; it is changed.
        num_data: N; where `fit` is used, counted from the loader if left out.
        learning_rate: Of the mean.
        momentum: Decay of the gradient's moving average.
        decay: Decay of the curvature's moving average.
        num_draws: S, draws of the weights per step.
        antithetic: Whether draws come in pairs of opposite noise, which cancels the noise of a gradient linear in the weights.
        kl_weight: Factor on the KL; below 1 it tempers the posterior, as if there were more data.
        point_learning_rate: Of Adam for everything that is not under the posterior.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork`, or its posterior is of another family.
        ValueError: If an argument is out of range, or the prior is hierarchical.
    """

    family: type[Posterior]

    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
        num_data: int | None,
        learning_rate: float,
        momentum: float,
        decay: float,
        num_draws: int,
        antithetic: bool,
        kl_weight: float,
        point_learning_rate: float,
    ) -> None:
        owner = type(self).__name__
        if not isinstance(bnn, BayesianNetwork):
            raise TypeError(f"{owner}: {type(bnn).__name__} is not a BayesianNetwork; make one with bayesianize")
        for part in bnn.posteriors:
            if type(part) is not self.family:
                raise TypeError(
                    f"{owner}: the posterior is {type(part).__name__}; make the network with {self.family.__name__}()"
                )
        self.likelihood = bnn.require_likelihood(owner)
        check_positive(owner, learning_rate=learning_rate, kl_weight=kl_weight, point_learning_rate=point_learning_rate)
        check_count(owner, num_draws=num_draws)
        if num_data is not None:
            check_count(owner, num_data=num_data)
        for key, value in (("momentum", momentum), ("decay", decay)):
            if not 0 <= value < 1:
                raise ValueError(f"{owner}: {key}={value}; give a number of at least 0 and below 1")
        prior = bnn.prior.typical()
        if not prior.fixed:
            raise ValueError(f"{owner}: the prior draws its scale; use a fixed one, such as Neal()")
        self.prior_precision = {name: 1 / float(value) ** 2 for name, value in prior.std.items()}
        self.bnn, self.num_data = bnn, num_data
        self.learning_rate, self.momentum, self.decay = learning_rate, momentum, decay
        self.num_draws, self.antithetic, self.kl_weight = num_draws, antithetic, kl_weight
        self.steps = 0
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.history = History()
        self._runner = Runner(bnn.network, bnn.weights)
        self._points = [
            parameter
            for parameter in (*bnn.network.parameters(), *self.likelihood.parameters())
            if parameter.requires_grad
        ]
        self._optimizer = torch.optim.Adam(self._points, lr=point_learning_rate) if self._points else None

    # -- one step --------------------------------------------------------------------------------------------------

    def step(
        self,
        x: Any,
        y: Tensor,
        *,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        learning_rate: float | None = None,
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
        if self.num_data is None:
            raise ValueError(f"{type(self).__name__}: give num_data, the number of examples in the whole dataset")
        args, kwargs = as_inputs(x)
        check_inputs(args, kwargs)
        with torch.no_grad():
            draws = self.bnn.draw(self.num_draws, generator=generator, antithetic=self.antithetic)
        rate = self.learning_rate if learning_rate is None else learning_rate
        gathered: dict[str, dict[str, Tensor]] = {}
        gradient: dict[str, Tensor] = {}
        points: list[Tensor | None] = [None] * len(self._points)
        total = 0.0
        for weights in each(draws.weights):
            with explain_shape_errors(args, kwargs):
                seen = LayerPass(self._runner, weights, self.rules(), args, kwargs, self.bnn.output)
            with torch.enable_grad():
                log_prob = self.likelihood.log_prob(seen.outputs, y, has_draws=False)
                loss = -(log_prob if example_weights is None else log_prob * example_weights).sum()
            if not bool(torch.isfinite(loss)):
                raise ValueError(f"{type(self).__name__}: the loss is {loss.item()}; lower the learning rate")
            batch = log_prob.shape[0]
            taps, names = seen.taps(), list(seen.weights)
            targets = [seen.outputs, *taps, *seen.weights.values(), *self._points]
            grads = torch.autograd.grad(loss, targets, allow_unused=True, retain_graph=True)
            factor = 1 / (batch * self.num_draws)
            at_outputs, at_taps = grads[0], grads[1 : 1 + len(taps)]
            for name, grad in zip(names, grads[1 + len(taps) :], strict=False):
                _add(gradient, name, grad, factor, seen.weights[name])
                if grad is not None:
                    seen.used.add(name)
            for place, grad in enumerate(grads[1 + len(taps) + len(names) :]):
                if grad is not None:
                    before = points[place]
                    points[place] = grad * factor if before is None else before + grad * factor
            assert at_outputs is not None
            if example_weights is not None:  # a gradient that holds w, squared, is to hold it once
                shrink = torch.where(example_weights > 0, example_weights.double().rsqrt(), 0.0)
                at_outputs, *others = (
                    grad if grad is None else grad * _along(shrink, grad) for grad in (at_outputs, *at_taps)
                )
                at_taps = tuple(others)
            curvature = self.curvature(seen, at_taps, at_outputs, args, kwargs, generator, example_weights)
            for kind, values in curvature.items():
                for name, value in values.items():
                    _add(gathered.setdefault(kind, {}), name, value, 1 / self.num_draws, value)
            total += float(loss.detach()) * factor
        self.steps += 1
        with torch.no_grad():
            self.update(gradient, gathered, rate)
        self._step_points(points)
        return total

    def _step_points(self, grads: list[Tensor | None]) -> None:
        if self._optimizer is not None:
            for parameter, grad in zip(self._points, grads, strict=True):
                parameter.grad = None if grad is None else grad.to(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad()

    @abstractmethod
    def rules(self) -> Mapping[str, Rule]:
        """Rules of the layers whose inputs a pass must remember, by module name."""

    @abstractmethod
    def curvature(
        self,
        seen: LayerPass,
        at_taps: tuple[Tensor | None, ...],
        at_outputs: Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        generator: torch.Generator | None,
        example_weights: Tensor | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """What one draw's pass says of the curvature per example: kinds of moments, each by name.

        Gradients at taps and outputs hold the root of an example's weight, so that their squares hold the weight.
        """

    @abstractmethod
    def update(
        self, gradient: Mapping[str, Tensor], curvature: Mapping[str, Mapping[str, Tensor]], learning_rate: float
    ) -> None:
        """Change the posterior: `gradient` is that of the mean negative log-likelihood per example, by weight name."""

    @property
    def effective_data(self) -> float:
        """N divided by the KL's weight: a tempered posterior is that of more data."""
        assert self.num_data is not None
        return self.num_data / self.kl_weight

    def average(self, kind: str, name: str, value: Tensor, decay: float, times: int | None = None) -> Tensor:
        """A moving average brought up to date and freed of its start at 0 (as Adam does).

        Args:
            kind: Which moment.
            name: Of which weight or layer.
            value: The new observation.
            decay: Weight of the past.
            times: How often it was brought up to date, this time included; the number of steps if left out.
        """
        known = self.moments.setdefault(kind, {})
        past = known.get(name)
        known[name] = (1 - decay) * value if past is None else past.lerp(value, 1 - decay)
        return known[name] / (1 - decay ** (self.steps if times is None else times))

    # -- training --------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int,
        *,
        schedule: Callable[[float], float] | None = None,
        read_batch: BatchReader | None = None,
        checkpoint: str | Path | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Train over a loader, in training mode.

        Args:
            loader: Iterable of batches that starts anew each epoch.
            epochs: Passes over the data.
            schedule: Factor on the learning rate as a function of the share of the run that is done, from 0 to 1.
            read_batch: A function from what the loader yields to inputs and targets.
            checkpoint: File in which the run is stored after each epoch; a run whose file exists continues.
            seed: Of everything random; taken from torch's global generator if left out.
            progress: Whether to show a progress bar on the terminal.

        Returns:
            Itself; the trained network is `bnn`, the numbers of each epoch are in `history`.
        """
        if self.num_data is None:
            self.num_data = count_examples(loader, read_batch)
        check_num_data(self.num_data, min_examples(loader))

        def step(data: Batch, generator: torch.Generator, share: float) -> dict[str, float]:
            rate = self.learning_rate * (1.0 if schedule is None else schedule(share))
            nll = self.step(data.x, data.y, example_weights=data.weights, generator=generator, learning_rate=rate)
            return {"nll": nll}

        was_training = self.bnn.training
        self.bnn.train()
        try:
            self.history = run_epochs(
                type(self).__name__,
                step,
                loader,
                epochs=epochs,
                device=next(self.bnn.posteriors.parameters()).device,
                get_state=self.state_dict,
                set_state=self.load_state_dict,
                after_epoch=self._kl,
                seed=seed,
                read_batch=read_batch,
                checkpoint=checkpoint,
                progress=progress,
            )
        finally:
            self.bnn.train(was_training)
        return self

    @torch.no_grad()
    def _kl(self) -> dict[str, float]:
        return {"kl": float(self.bnn.kl())}

    def state_dict(self) -> dict[str, Any]:
        """All that a step changes, as nested data with tensors."""
        return {
            "bnn": dict(self.bnn.state_dict()),
            "moments": self.moments,
            "steps": self.steps,
            "points": self._optimizer.state_dict() if self._optimizer is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        device = next(self.bnn.posteriors.parameters()).device
        self.bnn.load_state_dict(state["bnn"])
        self.moments = {
            kind: {name: value.to(device) for name, value in values.items()}
            for kind, values in state["moments"].items()
        }
        self.steps = state["steps"]
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["points"])


def _add(into: dict[str, Tensor], name: str, value: Tensor | None, factor: float, like: Tensor) -> None:
    term = torch.zeros_like(widen(like.detach())) if value is None else widen(value) * factor
    into[name] = into[name] + term if name in into else term


def raw_softplus(value: Tensor) -> Tensor:
    """The inverse of softplus, entry by entry."""
    return value + torch.log(-torch.expm1(-value))


def check_damping(owner: str, damping: float) -> None:
    """Raise `ValueError` for a damping that is negative or not finite."""
    if not (damping >= 0 and math.isfinite(damping)):
        raise ValueError(f"{owner}: damping={damping}; give a number of at least 0")


def _along(numbers: Tensor, value: Tensor) -> Tensor:
    """[B] in a shape that multiplies the first axis of a tensor."""
    return numbers.to(value).view(-1, *[1] * (value.ndim - 1))
