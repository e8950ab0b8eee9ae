"""The noise variance of a regression that nobody has given: by closed forms while `fit` trains, not by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.likelihoods import Gaussian
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import Batch, Trainable
from bayesify.training.validation import predict_plain
from bayesify.training.watch import start_network

MAX_EXAMPLES = 8192
"""Examples whose residuals give the variance at the start: its standard error is then 1.6 %."""
UNTRAINED_SHARE = 0.1
"""Variance at the start, relative to that of the targets, where the given network is hardly better than their mean: its residuals
say nothing of the noise, and a large variance would let the prior win before the network has learned anything."""
MIN_EXPLAINED_SHARE = 0.2
"""Share of the targets' variance that a network must explain for its residuals to count."""
FALLING_SHARE = 2 / 3
"""Share of the epochs in which the variance only falls: residuals of a network that still learns are larger than the noise."""
FINAL_DRAWS = 8
"""Draws of the predictions that give the last variance where epochs do not tell it."""
MIN_VARIANCE = 1e-30
"""Smallest variance; float32 holds it with all its digits."""


class LearnedNoise:
    r"""The variance of `likelihoods.Gaussian()` in one run of `fit`.

    It starts at the mean squared residual of the network that was given, or at a tenth of the targets' variance if that network
    predicts hardly better than their mean. For given weights the bound is largest at

    $$ \sigma^2 = \frac{1}{N O} \sum_n \mathbb{E}_q \| y_n - f(x_n) \|^2, $$

    the mean over N examples of O numbers, by weights, which follows from an epoch's mean negative log-likelihood. After each epoch
    the variance is set to it; in the first two thirds of the epochs only if that is less than before. Dropout makes the residuals
    of training batches larger than those of predictions, and a run may be stopped early. In these cases the last variance is that
    of predictions in evaluation mode, on the first rows of the data.

    Args:
        model: What is trained.
        epochs: Epochs of the run.

    Attributes:
        replaced: The parameter of the variance as it was in the epoch, by name, from the change after an epoch to the epoch's end:
            what a checkpoint of that time holds, because a continued run makes the change again. Otherwise empty.
    """

    def __init__(self, model: Trainable, epochs: int) -> None:
        bnn, likelihood = model.module, cast(nn.Module | None, None)
        if isinstance(bnn, BayesianNetwork):
            likelihood = bnn.likelihood
        elif (
            isinstance(bnn, nn.ModuleDict) and "likelihood" in bnn
        ):  # a plain network that trains next to its likelihood
            likelihood = bnn["likelihood"]
        self._model, self._epochs = model, epochs
        self._likelihood = likelihood if isinstance(likelihood, Gaussian) and likelihood.is_learned_by_fit else None
        self._numbers = 1
        self.replaced: dict[str, Tensor] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether there is a variance to find."""
        return self._likelihood is not None

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """For the time of a run: no optimizer moves the variance."""
        raw = None if self._likelihood is None else self._likelihood.raw_noise.requires_grad_(False)
        try:
            yield
        finally:
            if raw is not None:
                raw.requires_grad_(True)

    @torch.no_grad()
    def begin(self, batches: Sequence[Batch], device: torch.device) -> None:
        """See sizes and scale of the targets, and set the variance where nothing has set it before."""
        likelihood, bnn = self._likelihood, self._model.module
        if likelihood is None or not batches:
            return
        weights = torch.cat([batch.counts for batch in batches])
        targets = torch.cat([batch.y.reshape(len(batch), -1) for batch in batches]).double().cpu()
        self._numbers = targets.shape[1]
        if likelihood.is_settled or not isinstance(bnn, BayesianNetwork):
            return
        shares = (weights / weights.sum()).unsqueeze(-1)
        spread = float((shares * (targets - (shares * targets).sum(0)).square()).sum() / self._numbers)
        network = start_network(self._model)
        assert network is not None
        residual = self._residual(batches, device, lambda x: predict_plain(network, x, likelihood, bnn.output))
        trained = residual < (1 - MIN_EXPLAINED_SHARE) * spread
        constant = float((shares * targets.square()).sum()) / self._numbers or 1.0
        self._set(residual if trained else UNTRAINED_SHARE * (spread if spread > 1e-12 * constant else constant))

    def _residual(self, batches: Sequence[Batch], device: torch.device, predict: Callable[[Any], Predictive]) -> float:
        """Mean over examples and outputs of the squared residual and the epistemic variance, by weights; in evaluation mode."""
        squares = count = 0.0
        for batch in (batch.to(device) for batch in batches):
            found = predict(batch.x)
            assert isinstance(found, RegressionPredictive)
            errors = (match_targets(batch.y, found.mean) - found.mean).square() + found.epistemic
            squares += float((batch.counts * errors.reshape(len(batch), -1).mean(1).double().cpu()).sum())
            count += float(batch.counts.sum())
        return squares / count if count > 0 else math.nan

    def after_epoch(self, nll: float, epoch: int, last: bool) -> None:
        """Set the variance by an epoch's mean negative log-likelihood of an example, by weights; `epoch` counts from 1."""
        likelihood = self._likelihood
        if likelihood is None:
            return
        self.replaced = {"likelihood.raw_noise": likelihood.raw_noise.detach().clone()}
        if not math.isfinite(nll):
            return
        now = float(likelihood.noise.detach())
        found = 2 * now * (nll / self._numbers - 0.5 * math.log(2 * math.pi * now))
        if last or epoch > FALLING_SHARE * self._epochs or found < now:
            self._set(found)

    @torch.no_grad()
    def finish(self, read: Callable[[], Sequence[Batch]], device: torch.device, stopped: bool) -> None:
        """Set the variance by predictions in evaluation mode, where epochs do not tell it: see the class."""
        bnn = self._model.module
        if self._likelihood is None or not isinstance(bnn, BayesianNetwork):
            return
        if stopped or _has_dropout(bnn):
            generator = torch.Generator(device).manual_seed(0)
            self._set(self._residual(read(), device, lambda x: bnn.predict(x, FINAL_DRAWS, generator=generator)))

    def _set(self, variance: float) -> None:
        if self._likelihood is not None and math.isfinite(variance):
            self._likelihood.set_noise(max(variance, MIN_VARIANCE))


def _has_dropout(bnn: BayesianNetwork) -> bool:
    return any(isinstance(part, _DropoutNd) and part.p > 0 for part in bnn.network.modules())
