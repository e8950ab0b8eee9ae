"""Covariance functions of Gaussian processes, over inputs divided by their lengthscales, and these lengthscales."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive


class KernelScales(nn.Module):
    r"""Lengthscales $\ell$, one per input, and amplitude a of a kernel, given by their initial values.

    Softplus maps the parameters `raw_lengthscale` [D] and `raw_amplitude` [] to these values.
    """

    def __init__(self, lengthscales: Sequence[float], amplitude: float, learn: bool = True) -> None:
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.tensor([raw_positive(scale) for scale in lengthscales]), learn)
        self.raw_amplitude = nn.Parameter(torch.tensor(raw_positive(amplitude)), learn)

    @property
    def lengthscale(self) -> Tensor:
        r"""Lengthscales $\ell$, [D]."""
        return positive(self.raw_lengthscale)

    @property
    def amplitude(self) -> Tensor:
        """Amplitude a, a scalar."""
        return positive(self.raw_amplitude)


def squared_exponential_matrix(x: Tensor, other: Tensor, log_variance: Tensor) -> Tensor:
    r"""$a^2 \exp(-\tfrac12 \lVert x - x' \rVert^2)$ for all pairs of rows, as the exponential of one product:
    [..., N, D], [..., M, D] -> [..., N, M]."""
    left = -0.5 * x.square().sum(-1, keepdim=True)
    right = left if other is x else -0.5 * other.square().sum(-1, keepdim=True)
    extended = torch.cat((x, left + log_variance, torch.ones_like(left)), dim=-1)
    return (extended @ torch.cat((other, torch.ones_like(right), right), dim=-1).mT).exp()


def distances(x: Tensor, other: Tensor) -> Tensor:
    """Distances between rows, [..., N, D], [..., M, D] -> [..., N, M]. The distance between equal rows is exactly 0,
    and its gradient is 0.

    The distances are computed from differences of rows. If they were computed from products of rows, rounding in float64 would
    give equal rows a distance of 1e-8 times their norm.
    """
    return torch.cdist(x, other, compute_mode="donot_use_mm_for_euclid_dist")


def matern12(r: Tensor) -> Tensor:
    r"""Covariance $\exp(-r)$ of continuous functions without derivatives."""
    return (-r).exp()


def matern32(r: Tensor) -> Tensor:
    r"""Covariance $(1 + \sqrt3 r) \exp(-\sqrt3 r)$ of functions with one derivative."""
    scaled = math.sqrt(3) * r
    return (1 + scaled) * (-scaled).exp()


def matern52(r: Tensor) -> Tensor:
    r"""Covariance $(1 + \sqrt5 r + \tfrac53 r^2) \exp(-\sqrt5 r)$ of functions with two derivatives."""
    scaled = math.sqrt(5) * r
    return (1 + scaled + scaled.square() / 3) * (-scaled).exp()


MATERN: dict[str, Callable[[Tensor], Tensor]] = {"matern12": matern12, "matern32": matern32, "matern52": matern52}
"""Matern covariances of unit variance as functions of the distance, by name."""
