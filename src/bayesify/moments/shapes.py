"""Rules for sums, products, pooling and changes of shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.tensors import Moments, NoRule, channels_last, moments_of

# -- arithmetic ------------------------------------------------------------------------------------------------------


def _layout(*values: Any) -> Moments:
    """The random operand with the most axes, whose layout the result has."""
    return max((value for value in values if isinstance(value, Moments)), key=lambda value: (value.ndim, value.numel()))


@Moments.rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
def _add(x: Any, y: Any, *, alpha: float = 1) -> Moments:
    """Random operands count as independent, a residual connection's too."""
    (mean, variance), (other, spread) = moments_of(x), moments_of(y)
    found = torch.add(mean, other, alpha=alpha) if isinstance(mean, Tensor) else mean + alpha * other
    if variance is not None and spread is not None:
        together = zip(*(value.channels_ for value in (x, y) if value.ndim == found.ndim), strict=True)
        return Moments(found, torch.add(variance, spread, alpha=alpha**2), tuple(min(flags) for flags in together))
    layout, kept = _layout(x, y), variance if spread is None else alpha**2 * spread
    if found.shape == layout.shape:
        return layout.like(found, kept, torch.ones_like(found[:1]))
    return Moments(found, kept.expand_as(found), (0,) * (found.ndim - layout.ndim) + layout.channels_)


@Moments.rule(torch.sub, Tensor.sub, Tensor.__sub__)
def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Moments:
    return _add(x, y, alpha=-alpha)


@Moments.rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.mul_, Tensor.__imul__)
def _multiply(x: Any, y: Any) -> Moments:
    (mean, variance), (other, spread) = moments_of(x), moments_of(y)
    if variance is not None and spread is not None:
        both = variance * spread + mean**2 * spread + other**2 * variance
        return Moments(mean * other, both, _layout(x, y).channels_)
    layout = _layout(x, y)
    factor = other if spread is None else mean
    found = mean * other
    if found.shape != layout.shape:
        raise NoRule("a product with a tensor of more axes than the random one has no rule")
    gain = factor if isinstance(factor, Tensor) else torch.as_tensor(factor, dtype=found.dtype, device=found.device)
    return layout.like(found, layout.variance_ * gain**2, gain)


@Moments.rule(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide)
def _divide(x: Any, y: Any) -> Any:
    return NotImplemented if isinstance(y, Moments) else _multiply(x, 1 / y)


@Moments.rule(torch.neg, Tensor.neg, Tensor.__neg__)
def _negative(x: Moments) -> Moments:
    return _multiply(x, -1.0)


@Moments.rule(torch.mean, Tensor.mean)
def _mean(x: Moments, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Moments:
    """Deviations average over positions, variances over channels."""
    if dim is None:
        raise NoRule("a mean over all axes, the batch among them, has no rule")
    axes = sorted({axis % x.ndim for axis in ((dim,) if isinstance(dim, int) else dim)}, reverse=True)
    spread, layout = x.variance_, list(x.channels_)
    for axis in axes:
        if axis == 0 or layout[axis] > 1:
            raise NoRule("a mean over the batch, or over features that were flattened, has no rule")
        if layout[axis] == 0:
            spread = spread.sqrt().mean(axis, keepdim=True).square()
        else:
            spread = spread.mean(axis, keepdim=True) / spread.shape[axis]
        if not keepdim:
            del layout[axis]
    mean = x.mean_.mean(tuple(axes), keepdim=keepdim)
    return Moments(mean, spread.reshape(mean.shape), tuple(layout))


# -- pooling ---------------------------------------------------------------------------------------------------------


def _average(pool: Callable[..., Tensor]) -> None:
    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        _check_maps(x)
        return x.like(pool(x.mean_, *args, **kwargs), pool(x.variance_.sqrt(), *args, **kwargs).square())

    Moments.rule(pool)(own)


def _check_maps(x: Moments) -> None:
    if x.ndim < 3 or x.channels_ != (0, 1, *[0] * (x.ndim - 2)):
        raise NoRule("pooling of anything but maps [B, C, ...] with random channels has no rule")


_AVERAGES: tuple[Callable[..., Tensor], ...] = (
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
)
for _pool in _AVERAGES:
    _average(_pool)


def _largest(pool: Callable[..., Any], *functions: Callable[..., Any]) -> None:
    """The position with the largest mean, which stays the largest where all vary together."""

    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        _check_maps(x)
        kwargs.pop("return_indices", None)
        mean, index = pool(channels_last(x.mean_), *args, **kwargs, return_indices=True)
        spread = channels_last(x.variance_)
        if spread.stride(1) != 1:
            return x.like(mean, spread.flatten(2).gather(2, index.flatten(2)).view(mean.shape))
        spread, index = (part.movedim(1, -1).flatten(1, -2) for part in (spread, index))  # [B, P, C]
        return x.like(mean, spread.gather(1, index).view(mean.movedim(1, -1).shape).movedim(-1, 1))

    Moments.rule(*functions)(own)


_largest(F.max_pool1d, torch.max_pool1d, F.max_pool1d)
_largest(F.max_pool2d, torch.max_pool2d, F.max_pool2d)
_largest(F.max_pool3d, torch.max_pool3d, F.max_pool3d)
_largest(F.adaptive_max_pool1d, torch.adaptive_max_pool1d, F.adaptive_max_pool1d)
_largest(F.adaptive_max_pool2d, F.adaptive_max_pool2d)


# -- shapes ----------------------------------------------------------------------------------------------------------


def reshaped(shape: Sequence[int], layout: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """The layout of channels after a change of shape; see `Moments`.

    Channels and then positions in one axis become blocks. Other mixtures count as independent.
    """
    found: list[int] = []
    old_at = new_at = 0
    while new_at < len(new):
        old_axes, new_axes = [old_at], [new_at]
        old_at, new_at = old_at + 1, new_at + 1
        if old_axes[0] >= len(shape):  # what is left has one entry each
            found.append(0)
            continue
        before, after = shape[old_axes[0]], new[new_axes[0]]
        while before != after:
            if before < after:
                before, old_axes, old_at = before * shape[old_at], [*old_axes, old_at], old_at + 1
            else:
                after, new_axes, new_at = after * new[new_at], [*new_axes, new_at], new_at + 1
        flags = [layout[axis] for axis in old_axes if shape[axis] > 1]
        found += _merged(flags, [shape[axis] for axis in old_axes if shape[axis] > 1], [new[axis] for axis in new_axes])
    return tuple(found)


def _merged(flags: list[int], sizes: list[int], new: list[int]) -> list[int]:
    if not any(flags):
        return [0] * len(new)
    if len(flags) == 1 and flags[0] > 1 and len(new) > 1:  # blocks come apart again
        inner = next((at for at in range(len(new)) if math.prod(new[at:]) == flags[0]), None)
        return [1] * len(new) if inner is None else [1] * inner + [0] * (len(new) - inner)
    if len([size for size in new if size > 1]) == 1 and flags[0] and not any(flags[1:]):
        block = flags[0] * math.prod(sizes[1:])
        return [block if size > 1 else 0 for size in new]
    return [1] * len(new)


def _shape_rule(function: Callable[..., Tensor]) -> None:
    change = Tensor.reshape if function is Tensor.view else function  # maps may have their channels last in memory

    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        mean = change(x.mean_, *args, **kwargs)
        if mean.shape == x.shape:
            return x
        return Moments(mean, change(x.variance_, *args, **kwargs), reshaped(x.shape, x.channels_, mean.shape))

    Moments.rule(function)(own)


_CHANGES: tuple[Callable[..., Tensor], ...] = (
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze),
)
for _change in _CHANGES:
    _shape_rule(_change)


@Moments.rule(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach)
def _same(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    return x


@Moments.rule(Tensor.permute, torch.permute)
def _permute(x: Moments, *dims: Any) -> Moments:
    order = [axis % x.ndim for axis in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    return Moments(x.mean_.permute(order), x.variance_.permute(order), tuple(x.channels_[axis] for axis in order))


@Moments.rule(Tensor.transpose, torch.transpose)
def _transpose(x: Moments, first: int, second: int) -> Moments:
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(x, order)


@Moments.rule(Tensor.__getitem__)
def _index(x: Any, index: Any) -> Any:
    """By slices, numbers and new axes."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
    if not isinstance(x, Moments) or not plain:
        return NotImplemented
    taken = sum(part is not None and part is not ... for part in parts)
    full: list[Any] = []
    for part in parts if any(part is ... for part in parts) else (*parts, ...):
        full += [slice(None)] * (x.ndim - taken) if part is ... else [part]
    layout, axis = [], 0
    for part in full:
        if part is None:
            layout.append(0)
            continue
        if isinstance(part, slice):
            layout.append(x.channels_[axis] if part == slice(None) else min(x.channels_[axis], 1))
        axis += 1
    return Moments(x.mean_[index], x.variance_[index], tuple(layout))


@Moments.rule(torch.cat, torch.concat)
def _cat(values: Sequence[Any], dim: int = 0) -> Moments:
    parts = [moments_of(value) for value in values]
    spreads = [torch.zeros_like(mean) if spread is None else spread for mean, spread in parts]
    layouts = {value.channels_ for value in values if isinstance(value, Moments)}
    if len(layouts) > 1:
        raise NoRule("cat of units whose channels lie on different axes has no rule")
    return Moments(torch.cat([mean for mean, _ in parts], dim), torch.cat(spreads, dim), layouts.pop())


@Moments.rule(F.pad)
def _pad(x: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    return x.like(F.pad(x.mean_, pad, mode, value), F.pad(x.variance_, pad, mode))
