"""Rules for linear maps, convolutions, embeddings and normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.tensors import Moments, NoRule, Origin, channels_last, in_pieces, moments_of, use


def _count(weight: Any, bias: Any, products: int, variance: Tensor | None) -> None:
    """Count the products of a layer, and those that its moments took."""
    for part in (weight, bias):
        if isinstance(part, Moments) and part.pass_ is not None:
            part.pass_.plain += products
            part.pass_.spent += products * (1 + isinstance(weight, Moments) + (variance is not None))
            return


def _own(
    layer: Callable[..., Tensor],
    mean: Tensor,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    like: Tensor,
) -> Tensor:
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
    block = x.channels_[-1]  # type: ignore[attr-defined]
    if origin is None and block == 1 and weight_variance is not None:  # nobody else needs what the weights' noise added
        rows = own.flatten(0, -2).addmm_(variance.flatten(0, -2), weight_mean.square().mT)
        return Moments(found, rows.view(found.shape))
    return Moments(found, _passed(variance, weight_mean, block).add_(own), origin=origin)


def _passed(variance: Tensor, weight: Tensor, block: int) -> Tensor:
    """Variance of a linear map of units that vary together in blocks of their last axis."""
    if block == 1:
        return F.linear(variance, weight.square())
    if block == 0:
        return F.linear(variance.sqrt(), weight).square()
    std = variance.sqrt().unflatten(-1, (-1, block)).flatten(0, -3)  # [B, C, P]
    moved: Tensor = std.transpose(0, 1) @ weight.unflatten(1, (-1, block)).permute(1, 2, 0)  # [C, B, O]
    return moved.square().sum(0).view(*variance.shape[:-1], len(weight))


def _convolution(convolve: Callable[..., Tensor]) -> None:
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

        mean, variance = channels_last(mean), None if variance is None else channels_last(variance)

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
                window = variance.new_full((variance.shape[1], 1, *weight_mean.shape[2:]), 1 / size)
                average, among = (
                    convolve(part, window, None, stride, padding, dilation, variance.shape[1])
                    for part in (variance.sqrt(), variance)
                )
                among = torch.addcmul(among, average, average, value=-1).clamp_min_(0)
                spread = spread + _seen(weight_mean, average, among, lambda *pair: convolve(*pair, groups=groups))
        return Moments(found, spread, (0, 1, *[0] * (mean.ndim - 2)))

    Moments.rule(convolve)(own)


def _seen(weight: Tensor, mean: Tensor, spread: Tensor, pointwise: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    r"""$\sum_c (\sum_k M_{ck} s_{ck})^2$ over a kernel's K positions, which vary together, without a product for each channel.

    Of $\sum_k M_k s_k = K \bar M \bar s + \sum_k (M_k - \bar M)(s_k - \bar s)$ the last sum is taken as if its terms had random
    signs: $(\sum_k M_k)^2\,\bar s^2 + \sum_k (M_k - \bar M)^2\,\overline{(s - \bar s)^2}$.
    """
    axes = tuple(range(2, weight.ndim))
    total = weight.sum(axes, keepdim=True).square()
    rest = weight.square().sum(axes, keepdim=True) - total / math.prod(weight.shape[2:])
    return pointwise(mean.square(), total) + pointwise(spread, rest.clamp_min(0))


for _convolve in (F.conv1d, F.conv2d, F.conv3d):
    _convolution(_convolve)


@Moments.rule(F.embedding)
def _embedding(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Moments) or not isinstance(weight, Moments):
        return NotImplemented
    use(weight)
    mean = F.embedding(x, weight.mean_)
    independent = (0, *[1] * (mean.ndim - 1))  # rows of their own
    return Moments(mean, F.embedding(x, weight.variance_), independent)


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
    _fixed("layer normalization", weight, bias)
    if len(shape) > 1 or x.channels_[-1] != 1:
        raise NoRule("layer normalization over more than one axis of channels has no rule")
    return x.like(*in_pieces(partial(_normalized_channels, weight, bias, eps), x.mean_, x.variance_))


@Moments.rule(F.group_norm)
def _group_norm(x: Moments, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Moments:
    _fixed("group normalization", weight, bias)
    shape = (len(x.mean_), groups, x.shape[1] // groups, -1)
    found = _normalized(x.mean_.reshape(shape), x.variance_.reshape(shape), eps)
    mean, spread = (part.view(x.shape) for part in found)
    per_channel = (-1, *[1] * (x.mean_.ndim - 2))
    if weight is not None:
        mean, spread = mean * weight.view(per_channel), spread * weight.square().view(per_channel)
    return x.like(mean if bias is None else mean + bias.view(per_channel), spread)


def _normalized_channels(
    weight: Tensor | None, bias: Tensor | None, eps: float, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """`_normalized` of units [..., C], scaled and shifted, in fewer steps: with one position a channel, no deviation needs its
    root."""
    share = 1 / mean.shape[-1]
    centered = mean - mean.mean(-1, keepdim=True)
    moved = share * variance.mean(-1, keepdim=True)
    scale = centered.square().mean(-1, keepdim=True).add_(moved, alpha=1 / share - 1)
    scale = scale.add_(eps).rsqrt_()
    z = centered.mul_(scale)
    squared = z.square()
    first, second = (share * (part * variance).mean(-1, keepdim=True) for part in (z, squared))
    spread = torch.addcmul(moved, z, 2 * first).addcmul_(squared, second)
    spread.addcmul_(variance, squared.mul_(-2 * share).add_(1 - 2 * share))
    spread.clamp_min_(0).mul_(scale.square())
    if weight is not None:
        z, spread = z.mul_(weight), spread.mul_(weight.square())
    return z if bias is None else z.add_(bias), spread


def _normalized(mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r"""Units [..., C, P], less their mean and over their deviation, linearized.

    With z the result for the means, $\delta z_{cp} = (s_{cp} \varepsilon_c - \sum_d (a_d + z_{cp} b_d)\,\varepsilon_d) / \sigma$
    for channels that vary independently, $a_c = \sum_p s_{cp} / (C P)$ and $b_c = \sum_p z_{cp} s_{cp} / (C P)$; the expected
    variance of the units is in $\sigma^2$.
    """
    channels, std = mean.shape[-2], variance.sqrt()
    centered = mean - mean.mean((-2, -1), keepdim=True)
    first = std.mean(-1, keepdim=True) / channels  # a, [..., C, 1]
    moved = first.square().sum(-2, keepdim=True)  # variance of the mean
    scale = centered.square().mean((-2, -1), keepdim=True) + variance.mean((-2, -1), keepdim=True) - moved
    scale = (scale + eps).rsqrt()
    z = centered * scale
    second = (z * std).mean(-1, keepdim=True) / channels  # b
    common = moved + z * (2 * (first * second).sum(-2, keepdim=True) + z * second.square().sum(-2, keepdim=True))
    spread = common + std * (std - 2 * (first + z * second))
    return z, spread.clamp_min(0) * scale.square()
