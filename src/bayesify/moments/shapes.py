"""Rules for sums, products, pooling and changes of shape."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.pointwise import combined
from bayesify.moments.responses import Node, Spread
from bayesify.moments.tensors import (
    ESTIMATED,
    UNKNOWN,
    Moments,
    NoRule,
    Value,
    affine,
    check_gaussian,
    correlations,
    count_positions,
    in_pieces,
    meet,
    nonlinear,
    per_axis,
    settled_pair,
    units,
    value_of,
    view,
)

# -- arithmetic ------------------------------------------------------------------------------------------------------


def _both(x: Moments, y: Moments) -> tuple[Value, Value]:
    """The units of two operands. One operand may be a weight."""
    known = next((part.value_ for part in (x, y) if part.value_ is not None), None)
    if known is None:
        return value_of(x), value_of(y)
    axes = max(x.ndim, y.ndim)
    batch = known.batch + axes - known.mean.ndim
    return value_of(x, axes, batch), value_of(y, axes, batch)


def _one(x: Moments, y: Any) -> Value:
    """The units of the random operand, if the other operand is a plain number or tensor."""
    if x.value_ is not None or not isinstance(y, Tensor) or y.ndim < x.ndim:
        return value_of(x)
    return value_of(x, y.ndim)


def _layout(shape: Sequence[int], *values: Value) -> tuple[int, ...]:
    """For each axis of a broadcast result, its kind (examples, positions or channels); see `Value`. An axis holds channels if it
    holds channels in any operand."""
    found = [0] * len(shape)
    for value in values:
        for axis, (flag, size) in enumerate(
            zip(value.channels, value.mean.shape, strict=True), len(shape) - value.mean.ndim
        ):
            if flag == -1 and found[axis] in (0, -1):
                found[axis] = -1
            elif flag and size > 1 and found[axis] != -1:
                found[axis] = flag if found[axis] in (0, flag) else 1
    if found.count(-1) != 1:
        raise NoRule("operands whose examples lie on different axes are not supported")
    return tuple(found)


def _stretched(value: Value, mean: Tensor, factor: Any, push: Callable[[Tensor], Tensor]) -> Moments:
    """Units times a factor, repeated along new axes. The copies of a unit are fully correlated."""
    variance = (value.variance * factor**2).expand_as(mean)
    ones = torch.ones_like(value.together)
    doubt = value.doubt if value.num_positions() == 1 else max(ESTIMATED, value.doubt)
    together = ones if value.num_positions() == 1 else value.together
    return units(
        value.derived(mean, variance, push, channels=_layout(mean.shape, value), together=together, doubt=doubt)
    )


@Moments.rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
def _add(x: Any, y: Any, *, alpha: float = 1) -> Moments:
    """The sum of two operands. For the variance of the sum, the outputs of different layers are treated as independent, even in a
    residual connection."""
    if isinstance(x, Moments) and isinstance(y, Moments):
        return _sum(*_both(x, y), alpha)
    if isinstance(x, Moments):
        return _shifted(_one(x, y), 1, alpha * y if alpha != 1 else y)
    return _shifted(_one(y, x), alpha, x)


def _shifted(value: Value, factor: float, constant: Any) -> Moments:
    found = value.mean * factor + constant if factor != 1 else value.mean + constant
    if found.shape == value.mean.shape:
        return affine(value, lambda units: units * factor + constant, factor)
    return _stretched(value, found, factor, lambda change: (change * factor).expand_as(found))


def _sum(x: Value, y: Value, alpha: float) -> Moments:
    if x.root is y.root:
        return combined(x, y, lambda one, other: one + alpha * other, True, "a sum")
    found = torch.add(x.mean, y.mean, alpha=alpha)
    variance = torch.add(x.variance, y.variance, alpha=alpha**2)

    def push(one: Tensor, other: Tensor) -> Tensor:
        return torch.add(one, other, alpha=alpha)

    return units(_joined(found, variance, _layout(found.shape, x, y), push, x, y))


def _joined(
    mean: Tensor, variance: Tensor, channels: tuple[int, ...], push: Callable[..., Tensor], *values: Value
) -> Value:
    """Units computed from several values. The values are treated as independent unless they come from the same layer."""
    doubt = max(value.doubt for value in values)
    if any(value.channels != channels for value in values):
        doubt = max(doubt, ESTIMATED)
    for index, value in enumerate(values):
        if any(meet(value.stem, other.stem) for other in values[:index]):
            doubt = UNKNOWN
        elif any(meet(value.sources, other.sources) for other in values[:index]):
            doubt = max(doubt, ESTIMATED)
    sums = torch.stack(
        [value.variance.sum([axis for axis in range(value.mean.ndim) if axis != value.batch]) for value in values]
    )
    shares = sums / sums.sum(0).clamp_min(1e-30)  # [n, B]
    together = torch.stack([value.together for value in values]).mul(shares.unsqueeze(1)).sum(0).clamp(0, 1)
    sources = frozenset().union(*(value.sources for value in values))
    stem = frozenset().union(*(value.stem for value in values))
    node = Node(mean.shape, tuple(value.node for value in values), push)
    return Value(mean, variance, channels, node, together, sources, stem, doubt=doubt)


@Moments.rule(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__)
def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Moments:
    return _add(x, y, alpha=-alpha)


@Moments.rule(torch.rsub, Tensor.__rsub__)
def _subtract_from(x: Any, y: Any) -> Moments:
    return _add(y, x, alpha=-1)


@Moments.rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__)
@Moments.rule(torch.multiply, Tensor.multiply)
def _multiply(x: Any, y: Any) -> Moments:
    if isinstance(x, Moments) and isinstance(y, Moments):
        return _product(*_both(x, y))
    value, factor = (_one(x, y), y) if isinstance(x, Moments) else (_one(y, x), x)
    found = value.mean * factor
    if found.shape == value.mean.shape:
        return affine(value, lambda units: units * factor, factor)
    return _stretched(value, found, factor, lambda change: change * factor)


def _product(x: Value, y: Value) -> Moments:
    if x.root is y.root:
        check_gaussian(x.root, "a product")
        return combined(x, y, torch.mul, False, "a product")
    found, both = x.mean * y.mean, None
    if meet(x.sources, y.sources):
        pair = settled_pair(_broadcast(x, found), _broadcast(y, found))
        if pair is None:
            raise NoRule("a product of two units that have noise in common is not supported")
        x, y, both = pair
        found = found + both
    else:
        x, y = nonlinear(x, "a product"), nonlinear(y, "a product")
    rest = x.variance * y.variance if both is None else x.variance * y.variance + both.square()
    spread = rest + x.mean**2 * y.variance + y.mean**2 * x.variance
    if both is not None:
        spread = (spread + 2 * x.mean * y.mean * both).clamp_min(0)
    layout = _layout(found.shape, x, y)
    made = _joined(found, spread, layout, lambda one, other: one * y.mean + other * x.mean, x, y)
    made.node.noise = Spread(rest, made.channels, made.together[1].square(), True)
    doubt = max(x.doubt, y.doubt) if both is not None else made.doubt
    return units(replace(made, doubt=doubt))


def _broadcast(value: Value, like: Tensor) -> Value:
    if value.mean.shape == like.shape:
        return value
    shape = like.shape
    changes = {"channels": _layout(shape, value), "doubt": UNKNOWN}
    return value.derived(
        value.mean.expand(shape), value.variance.expand(shape), lambda one: one.expand(shape), **changes
    )


@Moments.rule(torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__)
@Moments.rule(torch.true_divide, Tensor.true_divide)
def _divide(x: Any, y: Any) -> Any:
    return NotImplemented if isinstance(y, Moments) else _multiply(x, 1 / y)


@Moments.rule(torch.neg, Tensor.neg, Tensor.__neg__)
def _negative(x: Moments) -> Moments:
    return _multiply(x, -1.0)


@Moments.rule(torch.mean, Tensor.mean)
def _mean(x: Moments, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Moments:
    """A mean over axes. Channels are independent, and positions are correlated."""
    value = value_of(x)
    if dim is None:
        raise NoRule("a mean over all axes, including the batch, is not supported")
    axes = sorted({axis % x.ndim for axis in ((dim,) if isinstance(dim, int) else dim)}, reverse=True)
    spread, layout, doubt, num_averaged = value.variance, list(value.channels), value.doubt, 1
    for axis in axes:
        if layout[axis] == -1 or layout[axis] > 1:
            raise NoRule("a mean over the batch or over flattened features is not supported")
        if layout[axis] == 1:
            spread = spread.mean(axis, keepdim=True) / spread.shape[axis]
    positions = tuple(axis for axis in axes if layout[axis] == 0)
    if positions:
        num_averaged = math.prod(spread.shape[axis] for axis in positions)
        common, apart = spread.sqrt().mean(positions, keepdim=True).square(), spread.mean(positions, keepdim=True)
        spread = torch.lerp(apart / num_averaged, common, value.per_example(value.together[1]).expand_as(common))
        doubt = max(doubt, ESTIMATED) if num_averaged > 1 else doubt
    mean = value.mean.mean(tuple(axes), keepdim=keepdim)
    kept = tuple(flag for axis, flag in enumerate(layout) if keepdim or axis not in axes)
    changes = {"channels": kept, "doubt": doubt, "aligned": -1}
    spread = spread.reshape(mean.shape)
    return units(value.derived(mean, spread, lambda change: change.mean(tuple(axes), keepdim=keepdim), **changes))


@Moments.rule(torch.sum, Tensor.sum)
def _total(x: Moments, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Moments:
    mean = _mean(x, dim, keepdim)
    return _multiply(mean, x.numel() / mean.numel())


# -- pooling ---------------------------------------------------------------------------------------------------------

MAX_NEIGHBORS = 9
"""Windows with at most this many positions use the correlation of neighboring positions; larger windows use the correlation of
any two positions."""


def _share(value: Value, window: float) -> Tensor:
    return value.per_example(value.together[0 if window <= MAX_NEIGHBORS else 1])


def _average(pool: Callable[..., Tensor], is_adaptive: bool) -> None:
    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        value = _maps(x)
        mean = pool(value.mean, *args, **kwargs)
        common, apart = pool(value.variance.sqrt(), *args, **kwargs).square(), pool(value.variance, *args, **kwargs)
        kernel: Any = args[0] if args else kwargs.get("kernel_size", kwargs.get("output_size"))
        if is_adaptive:
            window = value.mean[0, 0].numel() / mean[0, 0].numel()
        else:
            window = float(kernel) ** (x.ndim - 2) if isinstance(kernel, int) else float(math.prod(kernel))
        spread = torch.lerp(apart / window, common, _share(value, window).expand_as(common))
        doubt = max(value.doubt, ESTIMATED) if window > 1 else value.doubt
        return units(value.derived(mean, spread, lambda change: pool(change, *args, **kwargs), doubt=doubt))

    Moments.rule(pool)(own)


def _maps(x: Moments) -> Value:
    value = value_of(x)
    if x.ndim < 3 or value.channels != (-1, 1, *[0] * (x.ndim - 2)):
        raise NoRule("pooling supports only inputs [B, C, ...] whose channels are random variables")
    return value


_POOLS: tuple[Callable[..., Tensor], ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_ADAPTIVE: tuple[Callable[..., Tensor], ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
for _pools, _is_adaptive in ((_POOLS, False), (_ADAPTIVE, True)):
    for _pool in _pools:
        _average(_pool, _is_adaptive)


MAX_WINDOW = 16
"""Maximum number of positions in a window of maximum pooling."""

MAX_WINDOW_OF_ALIKE = 4
"""Windows of a sequence with at most this many positions may use the average correlation of neighboring positions."""


def _largest(dims: int, is_adaptive: bool, *functions: Callable[..., Any]) -> None:
    def own(
        x: Moments,
        size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Moments:
        value = nonlinear(_maps(x), "maximum pooling")
        if value.before is not None and not return_indices:
            inside, function = value.before
            return function(own(units(inside), size, stride, padding, dilation, ceil_mode))
        sizes, spaces = per_axis(size, dims), value.mean.shape[2:]
        kernel, steps, sides = sizes, per_axis(size if stride in (None, []) else stride, dims), per_axis(padding, dims)
        if is_adaptive:
            kernel = steps = [space // one for space, one in zip(spaces, sizes, strict=True)]
            ceil_mode = any(space % one for space, one in zip(spaces, sizes, strict=True))
        if ceil_mode or return_indices or per_axis(dilation, dims) != [1] * dims or math.prod(kernel) > MAX_WINDOW:
            raise NoRule(
                f"maximum pooling over windows that are uneven, dilated or larger than {MAX_WINDOW} positions is not supported"
            )
        pads = [side for side in reversed(sides) for _ in range(2)]
        counts = [
            (space + 2 * side - one) // step + 1
            for space, side, one, step in zip(spaces, sides, kernel, steps, strict=True)
        ]
        spans = [
            [slice(first, first + step * (count - 1) + 1, step) for first in range(one)]
            for one, step, count in zip(kernel, steps, counts, strict=True)
        ]

        def windows(maps: Tensor, fill: float = 0.0) -> list[Tensor]:
            """A list with one tensor for each position in a window: the first tensor contains the first positions of all windows,
            the second tensor the second positions, and so on."""
            maps = F.pad(maps, pads, value=fill) if any(pads) else maps
            return [maps[(slice(None), slice(None), *at)] for at in itertools.product(*spans)]

        lowest = float((value.mean - 10 * value.variance.sqrt()).amin()) - 1 if any(pads) else 0.0

        share = _shares(value, windows, dims, math.prod(kernel))
        step = partial(_largest_of, windows, lowest)
        mean, variance, rest, *gains = in_pieces(step, value.mean, value.variance, share)

        def push(change: Tensor) -> Tensor:
            return sum((gain * part for gain, part in zip(gains, windows(change), strict=True)), torch.zeros_like(mean))

        made = value.derived(mean, variance, push)
        made.node.noise = Spread(rest, value.channels, value.together[1].square(), True)
        return units(made)

    Moments.rule(*functions)(own)


def _largest_of(
    windows: Callable[..., list[Tensor]], lowest: float, mean: Tensor, variance: Tensor, share: Tensor
) -> tuple[Tensor, ...]:
    """Mean and variance of each window's maximum, the nonlinear part of the variance, and the gain of each position."""
    spreads = [part.contiguous() for part in windows(variance)]  # strided tensors would slow down every step
    means = [part.contiguous() for part in windows(mean, lowest)]
    if share.ndim > mean.ndim:
        return _most_alike_first(torch.stack(means, -1), torch.stack(spreads, -1).sqrt(), share)
    found, spread, gains = _maximum(means, spreads, share)
    common, apart = torch.zeros_like(found), torch.zeros_like(found)
    for gain, part in zip(gains, spreads, strict=True):
        moved = gain * part.sqrt()
        common, apart = common.add_(moved), apart.addcmul_(moved, moved)
    rest = spread - torch.lerp(apart, common.square_(), share.expand_as(apart))
    return found, spread, rest.clamp_min_(0), *gains


def _most_alike_first(mean: Tensor, std: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    """The same as `_largest_of`, but each pair of the K positions has its own correlation.

    Repeatedly, the two positions with the highest correlation are replaced by their maximum, until one position is left. In
    another order, max(a, b) and the maximum of copies of a and b could be treated as different numbers. Means and standard
    deviations are [..., K], and correlations are [..., K, K].
    """
    shape, count = mean.shape[:-1], mean.shape[-1]
    mean, std = mean.flatten(0, -2), std.flatten(0, -2)
    first = std.unsqueeze(-1) * share.flatten(0, -3) * std.unsqueeze(-2)
    both, gains = first.clone(), torch.eye(count, dtype=mean.dtype, device=mean.device).repeat(len(mean), 1, 1)
    mean, rows = mean.clone(), torch.arange(len(mean), device=mean.device)
    left = torch.ones_like(mean, dtype=torch.bool)
    upper = torch.ones(count, count, dtype=torch.bool, device=mean.device).triu(1)
    for _ in range(count - 1):
        spread = both.diagonal(dim1=1, dim2=2).clamp_min(1e-30).sqrt()
        alike = both / (spread.unsqueeze(1) * spread.unsqueeze(2))
        alike = alike.masked_fill(~(left.unsqueeze(1) & left.unsqueeze(2) & upper), -math.inf)
        chosen = alike.flatten(1).argmax(1)
        one, two = chosen // count, chosen % count
        found, variance, part = _larger(
            mean[rows, one], mean[rows, two], both[rows, one, one], both[rows, two, two], both[rows, one, two]
        )
        part = part.unsqueeze(1)
        gains[rows, one] = part * gains[rows, one] + (1 - part) * gains[rows, two]
        mixed = part * both[rows, one] + (1 - part) * both[rows, two]
        both[rows, one], both[rows, :, one] = mixed, mixed
        mean[rows, one], both[rows, one, one], left[rows, two] = found, variance, False
    moved = (gains[:, :1] @ first @ gains[:, :1].mT).flatten()
    rest = (both[:, 0, 0] - moved).clamp_min(0)  # a pair's maximum replaces the earlier position, so position 0 is left
    whole = (part.view(shape) for part in (mean[:, 0], both[:, 0, 0], rest))
    return *whole, *gains[:, 0].view(*shape, count).unbind(-1)


def _shares(value: Value, windows: Callable[..., list[Tensor]], dims: int, window: int) -> Tensor:
    """Correlations of all pairs of a window's K positions, [B, C, ..., K, K]; one common correlation, [B, 1, ...], if there are
    too many pairs."""
    pairs = correlations(value.root) if window > 1 else None
    if pairs is not None:
        places = torch.arange(pairs.shape[1], device=pairs.device).view(1, 1, *value.mean.shape[2:])
        return _between(pairs, [part.flatten() for part in windows(places)], windows(_linear_share(value)))
    if dims == 1 and window > MAX_WINDOW_OF_ALIKE:
        raise NoRule(
            f"maximum pooling over more than {MAX_WINDOW_OF_ALIKE} positions of a sequence is supported only if the network is "
            "so small that all pairs of positions can be compared"
        )
    return value.per_example(value.together[0]).to(value.mean)


def _linear_share(value: Value) -> Tensor:
    """For each unit, the share of its variance that comes from its linear response to its root (the unit of which it is a
    function)."""
    rest = value.node.noise.variance if value.base is not None and isinstance(value.node.noise, Spread) else None
    if rest is None:
        return torch.ones_like(value.variance)
    return (1 - rest / value.variance.clamp_min(1e-30)).clamp(0, 1)


def _between(pairs: Tensor, places: list[Tensor], linear: list[Tensor]) -> Tensor:
    """Correlations of the positions of each window, [B, C, ..., K, K], computed from the correlations r of the roots.

    Linear parts have correlation r, and nonlinear parts have correlation r^2.
    """
    at = torch.stack(places, -1)  # [windows, K]
    found: Tensor = pairs[:, at.unsqueeze(-1), at.unsqueeze(-2)].unflatten(1, (1, *linear[0].shape[2:]))
    share = torch.stack(linear, -1)
    one, other = share.unsqueeze(-1), share.unsqueeze(-2)
    return (one * other).sqrt() * found + ((1 - one) * (1 - other)).sqrt() * found.square()


def _larger(
    one: Tensor, two: Tensor, one_variance: Tensor, two_variance: Tensor, both: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Mean and variance of the larger of two Gaussians, and the gain of the first Gaussian.

    With $\theta^2 = v_1 + v_2 - 2 c$ and $\alpha = (m_1 - m_2) / \theta$ the mean is
    $m_1 \Phi(\alpha) + m_2 \Phi(-\alpha) + \theta \varphi(\alpha)$ (Clark 1961).
    """
    gap = one - two
    theta = (one_variance + two_variance - 2 * both).clamp_min(1e-30).sqrt()
    alpha = (gap / theta).clamp(-10, 10)
    first = torch.special.ndtr(alpha)
    bump = theta * torch.exp(-0.5 * alpha.square()) / math.sqrt(2 * math.pi)
    above = torch.maximum(gap * first + bump, gap.clamp_min(0))  # the mean of the maximum minus the second mean
    second = (gap.square() + one_variance) * first + two_variance * (1 - first) + gap * bump
    return two + above, (second - above.square()).clamp_min(0), first


def _maximum(means: list[Tensor], variances: list[Tensor], share: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mean and variance of the maximum of Gaussians with one common correlation, and the gain of each Gaussian, computed pair by
    pair."""
    if len(means) == 1:
        return means[0], variances[0], [torch.ones_like(means[0])]
    half = len(means) // 2
    one, one_variance, one_gains = _maximum(means[:half], variances[:half], share)
    two, two_variance, two_gains = _maximum(means[half:], variances[half:], share)
    both = share * (one_variance * two_variance).sqrt()
    found, variance, first = _larger(one, two, one_variance, two_variance, both)
    gains = [*(first * gain for gain in one_gains), *((1 - first) * gain for gain in two_gains)]
    return found, variance, gains


_largest(1, False, torch.max_pool1d, F.max_pool1d)
_largest(2, False, torch.max_pool2d, F.max_pool2d)
_largest(3, False, torch.max_pool3d, F.max_pool3d)
_largest(1, True, F.adaptive_max_pool1d)
_largest(2, True, F.adaptive_max_pool2d)


# -- shapes ----------------------------------------------------------------------------------------------------------


def reshaped(shape: Sequence[int], layout: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Kinds of the axes after a change of shape; see `Value`.

    If a new axis merges channels with the positions that follow them, the positions of each channel become a block of
    this axis. Units of all other merged axes are treated as independent.
    """
    found: list[int] = []
    old_at = new_at = 0
    while new_at < len(new):
        old_axes, new_axes = [old_at], [new_at]
        old_at, new_at = old_at + 1, new_at + 1
        if old_axes[0] >= len(shape):  # the remaining axes have length 1
            found.append(0)
            continue
        before, after = shape[old_axes[0]], new[new_axes[0]]
        while before != after:
            if before < after:
                before, old_axes, old_at = before * shape[old_at], [*old_axes, old_at], old_at + 1
            else:
                after, new_axes, new_at = after * new[new_at], [*new_axes, new_at], new_at + 1
        if len(old_axes) == len(new_axes) == 1 and layout[old_axes[0]] == -1:
            found.append(-1)
            continue
        flags = [layout[axis] for axis in old_axes if shape[axis] > 1]
        found += _merged(flags, [shape[axis] for axis in old_axes if shape[axis] > 1], [new[axis] for axis in new_axes])
    return tuple(found)


def _merged(flags: list[int], sizes: list[int], new: list[int]) -> list[int]:
    if not any(flags):
        return [0] * len(new)
    if len(flags) == 1 and flags[0] > 1 and len(new) > 1:  # split blocks again
        inner = next((at for at in range(len(new)) if math.prod(new[at:]) == flags[0]), None)
        return [1] * len(new) if inner is None else [1] * inner + [0] * (len(new) - inner)
    if len([size for size in new if size > 1]) == 1 and flags[0] and not any(flags[1:]):
        block = flags[0] * math.prod(sizes[1:])
        return [block if size > 1 else 0 for size in new]
    return [1] * len(new)


def _shape_rule(function: Callable[..., Tensor]) -> None:
    change = Tensor.reshape if function is Tensor.view else function  # maps may be stored with channels last

    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        value = value_of(x)
        if change is not function and "size" in kwargs:
            kwargs["shape"] = kwargs.pop("size")
        mean = change(value.mean, *args, **kwargs)
        if mean.shape == x.shape:
            return view(x, value)
        channels = reshaped(x.shape, value.channels, mean.shape)
        if channels.count(-1) != 1:
            raise NoRule("a change of shape that merges examples with other axes is not supported")
        doubt = value.doubt
        if value.num_positions() != count_positions(channels, mean.shape):  # for example in a flattened sequence
            doubt = max(doubt, ESTIMATED)
        made = value.derived(
            mean,
            change(value.variance, *args, **kwargs),
            lambda units: change(units, *args, **kwargs),
            channels=channels,
            doubt=doubt,
            lanes=_viewed(value.lanes, mean.shape),
            before=_inside(value, lambda inside: own(inside, *args, **kwargs)),
        )
        return view(x, made)

    Moments.rule(function)(own)


def _viewed(lanes: Tensor | None, shape: torch.Size) -> Tensor | None:
    try:
        return None if lanes is None else lanes.view(shape)
    except RuntimeError:  # one axis holds channels and positions
        return None


_CHANGES: tuple[Callable[..., Tensor], ...] = (
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze),
)
for _change in _CHANGES:
    _shape_rule(_change)


@Moments.rule(Tensor.contiguous, Tensor.detach, torch.detach)
def _same(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    return view(x, value_of(x))


@Moments.rule(Tensor.clone, torch.clone)
def _copy(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    return units(value_of(x))


@Moments.rule(Tensor.expand)
def _expand(x: Moments, *sizes: Any, **kwargs: Any) -> Moments:
    value = value_of(x)
    mean = value.mean.expand(*sizes, **kwargs)
    if mean.shape == value.mean.shape:
        return view(x, value)
    return view(x, value_of(_stretched(value, mean, 1.0, lambda change: change.expand(*sizes, **kwargs))))


@Moments.rule(Tensor.permute, torch.permute)
def _permute(x: Moments, *args: Any, dims: Any = None) -> Moments:
    value, dims = value_of(x), args or (dims,)
    order = [axis % x.ndim for axis in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    channels = tuple(value.channels[axis] for axis in order)
    mean, variance = value.mean.permute(order), value.variance.permute(order)
    lanes = None if value.lanes is None else value.lanes.permute(order)
    before = _inside(value, lambda inside: _permute(inside, order))
    changes = {"channels": channels, "lanes": lanes, "before": before}
    return view(x, value.derived(mean, variance, lambda change: change.permute(order), **changes))


def _inside(value: Value, change: Callable[[Moments], Moments]) -> Any:
    """`Value.before` after a change of shape: the reshaped units before the activation, and the activation."""
    return value.before and (value_of(change(units(value.before[0]))), value.before[1])


@Moments.rule(Tensor.transpose, torch.transpose)
def _transpose(x: Moments, dim0: int, dim1: int) -> Moments:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


@Moments.rule(Tensor.__getitem__)
def _index(x: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
    if not isinstance(x, Moments) or not plain:
        return NotImplemented
    value = value_of(x)
    taken = sum(part is not None and part is not ... for part in parts)
    full: list[Any] = []
    for part in parts if any(part is ... for part in parts) else (*parts, ...):
        full += [slice(None)] * (x.ndim - taken) if part is ... else [part]
    layout, axis, made = [], 0, value
    for part in full:
        if part is None:
            layout.append(0)
            continue
        flag, size, whole = value.channels[axis], x.shape[axis], part == slice(None)
        whole = whole or (isinstance(part, slice) and part.indices(size) == (0, size, 1))
        if flag == -1 and not whole:
            raise NoRule("indexing along the axis of examples is not supported")
        if flag > 1 and not whole:
            made = replace(made, doubt=max(made.doubt, ESTIMATED))
        if isinstance(part, slice):
            layout.append(flag if whole else min(flag, 1))
        axis += 1
    changes = {"channels": tuple(layout), "lanes": None if value.lanes is None else value.lanes[index]}
    kept = made.derived(value.mean[index], value.variance[index], lambda change: change[index], **changes)
    return view(x, _narrowed(kept))


def _narrowed(value: Value) -> Value:
    """The same units, but with fewer noise sources: of the last layer's sources, only those of the units' own channels are
    kept."""
    own = value.own_lanes()
    if not own or not meet(own, value.sources):
        return value
    sources, stem = (
        frozenset(one for one in known if one[0] != value.aligned) | own for known in (value.sources, value.stem)
    )
    return replace(value, sources=sources, stem=stem)


@Moments.rule(torch.chunk, Tensor.chunk)
def _chunk(x: Moments, chunks: int, dim: int = 0) -> tuple[Moments, ...]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


@Moments.rule(torch.split, Tensor.split)
def _split(x: Moments, size: Any, dim: int = 0) -> tuple[Moments, ...]:
    length = x.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)] if isinstance(size, int) else list(size)
    before, start, parts = [slice(None)] * (dim % x.ndim), 0, []
    for one in sizes:
        parts.append(_index(x, (*before, slice(start, start + one))))
        start += one
    return tuple(parts)


@Moments.rule(torch.unbind, Tensor.unbind)
def _unbind(x: Moments, dim: int = 0) -> tuple[Moments, ...]:
    before = [slice(None)] * (dim % x.ndim)
    return tuple(_index(x, (*before, index)) for index in range(x.shape[dim]))


@Moments.rule(F.glu)
def _glu(x: Moments, dim: int = -1) -> Moments:
    first, second = _chunk(x, 2, dim)
    return _multiply(first, torch.sigmoid(second))


@Moments.rule(torch.cat, torch.concat)
def _cat(values: Sequence[Any], dim: int = 0) -> Moments:
    random = [value_of(value) for value in values if isinstance(value, Moments)]
    layouts = {value.channels for value in random}
    if len(layouts) > 1:
        raise NoRule("torch.cat of units whose channels lie on different axes is not supported")
    channels = layouts.pop()
    if channels[dim] == -1:
        raise NoRule("torch.cat along the axis of examples is not supported")
    means = [value_of(value).mean if isinstance(value, Moments) else value for value in values]
    spreads = [value_of(value).variance if isinstance(value, Moments) else torch.zeros_like(value) for value in values]

    fixed = [None if isinstance(value, Moments) else torch.zeros_like(value) for value in values]

    def push(*changes: Tensor) -> Tensor:
        left = iter(changes)
        return torch.cat([next(left) if part is None else part for part in fixed], dim)

    made = _joined(torch.cat(means, dim), torch.cat(spreads, dim), channels, push, *random)
    if channels[dim] != 1:  # positions or flattened features
        flags = tuple(min(flag, 1) if axis == dim % len(channels) else flag for axis, flag in enumerate(channels))
        made = replace(made, channels=flags, doubt=max(made.doubt, ESTIMATED))
    return units(made)


@Moments.rule(F.pad)
def _pad(x: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    old = value_of(x)
    mean, variance = F.pad(old.mean, pad, mode, value), F.pad(old.variance, pad, mode)
    if any(flag == -1 or flag > 1 for flag in old.channels[x.ndim - len(pad) // 2 :]):
        raise NoRule("padding of the axis of examples or of flattened features is not supported")
    return units(old.derived(mean, variance, lambda change: F.pad(change, pad, mode)))
