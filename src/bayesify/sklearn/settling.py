"""Where a method by name starts: a plain network with the noise that its evidence asks for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bayesify.conversion import bayesianize
from bayesify.laplace.from_task import laplace_around
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.posteriors import Point
from bayesify.predictive.regression import RegressionPredictive
from bayesify.priors import Neal
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.rows import FULL_BATCH, Rows
from bayesify.sklearn.training import Plan, train_posteriors
from bayesify.training.random_streams import derive_seed

START_NOISE = 0.1
"""Noise variance of standardized targets before it is estimated or learned."""
LEAST_NOISE = 1e-4
"""Noise variance of standardized targets, at least, where it is estimated."""
ROUNDS, ROUND_EFFORT, ENOUGH = 5, 0.3, 0.2
"""Trainings that settle the noise, at most, the share of the main phase's epochs that each has, and the change of the noise's
logarithm below which none follows."""
MOST_FULL = 1000
"""Weights up to which their correlations count in this."""
MOST_LEVERAGE = 0.95
"""How much of its target a row's prediction may hold in these."""
HELD = 0.4
"""Mean leverage above which it matters that a method may have less of it than the network it started from."""
DOUBTFUL = 0.5
"""Mean leverage above which the rounds run once more from a noise of `ALL_NOISE`: a network with more weights than rows can take
noise for signal, and both ends may hold themselves up."""
ALL_NOISE = 1.0
"""Noise variance of standardized targets that leaves no signal."""


@dataclass(frozen=True)
class Start:
    """Where a method starts.

    Args:
        network: The network.
        likelihood: p(y | outputs) in standardized units.
        rows: That the noise was settled by, if it was.
        leverage: How much of each row's own target its prediction holds, h in [0, 1), [N, O].
        residuals: What the network leaves of the rows' targets, [N, O].
    """

    network: nn.Module
    likelihood: Likelihood
    rows: Rows | None = None
    leverage: torch.Tensor | None = None
    residuals: torch.Tensor | None = None

    def recalibration(self, predict: Callable[[torch.Tensor], Any]) -> Recalibration:
        r"""Of a trained method's probabilities, by the rows' targets as they would be predicted without them.

        For a linear model these would differ from the mean by $r / (1 - h)$ where the epistemic variance were $v / (1 - h)$. The
        predictive is asked for its probability of a target that is as many of its standard deviations away. A method's mean may
        hold less of its targets than the network that it started from. Where that holds much (`HELD`), the method's $1 - h$ is the
        network's times the factor that makes the root mean square of $r / (1 - h)$ that of the network, if it is larger than 1.

        Args:
            predict: Of the method, for standardized inputs.
        """
        if self.rows is None or self.leverage is None:
            return Recalibration()
        x, y, weights = self.rows.tensors()
        found, kept = predict(x), 1 - self.leverage
        if self.residuals is not None and float(self.leverage.mean()) > HELD:
            share = weights.unsqueeze(-1) / kept.square()
            own, first = ((share * part.square()).sum(0) for part in (y - found.mean, self.residuals))
            kept = (kept * (own / first.clamp_min(1e-12)).sqrt().clamp_min(1.0)).clamp_max(1.0)
        away = (y - found.mean) / kept / (found.aleatoric + found.epistemic / kept).sqrt()
        places = found.cdf(found.mean + away * found.std)
        weights = weights.unsqueeze(-1).expand_as(places)
        return Recalibration.of(places.double().flatten().numpy(), weights.flatten().numpy())


def settle(net: nn.Module, rows: Rows, plan: Plan) -> Start:
    r"""Train a plain network with the noise that its evidence asks for: what it leaves of its own rows, counted without the
    $\gamma$ parameters that it has fitted to them (MacKay 1992),

    $$ \sigma^2 = \frac{\sum_n \omega_n r_n^2}{N - \gamma}, \qquad \gamma = \sum_n \omega_n h_n, \quad h_n = v_n / \sigma^2, $$

    v the variance of an output under the Laplace approximation. The network trains in rounds, each with the noise after the last;
    where it then holds most of its rows' targets, once more from much noise, and the greater evidence decides.

    Args:
        net: Where training starts.
        rows: Standardized; of more than `FULL_BATCH`, as many stand for all in the evidence.
        plan: How to train.
    """
    found, evidence = _rounds(net, rows, plan, START_NOISE)
    if found.leverage is not None and float(found.leverage.mean()) > DOUBTFUL:
        other, more = _rounds(net, rows, plan, ALL_NOISE)
        found = other if more > evidence else found
    return found


def settle_further(start: Start, rows: Rows, plan: Plan) -> Start:
    """`settle` from what an earlier one found, on other rows."""
    assert isinstance(start.likelihood, Gaussian)
    return _rounds(start.network, rows, plan, start.likelihood.noise.detach())[0]


def _rounds(net: nn.Module, rows: Rows, plan: Plan, start: float | torch.Tensor) -> tuple[Start, float]:
    """Training and noise in turns from one noise, and the log evidence of the last of them."""
    part = rows.thinned(FULL_BATCH, derive_seed(plan.seed, "evidence"))
    x, y, weights = part.tensors()
    noise, leverage, evidence = torch.ones_like(y[0]) * start, torch.zeros_like(y), -math.inf
    residuals = y
    for _ in range(ROUNDS if len(rows) > 1 else 0):
        likelihood, prior = Gaussian(noise.tolist(), learn=False).double(), Neal(plan.prior_scale)
        bnn = bayesianize(net, Point(), likelihood=likelihood, prior=prior)
        train_posteriors([bnn], [rows], [plan], effort=ROUND_EFFORT, start=False)
        net = bnn.mean_network()
        laplace = laplace_around(copy.deepcopy(net).eval(), likelihood, [(x, y, weights)], prior=prior, most=MOST_FULL)
        found, evidence = laplace.predict(x), float(laplace.log_evidence())
        assert isinstance(found, RegressionPredictive)
        leverage, residuals = (found.epistemic / noise).clamp(max=MOST_LEVERAGE), y - found.mean
        share = weights.unsqueeze(-1)
        before, noise = noise, (share * residuals.square()).sum(0) / (share * (1 - leverage)).sum(0)
        noise = noise.detach().clamp_min(LEAST_NOISE)
        if bool(((noise / before).log().abs() < ENOUGH).all()):
            break
    return Start(net, Gaussian(noise.tolist()).double(), part, leverage.detach(), residuals.detach()), evidence
