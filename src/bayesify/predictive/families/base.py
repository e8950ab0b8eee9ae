"""The base class for families of one-dimensional distributions, with operations on their mixtures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.predictive.base import check_finite

MAX_INTEGRATION_PLACES = 193
"""Maximum number of points that divide the integral in a mixture's score into pieces."""
_INNER, _OUTER = (math.sqrt(5 + sign * 2 * math.sqrt(10 / 7)) / 3 for sign in (-1, 1))
_HEAVY, _LIGHT = ((322 + sign * 13 * math.sqrt(70)) / 900 for sign in (1, -1))
LEGENDRE_NODES, LEGENDRE_WEIGHTS = (-_OUTER, -_INNER, 0.0, _INNER, _OUTER), (_LIGHT, _HEAVY, 128 / 225, _HEAVY, _LIGHT)
"""Nodes and weights of the five-point Gauss-Legendre rule on [-1, 1]."""
MAX_CDF_VALUES_PER_CHUNK = 2**18
"""Maximum number of values of distribution functions that are computed together."""


class Family(ABC):
    r"""A family of distributions of one number, and mixtures of S such distributions with equal weights.

    Parameters are tensors that broadcast to [S, B, O]. Each family defines its parameters and any further axes that they have.
    `*parameters` are the tensors that the function `components` of a predictive returns.
    """

    discrete: ClassVar[bool] = False
    """Whether all values are whole numbers."""
    least: ClassVar[float | None] = None
    """The smallest value, if it is an atom; otherwise `None`. All other values lie above it."""
    light_tailed: ClassVar[bool] = False
    """Whether exp(Y) has all moments."""

    @abstractmethod
    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance."""

    @abstractmethod
    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """Log-density of y; for whole numbers, the log-probability of y."""

    @abstractmethod
    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y <= y)."""

    def log_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """log P(Y <= y), computed in float64 so that small probabilities stay accurate."""
        return self.cdf(widened(y), *(widened(part) for part in parameters)).log().to(parameters[0].dtype)

    def component_quantile(self, q: float, *parameters: Tensor) -> Tensor:
        """The q-quantile of each component. A family that overrides `quantiles` and `places` does not need this method."""
        raise NotImplementedError

    def component_quantiles(self, levels: Sequence[float], *parameters: Tensor) -> Tensor:
        """Quantiles of each component at several probabilities: [Q, S, B, O]."""
        return torch.stack([self.component_quantile(q, *parameters) for q in levels])

    @abstractmethod
    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """E|Y - y|."""

    @abstractmethod
    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Parameters of the distribution that has the same center and whose variance is multiplied by a factor.

        Raises:
            TypeError: If the mean determines the variance.
        """

    def check_targets(self, y: Tensor) -> None:
        """Raise `ValueError` for a target that the distribution cannot produce."""
        check_finite(y, "targets")

    def below(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y < y)."""
        return self.cdf(y, *parameters)

    def quantiles(self, levels: Sequence[float], *parameters: Tensor) -> Tensor:
        """Quantiles of the mixture, [Q, B, O], found in float64 by Newton steps inside shrinking brackets."""
        wide = tuple(widened(part) for part in parameters)  # round only once, to keep quantiles in order
        each = self.component_quantiles(levels, *wide)
        if each.shape[1] == 1:
            return each[:, 0].to(parameters[0].dtype)
        scale = self.moments(*wide)[1].expand_as(each[0]).sqrt().amin(0)
        step = self._rows_at_once(each[:, 0], *wide)
        found = [
            solve_quantile(
                lambda value: self.cdf(value.unsqueeze(1), *wide).mean(1),
                lambda value: self.log_density(value.unsqueeze(1), *wide).exp().mean(1),
                q.view(-1, 1, 1),
                part.amin(1),  # the components' quantiles bracket the mixture's quantile
                part.amax(1),
                part.mean(1),
                scale,
            )
            for q, part in zip(each.new_tensor(levels).split(step), each.split(step), strict=True)
        ]
        return torch.cat(found).to(parameters[0].dtype)

    def cdfs(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """The mixture's P(Y <= y) at K values of each output: [K, B, O]."""
        step = self._rows_at_once(y, *parameters)
        return torch.cat([self.cdf(some.unsqueeze(1), *parameters).mean(1) for some in y.split(step)]).clamp(0, 1)

    def crps(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""Continuous ranked probability score of the mixture, $\mathbb{E}|Y - y| - \frac12 \mathbb{E}|Y - Y'|$: [B, O]."""
        wide = tuple(widened(part) for part in parameters)
        found = self.mean_distance(widened(y), *wide).mean(0) - self.half_spread(*wide)
        return found.clamp_min(0).to(parameters[0].dtype)

    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y <= y); in families of whole numbers, smoothly interpolated between whole numbers."""
        return self.cdf(y, *parameters)

    def half_spread(self, *parameters: Tensor) -> Tensor:
        r"""$\frac12 \mathbb{E}|Y - Y'| = \int F (1 - F)$ of the mixture, with a relative error of 1e-6: [B, O].

        The Gauss-Legendre rule is applied between the sorted quantiles of all components. Its nodes therefore lie in regions
        where the distribution function of a component varies.
        """
        places = self.places(*parameters)
        total, step = torch.zeros_like(places[0]), self._rows_at_once(places, *parameters)
        for at, share in self._nodes(places[:-1], places.diff(dim=0)):
            for some, shares in zip(at.split(step), share.split(step), strict=True):
                values = self.smooth_cdf(some.unsqueeze(1), *parameters).mean(1)
                total += (values * (1 - values) * shares).sum(0)
        return total

    def _nodes(self, left: Tensor, width: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nodes and their weights, [J, B, O] each, for an integral over pieces that start at `left`."""
        for node, weight in zip(LEGENDRE_NODES, LEGENDRE_WEIGHTS, strict=True):
            yield left + 0.5 * (1 + node) * width, 0.5 * weight * width

    def places(self, *parameters: Tensor) -> Tensor:
        """Sorted quantiles of the components: [J, B, O]. These quantiles divide an integral over the mixture into pieces."""
        return in_order([self.component_quantile(level, *parameters) for level in self.node_levels()])

    def node_levels(self) -> list[float]:
        """Quantile levels at which the integral in `half_spread` is split into pieces."""
        return torch.linspace(-30, 30, 41, dtype=torch.float64).sigmoid().tolist()

    @staticmethod
    def _rows_at_once(at: Tensor, *parameters: Tensor) -> int:
        return max(1, MAX_CDF_VALUES_PER_CHUNK // max(1, parameters[0].shape[0] * at[0].numel()))


def in_order(found: list[Tensor]) -> Tensor:
    """Join a list of tensors [S, B, O], one per level, and sort all values into one tensor [J, B, O]. At most
    `MAX_INTEGRATION_PLACES` values are kept."""
    values = torch.cat(found).sort(0).values
    if len(values) > MAX_INTEGRATION_PLACES:
        values = values[torch.linspace(0, len(values) - 1, MAX_INTEGRATION_PLACES, device=values.device).round().long()]
    return values


def solve_quantile(
    cdf: Callable[[Tensor], Tensor],
    density: Callable[[Tensor], Tensor],
    q: float | Tensor,
    lower: Tensor,
    upper: Tensor,
    start: Tensor,
    scale: Tensor,
    steps: int = 60,
) -> Tensor:
    """For each entry, the value at which a distribution function equals q, up to rounding.

    The solution x lies between `lower` and `upper`. The error is about 4 eps (|x| + `scale`), where eps is the relative rounding
    error of the dtype, if the distribution function is that accurate. In the upper tail, the rounding of probabilities next to 1
    adds to the error. Below the median, Newton steps solve for the logarithm of the distribution function, because steps for the
    function itself would be short in the lower tail.
    """
    value, tolerance = start.clamp(lower, upper), 4 * torch.finfo(start.dtype).eps
    level, done = torch.as_tensor(q).to(value), torch.zeros_like(value, dtype=torch.bool)
    for _ in range(steps):
        reached = cdf(value)
        excess = reached - level
        lower, upper = torch.where(excess < 0, value, lower), torch.where(excess > 0, value, upper)
        newton = value - torch.where(level < 0.5, reached * (reached / level).log(), excess) / density(value)
        # At the solution, rounding decides whether a step leaves the bracket. Bisection would then start again.
        short = (newton - value).abs() <= tolerance * (value.abs() + scale)
        inside = short | ((newton > lower) & (newton < upper))
        step = torch.where(inside, newton, 0.5 * (lower + upper))
        # An entry that is accurate up to rounding cannot improve. It stays fixed, so that the result for one entry does not
        # depend on the other entries.
        done = done | (excess.abs() <= tolerance * level)
        close = (step - value).abs() <= tolerance * (step.abs() + scale)
        value = torch.where(done, value, step)
        done = done | close
        if bool(done.all()):
            break
    return value
