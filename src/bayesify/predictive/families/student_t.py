"""Student-t distributions, with location, squared scale and degrees of freedom as parameters."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.maths.incomplete_beta import regularized_beta
from bayesify.predictive.families.base import Family, in_order, solve_quantile
from bayesify.predictive.families.gaussian import normal_quantile

TABLE_SIZE, TABLE_REACH = 8193, 36.0
"""Number of entries in the table of a distribution function, and the largest asinh t in the table."""


class StudentTFamily(Family):
    r"""Distributions of $\mu + s\,t_\nu$; the parameters are locations $\mu$, squared scales $s^2$ and degrees of freedom
    $\nu > 2$."""

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean $\mu$ and variance $s^2 \nu / (\nu - 2)$."""
        location, square, degrees = parameters
        return location, square * degrees / (degrees - 2)

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        location, square, degrees = parameters
        scaled = (y - location).square() / (degrees * square)
        return _log_normalizer(degrees) - 0.5 * square.log() - 0.5 * (degrees + 1) * torch.log1p(scaled)

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""P(Y <= y). Left of the location, the probability is $\frac12 I_x(\frac\nu2, \frac12)$ with $x = \nu / (\nu + t^2)$.

        For many values at once, the function is interpolated from a table, with an error of 1e-10.
        """
        location, square, degrees = parameters
        t = (y - location) / square.sqrt()
        return _standard_cdf(widened(t), widened(degrees)).to(t.dtype)

    def log_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """log P(Y <= y). The table of `cdf` is not used, because its absolute error would make small probabilities inaccurate."""
        location, square, degrees = parameters
        t = (y - location) / square.sqrt()
        return _exact_cdf(widened(t), widened(degrees)).log().to(t.dtype)

    def component_quantiles(self, levels: Sequence[float], *parameters: Tensor) -> Tensor:
        """Quantiles at several probabilities, [Q, S, B, O]. Each quantile lies between the quantile for infinitely many degrees
        of freedom and the quantile for two degrees, so only this range is searched."""
        location, square, degrees = parameters
        wide = widened(degrees).expand(*(1,) * (location.ndim - degrees.ndim), *degrees.shape)
        ends = torch.stack([wide.new_tensor([end(q) for q in levels]) for end in (normal_quantile, _two_degrees)])
        ends = ends.view(2, -1, *(1,) * wide.ndim).expand(-1, -1, *wide.shape)
        found = solve_quantile(
            lambda t: _standard_cdf(t, wide),
            lambda t: self.log_density(t, torch.zeros_like(t), torch.ones_like(t), wide).exp(),
            wide.new_tensor(levels).view(-1, *(1,) * wide.ndim),
            ends.amin(0),
            ends.amax(0),
            torch.stack([_near_quantile(q, wide) for q in levels]),
            torch.ones_like(wide),
        )
        return location + square.sqrt() * found.to(location.dtype)

    def places(self, *parameters: Tensor) -> Tensor:
        """See `Family.places`. Approximate quantiles are sufficient here."""
        location, square, degrees = parameters
        scale = square.sqrt()
        return in_order([location + scale * _near_quantile(q, degrees) for q in self.node_levels()])

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$s\,(z (2 F(z) - 1) + 2 p(z) \frac{\nu + z^2}{\nu - 1})$ with $z = (y - \mu) / s$ (Jordan et al. 2019)."""
        location, square, degrees = parameters
        scale = square.sqrt()
        z = (y - location) / scale
        density = self.log_density(z, torch.zeros_like(z), torch.ones_like(z), degrees).exp()
        signed = z * (2 * _standard_cdf(widened(z), widened(degrees)).to(z.dtype) - 1)
        return scale * (signed + 2 * density * (degrees + z.square()) / (degrees - 1))

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        location, square, degrees = parameters
        return location, square * factor, degrees


def _log_normalizer(degrees: Tensor) -> Tensor:
    wide = widened(degrees)
    found = torch.lgamma(0.5 * (wide + 1)) - torch.lgamma(0.5 * wide) - 0.5 * (wide * math.pi).log()
    return found.to(degrees.dtype)


def _standard_cdf(t: Tensor, degrees: Tensor) -> Tensor:
    if degrees.numel() > 1 or t.numel() <= TABLE_SIZE:
        return _exact_cdf(t, degrees)
    values, slopes = (part.to(t) for part in _table(float(degrees)))
    step = 2 * TABLE_REACH / (TABLE_SIZE - 1)
    place = ((t.asinh() + TABLE_REACH) / step).clamp(0, TABLE_SIZE - 1)
    left = place.floor().clamp_max(TABLE_SIZE - 2)
    w, left = place - left, left.long()
    rise = w.square() * (3 - 2 * w)
    bend = w * (1 - w).square() * slopes[left] - w.square() * (1 - w) * slopes[left + 1]
    return (1 - rise) * values[left] + rise * values[left + 1] + bend


@lru_cache(maxsize=16)
def _table(degrees: float) -> tuple[Tensor, Tensor]:
    """The distribution function at equal steps of asinh t, and its slopes."""
    u = torch.linspace(-TABLE_REACH, TABLE_REACH, TABLE_SIZE, dtype=torch.float64)
    number = torch.tensor(degrees, dtype=torch.float64)
    at = u.sinh()
    density = STUDENT_T.log_density(at, torch.zeros_like(at), torch.ones_like(at), number).exp()
    return _exact_cdf(at, number), 2 * TABLE_REACH / (TABLE_SIZE - 1) * u.cosh() * density


def _exact_cdf(t: Tensor, degrees: Tensor) -> Tensor:
    ratio = t.square() / degrees
    tail = 0.5 * regularized_beta(0.5 * degrees, torch.full_like(t, 0.5), 1 / (1 + ratio), 1 / (1 + 1 / ratio))
    return torch.where(t < 0, tail, 1 - tail)


def _near_quantile(q: float, degrees: Tensor) -> Tensor:
    """Approximation of the standard quantile (Wallace 1959)."""
    z = normal_quantile(q)
    grown = torch.expm1(z**2 * (degrees - 5 / 6) / (degrees - 2 / 3 + 0.1 / degrees).square())
    return math.copysign(1, z) * (degrees * grown).sqrt()


def _two_degrees(q: float) -> float:
    """Quantile of the t distribution with two degrees of freedom. With more degrees of freedom, the quantile is closer to 0."""
    return (2 * q - 1) / math.sqrt(2 * q * (1 - q))


STUDENT_T = StudentTFamily()
