"""Predictions of real numbers: a mixture over draws of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.predictive.base import Outputs, Predictive, check_finite


class RegressionPredictive(Predictive):
    r"""A mixture over draws of Gaussians, independent over outputs: $p(y) = \frac1S \sum_s \mathcal{N}(y; \mu_s, v_s)$.

    Args:
        outputs: The network's outputs of each draw.
        components: Means and variances [S, rows, O] of the Gaussians, from outputs [S, rows, ...]. A function of a module (or
            a partial of one), so that predictions can be pickled.
    """

    def __init__(self, outputs: Outputs, components: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(outputs)
        self._components = components

    def map_components(self, function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Self:
        """The same draws with other Gaussians: a function of their means and variances [S, rows, O] in place of these.

        Raises:
            TypeError: If this is no mixture over draws of outputs, but a closed form.
        """
        made = self._fresh()
        made._components = partial(_composed, self._components, function)
        return made

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        def reduce(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, variance = self._components(outputs)
            return mean.mean(0), mean.var(0, unbiased=False), variance.expand_as(mean).mean(0)

        moments: tuple[Tensor, Tensor, Tensor] = self._source.map(reduce)
        return moments

    @property
    def mean(self) -> Tensor:
        """E[y]: [B, O]."""
        return self._moments[0]

    @property
    def epistemic(self) -> Tensor:
        """Variance over draws of the Gaussians' means, the part that more data would remove: [B, O]."""
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        """Mean over draws of the Gaussians' variances, the noise in the data: [B, O]."""
        return self._moments[2]

    @property
    def variance(self) -> Tensor:
        """Var[y], epistemic plus aleatoric: [B, O]."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Root of the variance: [B, O]."""
        return self.variance.sqrt()

    @checked
    def log_prob(self, y: Tensor) -> Tensor:
        """`logsumexp_s sum_o log N(y_o; mu_so, v_so) - log S`: [B]."""

        def score(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            per_draw = (
                gaussian_log_density(y, mean, variance).flatten(2).sum(-1)
                if mean.ndim > 2
                else (gaussian_log_density(y, mean, variance))
            )
            return per_draw.logsumexp(0) - math.log(per_draw.shape[0])

        return self._rowwise(score, y)

    @checked
    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""

        def probability(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            return torch.special.ndtr((y - mean) / variance.sqrt()).mean(0)

        return self._rowwise(probability, y)

    @checked
    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The value that y stays below with probability q, exact for the mixture, and no smaller for a larger q.

        Solved in float64 by Newton steps on the mixture's distribution function, kept inside a bracket that shrinks with each.

        Args:
            q: Probability between 0 and 1, or several.

        Returns:
            [B, O], or [Q, B, O] for Q probabilities.

        Raises:
            ValueError: If a probability is not strictly between 0 and 1.
        """
        levels = [q] if isinstance(q, (int, float)) else list(q)
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")

        def solve(outputs: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            order = sorted(range(len(levels)), key=levels.__getitem__)
            found = torch.stack([mixture_quantile(mean, variance, levels[place]) for place in order], dim=1)
            ranks = torch.tensor(order, device=found.device).argsort()
            return found.cummax(1).values[:, ranks]  # what is equal up to rounding stays in order

        result = self._source.map(solve).movedim(1, 0)
        return result[0] if isinstance(q, (int, float)) else result

    @checked
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with probability `level`: lower and upper end, each [B, O]."""
        if not 0 < level < 1:
            raise ValueError(f"interval: level={level}; give a probability strictly between 0 and 1")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    @checked
    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of the mixture, in y's unit, less is better: [B, O].

        $$ \frac1S \sum_s A(y - \mu_s, v_s) - \frac{1}{2S^2} \sum_{s,t} A(\mu_s - \mu_t, v_s + v_t), \quad
           A(d, v) = d\,(2\Phi(d/\sqrt v) - 1) + 2 \sqrt v\, \varphi(d/\sqrt v) $$   (Grimit et al. 2006, eq. 5)
        """

        def score(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            variance = variance.expand_as(mean)
            spread = torch.zeros_like(y)
            for m, v in zip(mean, variance, strict=True):  # one draw against all: memory stays that of the draws
                spread += _absolute_gaussian(mean - m, variance + v).mean(0)
            return _absolute_gaussian(y - mean, variance).mean(0) - 0.5 * spread / mean.shape[0]

        return self._rowwise(score, y)

    def _rowwise(self, function: Callable[..., Tensor], y: Tensor) -> Tensor:
        result: Tensor = self._source.map(function, match_targets(y, self.mean))
        return result


def _composed(
    inner: Callable[[Tensor], tuple[Tensor, Tensor]],
    outer: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    outputs: Tensor,
) -> tuple[Tensor, Tensor]:
    return outer(*inner(outputs))


def with_variance(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Components of Gaussians around outputs, with a given variance."""
    return mean, variance.to(mean)


def match_targets(y: Tensor, mean: Tensor) -> Tensor:
    """Targets in the shape of predictions: a column that one side lacks is added or dropped; nothing else is broadcast.

    Raises:
        ValueError: If the shapes differ otherwise, or a target is not finite.
    """
    check_finite(y, "targets")
    if y.shape == mean.shape:
        return y
    if (*y.shape, 1) == mean.shape:
        return y.unsqueeze(-1)
    if y.shape == (*mean.shape, 1):
        return y.squeeze(-1)
    raise ValueError(
        f"targets of shape {tuple(y.shape)} do not fit predictions of shape {tuple(mean.shape)}; reshape y"
    )


def gaussian_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), entry by entry."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def mixture_quantile(mean: Tensor, variance: Tensor, q: float, steps: int = 60) -> Tensor:
    """Quantile of a Gaussian mixture with equal weights over the first axis: [S, ...] -> [...]."""
    dtype = mean.dtype
    mean, std = mean.double(), variance.double().expand_as(mean).sqrt()  # rounded once, which keeps the order
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * q - 1, dtype=torch.float64)))
    each = mean + z * std
    lower, upper = each.amin(0), each.amax(0)  # the components' quantiles bracket the mixture's
    value = (mean.mean(0) + z * (mean.var(0, unbiased=False) + std.square().mean(0)).sqrt()).clamp(lower, upper)
    tolerance, scale = 4 * torch.finfo(mean.dtype).eps, std.amin(0)
    done = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(steps):
        scaled = (value - mean) / std
        excess = torch.special.ndtr(scaled).mean(0) - q
        density = (torch.exp(-0.5 * scaled.square()) / std).mean(0) / math.sqrt(2 * math.pi)
        lower, upper = torch.where(excess < 0, value, lower), torch.where(excess > 0, value, upper)
        newton = value - excess / density
        inside = (newton > lower) & (newton < upper)
        step = torch.where(inside, newton, 0.5 * (lower + upper))
        # What is met to rounding cannot be met better; and what has converged stays, so that an entry does not depend on
        # those beside it.
        done = done | (excess.abs() <= tolerance)
        close = (step - value).abs() <= tolerance * (step.abs() + scale)
        value = torch.where(done, value, step)
        done = done | close
        if bool(done.all()):
            break
    return value.to(dtype)


def _absolute_gaussian(difference: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(difference, variance)."""
    std = variance.sqrt()
    scaled = difference / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    return difference * torch.erf(scaled / math.sqrt(2)) + 2 * std * density
