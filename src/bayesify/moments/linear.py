"""Rules for linear maps, convolutions, embeddings and normalization."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.convolution_moments import windows
from bayesify.moments.responses import Correlated, Node, Noise, SharedRows, SharedWeights, Spread
from bayesify.moments.tensors import (
    ESTIMATED,
    EXACT,
    Moments,
    NoRule,
    Pass,
    Value,
    affine,
    channel_covariances,
    channels_last,
    find_batch,
    moments_of,
    nonlinear,
    number_lanes,
    per_axis,
    units,
    use,
    value_of,
)


def _pass_of(*weights: Any) -> Pass | None:
    return next((part.pass_ for part in weights if isinstance(part, Moments) and part.pass_ is not None), None)


def _known(x: Any, weight: Any) -> Any:
    """A layer's input, whose variances are computed if they are not known yet. The variances are needed because they
    multiply the noise of random weights."""
    if not isinstance(x, Moments) or not isinstance(weight, Moments) or value_of(x).doubt == EXACT:
        return x
    value = value_of(x)
    return units(replace(nonlinear(value, "a random layer"), doubt=value.doubt))


def _own(
    layer: Callable[..., Tensor],
    mean: Tensor,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    like: Tensor,
) -> Tensor:
    r"""The part of the outputs' variance that comes from weights and bias, $\sum_j V_{ij} (m_j^2 + v_j) + V_{b,i}$."""
    if weight is not None:
        second = mean.square() if variance is None else torch.addcmul(variance, mean, mean)
        return layer(second, weight, bias)
    if bias is None:
        return torch.zeros_like(like)
    return (bias if layer is F.linear else bias.view(-1, *[1] * (like.ndim - 2))).expand_as(like)


def _pairs(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Mean product of neighboring units. Neighbors are taken along the last of the given axes whose length exceeds
    1."""
    axis = next((axis for axis in reversed(axes) if value.shape[axis] > 1), None)
    if axis is None:
        return value.square().mean(axes)
    size = value.shape[axis] - 1
    return (value.narrow(axis, 0, size) * value.narrow(axis, 1, size)).mean(axes)


def _own_together(
    x: Any, mean: Tensor, batch: int, positions: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    r"""Two correlations, between positions, of the noise that shared weights cause: one for neighboring positions, and one for
    all pairs of different positions. Each is the mean of $\sum_j V_j\,\varphi_{pj} \varphi_{qj} + V_b$ over these pairs (p, q),
    divided by the mean of this sum for p = q: [2, B].

    `weight` [I] is the variance of each input channel's weights, summed over outputs.
    """
    constant = mean.new_zeros(()) if bias is None else bias.sum()
    if weight is None:
        return mean.new_ones(2, mean.shape[batch])
    count = math.prod(mean.shape[axis] for axis in positions)
    near, far, same = _pairs(mean, positions), mean.mean(positions).square(), mean.square().mean(positions)
    if isinstance(x, Moments):
        spread = x.variance_.mean(positions)
        together = value_of(x).together
        by_example = (
            [part.unsqueeze(-1) for part in together] if spread.ndim == 2 else [mean.new_ones(()) for _ in together]
        )
        common = by_example[1] + (1 - by_example[1]) / count
        near, far, same = near + by_example[0] * spread, far + common * spread, same + spread
    near, far, same = (part @ weight + constant for part in (near, far, same))
    kept = torch.stack((near / same, (count * far / same - 1) / max(1, count - 1)))
    return kept.nan_to_num(1.0).clamp(0, 1)


def _mapped(
    x: Any,
    found: Tensor,
    own: Tensor,
    passed: Tensor | None,
    channels: tuple[int, ...],
    noise: Noise | None,
    push: Callable[..., Tensor],
    together: Tensor,
    products: float,
    doubt: int,
) -> Moments:
    value = value_of(x) if isinstance(x, Moments) else None
    node = Node(
        found.shape, () if value is None else (value.node,), push if value is not None else None, noise, products
    )
    stem, lanes = frozenset({(node.order, 0, 2**62)}), number_lanes(found.shape, channels)
    if value is None or passed is None:
        return units(Value(found, own, channels, node, together, stem, stem, node.order, lanes, doubt))
    axes = tuple(axis for axis in range(found.ndim) if channels[axis] != -1)
    if found.ndim > 2:
        mine, other = own.sum(axes), passed.sum(axes)
        together = (mine * together + other * value.together) / (mine + other).clamp_min(1e-30)
        together = together.clamp(0, 1)  # rounding
    sources = value.sources | stem if noise is not None else value.sources
    doubt = max(doubt, value.doubt)
    if value.sources != value.stem:  # the input's channels share the noise of earlier layers
        doubt = max(doubt, ESTIMATED)
    return units(Value(found, own + passed, channels, node, together, sources, stem, node.order, lanes, doubt))


@Moments.rule(F.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Moments:
    r"""Rule for $y = W h + b$, with variance $\sum_j V_{ij} (m_j^2 + v_j) + \sum_j M_{ij}^2 v_j + V_{b,i}$; exact for independent
    channels."""
    use(weight)
    use(bias)
    given: Any = _known(x, weight)
    x = given
    mean, variance = moments_of(x)
    (weight_mean, weight_variance), (bias_mean, bias_variance) = moments_of(weight), moments_of(bias)
    found = F.linear(mean, weight_mean, bias_mean)
    own = _own(F.linear, mean, variance, weight_variance, bias_variance, found)
    products, pass_ = mean.numel() * len(weight_mean), _pass_of(weight, bias)
    value = value_of(x) if isinstance(x, Moments) else None
    mixes = value is not None and value.channels[-1] != 1 and any(flag > 0 for flag in value.channels[:-1])
    if value is not None and mixes:  # the map mixes positions and keeps channels; channels are independent
        x = units(value := replace(value, together=torch.zeros_like(value.together)))
    batch = find_batch(mean, mean.ndim - 1, pass_) if value is None else value.batch
    if batch == mean.ndim - 1:
        raise NoRule("a linear map over the axis of examples is not supported")
    channels = (*tuple(-1 if axis == batch else 0 for axis in range(mean.ndim - 1)), 1)
    together = mean.new_ones(2, mean.shape[batch])
    noise: Noise | None = None
    if weight_variance is not None or bias_variance is not None:
        if mean.ndim == 2:
            noise = Spread(own, channels)
        else:
            positions = tuple(axis for axis in range(mean.ndim - 1) if axis != batch)
            per_input = None if weight_variance is None else weight_variance.sum(0)
            together = _own_together(x, mean, batch, positions, per_input, bias_variance)

            def arrange(slopes: Tensor) -> Tensor:
                return slopes.movedim(batch, 0).flatten(1, -2)

            spread = None if weight_variance is None else weight_variance.unsqueeze(0)
            second = _second(x, weight_variance, F.linear, channels)
            noise = SharedWeights(lambda: arrange(mean).unsqueeze(1), spread, bias_variance, arrange, products, second)
    passed, doubt = None, EXACT
    if value is not None:
        passed = _passed(value_of(given), weight_mean)
        doubt = EXACT if value.channels[-1] == 1 else ESTIMATED
    return _mapped(
        x, found, own, passed, channels, noise, lambda change: F.linear(change, weight_mean), together, products, doubt
    )


def _second(
    x: Any, weight: Tensor | None, layer: Callable[..., Tensor], channels: tuple[int, ...]
) -> Callable[[], Spread] | None:
    """The noise from products of random weights with random inputs; `None` if the weights or the inputs are fixed."""
    if weight is None or not isinstance(x, Moments):
        return None
    value = value_of(x)
    return lambda: Spread(layer(value.variance, weight), channels, value.together[1], is_rest=True)


def _passed(value: Value, weight: Tensor) -> Tensor:
    """Variance of a linear map of units whose positions are correlated. The positions of a channel form a block of the
    last axis."""
    variance, block = value.variance, value.channels[-1]
    apart = F.linear(variance, weight.square())
    if block == 1:
        return apart
    if block == 0:
        moved = F.linear(variance.sqrt(), weight).square()
    else:
        std = variance.sqrt().unflatten(-1, (-1, block)).flatten(0, -3)  # [B, C, P]
        blocks: Tensor = std.transpose(0, 1) @ weight.unflatten(1, (-1, block)).permute(1, 2, 0)  # [C, B, O]
        moved = blocks.square().sum(0).view(apart.shape)
    return torch.lerp(apart, moved, value.per_example(value.together[1]).expand_as(apart))


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
        x = _known(x, weight)
        mean, variance = moments_of(x)
        (weight_mean, weight_variance), (bias_mean, bias_variance) = moments_of(weight), moments_of(bias)
        pass_ = _pass_of(weight, bias)
        channels = (-1, 1, *[0] * (mean.ndim - 2))
        if mean.ndim != weight_mean.ndim or (pass_ is not None and len(mean) != pass_.rows):
            raise NoRule("a convolution whose input has no batch axis is not supported")
        if isinstance(x, Moments) and value_of(x).channels != channels:
            raise NoRule("a convolution over an axis that an earlier layer turned into channels is not supported")

        mean, variance = channels_last(mean), None if variance is None else channels_last(variance)

        def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return convolve(x, weight, bias, stride, padding, dilation, groups)

        found = layer(mean, weight_mean, bias_mean)
        spread = _own(layer, mean, variance, weight_variance, bias_variance, found)
        products = found.numel() * weight_mean[0].numel()
        noise, together = None, mean.new_ones(2, len(mean))
        if weight_variance is not None or bias_variance is not None:
            positions = tuple(range(2, mean.ndim))
            per_input = None
            if weight_variance is not None:
                per_input = weight_variance.sum(positions).unflatten(0, (groups, -1)).sum(1).flatten()
            together = _own_together(x, mean, 0, positions, per_input, bias_variance)
            by_group = None if weight_variance is None else weight_variance.flatten(1).unflatten(0, (groups, -1))
            noise = SharedWeights(
                lambda: _patches(mean, weight_mean.shape[2:], stride, padding, dilation, groups),
                by_group,  # [G, O / G, J]
                bias_variance,
                lambda slopes: slopes.flatten(2).mT,
                products,
                _second(x, weight_variance, layer, channels),
            )
        geometry = (stride, padding, dilation, groups)
        passed = None if variance is None else _seen(variance, weight_mean, convolve, geometry)
        doubt = EXACT if math.prod(weight_mean.shape[2:]) == 1 else ESTIMATED

        def push(change: Tensor) -> Tensor:
            return layer(change, weight_mean)

        return _mapped(x, found, spread, passed, channels, noise, push, together, products, doubt)

    Moments.rule(convolve)(own)


def _patches(maps: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """The input patch at each position of a convolution, for each group of channels: [B, G, P, J]."""
    dims = len(kernel)
    strides, dilations = per_axis(stride, dims), per_axis(dilation, dims)
    reach = [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
    if isinstance(padding, str):
        sides = [(total // 2, total - total // 2) if padding == "same" else (0, 0) for total in reach]
    else:
        sides = [(one, one) for one in per_axis(padding, dims)]
    maps = F.pad(maps, [one for pair in reversed(sides) for one in pair])
    maps = windows(maps, kernel, strides, dilations)
    patches = maps.movedim(1, 1 + dims).flatten(1, dims).flatten(3)  # [B, P, C, K]
    return torch.unflatten(patches, 2, (groups, -1)).movedim(2, 1).flatten(3)


def _seen(variance: Tensor, weight: Tensor, convolve: Callable[..., Tensor], geometry: Any) -> Tensor:
    r"""Approximation of the variance $\sum_c (\sum_k M_{ck} s_{ck})^2$ that weights M pass on from inputs with standard
    deviations s, if the K positions of a kernel are fully correlated. The approximation avoids one product per channel.

    In $\sum_k M_k s_k = K \bar M \bar s + \sum_k (M_k - \bar M)(s_k - \bar s)$, the terms of the last sum are treated as if they
    had random signs. The square is then $(\sum_k M_k)^2\,\bar s^2 + \sum_k (M_k - \bar M)^2\,\overline{(s - \bar s)^2}$.
    """
    size = math.prod(weight.shape[2:])
    if size == 1:
        return convolve(variance, weight.square(), None, *geometry)
    window = variance.new_full((variance.shape[1], 1, *weight.shape[2:]), 1 / size)
    average, among = (
        convolve(part, window, None, *geometry[:-1], variance.shape[1]) for part in (variance.sqrt(), variance)
    )
    among = torch.addcmul(among, average, average, value=-1).clamp_min_(0)
    axes = tuple(range(2, weight.ndim))
    total = weight.sum(axes, keepdim=True).square()
    rest = weight.square().sum(axes, keepdim=True) - total / size
    groups = geometry[-1]
    found: Tensor = convolve(average.square(), total, groups=groups)
    return found + convolve(among, rest.clamp_min(0), groups=groups)


for _convolve in (F.conv1d, F.conv2d, F.conv3d):
    _convolution(_convolve)


@Moments.rule(F.embedding)
def _embedding(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Moments) or not isinstance(weight, Moments):
        return NotImplemented
    use(weight)
    batch = find_batch(x, x.ndim, weight.pass_)
    mean, variance = (F.embedding(x, part) for part in (weight.mean_, weight.variance_))
    channels = (*tuple(-1 if axis == batch else 0 for axis in range(x.ndim)), 1)
    tokens = x.movedim(batch, 0).flatten(1)  # [B, P]
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    count = tokens.shape[1]
    share = (equal.sum((1, 2)) - count) / max(1, count * (count - 1))
    near = equal.diagonal(1, 1, 2).to(mean).mean(1) if count > 1 else share.to(mean)
    std = variance.sqrt().movedim(batch, 0).flatten(1, -2)
    noise = SharedRows(std, equal.to(torch.uint8).argmax(2), lambda slopes: slopes.movedim(batch, 0).flatten(1, -2))
    together = torch.stack((near, share.to(mean)))
    return _mapped(None, mean, variance, None, channels, noise, torch.clone, together, 0.0, EXACT)


MAX_NOISE_SHARE = 0.4
"""Maximum share of noise in the squared scale by which units are normalized. For larger shares, normalization is too nonlinear."""


def _check_noise(what: str, scale: Tensor, noise: Tensor) -> None:
    """Raise `NoRule` if the variance of the units is too large a share of the squared scale that normalizes them."""
    share = float((noise * scale.square()).mean())
    if share > MAX_NOISE_SHARE:
        raise NoRule(
            f"{what} does not support units that are mostly noise (the noise share is {share:.2g}, but at most "
            f"{MAX_NOISE_SHARE:g} is supported)"
        )


def _fixed(what: str, *values: Any) -> None:
    if any(isinstance(value, Moments) for value in values):
        raise NoRule(f"{what} with a random scale or shift is not supported; leave scale and shift as point estimates")


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
    """Batch normalization in evaluation mode, which is an affine map of each channel."""
    _fixed("batch normalization", weight, bias)
    if training or running_var is None:
        raise NoRule("batch normalization with the batch's own statistics is not supported")
    if x.ndim < 2:
        raise NoRule("batch normalization without an axis of channels is not supported")

    def function(units: Tensor) -> Tensor:
        return F.batch_norm(units, running_mean, running_var, weight, bias, False, momentum, eps)

    scale = (running_var + eps).rsqrt()
    scale = (scale if weight is None else scale * weight).view(-1, *[1] * (x.ndim - 2))
    return affine(value_of(x), function, scale)


@Moments.rule(F.layer_norm)
def _layer_norm(x: Moments, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Moments:
    _fixed("layer normalization", weight, bias)
    value = value_of(x)
    if len(shape) > 1 or value.channels[-1] != 1:
        raise NoRule("layer normalization over more than one axis of channels is not supported")
    dense = channel_covariances(value) if shape[0] <= MAX_DENSE_CHANNELS else None
    if dense is not None:
        return _dense_layer_norm(value, dense, weight, bias, eps)
    value = nonlinear(value, "layer normalization")
    share = 1 - 1 / shape[0]
    return _normalize(value, (*value.mean.shape, 1), weight, bias, eps, "layer normalization", share, value.doubt)


MAX_DENSE_CHANNELS = 16
"""With at most this many channels, layer normalization uses the channels' covariance and second-order terms. These terms shrink
in proportion to one over the number of channels."""

MAX_SCALE_VARIANCE = 0.45
"""Maximum relative variance of the squared scale by which channels are normalized. Above this value, second-order terms are
inaccurate."""


def _dense_layer_norm(value: Value, spread: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Moments:
    r"""Layer normalization of units with covariance $\Sigma$ between the C channels of a position, to second order.

    With $q = \mathbb{E}\,|c|^2 / C + \epsilon$ for centered units c, $z = m / \sqrt q$ and $S = \Sigma / q$, the squared scale has
    relative variance $\nu = (4 z^\top S z + 2 \operatorname{tr} S^2) / C^2$. The mean is $(1 + \frac38 \nu)\,z - S z / C$, and
    the gain is $((1 + \frac38 \nu) I - (z z^\top + S) / C) / \sqrt q$. The variance of the nonlinear part of unit i is
    $\frac12 \operatorname{tr}(H_i S H_i S)$, where $H_i$ is the unit's Hessian. The covariances are [B, P, C, C].
    """
    batch, count = value.batch, value.mean.shape[-1]
    spread = spread - spread.mean(-1, keepdim=True)
    spread = spread - spread.mean(-2, keepdim=True)
    centered = value.mean.movedim(batch, 0).reshape(len(spread), -1, count)  # [B, P, C]
    centered = centered - centered.mean(-1, keepdim=True)
    own = spread.diagonal(dim1=-2, dim2=-1)
    scale = (centered.square().mean(-1, keepdim=True) + own.mean(-1, keepdim=True) + eps).rsqrt()
    z, s = centered * scale, spread * scale.square().unsqueeze(-1)
    mean, gain, rest = _second_order(z, s)
    linear_part = ((gain @ s) * gain).sum(-1)
    if weight is not None:
        mean, linear_part = mean * weight, linear_part * weight.square()
        rest = rest * weight * weight.unsqueeze(-1)

    def back(units: Tensor) -> Tensor:
        return units.view(value.mean.movedim(batch, 0).shape).movedim(0, batch)

    def push(change: Tensor) -> Tensor:
        moved = change.movedim(batch, 0).reshape(len(spread), -1, count)
        moved = (gain @ ((moved - moved.mean(-1, keepdim=True)) * scale).unsqueeze(-1)).squeeze(-1)
        return back(moved if weight is None else moved * weight)

    mean = back(mean if bias is None else mean + bias)
    variance = back(linear_part + rest.diagonal(dim1=-2, dim2=-1).clamp_min(0))
    made = value.derived(mean, variance, push, aligned=-1, doubt=EXACT)
    made.node.noise = Correlated(rest, batch, value.together[1].square())
    return units(replace(made, sources=made.sources | {(made.node.order, 0, 2**62)}))


def _second_order(z: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean and gain of normalized channels, and the covariance of the nonlinear part; see `_dense_layer_norm`."""
    count, row, column = z.shape[-1], z.unsqueeze(-2), z.unsqueeze(-1)
    along = s @ column  # S z, [B, P, C, 1]
    both, squares = row @ along, s.square().sum((-2, -1), keepdim=True)  # [B, P, 1, 1]
    relative = (4 * both + 2 * squares) / count**2
    if relative.max() > MAX_SCALE_VARIANCE:
        raise NoRule(
            "layer normalization whose squared scale varies too much between draws is not supported (the relative variance "
            f"is {float(relative.max()):.2g}, but at most {MAX_SCALE_VARIANCE:g} is supported)"
        )
    factor = 1 + 0.375 * relative
    gain = factor * torch.eye(count).to(z) - (column * row + s) / count
    half = 0.5 * along @ along.mT + (s @ along - 3 * both / count * along) @ row
    alone = 0.5 * squares - 3 * along.square().sum(-2, keepdim=True) / count + 4.5 * (both / count).square()
    rest = (half + half.mT + s * both + alone * column * row) / count**2
    return (factor * column - along / count).squeeze(-1), gain, rest


@Moments.rule(F.group_norm)
def _group_norm(x: Moments, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Moments:
    _fixed("group normalization", weight, bias)
    value = nonlinear(value_of(x), "group normalization")
    if value.channels != (-1, 1, *[0] * (x.ndim - 2)):
        raise NoRule("group normalization supports only inputs [B, C, ...] whose channels are random variables")
    shape = (len(value.mean), groups, x.shape[1] // groups, -1)
    weight, bias = (None if part is None else part.view(-1, *[1] * (x.ndim - 2)) for part in (weight, bias))
    return _normalize(value, shape, weight, bias, eps, "group normalization", 1.0, max(ESTIMATED, value.doubt))


def _normalize(
    value: Value,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    what: str,
    share: float,
    doubt: int,
) -> Moments:
    """Units that are normalized over the last two axes of a shape [..., C, P], then scaled and shifted.

    The check for too much noise counts only the fraction `share` of the units' variance.
    """
    variance = value.variance.reshape(shape)
    z, spread, scale = _normalized(value.mean.reshape(shape), variance, eps)
    _check_noise(what, scale, share * variance.mean((-2, -1), keepdim=True))

    def back(units: Tensor, factor: Tensor | None) -> Tensor:
        units = units.view(value.mean.shape)
        return units if factor is None else units * factor

    def push(change: Tensor) -> Tensor:
        change = change.reshape(shape)
        change = change - change.mean((-2, -1), keepdim=True)
        return back((change - z * (z * change).mean((-2, -1), keepdim=True)) * scale, weight)

    mean = back(z, weight)
    variance = back(spread, None if weight is None else weight.square())
    return units(value.derived(mean if bias is None else mean + bias, variance, push, doubt=doubt, aligned=-1))


def _normalized(mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Mean, variance and scale of units [..., C, P] after a linearized normalization to mean 0 and variance 1.

    Let z be the result for the means, and let the channels be independent. Then $\delta z_{cp} = (s_{cp} \varepsilon_c
    - \sum_d (a_d + z_{cp} b_d)\,\varepsilon_d) / \sigma$, where $a_c = \sum_p s_{cp} / (C P)$ and $b_c = \sum_p z_{cp}
    s_{cp} / (C P)$. $\sigma^2$ includes the expected variance of the units.
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
    return z, spread.clamp_min(0) * scale.square(), scale
