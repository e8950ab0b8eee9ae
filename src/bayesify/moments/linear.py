"""Rules for linear maps, convolutions, embeddings and normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.tensors import Moments, NoRule, Origin, moments_of, use


def _count(weight: Any, bias: Any, products: int, variance: Tensor | None) -> None:
    """Count the products of a layer, and those that its moments took."""
    for part in (weight, bias):
        if isinstance(part, Moments) and part.pass_ is not None:
            part.pass_.plain += products
            part.pass_.spent += products * (1 + isinstance(weight, Moments) + (variance is not None))
            return


def _own(layer: Callable[..., Tensor], mean: Tensor, variance: Tensor | None, weight: Any, bias: Any, like: Any) -> Tensor:
    r"""What the noise of weights and bias adds to the variance of their outputs, $\sum_j V_{ij} (m_j^2 + v_j) + V_{b,i}$."""
    if weight is not None:
        second = mean.square() if variance is None else torch.addcmul(variance, mean, mean)
        return layer(second, weight, bias)
    if bias is None:
        return torch.zeros_like(like)
    return bias.view(-1, *[1] * (like.ndim - 2)).expand_as(like) if layer is not F.linear else bias.expand_as(like)


@Moments.rule(F.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Moments:
    r"""$y = W h + b$: variance $\sum_j V_{ij} (m_j^2 + v_j) + \sum_j M_{ij}^2 v_j + V_{b,i}$, exact for independent channels."""
    use(weight)
    use(bias)
    mean, variance = moments_of(x)
    (weight_mean, weight_variance), (bias_mean, bias_variance) = moments_of(weight), moments_of(bias)
    found = F.linear(mean, weight_mean, bias_mean)
    own = _own(F.linear, mean, variance, weight_variance, bias_variance, found)
    _count(weight, bias, mean.numel() * len(weight_mean), variance)
    origin = Origin(x if isinstance(x, Moments) else None, weight_mean, own) if mean.ndim == 2 else None
    if variance is None:
        return Moments(found, own, origin=origin)
    return Moments(found, own + _passed(variance, weight_mean, x.channels_[-1]), origin=origin)  # type: ignore[attr-defined]


def _passed(variance: Tensor, weight: Tensor, block: int) -> Tensor:
    """Variance of a linear map of units that vary together in blocks of their last axis."""
    if block == 1:
        return F.linear(variance, weight.square())
    if block == 0:
        return F.linear(variance.sqrt(), weight).square()
    std = variance.sqrt().unflatten(-1, (-1, block)).flatten(0, -3)  # [B, C, P]
    moved = std.transpose(0, 1) @ weight.unflatten(1, (-1, block)).permute(1, 2, 0)  # [C, B, O]
    return moved.square().sum(0).view(*variance.shape[:-1], len(weight))


def _convolution(convolve: Callable[..., Tensor], pool: Callable[..., Tensor]) -> None:
    def own(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Moments:
        use(weight)
        use(bias)
        mean, variance = moments_of(x)
        (weight_mean, weight_variance), (bias_mean, bias_variance) = moments_of(weight), moments_of(bias)
        if mean.ndim != weight_mean.ndim:
            raise NoRule("a convolution of one example without a batch axis has no rule")
        if isinstance(x, Moments) and x.channels_ != (0, 1, *[0] * (mean.ndim - 2)):
            raise NoRule("a convolution over an axis that a layer before it made channels of has no rule")

        def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return convolve(x, weight, bias, stride, padding, dilation, groups)

        found = layer(mean, weight_mean, bias_mean)
        spread = _own(layer, mean, variance, weight_variance, bias_variance, found)
        size = math.prod(weight_mean.shape[2:])
        _count(weight, bias, found.numel() * weight_mean[0].numel(), None if size > 1 else variance)
        if variance is not None:
            if size == 1:
                spread = spread + layer(variance, weight_mean.square())
            else:
                windows = _windows(variance, weight_mean.shape[2:], stride, padding, dilation, convolve, pool)
                spread = spread + _seen(weight_mean, *windows, lambda x, weight: convolve(x, weight, groups=groups))
        return Moments(found, spread, (0, 1, *[0] * (mean.ndim - 2)))

    Moments.rule(convolve)(own)


def _seen(weight: Tensor, mean: Tensor, spread: Tensor, pointwise: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    r"""$\sum_c (\sum_k M_{ck} s_{ck})^2$ over a kernel's K positions, which vary together, without a product for each channel.

    Of $\sum_k M_k s_k = K \bar M \bar s + \sum_k (M_k - \bar M)(s_k - \bar s)$ the last sum is taken as if its terms had random signs:
    $(\sum_k M_k)^2\,\bar s^2 + \sum_k (M_k - \bar M)^2\,\overline{(s - \bar s)^2}$.
    """
    axes = tuple(range(2, weight.ndim))
    total = weight.sum(axes, keepdim=True).square()
    rest = weight.square().sum(axes, keepdim=True) - total / math.prod(weight.shape[2:])
    return pointwise(torch.cat((mean.square(), spread), 1), torch.cat((total, rest.clamp_min(0)), 1))


def _windows(
    variance: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, convolve: Any, pool: Any
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the standard deviations in the window of a kernel, [B, C, *o] each."""
    std = variance.sqrt()
    ones = [1] * len(size)
    pads = [padding] * len(size) if isinstance(padding, int) else list(padding)
    if isinstance(padding, str) or list(_each(dilation, size)) != ones or any(2 * p > k for p, k in zip(pads, size, strict=True)):
        kernel = variance.new_full((1, 1, *size), 1 / math.prod(size))

        def average(x: Tensor) -> Tensor:
            flat = convolve(x.flatten(0, 1).unsqueeze(1), kernel, None, stride, padding, dilation)
            return flat.view(*x.shape[:2], *flat.shape[2:])

    else:

        def average(x: Tensor) -> Tensor:
            found: Tensor = pool(x, tuple(size), stride, padding)
            return found

    mean = average(std)
    return mean, torch.addcmul(average(variance), mean, mean, value=-1).clamp_min_(0)


def _each(value: Any, size: Any) -> Any:
    return [value] * len(size) if isinstance(value, int) else value


_convolution(F.conv1d, F.avg_pool1d)
_convolution(F.conv2d, F.avg_pool2d)
_convolution(F.conv3d, F.avg_pool3d)


@Moments.rule(F.embedding)
def _embedding(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Moments:
    if isinstance(x, Moments) or not isinstance(weight, Moments):
        return NotImplemented
    use(weight)
    return Moments(F.embedding(x, weight.mean_), F.embedding(x, weight.variance_))


def _fixed(what: str, *values: Any) -> None:
    if any(isinstance(value, Moments) for value in values):
        raise NoRule(f"{what} whose own scale and shift are random has no rule; leave them as point estimates")


@Moments.rule(F.batch_norm)
def _batch_norm(
    x: Moments,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    """In evaluation mode a linear map of each channel."""
    _fixed("batch normalization", weight, bias)
    if training or running_var is None:
        raise NoRule("batch normalization by the batch's own statistics has no rule")
    mean = F.batch_norm(x.mean_, running_mean, running_var, weight, bias, False, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = (scale if weight is None else scale * weight).view(-1, *[1] * (mean.ndim - 2))
    return x.like(mean, x.variance_ * scale.square(), scale)


@Moments.rule(F.layer_norm)
def _layer_norm(x: Moments, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Moments:
    r"""Linearized, $J = \frac{g}{\sigma} (I - \frac{1 1^\top + z z^\top}{H})$, with the units' variance in $\sigma^2$."""
    _fixed("layer normalization", weight, bias)
    axes = tuple(range(-len(shape), 0))
    size = math.prod(shape)
    centered = x.mean_ - x.mean_.mean(axes, keepdim=True)
    scale = (centered.square().mean(axes, keepdim=True) + x.variance_.mean(axes, keepdim=True) + eps).rsqrt()
    z = centered * scale
    first, second, third = ((x.variance_ * z**power).sum(axes, keepdim=True) for power in range(3))
    spread = x.variance_ * (1 - 2 * (1 + z * z) / size) + (first + 2 * z * second + z * z * third) / size**2
    spread = spread.clamp_min(0) * scale.square()
    mean, spread = (z, spread) if weight is None else (z * weight, spread * weight.square())
    return x.like(mean if bias is None else mean + bias, spread)


@Moments.rule(F.group_norm)
def _group_norm(x: Moments, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Moments:
    """Linearized, with the statistics of a group, which has many units, held."""
    _fixed("group normalization", weight, bias)
    mean, variance = (part.unflatten(1, (groups, -1)).flatten(2) for part in (x.mean_, x.variance_))
    centered = mean - mean.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + variance.mean(-1, keepdim=True) + eps).rsqrt()
    per_channel = (-1, *[1] * (x.mean_.ndim - 2))
    found, spread = (centered * scale).view(x.shape), (variance * scale.square()).view(x.shape)
    if weight is not None:
        found, spread = found * weight.view(per_channel), spread * weight.square().view(per_channel)
    return x.like(found if bias is None else found + bias.view(per_channel), spread)
