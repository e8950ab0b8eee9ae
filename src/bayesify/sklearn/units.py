"""Units of a regression's targets, and the predictive in these units after transforming, scaling and recalibrating."""

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
from bayesify.predictive.transformed import TargetTransform, TransformedPredictive, knot_at
from bayesify.sklearn.recalibration import Recalibration
from bayesify.tables.errors import check_magnitude

TRANSFORMS = ("none", "log", "log1p", "sqrt")
"""Values of an estimator's `target_transform`. Every transform acts on each target separately."""
MIN_PROBABILITY = 1e-12
"""Total probability that is reserved for targets that a distribution cannot produce."""


@dataclass(frozen=True)
class TargetUnits(Plain):
    r"""The units of training, $z = (t(y) - \text{shift}) / \text{scale}$ for targets y, and the conversion back.

    Args:
        transform: Transform t, one of `TRANSFORMS`.
        shift: Shift of each target, [O].
        scale: Scale of each target, [O], positive.
        recalibration: Recalibration of the probabilities.
        floor: Lower limit of all quantiles; `None` for no limit.
        ceiling: Upper limit. Means and variances are computed as if larger values were equal to this limit. `None` for no limit.
        extremes: Smallest and largest z of the training rows, from which the limits of the quantiles follow; empty for no limit.
    """

    transform: str
    shift: np.ndarray
    scale: np.ndarray
    recalibration: Recalibration = field(default_factory=Recalibration)
    floor: float | None = None
    ceiling: float | None = None
    extremes: tuple[float, ...] = ()

    @classmethod
    def of(cls, y: np.ndarray, weights: np.ndarray, transform: str, *, standardize: bool = True) -> Self:
        """Units in which the transformed targets [N, O], with weights [N], have mean 0 and variance 1.

        If `standardize` is false, the targets are transformed but not scaled.
        """
        units = cls(transform, np.zeros(y.shape[1]), np.ones(y.shape[1]))
        if not standardize:
            return units
        for column in y.T:
            check_magnitude("the target", column)
        t, share = units(y), torch.from_numpy(weights / weights.sum()).unsqueeze(1)
        shift = (share * t).sum(0)
        scale = (share * (t - shift).square()).sum(0).sqrt()
        scale = torch.where(scale > 1e-12 * shift.abs(), scale, torch.ones_like(scale))
        return replace(units, shift=shift.numpy(), scale=scale.numpy())

    def __call__(self, y: np.ndarray) -> Tensor:
        """The values z of targets [N, O]."""
        one = torch.ones(y.shape[1], dtype=torch.float64)
        t = TargetTransform.scaled(self.transform, 0 * one, one).forward(torch.from_numpy(y))
        return (t - torch.from_numpy(self.shift)) / torch.from_numpy(self.scale)

    def predictive(self, inner: RegressionPredictive, stretch: Tensor | None = None) -> UnitsPredictive:
        """The distribution of y, computed from the distribution of z. If `stretch` [B, 1] is given, normal scores are divided by
        it."""
        shift, scale = torch.from_numpy(self.shift), torch.from_numpy(self.scale)
        floor = -math.inf if self.floor is None else self.floor
        ceiling = math.inf if self.ceiling is None else self.ceiling
        return UnitsPredictive(
            inner, shift, scale, self.transform, self.recalibration, floor, ceiling, stretch, self.extremes
        )


class UnitsPredictive(TransformedPredictive):
    r"""The recalibrated distribution of $y = t^{-1}(\text{shift} + \text{scale} \cdot z)$, given the predictive of z.

    $P(Y \le y) = G(F_z(z(y)))$ with the map G of a `Recalibration`. If there is a floor, probability below the floor is moved
    to the floor. If there is a ceiling, it is far above all training targets. With a ceiling, mean and variance are those of
    $\min(Y, c)$, where c is the larger of the ceiling and the median of Y. Without this limit, the tail beyond the ceiling could
    dominate the mean. If the smallest and the largest z of the training rows are given, let d be their difference. Quantiles of z
    are then at most d below the smallest z and at most d above the largest z. If the median of z lies outside the training range,
    the limit on this side lies d beyond the median. Without these limits, the recalibrated tail of a few atypical rows, mapped
    back from a logarithm, could lie orders of magnitude beyond all targets.

    Args:
        inner: Predictive of z, [B, O].
        shift: Shift of each target, [O].
        scale: Scale of each target, [O], positive.
        transform: Transform t, one of `TRANSFORMS`.
        recalibration: The map G.
        floor: Lower limit of all quantiles.
        ceiling: Upper limit. Means and variances are computed as if larger values were equal to this limit.
        stretch: Factor s of each row, [B, 1], at least 1. It replaces G(u) by $\Phi(\Phi^{-1}(G(u)) / s)$ and thereby widens
            central intervals.
        extremes: Smallest and largest z of the training rows; empty for no limit.
    """

    def __init__(
        self,
        inner: RegressionPredictive,
        shift: Tensor,
        scale: Tensor,
        transform: str = "none",
        recalibration: Recalibration | None = None,
        floor: float = -math.inf,
        ceiling: float = math.inf,
        stretch: Tensor | None = None,
        extremes: Sequence[float] = (),
    ) -> None:
        super().__init__(inner, TargetTransform.scaled(transform, shift, scale))
        self._ceiling, self._extremes = ceiling, tuple(extremes)
        self._recalibration, self._stretch = recalibration or Recalibration(), stretch
        self._floor = math.ceil(floor) if self.family.discrete and math.isfinite(floor) else floor

    def __repr__(self) -> str:
        return f"UnitsPredictive({self.inner!r}, transform={self.transform.name!r})"

    @property
    def _is_recalibrated(self) -> bool:
        return bool(self._recalibration.said) or self._stretch is not None

    @property
    def _affine(self) -> bool:
        unbounded = self._floor <= (0.0 if self.family.discrete else float(self._family_least.min()))
        return super()._affine and not self._is_recalibrated and unbounded and self._ceiling == math.inf

    def _limited(self, p: Tensor, y: Tensor) -> Tensor:
        return y if self._ceiling == math.inf else torch.minimum(y, knot_at(0.5, p, y).clamp_min(self._ceiling))

    @property
    def outputs(self) -> Tensor:
        """The network's outputs for each draw, [S, B, O]. The outputs are in the targets' units if the conversion is only a shift
        and a scale."""
        outputs, own = self.inner.outputs, self.transform
        return own.shift + own.scale * outputs if outputs.shape[-1] == len(own.shift) else outputs

    def _inner_quantiles(self, q: float | Sequence[float]) -> Tensor:
        levels = [float(q)] if isinstance(q, (int, float)) else [float(level) for level in q]
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")
        found = self.inner.quantile(self._recalibration.inverse(levels)).to(self.transform.shift)
        for stretch in () if self._stretch is None else self._stretch[self._stretch > 1].unique().tolist():
            wide = self.inner.quantile(self._recalibration.inverse(levels, stretch)).to(found)
            found = torch.where(self._stretch == stretch, wide, found)
        found = self._near_targets(found)
        return found[0] if isinstance(q, (int, float)) else found

    def _near_targets(self, z: Tensor) -> Tensor:
        """Quantiles z [Q, B, O], clipped to the limits that `UnitsPredictive` describes."""
        if not self._extremes or self._extremes[0] == self._extremes[1]:
            return z
        low, high = self._extremes
        reach = high - low
        if bool(((z >= low - reach) & (z <= high + reach)).all()):
            return z
        median = self.inner.quantile(self._recalibration.inverse([0.5])).to(z)
        return z.clamp(median.clamp_max(low) - reach, median.clamp_min(high) + reach)

    def _to_targets(self, z: Tensor) -> Tensor:
        return super()._to_targets(z).clamp_min(self._floor)

    def _recalibrated(self, p: Tensor) -> Tensor:
        return self._recalibration(p.double(), self._stretch)

    @property
    def _least(self) -> Tensor:
        return super()._least.clamp_min(self._floor)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the targets, [B]. A target at the floor contributes the log-probability of the floor.

        The log-density includes the slopes of transform, scale and recalibration. Some targets cannot be produced by the
        distribution, for example targets below the floor, or negative targets if the transform accepts only positive numbers.
        Together, the targets that the distribution cannot produce have at most the probability `MIN_PROBABILITY`. This
        probability is spread as a Cauchy density, whose center is the mean and whose scale is the standard deviation. So
        log-densities stay finite, and the density integrates to 1 up to rounding.
        """
        found = super().log_prob(y).double()
        lost = found == -math.inf
        if not bool(lost.any()):
            return found
        z = (match_targets(y, self.inner.mean) - self.mean) / self.std
        rest = math.log(MIN_PROBABILITY) - (math.pi * self.std * (1 + z.square())).log().sum(-1)
        return torch.where(lost, rest.double(), found)

    def censored_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """Logarithm of a product, [B]: the density of the uncensored outputs times the probability that the censored outputs are
        at most y.

        Recalibrated outputs are treated as independent, because the recalibration of single outputs does not describe the
        dependence between them.
        """
        if self._is_recalibrated:
            return self.marginal_log_prob(y, censored).sum(-1)
        return super().censored_log_prob(y, censored).double()

    def marginal_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """The log-density of each output separately: [B, O]."""
        found = super().marginal_log_prob(y, censored).double()
        if not self._is_recalibrated:
            return found
        at, (z, mask, _) = match_targets(y, self.inner.mean), self._places(y, censored)
        cdf = self.cdf(at)
        mass = torch.where(mask, cdf, cdf - self.below(at))
        whole = mask | self.family.discrete
        # If rounding makes the difference of the recalibrated probabilities 0, use the slope times the difference before
        # recalibration.
        sloped = found + self._recalibration.log_slope(self.inner.cdf(z), self._stretch)
        return torch.where(whole & (mass > 1e-9 * cdf), mass.log(), sloped)
