r"""Means and variances of elementwise functions of a Gaussian $x \sim \mathcal{N}(m, v)$.

The gain $\operatorname{Cov}(f(x), x) / v = \mathbb{E} f'(x)$ (Stein) is the best linear answer to changes of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.tensors import Moments, in_pieces

NUM_QUADRATURE_POINTS = 8
"""Of the Gauss-Hermite rule."""


def leaky(x: Moments, slope: float) -> Moments:
    r"""$\max(x, 0) + a \min(x, 0)$ in closed form: with $z = m / \sqrt v$, ReLU has mean $m \Phi(z) + \sqrt v \varphi(z)$, variance
    $v ((1 + z^2) \Phi + z \varphi - (z \Phi + \varphi)^2)$ and gain $\Phi(z)$."""
    kept = 3 if x.mean_.ndim == 2 else 2  # only units [B, O] have an origin
    return x.like(*in_pieces(lambda mean, variance: _leaky(mean, variance, slope)[:kept], x.mean_, x.variance_))


def _leaky(mean: Tensor, variance: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Mean, variance and gain, in $u = z / \sqrt 2$."""
    root = torch.add(mean.new_full((), 1e-30), variance, alpha=2).sqrt_()
    # Above z = 6 the variance is x's to seven digits and cancels badly. Below, all is 0; at z = -10 the squares of means would be
    # denormal numbers in float32, which x86-64 multiplies slowly.
    u = (mean / root).clamp_((-10 if mean.dtype == torch.float64 else -7) * math.sqrt(0.5), 6 * math.sqrt(0.5))
    density = torch.addcmul(mean.new_full((), -0.5 * math.log(4 * math.pi)), u, u, value=-1).exp_()
    below = torch.add(mean.new_full((), 0.5), u.erf(), alpha=0.5)
    scaled = density.addcmul_(u, below)  # mean of max(u + e / sqrt 2, 0)
    share = torch.addcmul(below, u.sub_(scaled), scaled, value=2).clamp_(0, 1)
    found = torch.maximum(scaled.mul_(root), mean)  # the mean is never below x's: equal above z = 6
    if slope == 0:
        return found, share.mul_(variance), below
    mixed = slope**2 + (1 - slope) ** 2 * share + 2 * slope * (1 - slope) * below
    return slope * mean + (1 - slope) * found, variance * mixed, slope + (1 - slope) * below


@cache
def _rule() -> list[tuple[float, float]]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_QUADRATURE_POINTS)
    return list(zip(nodes.tolist(), (weights / math.sqrt(2 * math.pi)).tolist(), strict=True))


def quadrature(x: Moments, function: Callable[[Tensor], Tensor]) -> Moments:
    """Any smooth function, by a Gauss-Hermite rule."""
    std = x.variance_.sqrt()
    values = [(node, weight, function(torch.add(x.mean_, std, alpha=node))) for node, weight in _rule()]
    zero = torch.zeros_like(std)
    mean = sum((weight * value for _, weight, value in values), zero)
    spread = sum((weight * (value - mean).square() for _, weight, value in values), zero)
    slope = sum((weight * node * value for node, weight, value in values), zero)
    return x.like(mean, spread, slope / std.clamp_min(1e-15))


@Moments.rule(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
def _relu(x: Moments, inplace: bool = False) -> Moments:
    return leaky(x, 0.0)


@Moments.rule(F.leaky_relu)
def _leaky_relu(x: Moments, negative_slope: float = 0.01, inplace: bool = False) -> Moments:
    return leaky(x, negative_slope)


def _by_quadrature(function: Callable[..., Tensor]) -> None:
    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        kwargs.pop("inplace", None)
        return quadrature(x, lambda values: function(values, *args, **kwargs))

    Moments.rule(function)(own)


_SMOOTH: tuple[Callable[..., Tensor], ...] = (
    *(torch.tanh, Tensor.tanh, F.tanh, torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.gelu, F.silu, F.softplus, F.elu),
    *(F.selu, F.celu, F.mish, F.softsign, F.logsigmoid, F.hardtanh, F.relu6, F.hardswish, F.hardsigmoid),
)
for _function in _SMOOTH:
    _by_quadrature(_function)


@Moments.rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)
def _dropout(x: Moments, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training else x
