r"""Matrices of Bayesian linear regression on patches, $A^\top \Lambda A$ and $A^\top \Lambda V$, without extracting the patches.

Rows of A are the patches that a convolution multiplies: row (m, t) and column (c, a) hold $x_{mc}(s t + d a - p)$, with
stride s, dilation d and padding p. Hence

$$ (A^\top A)_{(c, a), (e, b)} = \sum_{m, t} x_{mc}(s t + d a - p)\, x_{me}(s t + d b - p). $$

At stride 1 this is the correlation of maps at lag $d (b - a)$, over all positions except a few at the borders, which the
window of a and b excludes. The correlations come from Fourier transforms (`correlate`), and the border strips are
subtracted. With a larger stride, row a of the matrix is the weight gradient of the convolution at the strided view of
the map that a selects. In both cases, memory is that of a few maps, whatever the kernel's size (Ober & Aitchison 2021,
section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.convolution_geometry import Geometry, Offset
from bayesify.maths.convolution_lags import lag_moments
from bayesify.maths.signatures import Function


def convolution_moments(
    x: Tensor, targets: Tensor, geometry: Geometry, ones: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""$A^\top A$ and $A^\top V$ for each group.

    A diagonal $\Lambda$ with one value per example is passed by its root, as `scale` and `ones`. A full $\Lambda$ over examples
    is applied by its root to x, V and the ones.

    Args:
        x: The map, [M, c_in, *n].
        targets: V, [M, c_out, *o].
        geometry: Geometry of the convolution.
        ones: With a bias, the entry of each example in the last column of A, [M].
        scale: Factor on x and V of each example, [M].

    Returns:
        [G, D, D] and [G, D, c_out / G], with D = c_in / G times the kernel's positions, and one more for a bias.
    """
    if any(size > 1 for size in geometry.stride) or math.prod(geometry.kernel) == 1:
        if scale is not None:
            shape = (-1, *[1] * (x.ndim - 1))
            x, targets = x * scale.view(shape), targets * scale.view(shape)
        gram, cross = patch_gram(x, geometry), patch_cross(x, targets, geometry)
        if ones is None:
            return gram, cross
        totals = (ones @ targets.reshape(*targets.shape[:2], -1).sum(-1)).view(geometry.groups, -1)
        total, once = torch.tensordot(ones, x, 1).unsqueeze(0), x.new_ones(1, geometry.groups, *targets.shape[2:])
        sums = patch_cross(total, once, geometry).squeeze(-1)  # over all patches, weighted by `ones`
    else:
        gram, cross, sums, totals = lag_moments(x, targets, geometry, ones, scale)
        if ones is None:
            return gram, cross
    count = (ones.square().sum() * math.prod(targets.shape[2:])).expand(geometry.groups, 1, 1)
    gram = torch.cat((torch.cat((gram, sums.unsqueeze(-1)), -1), torch.cat((sums.unsqueeze(-2), count), -1)), -2)
    return gram, torch.cat((cross, totals.unsqueeze(-2)), -2)


def patch_gram(x: Tensor, geometry: Geometry) -> Tensor:
    r"""$A^\top A$ by strided views, for any stride: [M, c_in, *n] -> [G, D, D]."""
    found: Tensor = _Gram.apply(*geometry.padded(x))
    return found


def patch_cross(x: Tensor, targets: Tensor, geometry: Geometry) -> Tensor:
    r"""$A^\top V$: the weight gradient of the convolution at V, [G, D, c_out / G]."""
    padded, bare = geometry.padded(x)
    gradient: Tensor = _Cross.apply(padded, targets, bare)  # [c_out, c_in / G, *k]
    found: Tensor = gradient.flatten(1).unflatten(0, (geometry.groups, -1)).mT
    return found


# -- strided views ---------------------------------------------------------------------------------------------------


def _settings(geometry: Geometry, transposed: bool = False) -> tuple[Any, ...]:
    """Arguments of torch's convolutions after the bias."""
    zeros = [0] * len(geometry.kernel)
    return geometry.stride, zeros, geometry.dilation, transposed, zeros, geometry.groups


def _kernel_gradient(x: Tensor, outputs: Tensor, geometry: Geometry) -> Tensor:
    """Weight gradient of a convolution, [outputs' channels, c_in / G, *k]."""
    x = _used(x, geometry)
    like = x.new_empty(1).expand(outputs.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    backward = torch.ops.aten.convolution_backward
    found: Tensor = backward(outputs, x, like, None, *_settings(geometry), [False, True, False])[1]
    return found


def _used(x: Tensor, geometry: Geometry) -> Tensor:
    """The map without the positions at its end that the stride never reaches."""
    for axis, (size, k, s, d) in enumerate(
        zip(geometry.outputs(x.shape[2:]), geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2
    ):
        x = x.narrow(axis, 0, s * (size - 1) + d * (k - 1) + 1)
    return x


def _view(x: Tensor, offset: Offset, geometry: Geometry) -> Tensor:
    """Part of the map that one kernel position sees, [M, c_in, *o]."""
    sizes = geometry.outputs(x.shape[2:])
    index = [slice(None), slice(None)]
    for start, size, s, d in zip(offset, sizes, geometry.stride, geometry.dilation, strict=True):
        index.append(slice(d * start, d * start + s * (size - 1) + 1, s))
    return x[tuple(index)]


class _Cross(Function):
    """Weight gradient of a convolution; its own gradients are a transposed convolution and a convolution."""

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
            used = torch.convolution(targets, kernel, None, *_settings(geometry, transposed=True))
            rest = [size - own for size, own in zip(x.shape[2:], used.shape[2:], strict=True)]
            by_x = F.pad(used, [size for more in reversed(rest) for size in (0, more)])
        if ctx.needs_input_grad[1]:
            by_targets = torch.convolution(x, kernel, None, *_settings(geometry))
        return by_x, by_targets, None


class _Gram(Function):
    """Gram matrix, one kernel position at a time, by weight gradients at strided views; its gradient is a convolution each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x)
        ctx.geometry = geometry
        groups, positions = geometry.groups, math.prod(geometry.kernel)
        width = x.shape[1] // groups
        gram = x.new_empty(groups, width, positions, width * positions)
        for index, offset in enumerate(geometry.offsets):
            view = _view(x, offset, geometry)
            if positions == 1:
                rows = view.unflatten(1, (groups, width)).movedim(0, 2).flatten(2)  # [G, C, M o]
                found: Tensor = rows @ rows.mT
                return found
            gram[:, :, index] = _kernel_gradient(x, view, geometry).flatten(1).unflatten(0, (groups, width))
        return gram.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        geometry = ctx.geometry
        groups, positions = geometry.groups, math.prod(geometry.kernel)
        width = x.shape[1] // groups
        both = (grads[0] + grads[0].mT).view(groups, width, positions, width, *geometry.kernel)
        by_x = torch.zeros_like(x)
        for index, offset in enumerate(geometry.offsets):
            kernel = both[:, :, index].flatten(0, 1)
            seen = torch.convolution(x, kernel, None, *_settings(geometry))  # [M, c_in, *o]
            _view(by_x, offset, geometry).add_(seen)
        return by_x, None
