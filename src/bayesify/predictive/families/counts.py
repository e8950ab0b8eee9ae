"""Distributions of counts. Their parameters are the logarithm of the mean and, for the negative binomial, the dispersion."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.maths.incomplete_beta import regularized_beta
from bayesify.predictive.families.base import LEGENDRE_NODES, Family, in_order
from bayesify.predictive.families.gaussian import normal_quantile

TAIL_PROBABILITY = 1e-12
"""A sum over the terms of a distribution stops at this tail probability."""
MAX_SUMMED_TERMS, MAX_SUMMED_MEAN = 4096, 500.0
"""Maximum number of terms in a sum over counts, and maximum mean for which the sum can start at the probability of 0."""


class CountFamily(Family):
    """Distributions of whole numbers of at least 0. Some computations interpolate the distribution function between whole
    numbers."""

    discrete = True

    @abstractmethod
    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """P(Y <= y), smoothly interpolated between whole numbers."""

    def check_targets(self, y: Tensor) -> None:
        super().check_targets(y)
        wrong = (y < 0) | (y != y.round() if y.is_floating_point() else y < 0)
        if bool(wrong.any()):
            raise ValueError(
                f"targets hold {y[wrong][0].item()}, but counts are whole numbers of at least 0; use likelihoods.StudentT() or "
                "likelihoods.Gaussian() for numbers that are not counts"
            )

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        wide = widened(y).floor()
        found = self.smooth_cdf(wide.clamp_min(0), *(widened(part) for part in parameters))
        return torch.where(wide < 0, 0.0, found).to(parameters[0].dtype)

    def below(self, y: Tensor, *parameters: Tensor) -> Tensor:
        return self.cdf(y.ceil() - 1 if y.is_floating_point() else y - 1, *parameters)

    @abstractmethod
    def ratio(self, k: int, *parameters: Tensor) -> Tensor:
        """P(Y = k + 1) / P(Y = k)."""

    def quantiles(self, levels: Sequence[float], *parameters: Tensor) -> Tensor:
        """For each level, the smallest count k for which P(Y <= k) is at least this level: [Q, B, O]."""
        wide = tuple(widened(part) for part in parameters)
        found = torch.zeros(len(levels), *wide[0].shape[1:], dtype=wide[0].dtype, device=wide[0].device)
        if not self._few(*wide):
            found = torch.stack([self._bisected(q, *wide) for q in levels])
        else:
            for total in self._cumulated(*wide):
                below = torch.stack([total < q for q in levels])
                found += below
                if not bool(below.any()):
                    break
        return found.to(parameters[0].dtype)

    def crps(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""Continuous ranked probability score of the mixture: [B, O]. If all means are below 500, the score is the sum
        $\sum_k (F(k) - [k \ge y])^2$ up to a tail probability of 1e-12.

        For larger means, the score is $\mathbb{E}|Y - y| - \sum_k F(k) (1 - F(k))$. The components' quantiles divide the range of
        this sum into pieces. Long pieces are integrated instead of summed, with a relative error of 1e-4.
        """
        wide, y = tuple(widened(part) for part in parameters), widened(y)
        if not self._few(*wide):
            return super().crps(y, *parameters)
        score, k = torch.zeros_like(y), 0
        for total in self._cumulated(*wide):
            score += (total - (y <= k).to(y)).square()
            k += 1
            if k % 16 == 0 and bool((total > 1 - TAIL_PROBABILITY).all()):
                break
        return (score + (y - k).clamp_min(0)).to(parameters[0].dtype)

    def cumulated(self, most: int, *parameters: Tensor) -> Tensor:
        """P(Y <= k) of the mixture for k = 0, ..., `most`: [B, K, O]. No component's mean may exceed `MAX_SUMMED_MEAN`."""
        wide = tuple(widened(part) for part in parameters)
        return torch.stack(list(islice(self._cumulated(*wide), most + 1)), 1).clamp_max(1)

    def _few(self, *parameters: Tensor) -> bool:
        """Whether means and variances are small enough to sum over all probable counts, starting at 0."""
        mean, variance = self.moments(*parameters)
        return bool((mean <= MAX_SUMMED_MEAN).all() & (mean + 40 * variance.sqrt() <= MAX_SUMMED_TERMS).all())

    def _cumulated(self, *parameters: Tensor) -> Iterator[Tensor]:
        """P(Y <= k) of the mixture for k = 0, 1, ...: [B, O]."""
        term = self.log_density(torch.zeros_like(parameters[0]), *parameters).exp()
        total = term.mean(0)
        for k in range(100 * MAX_SUMMED_TERMS):
            yield total
            term = term * self.ratio(k, *parameters)
            total = total + term.mean(0)

    def _bisected(self, q: float, *parameters: Tensor) -> Tensor:
        """The q-quantile, found by bisection between Cantelli's bounds."""
        mean, variance = self.moments(*parameters)
        center, std = mean.mean(0), (mean.var(0, unbiased=False) + variance.expand_as(mean).mean(0)).sqrt()
        lower = ((center - std * math.sqrt((1 - q) / q)).floor() - 1).clamp_min(-1)
        upper = (center + std * math.sqrt(q / (1 - q))).ceil() + 1
        while bool((upper - lower > 1).any()):
            middle = (0.5 * (lower + upper)).floor()
            reached = self.cdf(middle, *parameters).mean(0) >= q
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return upper

    def _nodes(self, left: Tensor, width: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For a short piece between `places`, the nodes are all counts of the piece, each with weight 1. For a long piece, the
        nodes are those of a numerical integral."""
        short = width <= len(LEGENDRE_NODES)
        for index, (at, share) in enumerate(super()._nodes(left - 0.5, width)):
            yield torch.where(short, left + index, at), torch.where(short, (index < width).to(width), share)

    def places(self, *parameters: Tensor) -> Tensor:
        """Counts that divide the integral into pieces: counts from 0 upward with growing gaps, and approximate quantiles of the
        components. The quantiles come from gamma distributions with the components' moments."""
        mean, variance = self.moments(*parameters)
        shape = mean.square() / variance
        near = [  # Wilson & Hilferty 1931
            (mean * (1 - 1 / (9 * shape) + normal_quantile(q) / (3 * shape.sqrt())).clamp_min(0).pow(3)).floor()
            for q in self.node_levels()
        ]
        last = near[-1].amax(0, keepdim=True)
        return in_order([*near, *((last + 1).pow(step / 64).floor() - 1 for step in range(65))])

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        raise TypeError(
            "this prediction is a distribution of counts, whose variance cannot be scaled separately; calibrate its "
            "intervals with bayesify.conformal"
        )


class PoissonFamily(CountFamily):
    """Poisson distributions; the parameter is the logarithm of the mean."""

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean = parameters[0].exp()
        return mean, mean

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y \log \lambda - \lambda - \log y!$."""
        (log_mean,) = parameters
        y = y.to(log_mean.dtype)
        return y * log_mean - log_mean.exp() - torch.lgamma(y + 1)

    def smooth_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""The regularized upper incomplete gamma function $Q(y + 1, \lambda)$."""
        probability: Tensor = torch.special.gammaincc(y + 1, parameters[0].exp())
        return probability

    def ratio(self, k: int, *parameters: Tensor) -> Tensor:
        r"""$\lambda / (k + 1)$."""
        return parameters[0].exp() / (k + 1)

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y (2 F(y) - 1) + \lambda (1 - 2 F(y - 1))$."""
        mean = parameters[0].exp()
        return y * (2 * self.cdf(y, *parameters) - 1) + mean * (1 - 2 * self.cdf(y - 1, *parameters))


class NegativeBinomialFamily(CountFamily):
    r"""Negative binomial distributions with parameters $\log \mu$ and $\alpha$: mean $\mu$, dispersion $\alpha$, and
    $r = 1 / \alpha$."""

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean $\mu$ and variance $\mu + \alpha \mu^2$."""
        log_mean, dispersion = parameters
        mean = log_mean.exp()
        return mean, mean + dispersion * mean.square()

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$\log \frac{\Gamma(y + r)}{\Gamma(r)\,y!} - r \log(1 + \alpha \mu) + y (\log \alpha \mu - \log(1 + \alpha \mu))$.

        The result is computed in float64, because the difference of the gamma functions loses digits.
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

    def ratio(self, k: int, *parameters: Tensor) -> Tensor:
        r"""$\frac{k + r}{k + 1} \frac{\alpha \mu}{1 + \alpha \mu}$."""
        log_mean, dispersion = parameters
        return (k + 1 / dispersion) / (k + 1) * torch.sigmoid(log_mean + dispersion.log())

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$y (2 F(y) - 1) + \mu (1 - 2 F_{r + 1}(y - 1))$, where $F_{r + 1}$ is the distribution function for $r + 1$ and the
        same p."""
        log_mean, dispersion = (widened(part) for part in parameters)
        y = widened(y)
        before = self._smooth_cdf((y - 1).clamp_min(0), log_mean, dispersion, 1 / dispersion + 1)
        before = torch.where(y < 1, 0.0, before)
        found = y * (2 * self.cdf(y, log_mean, dispersion) - 1) + log_mean.exp() * (1 - 2 * before)
        return found.to(parameters[0].dtype)


POISSON = PoissonFamily()
NEGATIVE_BINOMIAL = NegativeBinomialFamily()
