"""The initial noise of named methods, estimated from the evidence of a plain network."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesify.laplace.from_task import laplace_around
from bayesify.likelihoods import Gaussian
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn.settings import FULL_BATCH_ROWS
from bayesify.sklearn.training import Start, train_posteriors
from bayesify.training.random_streams import derive_seed

START_NOISE = 0.1
"""Noise variance of standardized targets before the noise is estimated or learned."""
MIN_NOISE = 1e-4
"""Lower limit of the estimated noise variance of standardized targets."""
MAX_ROUNDS, ROUND_EFFORT, MIN_LOG_CHANGE = 5, 0.3, 0.2
"""Limits of the training rounds that estimate the noise: maximum number of rounds, epochs per round as a share of the main
phase's epochs, and the change of the log noise below which no further round follows."""
MAX_FULL_WEIGHTS = 1000
"""With at most this many weights, the evidence includes the correlations between weights."""
MAX_LEVERAGE = 0.95
"""Upper limit of a row's leverage in the rounds. The leverage is the share of the row's own target in its prediction."""
DOUBTFUL_LEVERAGE = 0.5
"""If the mean leverage exceeds this value, the rounds run once more, starting from the noise `ALL_NOISE`. A network with more
weights than rows can mistake noise for signal, and both extremes may be stable."""
ALL_NOISE = 1.0
"""Noise variance that explains the whole variance of standardized targets and leaves no signal."""


def settle(starts: Sequence[Start]) -> list[Start]:
    r"""Train plain networks with the noise variance that maximizes their evidence (MacKay 1992).

    This variance is the mean squared residual of the network's training rows, corrected for the $\gamma$ parameters that were
    fitted to these rows,

    $$ \sigma^2 = \frac{\sum_n \omega_n r_n^2}{N - \gamma}, \qquad \gamma = \sum_n \omega_n h_n, \quad h_n = v_n / \sigma^2, $$

    where v is the variance of an output under the Laplace approximation. A network trains in rounds, each with the noise that
    the round before has estimated. If the network after the last round reproduces most of its targets, the rounds are repeated
    with a large initial noise. The result with the greater evidence is returned. If a table has more than `FULL_BATCH_ROWS` rows,
    the evidence is computed from `FULL_BATCH_ROWS` representative rows.
    """
    found = _settle_rounds(starts, [START_NOISE] * len(starts))
    doubtful = [
        place
        for place, (start, _) in enumerate(found)
        if start.leverage is not None and float(start.leverage.mean()) > DOUBTFUL_LEVERAGE
    ]
    others = _settle_rounds([starts[place] for place in doubtful], [ALL_NOISE] * len(doubtful))
    for place, other in zip(doubtful, others, strict=True):
        found[place] = max(found[place], other, key=lambda entry: entry[1])
    return [start for start, _ in found]


def settle_further(starts: Sequence[Start]) -> list[Start]:
    """Continue an earlier `settle` with other rows."""
    return [start for start, _ in _settle_rounds(starts, [_noise(start) for start in starts])]


def _settle_rounds(starts: Sequence[Start], noises: Sequence[float | Tensor]) -> list[tuple[Start, float]]:
    """Alternate training and noise estimation, starting from given noises. Return the results and the log evidence of the last
    round."""
    found = []
    for start, noise in zip(starts, noises, strict=True):
        y = torch.from_numpy(start.rows.y)
        likelihood = Gaussian((torch.ones_like(y[0]) * noise).tolist()).double()
        found.append((replace(start, likelihood=likelihood, leverage=torch.zeros_like(y)), -math.inf))
    unsettled = [place for place, start in enumerate(starts) if len(start.rows) > 1]
    for _ in range(MAX_ROUNDS):
        if not unsettled:
            break
        now = [found[place][0] for place in unsettled]
        bnns = [start.point() for start in now]
        rows, settings = [start.rows for start in now], [start.settings for start in now]
        train_posteriors(bnns, rows, settings, effort=ROUND_EFFORT, start=False)
        for place, start, bnn in zip(list(unsettled), now, bnns, strict=True):
            found[place] = _estimate_noise(replace(start, network=bnn.mean_network()))
            change = _noise(found[place][0]) / _noise(start)
            if bool((change.log().abs() < MIN_LOG_CHANGE).all()):
                unsettled.remove(place)
    return found


def _noise(start: Start) -> Tensor:
    assert isinstance(start.likelihood, Gaussian)
    return start.likelihood.noise.detach()


def _estimate_noise(start: Start) -> tuple[Start, float]:
    """Two values after a round of training: the `Start` with the noise and the leverage; and the log evidence at the old noise."""
    x, y, weights = start.rows.thinned(FULL_BATCH_ROWS, derive_seed(start.settings.seed, "evidence")).tensors()
    net, likelihood, prior = copy.deepcopy(start.network).eval(), start.fixed_likelihood, start.settings.prior
    with warnings.catch_warnings():  # about a network in the middle of its training
        warnings.filterwarnings("ignore", message="Laplace.fit: the network has learned little")
        laplace = laplace_around(net, likelihood, [(x, y, weights)], prior=prior, most=MAX_FULL_WEIGHTS)
    found = laplace.predict(x)
    assert isinstance(found, RegressionPredictive)
    leverage = (found.epistemic / _noise(start)).clamp(max=MAX_LEVERAGE).detach()
    residuals, share = (y - found.mean).detach(), weights.unsqueeze(-1)
    noise = (share * residuals.square()).sum(0) / (share * (1 - leverage)).sum(0)
    settled = Gaussian(noise.clamp_min(MIN_NOISE).tolist()).double()
    return replace(start, likelihood=settled, leverage=leverage), float(laplace.log_evidence())
