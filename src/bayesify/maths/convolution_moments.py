r"""The matrices of Bayesian linear regression on patches, $A^\top \Lambda A$ and $A^\top \Lambda V$, without extracting them.

Rows of A are the patches that a convolution multiplies: row (m, t) and column (c, a) hold $x_{mc}(s t + d a - p)$, with
stride s, dilation d and padding p. So

$$ (A^\top A)_{(c, a), (e, b)} = \sum_{m, t} x_{mc}(s t + d a - p)\, x_{me}(s t + d b - p). $$

At stride 1 this is the correlation of maps at lag $d (b - a)$, over all positions but a few at the borders, which the
window of a and b leaves out: the correlations come from Fourier transforms (`lag_correlations`), and the border strips
are subtracted. With a stride, or a precision that differs between positions, row a of the matrix is the
weight gradient of the convolution at the strided view of the map that a selects. Either way memory is that of a
few maps, whatever the kernel's size (Ober & Aitchison 2021, section 2.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.lag_correlations import fast_size, lag_correlations

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """How a convolution without padding reads its map, and the zeros around the map.

    Args:
        kernel: Sizes of the kernel.
        stride: In each axis.
        dilation: In each axis.
        padding: Zeros before and after the map, in each axis.
        groups: Groups of channels.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Positions of the output in each axis, for a map of the given sizes."""
        return tuple(
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, pad, d, k, s in zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )

    def padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The map with its zeros around it, and the geometry without them."""
        if not any(map(any, self.padding)):
            return x, self
        pads = [size for pair in reversed(self.padding) for size in pair]
        bare = tuple((0, 0) for _ in self.padding)
        return F.pad(x, pads), Geometry(self.kernel, self.stride, self.dilation, bare, self.groups)

    @property
    def offsets(self) -> list[Offset]:
        """Positions in the kernel, row-major."""
        return list(itertools.product(*(range(size) for size in self.kernel)))


def convolution_moments(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    r"""$A^\top A$ and $A^\top V$ for each group.

    A diagonal $\Lambda$ with one value per example, or a full one over examples, enters by $\Lambda^{1/2}$ in x and V.

    Args:
        x: The map, [M, c_in, *n].
        targets: V, [M, c_out, *o].
        geometry: Of the convolution.

    Returns:
        [G, D, D] and [G, D, c_out / G], with D = c_in / G times the kernel's positions.
    """
    if any(size > 1 for size in geometry.stride) or math.prod(geometry.kernel) == 1:
        return patch_gram(x, geometry), patch_cross(x, targets, geometry)
    return _by_lag(x, targets, geometry)


def patch_gram(x: Tensor, geometry: Geometry, precision: Tensor | None = None) -> Tensor:
    r"""$A^\top \Lambda A$ by strided views, for any stride and any diagonal $\Lambda$.

    Args:
        x: [M, c_in, *n].
        geometry: Of the convolution.
        precision: The diagonal of $\Lambda$, [M, *o], or anything that expands to it; 1 if left out.

    Returns:
        [G, D, D].
    """
    padded, bare = geometry.padded(x)
    if precision is not None:
        precision = precision.expand(x.shape[0], *geometry.outputs(x.shape[2:]))
    found: Tensor = _Gram.apply(padded, precision, bare)
    return found


def patch_cross(x: Tensor, targets: Tensor, geometry: Geometry) -> Tensor:
    r"""$A^\top V$: the weight gradient of the convolution at V, [G, D, c_out / G]."""
    padded, bare = geometry.padded(x)
    gradient: Tensor = _Cross.apply(padded, targets, bare)  # [c_out, c_in / G, *k]
    return gradient.flatten(1).unflatten(0, (geometry.groups, -1)).mT


def patch_sums(x: Tensor, geometry: Geometry, examples: Tensor) -> Tensor:
    """Sum of all patches of each example times a number for the example: the product of A with a column for the bias.

    Args:
        x: [M, c_in, *n].
        geometry: Of the convolution.
        examples: [M].

    Returns:
        [G, D].
    """
    total = torch.tensordot(examples, x, 1).unsqueeze(0)
    ones = x.new_ones(1, geometry.groups, *geometry.outputs(x.shape[2:]))
    return patch_cross(total, ones, geometry).squeeze(-1)


# -- strided views ---------------------------------------------------------------------------------------------------


def _convolve(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    zeros = [0] * len(geometry.kernel)
    return torch.convolution(x, kernel, None, geometry.stride, zeros, geometry.dilation, False, zeros, geometry.groups)


def _kernel_gradient(x: Tensor, outputs: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient of a convolution, [outputs' channels, c_in / G, *k]."""
    zeros = [0] * len(geometry.kernel)
    x = _used(x, geometry)
    like = x.new_empty(1).expand(outputs.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    found: Tensor = torch.ops.aten.convolution_backward(
        outputs,
        x,
        like,
        None,
        geometry.stride,
        zeros,
        geometry.dilation,
        False,
        zeros,
        geometry.groups,
        [False, True, False],
    )[1]
    return found


def _used(x: Tensor, geometry: Geometry) -> Tensor:
    """The map without the positions at its end that no stride reaches."""
    for axis, (size, k, s, d) in enumerate(
        zip(geometry.outputs(x.shape[2:]), geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2
    ):
        x = x.narrow(axis, 0, s * (size - 1) + d * (k - 1) + 1)
    return x


def _view(x: Tensor, offset: Offset, geometry: Geometry) -> Tensor:
    """What one position of the kernel sees, [M, c_in, *o]."""
    sizes = geometry.outputs(x.shape[2:])
    index = [slice(None), slice(None)]
    for start, size, s, d in zip(offset, sizes, geometry.stride, geometry.dilation, strict=True):
        index.append(slice(d * start, d * start + s * (size - 1) + 1, s))
    return x[tuple(index)]


class _Cross(torch.autograd.Function):
    """The weight gradient of a convolution; its own gradients are a transposed convolution and a convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, targets)
        ctx.geometry = geometry
        return _kernel_gradient(x, targets, geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, targets = ctx.saved_tensors
        geometry, kernel = ctx.geometry, grads[0]
        by_x = by_targets = None
        if ctx.needs_input_grad[0]:
            zeros = [0] * len(geometry.kernel)
            used = torch.convolution(
                targets, kernel, None, geometry.stride, zeros, geometry.dilation, True, zeros, geometry.groups
            )
            rest = [size - own for size, own in zip(x.shape[2:], used.shape[2:], strict=True)]
            by_x = F.pad(used, [size for more in reversed(rest) for size in (0, more)])
        if ctx.needs_input_grad[1]:
            by_targets = _convolve(x, kernel, geometry)
        return by_x, by_targets, None


class _Gram(torch.autograd.Function):
    """Row by row of the kernel's positions: weight gradients at strided views; the gradient is a convolution for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, precision: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, precision)
        ctx.geometry = geometry
        groups, positions = geometry.groups, math.prod(geometry.kernel)
        width = x.shape[1] // groups
        gram = x.new_empty(groups, width, positions, width * positions)
        for index, offset in enumerate(geometry.offsets):
            view = _view(x, offset, geometry)
            if positions == 1 and precision is None:
                rows = view.unflatten(1, (groups, width)).movedim(0, 2).flatten(2)  # [G, C, M o]
                return rows @ rows.mT
            view = view if precision is None else view * precision.unsqueeze(1)
            gram[:, :, index] = _kernel_gradient(x, view, geometry).flatten(1).unflatten(0, (groups, width))
        return gram.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, precision = ctx.saved_tensors
        geometry = ctx.geometry
        groups, positions = geometry.groups, math.prod(geometry.kernel)
        width = x.shape[1] // groups
        both = (grads[0] + grads[0].mT).view(groups, width, positions, width, *geometry.kernel)
        by_x = torch.zeros_like(x)
        by_precision = None if precision is None else torch.zeros_like(precision)
        for index, offset in enumerate(geometry.offsets):
            seen = _convolve(x, both[:, :, index].flatten(0, 1), geometry)  # [M, c_in, *o]
            if by_precision is not None:
                by_precision += 0.5 * (seen * _view(x, offset, geometry)).sum(1)
                seen = seen * precision.unsqueeze(1)
            _view(by_x, offset, geometry).add_(seen)
        return by_x, by_precision, None


# -- lags ------------------------------------------------------------------------------------------------------------


def _by_lag(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Both matrices at stride 1."""
    offsets, groups = geometry.offsets, geometry.groups
    pairs = list(itertools.product(offsets, offsets))
    lags = [tuple(d * (j - i) for d, i, j in zip(geometry.dilation, a, b, strict=True)) for a, b in pairs]
    half = sorted({max(lag, _negated(lag)) for lag in lags})
    shifts = [
        tuple(pad[0] - d * i for pad, d, i in zip(geometry.padding, geometry.dilation, a, strict=True)) for a in offsets
    ]
    sizes = [
        fast_size(max(n + max(pad), o, n + d * (k - 1)))
        for n, pad, o, d, k in zip(
            x.shape[2:], geometry.padding, targets.shape[2:], geometry.dilation, geometry.kernel, strict=True
        )
    ]
    maps, outputs = (value.unflatten(1, (groups, -1)) for value in (x, targets))
    found, cross = lag_correlations(maps, outputs, half, shifts, sizes)
    place = {lag: index for index, lag in enumerate(half)}
    index = [place[lag] if lag in place else len(half) + place[_negated(lag)] for lag in lags]
    gram = torch.cat((found, found.mT))[torch.tensor(index, device=x.device)]  # [pairs, G, C, C]
    gram = _without_borders(gram, maps, pairs, geometry)
    width = maps.shape[2]
    gram = gram.unflatten(0, (len(offsets), len(offsets))).permute(2, 3, 0, 4, 1)  # [G, C, K, C, K]
    square = gram.reshape(groups, width * len(offsets), width * len(offsets))
    return square, cross.permute(1, 2, 0, 3).flatten(1, 2)


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


def _without_borders(gram: Tensor, maps: Tensor, pairs: list[tuple[Offset, Offset]], geometry: Geometry) -> Tensor:
    """Subtract from full correlations the positions that are outside of the window of each pair of kernel positions."""
    places = {pair: index for index, pair in enumerate(pairs)}
    boxes: dict[_Box, int] = {}
    targets: list[int] = []
    sources: list[int] = []
    signs: list[float] = []
    for a, b in pairs:
        for sign, box in _outside(a, b, maps.shape[3:], geometry) if a <= b else ():
            targets.append(places[a, b])
            sources.append(2 * boxes.setdefault(box, len(boxes)))
            signs.append(-sign)
            if a != b:
                targets.append(places[b, a])
                sources.append(sources[-1] + 1)
                signs.append(-sign)
    if not boxes:
        return gram
    sums: Tensor = _BoxSums.apply(maps, tuple(boxes), geometry)
    both = torch.stack((sums, sums.mT), 1).flatten(0, 1)  # [2 boxes, G, C, C]
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


class _BoxSums(torch.autograd.Function):
    """Correlations over boxes, [boxes, G, C, C]; each border is cut out of the map once, and filled by gradients once."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, boxes: tuple[_Box, ...], geometry: Geometry) -> Tensor:
        starts: dict[tuple[int, bool], int] = {}
        sides: list[Tensor] = []
        for box in boxes:
            key = (box.axis, box.ranges[box.axis][0] == 0)
            if key not in starts:
                size = maps.shape[3 + box.axis]
                width = min(2 * geometry.dilation[box.axis] * (geometry.kernel[box.axis] - 1), size)
                starts[key] = 0 if key[1] else size - width
                strip = maps.narrow(3 + box.axis, starts[key], width)
                sides.append(strip.movedim(0, 1).movedim(2, -1).contiguous())  # [G, M, *n, C]
        ctx.save_for_backward(*sides)
        ctx.boxes, ctx.starts, ctx.shape = boxes, starts, maps.shape
        return torch.stack(
            [left.flatten(1, -2).mT @ right.flatten(1, -2) for left, right in _factors(boxes, starts, sides)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sides, grad = ctx.saved_tensors, grads[0].contiguous()
        turned = grad.mT.contiguous()  # a transposed operand on the right can be slow
        filled = [torch.zeros_like(side) for side in sides]
        pairs = zip(_factors(ctx.boxes, ctx.starts, sides), _factors(ctx.boxes, ctx.starts, filled), strict=True)
        for index, ((left, right), (by_left, by_right)) in enumerate(pairs):
            by_left += (right.flatten(1, -2) @ turned[index]).view(left.shape)
            by_right += (left.flatten(1, -2) @ grad[index]).view(right.shape)
        by_maps = grad.new_zeros(ctx.shape)
        for ((axis, _), start), side in zip(ctx.starts.items(), filled, strict=True):
            strip = by_maps.narrow(3 + axis, start, side.shape[2 + axis])
            strip += side.movedim(-1, 2).movedim(1, 0)
        return by_maps, None, None


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
