"""Distributions that are defined by some of their quantiles."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.predictive.families.base import Family


class QuantileFunction(Family):
    r"""The distribution whose quantile function is linear between given quantiles and logarithmic beyond them.

    The parameter is one tensor of quantiles $q_1 < \dots < q_K$, [..., K], at fixed levels $l_k$. Between two neighboring
    quantiles the density is constant, $(l_{k+1} - l_k) / (q_{k+1} - q_k)$. Beyond the first and the last quantile the tails are
    exponential. Each tail passes through the two quantiles nearest to it: $Q(p) = q_1 + b \log(p / l_1)$ for $p < l_1$ with $b =
    (q_2 - q_1) / \log(l_2 / l_1)$, and likewise above $l_K$.

    Args:
        levels: Levels $l_1 < \dots < l_K$, strictly between 0 and 1.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self.levels = tuple(float(level) for level in levels)

    def _tails(self, knots: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.levels[:2], self.levels[-2:]
        width = _widths(knots)
        first, last = width[..., 0], width[..., -1]
        return first / math.log(low[1] / low[0]), last / math.log((1 - high[0]) / (1 - high[1]))

    def _levels(self, knots: Tensor) -> Tensor:
        return torch.tensor(self.levels, dtype=knots.dtype, device=knots.device)

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        (knots,) = parameters
        mass = self._levels(knots).diff()
        left, right = self._tails(knots)
        first, last, below, above = knots[..., 0], knots[..., -1], self.levels[0], 1 - self.levels[-1]
        middle = 0.5 * (knots[..., 1:] + knots[..., :-1])
        mean = (mass * middle).sum(-1) + below * (first - left) + above * (last + right)
        squares = (middle - mean.unsqueeze(-1)).square() + knots.diff(dim=-1).square() / 12
        within = (mass * squares).sum(-1)
        low = (first - left - mean).square() + left.square()
        high = (last + right - mean).square() + right.square()
        return mean, within + below * low + above * high

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        left, right = self._tails(knots)
        place = (y.unsqueeze(-1) >= knots).sum(-1)  # number of quantiles at or below y
        inside = (self._levels(knots).diff().log() - _widths(knots).log()).expand(*place.shape, -1)
        between = inside.gather(-1, (place - 1).clamp(0, inside.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        low = math.log(self.levels[0]) - left.log() + (y - knots[..., 0]).clamp_max(0) / left
        high = math.log(1 - self.levels[-1]) - right.log() - (y - knots[..., -1]).clamp_min(0) / right
        return torch.where(place == 0, low, torch.where(place == knots.shape[-1], high, between))

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        left, right = self._tails(knots)
        share = ((y.unsqueeze(-1) - knots[..., :-1]) / _widths(knots)).clamp(0, 1)
        low = self.levels[0] * ((y - knots[..., 0]).clamp_max(0) / left).exp()
        high = -(1 - self.levels[-1]) * torch.expm1(-(y - knots[..., -1]).clamp_min(0) / right)
        return low + (share * self._levels(knots).diff()).sum(-1) + high

    def log_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        low = math.log(self.levels[0]) + (y - knots[..., 0]) / self._tails(knots)[0]
        return torch.where(y < knots[..., 0], low, self.cdf(y, knots).log())

    def component_quantile(self, q: float, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        left, right = self._tails(knots)
        if q <= self.levels[0]:
            return knots[..., 0] + left * math.log(q / self.levels[0])
        if q >= self.levels[-1]:
            return knots[..., -1] - right * math.log((1 - q) / (1 - self.levels[-1]))
        place = max(index for index, level in enumerate(self.levels) if level <= q)
        share = (q - self.levels[place]) / (self.levels[place + 1] - self.levels[place])
        return knots[..., place] + share * (knots[..., place + 1] - knots[..., place])

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        left, right = self._tails(knots)
        start, end = knots[..., :-1], knots[..., 1:]
        at = y.unsqueeze(-1)
        inside = at.clamp(start, end)
        crossing = ((inside - start).square() + (end - inside).square()) / (2 * _widths(knots))
        each = crossing + (at - inside).abs()
        middle = (self._levels(knots).diff() * each).sum(-1)
        low, high = y - knots[..., 0], knots[..., -1] - y
        return middle + self.levels[0] * _from_tail(low, left) + (1 - self.levels[-1]) * _from_tail(high, right)

    def half_spread(self, *parameters: Tensor) -> Tensor:
        (knots,) = parameters
        if len(knots) > 1:
            return super().half_spread(*parameters)
        left, right = self._tails(knots[0])
        levels = self._levels(knots)
        a, b = levels[:-1], levels[1:]
        middle = (knots[0].diff(dim=-1) * (0.5 * (a + b) - (a.square() + a * b + b.square()) / 3)).sum(-1)
        low, high = self.levels[0], 1 - self.levels[-1]
        return middle + left * (low - low**2 / 2) + right * (high - high**2 / 2)

    def node_levels(self) -> list[float]:
        """The given levels, and additional levels in the tails. Between two given levels, the integrand is a parabola."""
        steps = [math.exp(-step) for step in (0.5, 1, 1.5, 2, 3, 4, 5, 7, 9, 12, 16, 20, 25)]
        low, high = self.levels[0], 1 - self.levels[-1]
        return [*(low * step for step in steps), *self.levels, *(1 - high * step for step in steps)]

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        (knots,) = parameters
        mean = self.moments(knots)[0].unsqueeze(-1)
        return (mean + factor**0.5 * (knots - mean),)


def _widths(knots: Tensor) -> Tensor:
    """Distances between neighboring quantiles. The distances are made positive, because quantiles may coincide after clipping."""
    return knots.diff(dim=-1).clamp_min(torch.finfo(knots.dtype).tiny)


def _from_tail(gap: Tensor, scale: Tensor) -> Tensor:
    """E|X - y| for an exponential tail that starts at a distance `gap` from y and extends away from y.

    The gap is negative if y lies inside the tail.
    """
    inside = (-gap).clamp_min(0)
    return gap.clamp_min(0) + scale + torch.where(gap < 0, inside + 2 * scale * torch.expm1(-inside / scale), 0.0)
