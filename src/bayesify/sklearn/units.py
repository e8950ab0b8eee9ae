"""A regression's predictive in the units of the targets: transformed, scaled, recalibrated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.sklearn.recalibration import Recalibration

NODES = np.linspace(-4.5, 4.5, 37)
"""Normal scores at whose quantiles integrals over a distribution are taken: the trapezoidal rule, to some 1e-6 for smooth ones."""


LEAST_PROBABILITY = 1e-12
"""Of a value that has a probability, in logarithms."""


@dataclass(frozen=True)
class Transform:
    """An increasing function t of the target, in which it is closer to what a network predicts well.

    Args:
        forward: t.
        inverse: Its inverse.
        log_slope: log t'.
        least: The values of y lie above it, or are it where `with_least`.
        with_least: Whether y may be `least`.
    """

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]
    least: float = -math.inf
    with_least: bool = False

    def fits(self, y: np.ndarray) -> bool:
        """Whether it takes all these values."""
        return bool((y >= self.least).all() if self.with_least else (y > self.least).all())


TRANSFORMS = {
    "none": Transform(lambda y: y, lambda t: t, torch.zeros_like),
    "log": Transform(torch.log, torch.exp, lambda y: -y.log(), 0.0),
    "log1p": Transform(torch.log1p, lambda t: torch.expm1(t).clamp_min(0), lambda y: -y.log1p(), 0.0, True),
    "sqrt": Transform(torch.sqrt, lambda t: t.clamp_min(0).square(), lambda y: -0.5 * (4 * y).log(), 0.0, True),
}
"""By the name that an estimator's `target_transform` takes; all act on each target."""


class UnitsPredictive(RegressionPredictive):
    r"""The distribution of $y = t^{-1}(\text{shift} + \text{scale} \cdot z)$ for z of a given predictive, recalibrated.

    $P(Y \le y) = G(F_z(z(y)))$ with the map G of a `Recalibration`; where all targets were above a floor, what lies below is put
    at the floor. Mean and variance are integrals over quantiles unless t is affine, G the identity and there is no floor; the
    parts of the variance then keep their shares in z's.

    Args:
        inner: The predictive of z, [B, O].
        shift: [O].
        scale: [O], positive.
        transform: t, a key of `TRANSFORMS`.
        recalibration: G.
        floor: No quantile lies below it.
    """

    is_mixture = False

    def __init__(
        self,
        inner: RegressionPredictive,
        shift: Tensor,
        scale: Tensor,
        transform: str = "none",
        recalibration: Recalibration | None = None,
        floor: float = -math.inf,
    ) -> None:
        self._inner, self._shift, self._scale, self._floor = inner, shift, scale, floor
        self._name, self._recalibration = transform, recalibration or Recalibration()
        self.family = inner.family

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return f"UnitsPredictive({self._inner!r}, transform={self._name!r})"

    def of_rows(self, index: Tensor, recalibration: Recalibration | None, floor: float) -> UnitsPredictive:
        """The distribution of some rows, with another recalibration and floor.

        Args:
            index: Their positions.
            recalibration: G; `None` for the identity.
            floor: No quantile lies below it.
        """
        inner = self._inner.with_outputs(self._inner.outputs[:, index])
        return UnitsPredictive(inner, self._shift, self._scale, self._name, recalibration, floor)

    @property
    def _transform(self) -> Transform:
        return TRANSFORMS[self._name]

    @property
    def _affine(self) -> bool:
        return self._name == "none" and not self._recalibration.said and self._floor == -math.inf

    @property
    def outputs(self) -> Tensor:
        """The network's outputs of each draw; in the targets' units where these are a shift and a scale away: [S, B, O]."""
        outputs = self._inner.outputs
        return self._shift + self._scale * outputs if outputs.shape[-1] == len(self._shift) else outputs

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        inner = self._inner
        if self._affine:
            square = self._scale.square()
            return self._shift + self._scale * inner.mean, square * inner.epistemic, square * inner.aleatoric
        weights = np.exp(-0.5 * NODES**2)
        share = torch.from_numpy(weights / weights.sum()).view(-1, 1, 1)
        levels = torch.special.ndtr(torch.from_numpy(NODES)).tolist()
        values = self.quantile(levels).double()  # [Q, B, O]
        mean = (share * values).sum(0)
        variance = (share * (values - mean).square()).sum(0)
        part = (inner.epistemic / (inner.epistemic + inner.aleatoric)).double()
        return mean, part * variance, (1 - part) * variance

    def _standardized(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """z and y in the shape of predictions; y outside the transform's domain is moved into it."""
        y = match_targets(y, self._inner.mean).to(self._shift.dtype)
        least = self._transform.least
        inside = (
            y.clamp_min(least + 1e-300) if least > -math.inf and not self._transform.with_least else y.clamp_min(least)
        )
        return (self._transform.forward(inside) - self._shift) / self._scale, inside

    def _as_inner(self, z: Tensor) -> Tensor:
        return z.to(self._inner.mean.dtype)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of targets, one number per example, with the slopes of transform, scale and recalibration: [B].

        At a floor it is the logarithm of the probability that all that lies below has been put there.
        """
        z, y = self._standardized(y)
        if self.family.discrete:
            return (self.cdf(y) - self._below(y)).clamp_min(LEAST_PROBABILITY).log().sum(-1)
        least = max(self._floor, self._transform.least)
        atom = (y <= least).any(-1) if least > -math.inf else torch.zeros(len(y), dtype=torch.bool)
        slopes = self._transform.log_slope(y) - self._scale.log()
        if self._recalibration.said:
            slopes = slopes + self._recalibration.log_slope(self._inner.cdf(self._as_inner(z)))
        density = self._inner.log_prob(self._as_inner(z)) + slopes.sum(-1)
        if not bool(atom.any()):
            return density
        return torch.where(atom, self.cdf(y).clamp_min(LEAST_PROBABILITY).log().sum(-1).to(density), density)

    def _below(self, y: Tensor) -> Tensor:
        """P(Y < y) of whole numbers."""
        y = match_targets(y, self._inner.mean)
        return torch.where(y >= 1, self.cdf((y - 1).clamp_min(0)), 0.0)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""
        z, y = self._standardized(y)
        found = self._recalibration(self._inner.cdf(self._as_inner(z)).double())
        return torch.where((y < self._floor) | (y < self._transform.least), torch.zeros_like(found), found)

    def centrality(self, y: Tensor) -> Tensor:
        """The level of the smallest central interval that holds y: [B, O]."""
        if not self.family.discrete:
            return (2 * self.cdf(y) - 1).abs()
        return torch.maximum(1 - 2 * self.cdf(y), 2 * self._below(y) - 1).clamp_min(0)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The value that y stays below with probability q: [B, O], or [Q, B, O]."""
        levels = [float(q)] if isinstance(q, (int, float)) else [float(level) for level in q]
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")
        inner = self._inner.quantile(self._recalibration.inverse(levels)).to(self._shift.dtype)
        found = self._transform.inverse(self._shift + self._scale * inner).clamp_min(self._floor)
        return found[0] if isinstance(q, (int, float)) else found

    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score in y's unit, $2 \int \rho_q(y - Q(q))\,dq$ with the pinball loss: [B, O]."""
        if self._affine:
            return self._scale * self._inner.crps(self._as_inner(self._standardized(y)[0]))
        weights = np.exp(-0.5 * NODES**2)
        share = torch.from_numpy(weights / weights.sum()).view(-1, 1, 1)
        levels = torch.special.ndtr(torch.from_numpy(NODES))
        error = match_targets(y, self._inner.mean) - self.quantile(levels.tolist())
        level = levels.view(-1, 1, 1)
        return 2 * (share * torch.maximum(level * error, (level - 1) * error)).sum(0)
