"""Covariance functions of Gaussian processes, over inputs divided by their lengthscales."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


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
