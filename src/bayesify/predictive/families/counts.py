"""Distributions of counts, by the logarithm of the mean and, for the negative binomial, the dispersion."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.maths.incomplete_beta import regularized_beta
from bayesify.predictive.families.base import NODES, WEIGHTS, Family

TAIL = 1e-12
"""Probability on either side beyond which a distribution's terms are left out of a sum."""
MOST_TERMS = 1024
"""Of a sum over counts; in a longer range some of them stand for those around them."""


class CountFamily(Family):
    """Whole numbers of at least 0. In sums and searches the distribution function is continued between them."""

    discrete = True

    @abstractmethod
    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y <= y) at whole numbers, and a smooth line between them."""

    def check_targets(self, y: Tensor) -> None:
        """Raise `ValueError` for a target that is no count."""
        super().check_targets(y)
        wrong = (y < 0) | (y != y.round() if y.is_floating_point() else y < 0)
        if bool(wrong.any()):
            raise ValueError(
                f"targets hold {y[wrong][0].item()}; counts are whole numbers of at least 0, use likelihoods.StudentT() or "
                "likelihoods.Gaussian() for other numbers"
            )

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y <= y), 0 below 0."""
        wide = widened(y).floor()
        found = self.smooth_cdf(wide.clamp_min(0), *(widened(part) for part in parameters))
        return torch.where(wide < 0, 0.0, found).to(parameters[0].dtype)

    def below(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y < y)."""
        return self.cdf(y.ceil() - 1 if y.is_floating_point() else y - 1, *parameters)

    def component_quantile(self, q: float, *parameters: Tensor) -> Tensor:
        """The smallest count k with P(Y <= k) of at least q."""
        return self.quantile(q, *(part.unsqueeze(0) for part in parameters))

    def quantile(self, q: float, *parameters: Tensor) -> Tensor:
        """The smallest count k with P(Y <= k) of at least q, by bisection between Cantelli's bounds: [B, O]."""
        wide = tuple(widened(part) for part in parameters)
        mean, variance = self.moments(*wide)
        center, std = mean.mean(0), (mean.var(0, unbiased=False) + variance.expand_as(mean).mean(0)).sqrt()
        lower = ((center - std * math.sqrt((1 - q) / q)).floor() - 1).clamp_min(-1)
        upper = (center + std * math.sqrt(q / (1 - q))).ceil() + 1
        while bool((upper - lower > 1).any()):
            middle = (0.5 * (lower + upper)).floor()
            reached = self.cdf(middle, *wide).mean(0) >= q
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return upper.to(parameters[0].dtype)

    def half_spread(self, *parameters: Tensor) -> Tensor:
        r"""$\sum_k F(k) (1 - F(k))$ of the mixture, but for tails of 1e-12: [B, O].

        A range of more than 1024 counts is cut at the components' quantiles, and long pieces are integrated: to a relative 1e-4.
        """
        first, last = self.quantile(TAIL, *parameters), self.quantile(1 - TAIL, *parameters)
        total = torch.zeros_like(first)
        if float((last - first).amax()) >= MOST_TERMS:
            return self._pieces(self.places(*parameters), *parameters)
        terms = torch.arange(int((last - first).amax()) + 1, dtype=first.dtype, device=first.device)
        for _, values in self._mixture_cdf(first + terms.view(-1, *[1] * first.ndim), *parameters):
            total += (values * (1 - values)).sum(0)  # what lies beyond a row's last count adds nothing
        return total

    def _pieces(self, places: Tensor, *parameters: Tensor) -> Tensor:
        """The sum over counts from the first place to the last: each for itself in short pieces, integrals over long ones."""
        left, width = places[:-1], places.diff(dim=0)
        short = width <= len(NODES)
        total = torch.zeros_like(places[0])
        for index, (node, weight) in enumerate(zip(NODES, WEIGHTS, strict=True)):
            at = torch.where(short, left + index, left - 0.5 + 0.5 * (1 + node) * width)
            share = torch.where(short, (index < width).to(width), 0.5 * weight * width)
            step = self._rows_at_once(at, *parameters)
            for some, shares in zip(at.split(step), share.split(step), strict=True):
                values = self.smooth_cdf(some.unsqueeze(1), *parameters).mean(1)
                total += (values * (1 - values) * shares).sum(0)
        return total

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Refused: the mean says the variance."""
        raise TypeError(
            "a distribution of counts has no variance of its own to scale; calibrate its intervals by bayesify.conformal"
        )


class PoissonFamily(CountFamily):
    """Poisson distributions, by the logarithm of the mean."""

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The mean twice."""
        mean = parameters[0].exp()
        return mean, mean

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y \log \lambda - \lambda - \log y!$."""
        (log_mean,) = parameters
        y = y.to(log_mean.dtype)
        return y * log_mean - log_mean.exp() - torch.lgamma(y + 1)

    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$Q(y + 1, \lambda)$, the upper incomplete gamma function."""
        return torch.special.gammaincc(y + 1, parameters[0].exp())

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y (2 F(y) - 1) + \lambda (1 - 2 F(y - 1))$."""
        mean = parameters[0].exp()
        return y * (2 * self.cdf(y, *parameters) - 1) + mean * (1 - 2 * self.cdf(y - 1, *parameters))


class NegativeBinomialFamily(CountFamily):
    r"""Negative binomial distributions, by the logarithm of the mean $\mu$ and the dispersion $\alpha$, $r = 1 / \alpha$."""

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\mu$ and $\mu + \alpha \mu^2$."""
        log_mean, dispersion = parameters
        mean = log_mean.exp()
        return mean, mean + dispersion * mean.square()

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$\log \frac{\Gamma(y + r)}{\Gamma(r)\,y!} - r \log(1 + \alpha \mu) + y (\log \alpha \mu - \log(1 + \alpha \mu))$.

        In float64: the gamma functions cancel.
        """
        log_mean, dispersion = (widened(part) for part in parameters)
        y, number = widened(y), 1 / dispersion
        log_ratio = log_mean + dispersion.log()
        total = torch.nn.functional.softplus(log_ratio)  # log(1 + alpha mu)
        gammas = torch.lgamma(y + number) - torch.lgamma(number) - torch.lgamma(y + 1)
        return (gammas - number * total + y * (log_ratio - total)).to(parameters[0].dtype)

    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$I_p(r, y + 1)$ with $p = 1 / (1 + \alpha \mu)$."""
        log_mean, dispersion = parameters
        return self._smooth_cdf(y, log_mean, dispersion, 1 / dispersion)

    @staticmethod
    def _smooth_cdf(y: Tensor, log_mean: Tensor, dispersion: Tensor, number: Tensor) -> Tensor:
        log_ratio = log_mean + dispersion.log()
        return regularized_beta(number, y + 1, torch.sigmoid(-log_ratio), torch.sigmoid(log_ratio))

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y (2 F(y) - 1) + \mu (1 - 2 F_{r + 1}(y - 1))$, $F_{r + 1}$ with one more success and the same p."""
        log_mean, dispersion = (widened(part) for part in parameters)
        y = widened(y)
        before = self._smooth_cdf((y - 1).clamp_min(0), log_mean, dispersion, 1 / dispersion + 1)
        before = torch.where(y < 1, 0.0, before)
        found = y * (2 * self.cdf(y, log_mean, dispersion) - 1) + log_mean.exp() * (1 - 2 * before)
        return found.to(parameters[0].dtype)


POISSON = PoissonFamily()
NEGATIVE_BINOMIAL = NegativeBinomialFamily()
