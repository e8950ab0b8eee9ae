r"""The matrices $A^\top \Lambda A$ and $A^\top \Lambda V$ of Bayesian linear regression on patches, computed with little memory.

Rows of A are the patches that a convolution multiplies: row (m, t) and column (c, a) hold $x_{mc}(s t + d a - p)$, with
stride s, dilation d and padding p. Hence

$$ (A^\top A)_{(c, a), (e, b)} = \sum_{m, t} x_{mc}(s t + d a - p)\, x_{me}(s t + d b - p). $$

At stride 1, the entry of $A^\top A$ for kernel positions a and b is the correlation of maps at lag $d (b - a)$. This
correlation leaves out the few positions at the borders that only one of the kernel positions a and b reaches. The
correlations of whole maps come from Fourier transforms (`correlate`), and the products at these border positions are
subtracted. With a larger stride, patches are extracted and multiplied for a few examples at a time. For the gradient, the
patches are extracted again. For every stride, the computation needs only the memory of a few maps (Ober & Aitchison 2021,
section 2.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.autograd_functions import Function
from bayesify.maths.lag_correlations import Spectra, correlate, correlate_gradient, fast_size

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride and dilation of a convolution in each axis, and the number of zeros before and after the input map."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of output positions in each axis, for a map of the given sizes."""
        return tuple(
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, pad, d, k, s in zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )

    def padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The padded map, and the geometry without padding."""
        if not any(map(any, self.padding)):
            return x, self
        pads = [size for pair in reversed(self.padding) for size in pair]
        bare = tuple((0, 0) for _ in self.padding)
        return F.pad(x, pads), Geometry(self.kernel, self.stride, self.dilation, bare, self.groups)

    @property
    def offsets(self) -> list[Offset]:
        """Positions in the kernel, row-major."""
        return list(itertools.product(*(range(size) for size in self.kernel)))


def windows(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A view of padded maps [B, C, *n] that has one window for each output position: [B, C, *o, *k]."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        padded = padded.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return padded


def lag_moments(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The same matrices as `patch_moments`, at stride 1."""
    groups, positions = geometry.groups, math.prod(geometry.kernel)
    maps, outputs = (value.unflatten(1, (groups, -1)) for value in (x, targets))
    plan = _plan(tuple(x.shape[2:]), geometry, x.device)
    found, boxes, cross = _Lagged.apply(maps, outputs, plan, geometry)
    gram = plan.subtract(torch.cat((found, found.mT))[plan.order], boxes)  # [pairs, G, C, C]
    width = maps.shape[2]
    gram = gram.unflatten(0, (positions, positions)).permute(2, 3, 0, 4, 1)  # [G, C, K, C, K]
    square = gram.reshape(groups, width * positions, width * positions)
    return square, cross.permute(1, 2, 0, 3).flatten(1, 2)


def _negated(lag: Offset) -> Offset:
    return tuple(-size for size in lag)


@dataclass(frozen=True)
class _Box:
    """Correlation of two maps at a lag, summed over a box of positions at a border.

    `ranges` contains the first position and the end of the box in each axis. The positions are those of the map that the lag does
    not shift.
    """

    lags: Offset
    ranges: tuple[tuple[int, int], ...]
    axis: int  # an axis in which the box is a strip at a border

    def cut(self, side: Tensor, start: int, forward: bool) -> Tensor:
        """One of the two maps that the box correlates, cut to the positions of the box. The result is a view of `side`, [G, M,
        *n, C]; `start` is the position at which `side` begins."""
        for axis, (lag, (first, end)) in enumerate(zip(self.lags, self.ranges, strict=True)):
            move = max(0, lag if forward else -lag) - (start if axis == self.axis else 0)
            side = side.narrow(2 + axis, first + move, end - first)
        return side


@dataclass(frozen=True)
class _Plan:
    lags: tuple[Offset, ...]  # half of the lags between kernel positions; the other half have the opposite sign
    order: Tensor  # index of each pair's lag in the list of `lags` followed by their opposites
    boxes: tuple[_Box, ...]  # all distinct boxes that the windows of pairs exclude from the full correlations
    targets: Tensor  # index of the pair from which each term is subtracted
    sources: Tensor  # index of each term: 2 i for box i, 2 i + 1 for its transpose
    signs: Tensor  # sign of each term, [terms, 1, 1, 1]

    def subtract(self, gram: Tensor, sums: Tensor) -> Tensor:
        """Full correlations of all pairs, [pairs, G, C, C], minus the correlations over boxes, [boxes, G, C, C]."""
        if not self.boxes:
            return gram
        both = torch.stack((sums, sums.mT), 1).flatten(0, 1)
        return gram.index_add(0, self.targets, both[self.sources] * self.signs.to(gram.dtype))


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], geometry: Geometry, device: torch.device) -> _Plan:
    pairs = list(itertools.product(geometry.offsets, geometry.offsets))
    lags = [tuple(d * (j - i) for d, i, j in zip(geometry.dilation, a, b, strict=True)) for a, b in pairs]
    half = sorted({max(lag, _negated(lag)) for lag in lags})
    number = {lag: index for index, lag in enumerate(half)}
    order = [number[lag] if lag in number else len(half) + number[_negated(lag)] for lag in lags]
    places = {pair: index for index, pair in enumerate(pairs)}
    boxes: dict[_Box, int] = {}
    targets, sources, signs = [], [], []
    for a, b in pairs:
        for sign, box in _outside(a, b, sizes, geometry) if a <= b else ():
            index = boxes.setdefault(box, len(boxes))
            ends = [(places[a, b], 2 * index), (places[b, a], 2 * index + 1)]
            for target, source in ends if a != b else ends[:1]:
                targets.append(target)
                sources.append(source)
                signs.append(-sign)
    numbers = [torch.tensor(values, dtype=torch.int64, device=device) for values in (order, targets, sources)]
    factors = torch.tensor(signs, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    return _Plan(tuple(half), numbers[0], tuple(boxes), numbers[1], numbers[2], factors)


def _outside(a: Offset, b: Offset, sizes: Sequence[int], geometry: Geometry) -> list[tuple[int, _Box]]:
    """Positions that the full correlation includes, but that a pair of kernel positions does not reach. They are expressed as a
    signed sum of boxes."""
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


class _Lagged(Function):
    """Three kinds of correlations: of maps at lags, [lags, G, C, C]; of maps over boxes, [boxes, G, C, C]; and of maps with
    targets, [K, G, C, R].

    Each border is extracted from the map once, and all gradients with respect to the map are accumulated in one tensor.
    """

    @staticmethod
    def forward(ctx: Any, maps: Tensor, targets: Tensor, plan: _Plan, geometry: Geometry) -> tuple[Tensor, ...]:
        boxes = plan.boxes
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
        own, cross, spectra = correlate(maps, targets, plan.lags, shifts, sizes)
        strips = _strips(boxes)
        starts = {key: first for key, (first, _) in strips.items()}
        sides: list[Tensor] = []
        for (axis, _), (first, end) in strips.items():
            strip = maps.narrow(3 + axis, first, end - first)
            sides.append(strip.movedim(0, 1).movedim(2, -1).contiguous())  # [G, M, *n, C]
        found = own.new_zeros(len(boxes), *own.shape[1:])
        for index, (left, right) in enumerate(_factors(boxes, starts, sides)):
            found[index] = left.flatten(1, -2).mT @ right.flatten(1, -2)
        ctx.save_for_backward(spectra.both, spectra.own, spectra.cross, *sides)
        ctx.sizes, ctx.boxes, ctx.starts, ctx.shapes = spectra.sizes, boxes, starts, (maps.shape, targets.shape)
        return own, found, cross

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        both, own, cross, *sides = ctx.saved_tensors
        spectra = Spectra(both, own, cross, ctx.sizes, ctx.shapes[0][2])
        by_maps, by_targets = correlate_gradient(spectra, grads[0], grads[2], ctx.shapes)
        grad = grads[1].contiguous()
        turned = grad.mT.contiguous()  # a transposed right operand can be slow
        filled = [torch.zeros_like(side) for side in sides]
        pairs = zip(_factors(ctx.boxes, ctx.starts, sides), _factors(ctx.boxes, ctx.starts, filled), strict=True)
        for index, ((left, right), (by_left, by_right)) in enumerate(pairs):
            by_left += (right.flatten(1, -2) @ turned[index]).view(left.shape)
            by_right += (left.flatten(1, -2) @ grad[index]).view(right.shape)
        for ((axis, _), start), side in zip(ctx.starts.items(), filled, strict=True):
            by_maps.narrow(3 + axis, start, side.shape[2 + axis]).add_(side.movedim(-1, 2).movedim(1, 0))
        return by_maps, by_targets, None, None


def _strips(boxes: Sequence[_Box]) -> dict[tuple[int, bool], tuple[int, int]]:
    """First position and end of each border strip, chosen so that the strip contains all its boxes. Keys are pairs of an axis and
    a flag that is true for the border at the start of this axis."""
    found: dict[tuple[int, bool], tuple[int, int]] = {}
    for box in boxes:
        (first, end), lag = box.ranges[box.axis], abs(box.lags[box.axis])
        key = (box.axis, first == 0)
        before = found.get(key, (first, end + lag))
        found[key] = (min(before[0], first), max(before[1], end + lag))
    return found


def _factors(
    boxes: Sequence[_Box], starts: dict[tuple[int, bool], int], sides: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    order = {key: index for index, key in enumerate(starts)}
    found = []
    for box in boxes:
        key = (box.axis, box.ranges[box.axis][0] == 0)
        side = sides[order[key]]
        found.append((box.cut(side, starts[key], forward=False), box.cut(side, starts[key], forward=True)))
    return found


MAX_MAPS_OF_PATCHES = 2
"""Maximum size of the patches in memory at once, as a multiple of the size of all maps."""


def convolution_moments(
    x: Tensor, targets: Tensor, geometry: Geometry, ones: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""$A^\top A$ and $A^\top V$ for each group. For $A^\top \Lambda A$ and $A^\top \Lambda V$, multiply x, V and the ones by
    $\Lambda^{1/2}$ first.

    The map x is [M, c_in, *n], and the targets V are [M, c_out, *o]. With a bias, `ones` [M] contains the entry of each example
    in the last column of A. The two matrices are [G, D, D] and [G, D, c_out / G]. D is c_in / G times the number of kernel
    positions, plus 1 for a bias.
    """
    by_patches = max(geometry.stride) > 1 or math.prod(geometry.kernel) == 1
    gram, cross = (patch_moments if by_patches else lag_moments)(x, targets, geometry)
    if ones is None:
        return gram, cross
    totals = (ones @ targets.flatten(2).sum(-1)).view(geometry.groups, -1)
    sums = _patches(torch.tensordot(ones, x, 1).unsqueeze(0), geometry).sum(-1)  # weighted by `ones`
    count = (ones.square().sum() * math.prod(targets.shape[2:])).expand(geometry.groups, 1, 1)
    gram = torch.cat((torch.cat((gram, sums.unsqueeze(-1)), -1), torch.cat((sums.unsqueeze(-2), count), -1)), -2)
    return gram, torch.cat((cross, totals.unsqueeze(-2)), -2)


def patch_moments(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    r"""The matrices $A^\top A$, [G, D, D], and $A^\top V$, [G, D, c_out / G], computed from extracted patches, for any stride."""
    from torch.utils.checkpoint import checkpoint  # loads sympy in torch 2.6

    copies = math.prod(geometry.kernel) * math.prod(targets.shape[2:]) / math.prod(x.shape[2:])
    rows = max(1, int(len(x) * MAX_MAPS_OF_PATCHES / copies))
    parts = [
        checkpoint(_products, *part, geometry, use_reentrant=False, preserve_rng_state=False)
        for part in zip(x.split(rows), targets.split(rows), strict=True)
    ]
    gram, cross = (torch.stack(values).sum(0) for values in zip(*parts, strict=True))
    return gram, cross


def _products(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    a = _patches(x, geometry)
    v = targets.unflatten(1, (geometry.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)  # [G, M o, R]
    return a @ a.mT, a @ v


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """The transposed matrix A of each group: [G, D, M o]."""
    x, bare = geometry.padded(x)
    dims, x = len(bare.kernel), windows(x, bare.kernel, bare.stride, bare.dilation)
    order = (1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims))
    grouped: Tensor = x.unflatten(1, (geometry.groups, -1)).permute(order)  # [G, C, *k, M, *o]
    return grouped.reshape(geometry.groups, math.prod(grouped.shape[1 : 2 + dims]), -1)
