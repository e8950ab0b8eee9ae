"""Units of a regression's targets, and its predictive in them: transformed, scaled, recalibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bayesify.arguments.plain import Plain
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictive.transformed import TargetTransform, TransformedPredictive
from bayesify.sklearn.recalibration import Recalibration

TRANSFORMS = ("none", "log", "log1p", "sqrt")
"""What an estimator's `target_transform` takes; all act on each target."""
MIN_PROBABILITY = 1e-12
"""Smallest probability of a value whose logarithm is taken."""


@dataclass(frozen=True)
class TargetUnits(Plain):
    r"""What a network is trained on in place of targets y: $z = (t(y) - \text{shift}) / \text{scale}$, and the way back.

    Args:
        transform: t, one of `TRANSFORMS`.
        shift: [O].
        scale: [O], positive.
        recalibration: Of the probabilities.
        floor: No quantile lies below it; `None` for none.
    """

    transform: str
    shift: np.ndarray
    scale: np.ndarray
    recalibration: Recalibration = field(default_factory=Recalibration)
    floor: float | None = None

    @classmethod
    def of(cls, y: np.ndarray, weights: np.ndarray, transform: str, *, standardize: bool = True) -> Self:
        """Units in which the rows' targets have mean 0 and variance 1, unless they are not to be scaled.

        Args:
            y: Targets, [N, O].
            weights: How many examples each row stands for, [N].
            transform: One of `TRANSFORMS`.
            standardize: Whether to scale.
        """
        units = cls(transform, np.zeros(y.shape[1]), np.ones(y.shape[1]))
        if not standardize:
            return units
        t, share = units(y), torch.from_numpy(weights / weights.sum()).unsqueeze(1)
        shift = (share * t).sum(0)
        scale = (share * (t - shift).square()).sum(0).sqrt()
        scale = torch.where(scale > 1e-12 * shift.abs(), scale, torch.ones_like(scale))
        return replace(units, shift=shift.numpy(), scale=scale.numpy())

    def __call__(self, y: np.ndarray) -> Tensor:
        """z of targets [N, O]."""
        one = torch.ones(y.shape[1], dtype=torch.float64)
        t = TargetTransform.scaled(self.transform, 0 * one, one).forward(torch.from_numpy(y))
        return (t - torch.from_numpy(self.shift)) / torch.from_numpy(self.scale)

    def predictive(self, inner: RegressionPredictive) -> UnitsPredictive:
        """The distribution of y for that of z."""
        shift, scale = torch.from_numpy(self.shift), torch.from_numpy(self.scale)
        floor = -math.inf if self.floor is None else self.floor
        return UnitsPredictive(inner, shift, scale, self.transform, self.recalibration, floor)


class UnitsPredictive(TransformedPredictive):
    r"""The distribution of $y = t^{-1}(\text{shift} + \text{scale} \cdot z)$ for z of a given predictive, recalibrated.

    $P(Y \le y) = G(F_z(z(y)))$ with the map G of a `Recalibration`; where all targets were above a floor, what lies below is put
    at the floor. The rest is as for `TransformedPredictive`.

    Args:
        inner: The predictive of z, [B, O].
        shift: [O].
        scale: [O], positive.
        transform: t, one of `TRANSFORMS`.
        recalibration: G.
        floor: No quantile lies below it.
    """

    def __init__(
        self,
        inner: RegressionPredictive,
        shift: Tensor,
        scale: Tensor,
        transform: str = "none",
        recalibration: Recalibration | None = None,
        floor: float = -math.inf,
    ) -> None:
        super().__init__(inner, TargetTransform.scaled(transform, shift, scale))
        self._recalibration, self._floor = recalibration or Recalibration(), floor

    def __repr__(self) -> str:
        return f"UnitsPredictive({self.inner!r}, transform={self.transform.name!r})"

    @property
    def _affine(self) -> bool:
        return super()._affine and not self._recalibration.said and self._floor == -math.inf

    @property
    def outputs(self) -> Tensor:
        """The network's outputs of each draw; in the targets' units where these are a shift and a scale away: [S, B, O]."""
        outputs, own = self.inner.outputs, self.transform
        return own.shift + own.scale * outputs if outputs.shape[-1] == len(own.shift) else outputs

    def _inner_quantiles(self, q: float | Sequence[float]) -> Tensor:
        levels = [float(q)] if isinstance(q, (int, float)) else [float(level) for level in q]
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")
        found = self.inner.quantile(self._recalibration.inverse(levels)).to(self.transform.shift)
        return found[0] if isinstance(q, (int, float)) else found

    def _to_targets(self, z: Tensor) -> Tensor:
        return super()._to_targets(z).clamp_min(self._floor)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of targets, one number per example, with the slopes of transform, scale and recalibration: [B].

        At a floor it is the logarithm of the probability that all that lies below has been put there.
        """
        at = match_targets(y, self.inner.mean)
        if self.family.discrete:
            return (self.cdf(y) - self._below(at)).clamp_min(MIN_PROBABILITY).log().sum(-1)
        density = super().log_prob(y)
        if self._recalibration.said:
            density = density + self._recalibration.log_slope(self.inner.cdf(self._standardized(y))).sum(-1)
        least = max(self._floor, 0.0 if self.transform.name != "none" else -math.inf)
        atom = (at <= least).any(-1)
        return torch.where(atom, self.cdf(y).clamp_min(MIN_PROBABILITY).log().sum(-1), density.double())

    def _below(self, y: Tensor) -> Tensor:
        """P(Y < y) of whole numbers."""
        return torch.where(y >= 1, self.cdf((y - 1).clamp_min(0)), 0.0)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""
        z, at = self._standardized(y), match_targets(y, self.inner.mean)
        found = self._recalibration(self.inner.cdf(z.nan_to_num(0, 0, 0)).double())
        return torch.where((at < self._floor) | ~z.isfinite(), torch.zeros_like(found), found)

    def centrality(self, y: Tensor) -> Tensor:
        """The level of the smallest central interval that holds y: [B, O]."""
        if not self.family.discrete:
            return super().centrality(y)
        return torch.maximum(1 - 2 * self.cdf(y), 2 * self._below(match_targets(y, self.inner.mean)) - 1).clamp_min(0)
