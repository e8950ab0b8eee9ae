"""The noise variance of a regression that nobody has given: by closed forms while `fit` trains, not by gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bayesify.likelihoods import Gaussian
from bayesify.network import BayesianNetwork
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
MIN_RELATIVE_VARIANCE = 1e-8
"""Smallest variance, relative to that of the targets."""


class LearnedNoise:
    r"""The variance of `likelihoods.Gaussian()` in one run of `fit`.

    It starts at the mean squared residual of the network that was given, or at a tenth of the targets' variance if that network
    predicts hardly better than their mean. For given weights the bound is largest at

    $$ \sigma^2 = \frac{1}{N O} \sum_n \mathbb{E}_q \| y_n - f(x_n) \|^2, $$

    the mean over N examples of O numbers, which follows from an epoch's mean negative log-likelihood. After each epoch the variance
    is set to it; in the first two thirds of the epochs only if that is less than before.

    Args:
        model: What is trained.
        epochs: Epochs of the run.
    """

    def __init__(self, model: Trainable, epochs: int) -> None:
        bnn = model.module
        likelihood = bnn.likelihood if isinstance(bnn, BayesianNetwork) else None
        self._model, self._epochs = model, epochs
        self._likelihood = likelihood if isinstance(likelihood, Gaussian) and likelihood.is_learned_by_fit else None
        self._numbers, self._weight, self._least = 1, 1.0, 0.0

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
        assert isinstance(bnn, BayesianNetwork)
        weights = torch.cat([batch.counts for batch in batches]).double().cpu()
        targets = torch.cat([batch.y.flatten(1) if batch.y.ndim > 1 else batch.y[:, None] for batch in batches])
        targets = targets.double().cpu()
        self._numbers, self._weight = targets.shape[1], float(weights.mean())
        shares = (weights / weights.sum()).unsqueeze(-1)
        spread = float((shares * (targets - (shares * targets).sum(0)).square()).sum() / self._numbers)
        self._least = MIN_RELATIVE_VARIANCE * spread or MIN_RELATIVE_VARIANCE
        if likelihood.is_settled:
            return
        network, squares = start_network(self._model), 0.0
        assert network is not None
        for batch in (batch.to(device) for batch in batches):
            found = predict_plain(network, batch.x, likelihood, bnn.output)
            assert isinstance(found, RegressionPredictive)
            errors = (match_targets(batch.y, found.mean) - found.mean).square().flatten(1).mean(1).double().cpu()
            squares += float((batch.counts * errors).sum())
        residual = squares / max(float(weights.sum()), 1e-30)
        trained = residual < (1 - MIN_EXPLAINED_SHARE) * spread
        self._set(residual if trained else UNTRAINED_SHARE * spread)

    def after_epoch(self, nll: float, epoch: int, last: bool) -> None:
        """Set the variance by an epoch's mean negative log-likelihood of an example; `epoch` counts from 1."""
        likelihood = self._likelihood
        if likelihood is None or not math.isfinite(nll):
            return
        now = float(likelihood.noise.detach())
        found = 2 * now * (nll / (self._numbers * self._weight) - 0.5 * math.log(2 * math.pi * now))
        if last or epoch > FALLING_SHARE * self._epochs or found < now:
            self._set(found)

    def _set(self, variance: float) -> None:
        assert self._likelihood is not None
        self._likelihood.set_noise(max(variance, self._least))
