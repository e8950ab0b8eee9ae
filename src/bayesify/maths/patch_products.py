r"""Matrices of a regression on a convolution's patches. Kernels on a GPU compute the matrices as products of bfloat16 patches.

The features of a network that runs in bfloat16 are bfloat16 numbers. Products of two bfloat16 numbers are exact in float32,
and a GPU sums in float32 as fast as it multiplies. In $\sum_m \lambda_m A_m^\top [A_m\ V_m]$, where m runs over examples,
each product $A_m^\top [A_m\ V_m]$ is a sum over the positions of example m. This sum is computed in float32, and its rounding
is the only error. The precisions $\lambda$ multiply these sums. Only V is rounded to bfloat16. V takes the place of the
network's outputs, which are also rounded to bfloat16. No matter how V is rounded, the two matrices are those of some
regression, so the evidence lower bound remains valid. Unlike `convolution_moments`, this module extracts the patches; it
works on chunks of examples to limit the memory.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function
from bayesify.maths.convolution_moments import Geometry, convolution_moments
from bayesify.maths.fused_draws import has_kernel, on_device
from bayesify.transforms import next_power_of_two

MAX_PATCH_NUMBERS = 2**28
"""Maximum number of entries of extracted patches in memory at once."""


def patch_products(x: Tensor, targets: Tensor, geometry: Geometry, scale: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    r"""$A^\top \Lambda A$ [1, D, D] and $A^\top \Lambda V$ [1, D, c_out] of a convolution with one group of channels.

    The kernels support maps with two axes. For other maps, and on devices without kernels, `convolution_moments` computes the
    same two matrices in float32. The map is in bfloat16; the targets and `scale` (the square root of the diagonal of $\Lambda$)
    are in float32. If `bias` is true, the last column of A contains ones.
    """
    if len(geometry.kernel) != 2 or not has_kernel(targets):
        maps, rounded = (part.float() * scale.view(-1, *[1] * (x.ndim - 1)) for part in (x, targets.to(x.dtype)))
        return convolution_moments(maps, rounded, geometry, scale if bias else None)
    size = max(1, MAX_PATCH_NUMBERS // (math.prod(targets.shape[2:]) * x.shape[1] * math.prod(geometry.kernel)))
    parts = [
        _Products.apply(*part, geometry, bias)
        for part in zip(x.split(size), targets.split(size), scale.square().split(size), strict=True)
    ]
    found = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]  # [K C + bias, K C + bias + R]
    turned = _by_channel(found, x.shape[1], bias)
    gram, cross = turned.split((len(turned), targets.shape[1]), -1)
    return _by_channel(gram.mT, x.shape[1], bias).mT.unsqueeze(0), cross.unsqueeze(0)


def _by_channel(matrix: Tensor, channels: int, bias: bool) -> Tensor:
    """Reorder rows: the input is sorted by kernel position and then by channel, the result by channel and then by
    position. The row of the bias stays last."""
    own = matrix[:-1] if bias else matrix
    own = own.unflatten(0, (-1, channels)).transpose(0, 1).flatten(0, 1)
    return torch.cat((own, matrix[-1:])) if bias else own


class _Products(Function):
    r"""The matrix $\sum_m \lambda_m A_m^\top [A_m\ V_m]$, [D, D + R]. The columns of A are sorted by kernel position and then by
    channel; the column of ones is last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, precision: Tensor, geometry: Geometry, bias: bool) -> Tensor:
        outputs, width = targets.shape[1], x.shape[1] * math.prod(geometry.kernel) + bias
        rows = _rows(x, targets, geometry, bias)  # [M, o, A V 0]
        each = torch.bmm(rows[..., : _aligned(width)].mT, rows, out_dtype=torch.float32)
        each = each[:, :width, : width + outputs].contiguous()  # [M, D, D + R]
        ctx.save_for_backward(rows, each, precision)
        ctx.geometry, ctx.shapes = geometry, (x.shape, targets.shape)
        return torch.mv(each.flatten(1).T, precision).view(each.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, each, precision = ctx.saved_tensors
        (inputs, targets), geometry = ctx.shapes, ctx.geometry
        width, outputs, columns = each.shape[1], targets[1], inputs[1] * math.prod(geometry.kernel)
        gram, cross = grads[0].split((width, outputs), -1)
        by_precision = torch.mv(each.flatten(1), grads[0].flatten())
        full = grads[0].new_zeros(rows.shape[-1], _aligned(columns + outputs))
        full[:width, :columns] = (gram + gram.mT)[:, :columns]
        full[width : width + outputs, :columns] = cross.mT[:, :columns]
        full[:width, columns : columns + outputs] = cross
        found = (rows.flatten(0, 1) @ full.to(rows.dtype)).view(inputs[0], *targets[2:], -1)
        by_targets = _scaled(found, precision, columns, outputs).movedim(-1, 1)
        return _folded(found, precision, geometry, inputs), by_targets, by_precision, None, None


def _aligned(columns: int) -> int:
    """Number of columns rounded up so that rows are aligned for fast kernels."""
    return -(-columns // 8) * 8


def _rows(x: Tensor, targets: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    """Patches, ones and V, concatenated and padded to a multiple of eight columns, [M, o, ...]."""
    from bayesify.maths.patch_kernels import gather_kernel

    columns, outputs, sizes = x.shape[1] * math.prod(geometry.kernel), targets.shape[1], targets.shape[2:]
    rows = x.new_empty(x.shape[0], *sizes, _aligned(columns + bias + outputs))
    maps, values = x.movedim(1, -1).contiguous(), targets.movedim(1, -1).contiguous()
    count, wide = x.shape[0] * sizes.numel(), next_power_of_two(rows.shape[-1])
    block = max(1, 4096 // wide)
    with on_device(x.device):
        gather_kernel[(-(-count // block),)](
            maps, values, rows, count, *x.shape[2:], *sizes, x.shape[1], outputs, columns, rows.shape[-1],
            geometry.kernel[1], *_steps(geometry), bias, block, wide, num_warps=8,
        )  # fmt: skip
    return rows.flatten(1, -2)


def _scaled(found: Tensor, precision: Tensor, start: int, outputs: int) -> Tensor:
    from bayesify.maths.patch_kernels import scale_kernel

    out, wide = precision.new_empty(*found.shape[:-1], outputs), next_power_of_two(outputs)
    count, block = out[..., 0].numel(), max(1, 4096 // wide)
    with on_device(found.device):
        scale_kernel[(-(-count // block),)](
            found, precision, out, count, count // len(precision), start, outputs, found.shape[-1], block, wide, num_warps=4,
        )  # fmt: skip
    return out


def _folded(found: Tensor, precision: Tensor, geometry: Geometry, shape: torch.Size) -> Tensor:
    """Gradients with respect to patches [M, *o, (*k, C, ...)], summed at each position of the map and multiplied by the example's
    precision: [M, C, *n]."""
    from bayesify.maths.patch_kernels import fold_kernel

    sizes, channels = found.shape[1:-1], shape[1]
    out, wide = found.new_empty(shape[0], *shape[2:], channels), next_power_of_two(channels)
    count, block = shape[0] * shape[2:].numel(), max(1, 2048 // wide)
    with on_device(found.device):
        fold_kernel[(-(-count // block),)](
            found, precision, out, count, *shape[2:], *sizes, channels, found.shape[-1], *geometry.kernel,
            *_steps(geometry), block, wide, num_warps=4,
        )  # fmt: skip
    return out.movedim(-1, 1)


def _steps(geometry: Geometry) -> tuple[int, ...]:
    return (*geometry.stride, *geometry.dilation, *(pad[0] for pad in geometry.padding))
