"""Recalibration of probabilities from out-of-fold predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from bayesify.arguments.plain import Plain
from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Outputs
from bayesify.predictive.families.gaussian import normal_cdf
from bayesify.predictive.regression import RegressionPredictive

MIN_ROWS, MIN_ROWS_FOR_MORE_KNOTS = 60, 600
"""Minimum number of rows for a recalibration, and minimum number of rows for a recalibration with more knots."""
KNOT_LEVELS_OF_FEW = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
KNOT_LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
PRIOR_ROWS = 30.0
"""Weight of the identity map, as a number of rows."""
MIN_DEGREES, MAX_SCORE_OF_FEW = 8.0, 2.5
"""If there are few rows: the minimum degrees of freedom for their quantiles, and the absolute value at which their normal scores
are clipped, so that no row dominates the scale."""
MIN_ERROR_SHARE = 0.25
"""The ensemble's squared error is assumed to be at least this share of a member's squared error."""
MAX_NORMAL_SCORE = 6.0
"""Maximum absolute normal score of an observed frequency."""
STRETCH_LEVEL = 0.9
"""Level of the intervals whose coverage is right after stretching."""
MIN_TAIL_SCORE, MAX_TAIL_SCORE = -38.0, 8.2
"""Normal scores of the smallest positive probability in float64, and of the largest probability below 1."""


@dataclass(frozen=True)
class Recalibration(Plain):
    r"""An increasing map G of probabilities (Kuleshov et al. 2018). If a predictive states $P(Y \le y) = u$, the observed
    frequency of $Y \le y$ is $G(u)$.

    In normal scores, $\Phi^{-1} \circ G \circ \Phi$ is linear between the knots and has slope 1 beyond the first and the last
    knot.

    Args:
        said: Normal scores of stated probabilities, in increasing order; if there are none, G is the identity.
        seen: Normal scores of the observed frequencies, in increasing order.
    """

    said: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray) -> Self:
        r"""Fit the map to the stated probabilities $P(Y \le y)$ [N] and weights [N] of rows that the model has not seen."""
        num_rows = float(weights.sum())
        if num_rows < MIN_ROWS:
            return cls()
        order = np.argsort(values, kind="stable")
        # A row that stands for several examples contributes the places of its first and its last example.
        above, inset = np.cumsum(weights[order]), np.minimum(0.5, 0.5 * weights[order])
        places = np.column_stack((above - weights[order] + inset, above - inset)).reshape(-1) / num_rows
        levels = np.array(KNOT_LEVELS_OF_FEW if num_rows < MIN_ROWS_FOR_MORE_KNOTS else KNOT_LEVELS)
        found = np.interp(levels, places, values[order].repeat(2))
        share = num_rows / (num_rows + PRIOR_ROWS)
        said = share * _scores(found) + (1 - share) * _scores(levels)
        keep = np.concatenate(([True], np.diff(np.maximum.accumulate(said)) > 1e-3))
        return cls(tuple(said[keep].tolist()), tuple(_scores(levels)[keep].tolist()))

    @classmethod
    def of_few(cls, values: np.ndarray, weights: np.ndarray) -> Self:
        r"""For fewer than `MIN_ROWS` rows, fit a map that widens the predictive symmetrically. The arguments are the same as in
        `of`.

        Fewer than `MIN_ROWS` rows determine only one number: the scale of their clipped normal scores z. The quantile of level p
        has the normal score

        $$ c \sqrt{1 + 1/n}\; T_{n-1}^{-1}(p), \qquad c^2 = \max\Big(1, \frac{k + \sum_i \omega_i z_i^2}{k + n}\Big), $$

        where n is the sum of the weights, k is `PRIOR_ROWS`, and T is Student's distribution. Student's distribution allows for
        the error of means and scales that are estimated from n numbers.
        """
        num_rows = float(weights.sum())
        levels = np.array(KNOT_LEVELS_OF_FEW)
        squares = np.square(_scores(values)).clip(max=MAX_SCORE_OF_FEW**2)
        square = (PRIOR_ROWS + (weights * squares).sum()) / (PRIOR_ROWS + num_rows)
        said = stdtrit(max(num_rows - 1, MIN_DEGREES), levels) * math.sqrt(
            max(1.0, square) * (1 + 1 / max(num_rows, 1.0))
        )
        return cls(tuple(said.tolist()), tuple(_scores(levels).tolist()))

    def __call__(self, u: Tensor, stretch: Tensor | None = None) -> Tensor:
        """G(u); if `stretch` is given, the normal scores of G(u) are divided by it."""
        if not self.said and stretch is None:
            return u
        found = self._map(_as_scores(u), self.said, self.seen)[0]
        return normal_cdf(found if stretch is None else found / stretch)

    def inverse(self, levels: Sequence[float], stretch: float = 1.0) -> list[float]:
        """For each level, the u for which G(u) is this level."""
        if not self.said and stretch == 1:
            return list(levels)
        scores = stretch * _as_scores(torch.tensor(levels, dtype=torch.float64))
        found = normal_cdf(self._map(scores, self.seen, self.said)[0]).clamp(1e-300, 1 - 2**-53)
        return [float(level) for level in found]

    def log_slope(self, u: Tensor, stretch: Tensor | None = None) -> Tensor:
        """log G'(u)."""
        if not self.said and stretch is None:
            return torch.zeros_like(u)
        scores = _as_scores(u).clamp(MIN_TAIL_SCORE, MAX_TAIL_SCORE)
        mapped, slope = self._map(scores, self.said, self.seen)
        if stretch is not None:
            mapped, slope = mapped / stretch, slope / stretch
        return 0.5 * (scores - mapped) * (scores + mapped) + slope.log()

    @staticmethod
    def _map(scores: Tensor, start: Sequence[float], end: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Values and slopes of the piecewise-linear map that takes the knots `start` to the knots `end`."""
        if not start:
            return scores, torch.ones_like(scores)
        a, b = scores.new_tensor(start), scores.new_tensor(end)
        slopes = torch.cat((scores.new_ones(1), (b[1:] - b[:-1]) / (a[1:] - a[:-1]), scores.new_ones(1)))
        piece = torch.bucketize(scores, a)
        left = (piece - 1).clamp_min(0)
        return b[left] + slopes[piece] * (scores - a[left]), slopes[piece]


def _as_scores(u: Tensor) -> Tensor:
    scores: Tensor = torch.special.ndtri(u.double())
    return scores


def _scores(levels: np.ndarray) -> np.ndarray:
    return np.asarray(_as_scores(torch.from_numpy(levels)).clamp(-MAX_NORMAL_SCORE, MAX_NORMAL_SCORE))


def stretch_factor(u: np.ndarray, weights: np.ndarray) -> float:
    r"""The factor, at least 1, by which central 90 % intervals must be widened to contain 90 % of the targets.

    $$ s = \max(1, q_{0.9}(|\Phi^{-1}(u)|) / \Phi^{-1}(0.95)) $$

    for the stated probabilities $u = P(Y \le y)$ [N] and weights [N] of rows that the model has not seen.
    """
    scores = np.abs(np.asarray(_as_scores(torch.from_numpy(u).clamp(1e-12, 1 - 1e-12))))
    order = np.argsort(scores, kind="stable")
    share = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    wide = float(np.interp(STRETCH_LEVEL, share, scores[order]))
    return max(1.0, wide / float(_scores(np.array(0.5 + 0.5 * STRETCH_LEVEL))))


def ensemble_places(
    likelihood: Likelihood, every: Tensor, holder: np.ndarray, z: Tensor, weights: np.ndarray
) -> np.ndarray:
    r"""Estimate of P(Z <= z) for each row, [N], under an ensemble of K members that have not seen the row.

    Each row has exactly one member that has not seen it. This member's distribution has the location c. The mean of K such
    members has a smaller error than a single member, and the members disagree with each other. The smaller error and the
    disagreement both follow from the variance v between members. Let $\bar o$ be the mean location of the other members, which
    have seen the row. On average, $(c - \bar o)^2 (K - 1) / K$ is larger than v, because training has moved the other members
    toward the target. The variance between the members that have seen the row is smaller than v. So v is estimated by the
    geometric mean of $(c - \bar o)^2 (K - 1) / K$ and the variance between the other members, each averaged over rows in units of
    the noise variance. Then

    - the error $z - c$ shrinks by the factor $\sqrt{1 - (1 - 1/K)\, v / e^2}$, where $e^2$ is the error's mean square;
    - the distribution becomes a mixture of K copies of itself, at c and at $c + s\,(o_k - \bar o)$, where s makes the mean
      variance between the copies equal to v. The members that have seen a row thus show how much members disagree about it.

    Args:
        likelihood: A `NumberLikelihood` whose first output is a location.
        every: Outputs of all K members (at least 3), [K, N, outputs].
        holder: For each row, the index of the member that has not seen it, [N].
        z: Targets on the network's scale, [N, 1].
        weights: Number of examples that each row stands for, [N].
    """
    count, mine = len(every), torch.arange(len(every)).view(-1, 1, 1) == torch.from_numpy(holder).view(1, -1, 1)
    own = torch.where(mine, every, 0).sum(0, keepdim=True)
    center, places = own[0, :, :1], every[..., :1]
    z, share = z.to(center), torch.from_numpy(weights / weights.sum())
    others = (places.sum(0) - center) / (count - 1)
    apart = torch.where(mine, 0, places - others)
    alone = likelihood.predictive(Outputs(kept=own))
    assert isinstance(alone, RegressionPredictive)
    unit = alone.aleatoric.clamp_min(1e-12)

    def mean(square: Tensor) -> float:
        return max(float((share * (square / unit)[:, 0]).sum()), 1e-12)

    upper, lower = mean((center - others).square()) * (count - 1) / count, mean(apart.square().sum(0) / (count - 2))
    between = math.sqrt(upper * lower)
    stretch = math.sqrt(between / mean(apart.square().sum(0) / (count - 1)))
    moved = torch.cat((center + stretch * apart, own[..., 1:].expand(count, -1, -1)), dim=-1)
    smaller = math.sqrt(max(MIN_ERROR_SHARE, 1 - between * (1 - 1 / count) / mean((z - center).square())))
    return np.asarray(alone.with_outputs(moved).cdf(center + smaller * (z - center))[:, 0].double())
