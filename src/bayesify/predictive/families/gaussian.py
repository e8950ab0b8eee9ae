"""Gaussian distributions, with mean and variance as parameters."""

import math

import torch
from torch import Tensor

from bayesify.predictive.families.base import Family


class GaussianFamily(Family):
    r"""Gaussians $\mathcal{N}(\mu, v)$; the parameters are means $\mu$ and variances v."""

    light_tailed = True

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = parameters
        return mean, variance

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        return gaussian_log_density(y, *parameters)

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        mean, variance = parameters
        return normal_cdf((y - mean) / variance.sqrt())

    def log_cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        mean, variance = parameters
        found: Tensor = torch.special.log_ndtr((y - mean) / variance.sqrt())
        return found

    def component_quantile(self, q: float, *parameters: Tensor) -> Tensor:
        mean, variance = parameters
        return mean + normal_quantile(q) * variance.sqrt()

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        mean, variance = parameters
        return _absolute_gaussian(y - mean, variance)

    def half_spread(self, *parameters: Tensor) -> Tensor:
        r"""$\frac{1}{2S^2} \sum_{s,t} \mathbb{E}|Y_s - Y_t|$ in closed form (Grimit et al. 2006, eq. 5): [B, O]."""
        mean, variance = parameters[0], parameters[1].expand_as(parameters[0])
        total = torch.zeros_like(mean[0])
        for m, v in zip(mean, variance, strict=True):  # compare one draw at a time with all draws, to limit memory
            total += _absolute_gaussian(mean - m, variance + v).mean(0)
        return 0.5 * total / mean.shape[0]

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        mean, variance = parameters
        return mean, variance * factor


def gaussian_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), entry by entry."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def normal_cdf(z: Tensor) -> Tensor:
    """The standard normal distribution function. Torch's own `ndtr` loses precision in the lower tail and is 0 below -8.3."""
    return 0.5 * torch.erfc(-z / math.sqrt(2))


def normal_quantile(q: float) -> float:
    """The q-quantile of the standard normal distribution."""
    return float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))


def _absolute_gaussian(difference: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(difference, variance)."""
    std = variance.sqrt()
    scaled = difference / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    return difference * torch.erf(scaled / math.sqrt(2)) + 2 * std * density


GAUSSIAN = GaussianFamily()
