"""The matrices of regression on a convolution's patches at stride 1: correlations at few lags, less what borders leave out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.convolution_geometry import Geometry, Offset
from bayesify.maths.lag_correlations import Spectra, correlate, correlate_gradient, fast_size


def lag_moments(
    x: Tensor, targets: Tensor, geometry: Geometry, ones: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, ...]:
    r"""$A^\top A$, $A^\top V$ and, with a bias, the sums of patches, [G, D], and of targets, [G, R], at stride 1.

    See `convolution_moments` for the arguments.
    """
    offsets, groups = geometry.offsets, geometry.groups
    pairs = list(itertools.product(offsets, offsets))
    lags = [tuple(d * (j - i) for d, i, j in zip(geometry.dilation, a, b, strict=True)) for a, b in pairs]
    half = sorted({max(lag, _negated(lag)) for lag in lags})
    maps, outputs = (value.unflatten(1, (groups, -1)) for value in (x, targets))
    borders = _Borders(pairs, tuple(x.shape[2:]), geometry)
    found, boxes, cross, sums, totals = _Lagged.apply(maps, outputs, ones, scale, tuple(half), borders.boxes, geometry)
    place = {lag: index for index, lag in enumerate(half)}
    index = [place[lag] if lag in place else len(half) + place[_negated(lag)] for lag in lags]
    gram = torch.cat((found, found.mT))[torch.tensor(index, device=x.device)]  # [pairs, G, C, C]
    gram = borders.subtract(gram, boxes)
    width = maps.shape[2]
    gram = gram.unflatten(0, (len(offsets), len(offsets))).permute(2, 3, 0, 4, 1)  # [G, C, K, C, K]
    square = gram.reshape(groups, width * len(offsets), width * len(offsets))
    return square, cross.permute(1, 2, 0, 3).flatten(1, 2), sums.permute(1, 2, 0).flatten(1), totals


def _negated(lag: Offset) -> Offset:
    return tuple(-size for size in lag)


@dataclass(frozen=True)
class _Box:
    """A correlation over a part of the positions that touches a border.

    Args:
        lags: In each axis.
        ranges: First position and end of the nearer of the two factors, in each axis.
        axis: An axis in which the box is a strip at a border.
    """

    lags: Offset
    ranges: tuple[tuple[int, int], ...]
    axis: int

    def cut(self, side: Tensor, start: int, forward: bool) -> Tensor:
        """One of the two factors, a view of the border's positions [G, M, *n, C] that begin at `start`."""
        for axis, (lag, (first, end)) in enumerate(zip(self.lags, self.ranges, strict=True)):
            move = max(0, lag if forward else -lag) - (start if axis == self.axis else 0)
            side = side.narrow(2 + axis, first + move, end - first)
        return side


class _Borders:
    """Which boxes the windows of pairs of kernel positions leave out of the full correlations.

    Args:
        pairs: Of kernel positions.
        sizes: Of the map.
        geometry: Of the convolution.

    Attributes:
        boxes: All different ones.
    """

    def __init__(self, pairs: list[tuple[Offset, Offset]], sizes: tuple[int, ...], geometry: Geometry) -> None:
        places = {pair: index for index, pair in enumerate(pairs)}
        boxes: dict[_Box, int] = {}
        self.terms: list[tuple[int, int, float]] = []  # pair, box (or its transpose, counted after all boxes), sign
        for a, b in pairs:
            for sign, box in _outside(a, b, sizes, geometry) if a <= b else ():
                index = boxes.setdefault(box, len(boxes))
                self.terms.append((places[a, b], 2 * index, -sign))
                if a != b:
                    self.terms.append((places[b, a], 2 * index + 1, -sign))
        self.boxes = tuple(boxes)

    def subtract(self, gram: Tensor, sums: Tensor) -> Tensor:
        """Full correlations of all pairs, [pairs, G, C, C], less those over boxes, [boxes, G, C, C]."""
        if not self.terms:
            return gram
        targets, sources, signs = zip(*self.terms, strict=True)
        both = torch.stack((sums, sums.mT), 1).flatten(0, 1)
        factors = torch.tensor(signs, dtype=gram.dtype, device=gram.device).view(-1, 1, 1, 1)
        chosen = both[torch.tensor(sources, device=gram.device)] * factors
        return gram.index_add(0, torch.tensor(targets, device=gram.device), chosen)


def _outside(a: Offset, b: Offset, sizes: Sequence[int], geometry: Geometry) -> list[tuple[int, _Box]]:
    """What the window of two kernel positions leaves out of the full correlation, as a sum of boxes with signs."""
    choices = []
    for axis, (i, j) in enumerate(zip(a, b, strict=True)):
        d, k = geometry.dilation[axis], geometry.kernel[axis]
        before, after = geometry.padding[axis]
        length = sizes[axis] - d * abs(i - j)
        if length <= 0:
            return []
        low = min(max(0, d * min(i, j) - before), length)
        high = min(max(0, d * (k - 1 - max(i, j)) - after), length)
        strips = [(-1, 0, low)] if low else []
        strips += [(-1, length - high, length)] if high else []
        choices.append([(1, 0, length), *strips])
    lags = tuple(d * (j - i) for d, i, j in zip(geometry.dilation, a, b, strict=True))
    found = []
    for parts in itertools.product(*choices):
        signs = [sign for sign, _, _ in parts]
        if -1 in signs:
            ranges = tuple((start, end) for _, start, end in parts)
            found.append((-math.prod(signs), _Box(lags, ranges, signs.index(-1))))
    return found


class _Lagged(torch.autograd.Function):
    """Correlations at lags, [lags, G, C, C], over boxes, [boxes, G, C, C], with the targets, [K, G, C, R], and sums of both.

    Each border is cut out of the map once, and all gradients by the map are added up in one place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        targets: Tensor,
        ones: Tensor | None,
        scale: Tensor | None,
        lags: tuple[Offset, ...],
        boxes: tuple[_Box, ...],
        geometry: Geometry,
    ) -> tuple[Tensor, ...]:
        shifts = [
            tuple(pad[0] - d * i for pad, d, i in zip(geometry.padding, geometry.dilation, a, strict=True))
            for a in geometry.offsets
        ]
        sizes = [
            fast_size(max(n + max(pad), o, n + d * (k - 1)))
            for n, pad, o, d, k in zip(
                maps.shape[3:], geometry.padding, targets.shape[3:], geometry.dilation, geometry.kernel, strict=True
            )
        ]
        own, cross, spectra = correlate(maps, targets, lags, shifts, sizes, scale)
        starts: dict[tuple[int, bool], int] = {}
        sides: list[Tensor] = []
        for box in boxes:
            key = (box.axis, box.ranges[box.axis][0] == 0)
            if key not in starts:
                size = maps.shape[3 + box.axis]
                width = min(2 * geometry.dilation[box.axis] * (geometry.kernel[box.axis] - 1), size)
                starts[key] = 0 if key[1] else size - width
                strip = maps.narrow(3 + box.axis, starts[key], width)
                strip = strip if scale is None else strip * _along(scale, strip)
                sides.append(strip.movedim(0, 1).movedim(2, -1).contiguous())  # [G, M, *n, C]
        found = own.new_zeros(len(boxes), *own.shape[1:])
        for index, (left, right) in enumerate(_factors(boxes, starts, sides)):
            found[index] = left.flatten(1, -2).mT @ right.flatten(1, -2)
        sums, totals = cross.new_zeros(cross.shape[:3]), cross.new_zeros(cross.shape[1], cross.shape[3])
        if ones is not None:
            total = torch.tensordot(ones if scale is None else ones * scale, maps, 1)  # [G, C, *n]
            windows = _windows(total, geometry, targets.shape[3:])
            sums = torch.stack([window.flatten(2).sum(-1) for window in windows])
            totals = (spectra.right_sums() * ones.view(-1, 1)).sum(1)
        ctx.save_for_backward(maps, targets, ones, scale, spectra.both, spectra.own, spectra.cross, *sides)
        ctx.geometry = geometry
        ctx.sizes, ctx.boxes, ctx.starts, ctx.shapes = spectra.sizes, boxes, starts, (maps.shape, targets.shape)
        return own, found, cross, sums, totals

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        maps, targets, ones, scale, both, own, cross, *sides = ctx.saved_tensors
        spectra = Spectra(both, own, cross, ctx.sizes, maps.shape[2])
        by_sums = None if ones is None else ones.view(-1, 1) * grads[4].unsqueeze(1)
        by_maps, by_targets = correlate_gradient(spectra, grads[0], grads[2], ctx.shapes, by_sums)
        by_ones = None
        if ones is not None:
            by_total = torch.zeros_like(maps[0])
            for window, share in zip(_windows(by_total, ctx.geometry, ctx.shapes[1][3:]), grads[3], strict=True):
                window += share.view(*share.shape, *[1] * (window.ndim - 2))
            by_maps.addcmul_(_along(ones, by_maps), by_total)
            through = maps.flatten(1) @ by_total.flatten()
            by_ones = (through if scale is None else through * scale) + (
                spectra.right_sums() * grads[4].unsqueeze(1)
            ).sum((0, 2))
        grad = grads[1].contiguous()
        turned = grad.mT.contiguous()  # a transposed operand on the right can be slow
        filled = [torch.zeros_like(side) for side in sides]
        pairs = zip(_factors(ctx.boxes, ctx.starts, sides), _factors(ctx.boxes, ctx.starts, filled), strict=True)
        for index, ((left, right), (by_left, by_right)) in enumerate(pairs):
            by_left += (right.flatten(1, -2) @ turned[index]).view(left.shape)
            by_right += (left.flatten(1, -2) @ grad[index]).view(right.shape)
        for ((axis, _), start), side in zip(ctx.starts.items(), filled, strict=True):
            by_maps.narrow(3 + axis, start, side.shape[2 + axis]).add_(side.movedim(-1, 2).movedim(1, 0))
        by_scale = None
        if scale is not None:
            by_scale = _row_products(by_maps.flatten(1), maps.flatten(1))
            by_scale += _row_products(by_targets.flatten(1), targets.flatten(1))
            by_maps *= _along(scale, by_maps)
            by_targets *= _along(scale, by_targets)
        return by_maps, by_targets, by_ones, by_scale, None, None, None


def _along(numbers: Tensor, value: Tensor) -> Tensor:
    """[M] in a shape that multiplies the first axis of a tensor."""
    return numbers.view(-1, *[1] * (value.ndim - 1))


def _row_products(left: Tensor, right: Tensor) -> Tensor:
    """Products of rows, [M, n] both -> [M], in one pass over memory."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).flatten()


def _windows(total: Tensor, geometry: Geometry, sizes: Sequence[int]) -> list[Tensor]:
    """What each kernel position sees of a map at stride 1, [G, C, *n], its padding left out, as views."""
    found = []
    for offset in geometry.offsets:
        window = total
        for axis, (i, d, pad, o) in enumerate(zip(offset, geometry.dilation, geometry.padding, sizes, strict=True)):
            first, end = max(0, d * i - pad[0]), min(total.shape[2 + axis], o + d * i - pad[0])
            window = window.narrow(2 + axis, min(first, max(end, 0)), max(0, end - first))
        found.append(window)
    return found


def _factors(
    boxes: Sequence[_Box], starts: dict[tuple[int, bool], int], sides: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Both factors of each box as views of the borders."""
    order = {key: index for index, key in enumerate(starts)}
    found = []
    for box in boxes:
        key = (box.axis, box.ranges[box.axis][0] == 0)
        side = sides[order[key]]
        found.append((box.cut(side, starts[key], forward=False), box.cut(side, starts[key], forward=True)))
    return found
