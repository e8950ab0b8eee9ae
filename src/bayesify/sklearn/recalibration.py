"""Probabilities corrected by what out-of-fold predictions have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bayesify.predictive.base import Outputs

FEW, MANY = 60, 600
"""Rows below which nothing is corrected, and from which on there are more knots."""
LEVELS_OF_FEW = (0.05, 0.25, 0.5, 0.75, 0.95)
LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
PRIOR_ROWS = 30.0
"""Rows in favor of no correction."""
LEAST_SHARE = 0.25
"""Of a member's squared error that its ensemble has left, at least."""
LIMIT = 6.0
"""Normal scores beyond which a probability is 0 or 1."""


@dataclass(frozen=True)
class Recalibration:
    r"""An increasing map G of probabilities: where a predictive says $P(Y \le y) = u$, $G(u)$ was seen (Kuleshov et al. 2018).

    In normal scores, $\Phi^{-1} \circ G \circ \Phi$ is linear between knots and of slope 1 beyond them.

    Args:
        said: Normal scores of what predictions say, increasing; without any, G is the identity.
        seen: Of what was seen there, increasing.
    """

    said: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray) -> Self:
        """From $P(Y \\le y)$ of rows that the predictions have not seen.

        Args:
            values: [N], between 0 and 1.
            weights: How many examples each row stands for, [N].
        """
        num_rows = float(weights.sum())
        if num_rows < FEW:
            return cls()
        order = np.argsort(values, kind="stable")
        places = (np.cumsum(weights[order]) - 0.5 * weights[order]) / num_rows
        levels = np.array(LEVELS_OF_FEW if num_rows < MANY else LEVELS)
        found = np.interp(levels, places, values[order])
        share = num_rows / (num_rows + PRIOR_ROWS)
        said = share * _scores(found) + (1 - share) * _scores(levels)
        keep = np.concatenate(([True], np.diff(np.maximum.accumulate(said)) > 1e-3))
        return cls(tuple(said[keep].tolist()), tuple(_scores(levels)[keep].tolist()))

    def __call__(self, u: Tensor) -> Tensor:
        """G(u)."""
        return torch.special.ndtr(self._map(_as_scores(u), self.said, self.seen)[0]) if self.said else u

    def inverse(self, levels: Sequence[float]) -> list[float]:
        """The u at which G(u) is each level."""
        if not self.said:
            return list(levels)
        scores = _as_scores(torch.tensor(levels, dtype=torch.float64))
        u: list[float] = torch.special.ndtr(self._map(scores, self.seen, self.said)[0]).clamp(1e-12, 1 - 1e-12).tolist()
        return u

    def log_slope(self, u: Tensor) -> Tensor:
        """log G'(u)."""
        if not self.said:
            return torch.zeros_like(u)
        scores = _as_scores(u)
        mapped, slope = self._map(scores, self.said, self.seen)
        return 0.5 * (scores.square() - mapped.square()) + slope.log()

    @staticmethod
    def _map(scores: Tensor, start: Sequence[float], end: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Values and slopes of the piecewise-linear map from one list of knots to the other."""
        a, b = scores.new_tensor(start), scores.new_tensor(end)
        slopes = torch.cat((scores.new_ones(1), (b[1:] - b[:-1]) / (a[1:] - a[:-1]), scores.new_ones(1)))
        piece = torch.bucketize(scores, a)
        left = (piece - 1).clamp_min(0)
        return b[left] + slopes[piece] * (scores - a[left]), slopes[piece]

    def config(self) -> dict[str, Any]:
        """As plain data."""
        return {"said": list(self.said), "seen": list(self.seen)}


def _as_scores(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.double()).clamp(-LIMIT, LIMIT)


def _scores(levels: np.ndarray) -> np.ndarray:
    found: np.ndarray = _as_scores(torch.from_numpy(levels)).numpy()
    return found


def ensemble_places(likelihood: Any, every: Tensor, own: Tensor, z: Tensor, weights: np.ndarray) -> np.ndarray:
    r"""P(Z <= z) as an ensemble would say it of rows that none of its K members has seen: [2 N], two estimates of each row.

    A member k that has not seen a row errs by more than the mean of K such members, whose squared error is smaller by
    $(1 - 1/K)\,v$ with v the variance between them. Of v there is a bound from above, the distance of member k from the others,
    which were drawn to the row's target, and one from below, the variance between the others. The first estimate is member k's
    own probability, its error made smaller by the upper bound; the second that of the mixture of all members, moved to
    member k's location, with the geometric mean of the bounds as the variance between them. Alone the first leaves intervals too
    wide, as member k's own probabilities do more so, and the second too narrow.

    Args:
        likelihood: A `NumberLikelihood`, whose first output is a location.
        every: Outputs of all members, [K, N, outputs], K at least 3.
        own: Of the member that has not seen the row, [1, N, outputs].
        z: Targets on the network's scale, [N, 1].
        weights: How many examples each row stands for, [N].
    """
    count, center, places = len(every), own[0, :, :1], every[..., :1]
    z, share = z.to(center), torch.from_numpy(weights / weights.sum())
    others = (places.sum(0) - center) / (count - 1)
    unit = likelihood.predictive(Outputs(kept=every)).aleatoric.clamp_min(1e-12)

    def mean(square: Tensor) -> float:
        return max(float((share * (square / unit)[:, 0]).sum()), 1e-12)

    error, upper = mean((z - center).square()), mean((center - others).square()) * (count - 1) / count
    lower = mean(((places - others).square().sum(0) - (center - others).square()) / (count - 2))
    between, deviation = math.sqrt(upper * lower), places - places.mean(0)
    moved = center + deviation * math.sqrt(between / mean(deviation.square().sum(0) / (count - 1)))
    found = []
    for outputs, variance in ((own, upper), (torch.cat((moved, every[..., 1:]), dim=-1), between)):
        smaller = math.sqrt(max(LEAST_SHARE, 1 - variance * (1 - 1 / count) / error))
        found.append(likelihood.predictive(Outputs(kept=outputs)).cdf(center + smaller * (z - center))[:, 0].double())
    joined: np.ndarray = torch.cat(found).numpy()
    return joined
