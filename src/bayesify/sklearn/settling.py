"""The initial noise of named methods, estimated from the evidence of a plain network."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesify.laplace.from_task import laplace_around
from bayesify.likelihoods import Gaussian
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.settings import FULL_BATCH_ROWS
from bayesify.sklearn.training import Evidence, Start, train_posteriors
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
HELD_LEVERAGE = 0.4
"""If the mean leverage of the starting network exceeds this value, the trained method may have clearly less leverage."""
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
        if start.evidence is not None and float(start.evidence.leverage.mean()) > DOUBTFUL_LEVERAGE
    ]
    others = _settle_rounds([starts[place] for place in doubtful], [ALL_NOISE] * len(doubtful))
    for place, other in zip(doubtful, others, strict=True):
        found[place] = max(found[place], other, key=lambda entry: entry[1])
    return [start for start, _ in found]


def settle_further(start: Start) -> Start:
    """Continue an earlier `settle` with other rows."""
    return _settle_rounds([start], [_noise(start)])[0][0]


def _settle_rounds(starts: Sequence[Start], noises: Sequence[float | Tensor]) -> list[tuple[Start, float]]:
    """Alternate training and noise estimation, starting from given noises. Return the results and the log evidence of the last
    round."""
    found = []
    for start, noise in zip(starts, noises, strict=True):
        part = start.rows.thinned(FULL_BATCH_ROWS, derive_seed(start.settings.seed, "evidence"))
        y = torch.from_numpy(part.y)
        likelihood = Gaussian((torch.ones_like(y[0]) * noise).tolist()).double()
        found.append(
            (replace(start, likelihood=likelihood, evidence=Evidence(part, torch.zeros_like(y), y)), -math.inf)
        )
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
    """Two values after a round of training: the `Start` with the noise, leverage and residuals; and the log evidence at the old
    noise."""
    assert start.evidence is not None
    x, y, weights = start.evidence.rows.tensors()
    net, likelihood, prior = copy.deepcopy(start.network).eval(), start.fixed_likelihood, start.settings.prior
    laplace = laplace_around(net, likelihood, [(x, y, weights)], prior=prior, most=MAX_FULL_WEIGHTS)
    found = laplace.predict(x)
    assert isinstance(found, RegressionPredictive)
    leverage = (found.epistemic / _noise(start)).clamp(max=MAX_LEVERAGE).detach()
    residuals, share = (y - found.mean).detach(), weights.unsqueeze(-1)
    noise = (share * residuals.square()).sum(0) / (share * (1 - leverage)).sum(0)
    settled = Gaussian(noise.clamp_min(MIN_NOISE).tolist()).double()
    evidence = replace(start.evidence, leverage=leverage, residuals=residuals)
    return replace(start, likelihood=settled, evidence=evidence), float(laplace.log_evidence())


def recalibrate_by_leverage(evidence: Evidence, found: RegressionPredictive) -> Recalibration:
    r"""Recalibrate a trained method's probabilities from approximate leave-one-out predictions.

    In a linear model, a row with residual r, leverage h and epistemic variance v has the leave-one-out residual $r / (1 - h)$ and
    the leave-one-out epistemic variance $v / (1 - h)$. Let d be the leave-one-out residual divided by the standard deviation of
    the leave-one-out prediction. For each row, the method's distribution function is evaluated at the method's mean plus d times
    the method's standard deviation. The recalibration is fitted to these function values. A method's mean may have less leverage
    than the network from which the method started. If the mean leverage of this network exceeds `HELD_LEVERAGE`, $1 - h$ is
    multiplied by a factor of at least 1. With this factor, the method's mean and the network have the same root mean square of
    $r / (1 - h)$. `found` is the method's predictive for the rows from which the evidence was computed.
    """
    _, y, weights = evidence.rows.tensors()
    kept = 1 - evidence.leverage
    if float(evidence.leverage.mean()) > HELD_LEVERAGE:
        share = weights.unsqueeze(-1) / kept.square()
        own, first = ((share * part.square()).sum(0) for part in (y - found.mean, evidence.residuals))
        kept = (kept * (own / first.clamp_min(1e-12)).sqrt().clamp_min(1.0)).clamp_max(1.0)
    away = (y - found.mean) / kept / (found.aleatoric + found.epistemic / kept).sqrt()
    places = found.cdf(found.mean + away * found.std)
    weights = weights.unsqueeze(-1).expand_as(places)
    return Recalibration.of(places.double().flatten().numpy(), weights.flatten().numpy())
