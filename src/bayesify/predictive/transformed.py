"""Targets on another scale: transforms with at most one parameter, and predictions that are mapped back to the targets' scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.predictive.base import check_finite
from bayesify.predictive.families.gaussian import normal_cdf
from bayesify.predictive.regression import RegressionPredictive, match_targets

TransformName = Literal["none", "log", "log1p", "sqrt", "box_cox", "yeo_johnson"]
"""Names of the transforms of targets; see `TargetTransform`."""
SMALL_POWER = 1e-6
"""Powers below this value are treated as logarithms."""
KNOT_STEP, PIECES_PER_STEP = 0.25, 8
"""Distance (the step) between the normal quantiles at which quantiles are computed, and number of pieces per step."""
MAX_STEP_RATIO, GAP_CUTS = 3.0, (1.0, 2.5, 5.0)
"""A step counts as a gap between modes if it is longer than a neighboring step by more than this factor. A gap is cut in the
middle, and at these multiples of the neighboring step, measured from either end."""


@dataclass(frozen=True, eq=False)
class TargetTransform:
    r"""$z = (g(y) - \text{shift}) / \text{scale}$, the target on the scale of the network's predictions.

    - `none`: $g(y) = y$.
    - `log`: $\log y$ for positive targets.
    - `log1p`: $\log(1 + y)$ for targets of at least 0.
    - `sqrt`: $\sqrt y$ for targets of at least 0.
    - `box_cox`: $(y^\lambda - 1) / \lambda$ for positive targets, $0 \le \lambda \le 1$ (Box & Cox 1964).
    - `yeo_johnson`: with $t = y / \text{unit}$, $((1 + t)^\lambda - 1) / \lambda$ for $t \ge 0$, otherwise
      $-((1 - t)^{2 - \lambda} - 1) / (2 - \lambda)$, $0 \le \lambda \le 2$ (Yeo & Johnson 2000).

    If a transform accepts only targets of at least 0, the smallest possible z is that of the target 0. A z below this minimum is
    mapped back to the target 0.

    Args:
        name: Name of the transform; see above.
        shift: Shift, [O].
        scale: Positive scale, [O].
        power: Power $\lambda$, [O]; used by `box_cox` and `yeo_johnson`.
        unit: Positive unit, [O]; used by `yeo_johnson`.
    """

    name: TransformName
    shift: Tensor
    scale: Tensor
    power: Tensor
    unit: Tensor

    @classmethod
    @checked
    def fit(cls, name: TransformName, y: Tensor) -> Self:
        r"""The transform that gives targets mean 0 and standard deviation 1.

        $\lambda$ maximizes the likelihood of the targets under the assumption that z is Gaussian.

        Args:
            name: Name of the transform; see the class.
            y: Targets, [N, O]. Constant targets are not scaled.

        Raises:
            ValueError: If targets are not finite, or if the transform does not accept them.
        """
        if y.ndim != 2 or not len(y):
            raise ValueError(f"TargetTransform.fit: y has shape {tuple(y.shape)}; give targets [N, O]")
        check_finite(y, "targets")
        if not cls.takes(name, y):
            need = "of at least 0" if name in ("log1p", "sqrt") else "above 0"
            raise ValueError(
                f"TargetTransform.fit: {name!r} needs targets {need}, but the smallest is {float(y.min()):g}; use 'yeo_johnson'"
            )
        y = y.double()
        one = torch.ones(y.shape[1], dtype=torch.float64, device=y.device)
        deviation = y.std(0, unbiased=False)
        unit = torch.where(deviation > 0, deviation, one)
        made, best = cls(name, 0 * one, one, one, unit), torch.full_like(one, -math.inf)
        power = one.clone()
        if name in ("box_cox", "yeo_johnson"):
            for step in range(41):
                candidate = one * step / (40 if name == "box_cox" else 20)
                trial = cls(name, 0 * one, one, candidate, unit)
                score = trial.log_slope(y).mean(0) - trial.forward(y).var(0, unbiased=False).log() / 2
                power, best = torch.where(score > best, candidate, power), torch.maximum(score, best)
            made = cls(name, 0 * one, one, power, unit)
        z = made.forward(y)
        spread = z.std(0, unbiased=False)
        return cls(name, z.mean(0), torch.where(spread > 0, spread, one), power, unit)

    @staticmethod
    def takes(name: str, y: Tensor) -> bool:
        """Whether a transform accepts all targets in `y`."""
        least = float(y.min())
        return least > 0 if name in ("log", "box_cox") else least >= 0 or name not in ("log1p", "sqrt")

    @classmethod
    def scaled(cls, name: str, shift: Tensor, scale: Tensor) -> Self:
        """The transform with a given shift and scale, each [O], and without a power."""
        return cls(cast(TransformName, name), shift, scale, torch.ones_like(shift), torch.ones_like(shift))

    def config(self) -> dict[str, Any]:
        """The transform as plain data."""
        numbers = {key: getattr(self, key).tolist() for key in ("shift", "scale", "power", "unit")}
        return {"name": self.name, **numbers}

    @classmethod
    def restore(cls, config: dict[str, Any]) -> Self:
        """The transform from its plain data.

        Raises:
            ValueError: If `config` does not describe a transform.
        """
        if not isinstance(config, dict) or config.get("name") not in get_args(TransformName):
            raise ValueError(
                "TargetTransform.restore: config= does not describe a transform; give the result of config()"
            )
        numbers = {key: torch.tensor(config[key], dtype=torch.float64) for key in ("shift", "scale", "power", "unit")}
        return cls(config["name"], **numbers)

    def _numbers(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.to(like) for part in (self.shift, self.scale, self.power, self.unit))

    def forward(self, y: Tensor) -> Tensor:
        """The values z of the given targets, [..., O]. The result is minus infinity for a y below all possible targets."""
        shift, scale, power, unit = self._numbers(y)
        if self.name == "log":
            found = y.clamp_min(0).log()
        elif self.name == "log1p":
            found = torch.where(y < 0, -math.inf, y.clamp_min(0).log1p())
        elif self.name == "sqrt":
            found = torch.where(y < 0, -math.inf, y.clamp_min(0).sqrt())
        elif self.name == "box_cox":
            found = torch.where(y < 0, -math.inf, _power(y.clamp_min(0).log(), power))
        elif self.name == "yeo_johnson":
            t = y / unit
            found = torch.where(
                t < 0, -_power((-t).clamp_min(0).log1p(), 2 - power), _power(t.clamp_min(0).log1p(), power)
            )
        else:
            found = y
        return (found - shift) / scale

    def inverse(self, z: Tensor) -> Tensor:
        """The targets for the given values z, [..., O]; monotone in z."""
        shift, scale, power, unit = self._numbers(z)
        value = shift + scale * z
        if self.name == "log":
            return value.exp()
        if self.name == "log1p":
            return value.clamp_min(0).expm1()
        if self.name == "sqrt":
            return value.clamp_min(0).square()
        if self.name == "box_cox":
            return _unpower(value, power).exp()
        if self.name == "yeo_johnson":
            low, high = _unpower(-value.clamp_max(0), 2 - power), _unpower(value.clamp_min(0), power)
            return unit * torch.where(value < 0, -low.expm1(), high.expm1())
        return value

    def log_slope(self, y: Tensor) -> Tensor:
        """log dz/dy at targets [..., O]; minus infinity for impossible targets."""
        _, scale, power, unit = self._numbers(y)
        found = torch.zeros_like(y)
        if self.name == "log":
            found = torch.where(y > 0, -y.abs().log(), -math.inf)
        elif self.name == "log1p":
            found = torch.where(y >= 0, -y.abs().log1p(), -math.inf)
        elif self.name == "sqrt":
            found = torch.where(y > 0, -0.5 * (4 * y.abs()).log(), -math.inf)
        elif self.name == "box_cox":
            found = torch.where(y > 0, (power - 1) * y.abs().log(), -math.inf)
        elif self.name == "yeo_johnson":
            t = y / unit
            found = torch.where(t < 0, 1 - power, power - 1) * t.abs().log1p() - unit.log()
        return found - scale.log()

    @property
    def least(self) -> Tensor:
        """The smallest target, [O]. A z that is too small to belong to any target is mapped to this target. The result is minus
        infinity if every z has a target."""
        bounded = self.power > SMALL_POWER if self.name == "box_cox" else self.name in ("log1p", "sqrt")
        return torch.where(
            torch.as_tensor(bounded, device=self.shift.device), 0.0, torch.full_like(self.shift, -math.inf)
        )

    def predictive(self, inner: RegressionPredictive) -> TransformedPredictive:
        """The predictive of y, computed from the predictive of z."""
        return TransformedPredictive(inner, self)


def _power(log: Tensor, power: Tensor) -> Tensor:
    """`(exp(log)^power - 1) / power`, or `log` itself if `power` is 0."""
    small = power.abs() < SMALL_POWER
    return torch.where(small, log, torch.expm1(power * log) / torch.where(small, 1.0, power))


def _unpower(value: Tensor, power: Tensor) -> Tensor:
    small = power.abs() < SMALL_POWER
    inside = (power * value).clamp_min(-1)
    return torch.where(small, value, torch.log1p(inside) / torch.where(small, 1.0, power))


class TransformedPredictive(RegressionPredictive):
    r"""The distribution of y, given a transform z of y and the predictive of z.

    Quantiles, intervals and the distribution function are mapped back from z and are exact. The log-density is the log-density of
    z plus $\log dz/dy$. Mean and variance are computed by integrating the quantile function over $u = \Phi^{-1}(p)$ for $|u| <
    6$. Quantiles of z are computed at some values of u and interpolated by cubic polynomials in between. For mixtures of
    Gaussians, the error of mean and variance is about 1e-3. In families other than Gaussians, the tails may be so heavy that the
    mean of y does not exist. For these families, unless the transform is `none`, mean and variance describe the middle 99.9 % of
    the distribution. With any transform, the mean is limited to the interval that contains the middle 99.9 % of the distribution.
    If log y is a wide Gaussian, the limit keeps the far tails, where there are no data, from determining the mean. The CRPS is
    computed from the same quantiles as the mean and the variance. The ratio of the epistemic variance to the total variance is
    the same as for z. If the transform is only a shift and a scale, everything is exact.

    Args:
        inner: The predictive of z, [B, O].
        transform: The transform from y to z.
    """

    is_mixture = False

    def __init__(self, inner: RegressionPredictive, transform: TargetTransform) -> None:
        self.inner, self.transform = inner, transform
        self.family = inner.family

    def __len__(self) -> int:
        return len(self.inner)

    def __repr__(self) -> str:
        return f"TransformedPredictive({self.inner!r}, {self.transform.name})"

    @property
    def outputs(self) -> Tensor:
        """The network's outputs for each draw, on the scale of z: [S, B, ...]."""
        return self.inner.outputs

    @property
    def _affine(self) -> bool:
        return self.transform.name == "none"

    @cached_property
    def _knots(self) -> tuple[Tensor, Tensor]:
        """Probabilities and quantiles of y in increasing order, each [K, B, O]. Between two quantiles, y is uniformly
        distributed."""
        steps = self.inner.steps()
        if steps is not None:  # each count has two probabilities: P(Y < k) and P(Y <= k)
            z = torch.arange(len(steps), dtype=steps.dtype, device=steps.device).view(-1, *(1,) * (steps.ndim - 1))
            both = torch.stack((torch.cat((torch.zeros_like(steps[:1]), steps[:-1])), steps), 1).flatten(0, 1)
            return self._recalibrated(both), self._to_targets(z.expand_as(steps)).repeat_interleave(2, 0)
        reach = 6.0 if self.family.light_tailed or self.transform.name == "none" else 3.25
        coarse = torch.arange(-reach, reach + KNOT_STEP / 2, KNOT_STEP, dtype=torch.float64)
        z = self._inner_quantiles(normal_cdf(coarse).tolist())
        fine = torch.linspace(-reach, reach, (len(coarse) - 1) * PIECES_PER_STEP + 1, dtype=torch.float64)
        smooth = torch.einsum("fc,c...->f...", _cubic(coarse, fine).to(z), z)
        p = normal_cdf(fine).to(z).view(-1, *(1,) * (z.ndim - 1)).expand_as(smooth).clone()
        width = z.diff(dim=0)
        beside = torch.minimum(torch.cat((width[1:], width[-1:])), torch.cat((width[:1], width[:-1])))
        gap = width > MAX_STEP_RATIO * beside
        # A cubic also depends on the steps next to it.
        gap = gap | torch.cat((gap[1:], gap[-1:])) | torch.cat((gap[:1], gap[:-1]))
        places: list[int] = []
        values, where = [], []
        for step in gap.flatten(1).any(1).nonzero().flatten().tolist():
            before, after = (width[max(0, min(step + move, len(width) - 1))] for move in (-1, 1))
            before, after = (torch.minimum(part, width[step] / 12) for part in (before, after))
            values += [z[step] + times * before for times in GAP_CUTS]
            values += [0.5 * (z[step] + z[step + 1]), *(z[step + 1] - times * after for times in reversed(GAP_CUTS))]
            places += range(step * PIECES_PER_STEP + 1, (step + 1) * PIECES_PER_STEP)
            where += [gap[step]] * (PIECES_PER_STEP - 1)
        if places:
            at, inside = torch.stack(values), torch.stack(where)
            smooth[places] = torch.where(inside, at, smooth[places])
            found = self._recalibrated(self.inner.cdfs(at.to(self.inner.mean)))
            p[places] = torch.where(inside, found.to(p), p[places])
        # Recalibration causes kinks in the quantile function. A cubic through a kink may decrease, but quantiles must not
        # decrease.
        y, least = self._to_targets(smooth.cummax(0).values), self._least.to(z).expand_as(z[0])
        last = (y[:-1] == least) & (y[1:] > least)  # the atom ends at the last quantile that equals the smallest target
        p[:-1] = torch.where(last, self.cdf(least.nan_to_num(0, 0, 0)).to(p), p[:-1])
        return p, y

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._affine:
            shift, scale = self.transform.shift.to(self.inner.mean), self.transform.scale.to(self.inner.mean)
            square = scale.square()
            return shift + scale * self.inner.mean, square * self.inner.epistemic, square * self.inner.aleatoric
        p, y = self._knots
        y = self._limited(p, y)
        half = 0.5 * p.diff(dim=0) / (p[-1] - p[0])
        weights = torch.cat((half[:1], half[1:] + half[:-1], half[-1:]))
        if not self.family.discrete:  # a more accurate rule, for y that is smooth in the normal quantiles
            fine = torch.special.ndtri(p.double())
            density = (-0.5 * fine.square()).exp()
            even = (fine.diff(dim=0).diff(dim=0).abs().amax(0) < 1e-3) & (y[0] > self._least.to(y))
            weights = torch.where(even, (density / density.sum(0)).to(weights), weights)
        mean = (weights * y).sum(0)
        if self.transform.name != "none":
            mean = mean.clamp(knot_at(0.0005, p, y), knot_at(0.9995, p, y))
        variance = (weights * (y - mean).square()).sum(0)
        share = (self.inner.epistemic / self.inner.variance).nan_to_num(0)
        return mean, variance * share, variance * (1 - share)

    def _limited(self, p: Tensor, y: Tensor) -> Tensor:
        """The quantiles y at the probabilities p, each [K, B, O], for computing the moments. Subclasses may limit the
        quantiles."""
        return y

    def _recalibrated(self, p: Tensor) -> Tensor:
        """The probability that the target is at most y. It is computed from p, the probability that the transformed target is at
        most z."""
        return p

    def _inner_quantiles(self, q: float | Sequence[float]) -> Tensor:
        return self.inner.quantile(q)

    def _to_targets(self, z: Tensor) -> Tensor:
        return self.transform.inverse(z)

    def _standardized(self, y: Tensor) -> Tensor:
        """The values z of targets, computed in float64. A target at an atom gives exactly the atom's z."""
        at = match_targets(y, self.inner.mean).double()
        z = self.transform.forward(at)
        if self.family.least is not None:
            z = torch.where(at == self._family_least.to(at), self.family.least, z)
        return z.to(self.inner.mean)

    @property
    def _family_least(self) -> Tensor:
        """The target at which the family has its atom, [O]; minus infinity if the family has no atom."""
        least = -math.inf if self.family.least is None else self.family.least
        z = torch.full_like(self.transform.shift, least)
        return z if self.family.least is None else self.transform.inverse(z)

    @property
    def _least(self) -> Tensor:
        """The smallest target, if it is an atom; otherwise minus infinity: [O]."""
        return torch.maximum(self.transform.least, self._family_least)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the targets, [B]. A target that is an atom contributes the atom's log-probability.

        See `RegressionPredictive.log_prob`. The result is minus infinity for targets that have no z.
        """
        self.family.check_targets(self._standardized(y).nan_to_num(0, 0, 0))
        return self.censored_log_prob(y)

    def censored_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """Log-likelihood of each example [B]: the log density of the uncensored outputs, plus the log-probability that the
        censored outputs are at most y."""
        z, mask, slope = self._places(y, censored)
        return self.inner.censored_log_prob(z, mask) + slope.flatten(1).sum(-1).to(z)

    def marginal_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """The same as `censored_log_prob`, but for each output separately: [B, O]."""
        z, mask, slope = self._places(y, censored)
        return self.inner.marginal_log_prob(z, mask) + slope.to(z)

    def _places(self, y: Tensor, censored: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Three results: the values z of the targets; a mask that is true for atoms and for censored targets; and log dz/dy,
        which is minus infinity for impossible targets."""
        z, at = self._standardized(y), match_targets(y, self.inner.mean).double()
        least = self._least.to(at)
        mask = at == least if censored is None else censored | (at == least)
        slope = torch.where(mask, 0.0, self.transform.log_slope(at))
        lost = (at < least) | ~z.isfinite()
        return z.nan_to_num(0, 0, 0), mask, torch.where(lost, -math.inf, slope)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""
        at = match_targets(y, self.inner.mean)
        return self._probability(at, self.inner.cdf, at >= self._least.to(at))

    def below(self, y: Tensor) -> Tensor:
        """P(Y < y) for each output: [B, O]. At an atom, this probability is smaller than `cdf`."""
        at = match_targets(y, self.inner.mean)
        return self._probability(at, self.inner.below, at > self._least.to(at))

    def _probability(self, y: Tensor, of: Callable[[Tensor], Tensor], possible: Tensor) -> Tensor:
        """The probability that the function `of` computes from z; 0 where `possible` is false."""
        z = self._standardized(y)
        found = torch.where(possible & z.isfinite(), of(z.nan_to_num(0, 0, 0)), (z == math.inf).to(z))
        return self._recalibrated(found)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The q-quantile of y: [B, O], or [Q, B, O]."""
        return self._to_targets(self._inner_quantiles(q))

    def crps(self, y: Tensor) -> Tensor:
        """Continuous ranked probability score in the unit of y: [B, O]."""
        if self._affine:
            return self.transform.scale.to(self.inner.mean) * self.inner.crps(self._standardized(y))
        at = match_targets(y, self.inner.mean)
        p, knots = self._knots
        start, end = knots[:-1], knots[1:]
        inside = at.clamp(start, end)
        share = (inside - start) / (end - start).clamp_min(torch.finfo(knots.dtype).tiny)
        middle = p[:-1] + share * p.diff(dim=0)
        before = (inside - start) * (p[:-1].square() + p[:-1] * middle + middle.square())
        after = (end - inside) * ((1 - middle).square() + (1 - middle) * (1 - p[1:]) + (1 - p[1:]).square())
        return (before + after).sum(0) / 3 + (at - at.clamp(knots[0], knots[-1])).abs()


def knot_at(level: float, p: Tensor, y: Tensor) -> Tensor:
    """The first of the quantiles y, [K, B, O], whose probability in p is at least `level`: [B, O]."""
    place = (p < level).sum(0, keepdim=True).clamp_max(len(y) - 1)
    return y.gather(0, place)[0]


def _cubic(coarse: Tensor, fine: Tensor) -> Tensor:
    """The matrix that interpolates from evenly spaced coarse points to fine points, with a cubic polynomial through four coarse
    points: [F, C]."""
    count = len(coarse)
    place = (fine - coarse[0]) / (coarse[1] - coarse[0])
    first = (place.floor() - 1).clamp(0, count - 4).long()
    matrix = torch.zeros(len(fine), count, dtype=fine.dtype)
    for k in range(4):
        weight = torch.ones_like(place)
        for other in range(4):
            if other != k:
                weight = weight * (place - first - other) / (k - other)
        matrix[torch.arange(len(fine)), first + k] = weight
    return matrix
