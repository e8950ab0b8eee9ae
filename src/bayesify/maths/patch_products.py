r"""The matrices of regression on a convolution's patches by products of bfloat16 patches, for GPUs.

A network that runs in bfloat16 makes features of that type. Products of two such numbers are exact in float32, in which a GPU adds
them up as fast as it multiplies, so $\sum_m \lambda_m A_m^\top [A_m\ V_m]$ over examples m loses only what float32 sums of one
example's positions do: $\lambda$ multiplies what is summed, and V is split into two bfloat16 numbers, which hold 16 of its
24 digits. Patches are extracted, unlike in `convolution_moments`: at these speeds memory is what counts, and it is
bounded by chunks of examples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.convolution_geometry import Geometry

LARGEST = 2**28
"""Numbers of extracted patches that are held at once."""


def patch_products(
    x: Tensor, targets: Tensor, geometry: Geometry, precision: Tensor, bias: bool
) -> tuple[Tensor, Tensor]:
    r"""$A^\top \Lambda A$ and $A^\top \Lambda V$ of a convolution with one group of channels.

    Args:
        x: The map in bfloat16, [M, c_in, *n].
        targets: V in float32, [M, c_out, *o].
        geometry: Of the convolution.
        precision: The diagonal of $\Lambda$, one value for each example, float32, [M].
        bias: Whether the last column of A is 1.

    Returns:
        [1, D, D] and [1, D, c_out] in float32, with D = c_in times the kernel's positions, and one more for a bias.
    """
    size = max(1, LARGEST // (math.prod(targets.shape[2:]) * x.shape[1] * math.prod(geometry.kernel)))
    parts = [
        _Products.apply(*part, geometry, bias)
        for part in zip(x.split(size), targets.split(size), precision.split(size), strict=True)
    ]
    found = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]  # [K C + bias, K C + bias + R]
    order = _order(x.shape[1], math.prod(geometry.kernel), bias, x.device)
    gram, cross = found[order].split((len(order), targets.shape[1]), -1)
    return gram[:, order].unsqueeze(0), cross.unsqueeze(0)


def _order(channels: int, positions: int, bias: bool, device: torch.device) -> Tensor:
    """Where the columns (channel, position) stand among (position, channel)."""
    own = torch.arange(channels * positions, device=device).view(positions, channels).T.flatten()
    return torch.cat((own, own.new_tensor([channels * positions]))) if bias else own


def _windows(padded: Tensor, geometry: Geometry, outputs: tuple[int, ...]) -> Tensor:
    """What each kernel position sees of a map [M, *n, C] without padding, a view [M, *o, *k, C]."""
    steps = padded.stride()[1:-1]
    strides = [step * own for step, own in zip(steps, geometry.stride, strict=True)]
    strides += [step * own for step, own in zip(steps, geometry.dilation, strict=True)]
    sizes = (padded.shape[0], *outputs, *geometry.kernel, padded.shape[-1])
    return padded.as_strided(sizes, (padded.stride(0), *strides, padded.stride(-1)))


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Products of bfloat16 matrices added up in float32."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Products(torch.autograd.Function):
    r"""$\sum_m \lambda_m A_m^\top [A_m\ V_m]$, columns of A by kernel position, then channel, then the ones: [D, D + R]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, precision: Tensor, geometry: Geometry, bias: bool) -> Tensor:
        columns, outputs = x.shape[1] * math.prod(geometry.kernel), targets.shape[1]
        width = columns + bias
        rows = _rows(x, targets, geometry, bias)  # [M, o, A V V' 0]
        each = _multiply(rows[..., :width].mT, rows[..., : width + 2 * outputs])  # [M, D, D + 2 R]
        ctx.save_for_backward(rows, each, precision)
        ctx.geometry, ctx.bias, ctx.shapes, ctx.layout = geometry, bias, (x.shape, targets.shape), targets.stride()
        found = torch.mv(each.flatten(1).T, precision).view(each.shape[1:])
        gram, cross, rest = found.split((width, outputs, outputs), -1)
        return torch.cat((gram, cross + rest), -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, each, precision = ctx.saved_tensors
        (inputs, targets), geometry = ctx.shapes, ctx.geometry
        width, outputs = each.shape[1], targets[1]
        grad = grads[0]
        gram, cross = grad.split((width, outputs), -1)
        by_precision = torch.mv(each.flatten(1), torch.cat((gram, cross, cross), -1).flatten())
        columns = inputs[1] * math.prod(geometry.kernel)
        full = rows.new_zeros(rows.shape[-1], -(-(columns + outputs) // 8) * 8)
        full[:width, :columns] = (gram + gram.mT)[:, :columns]
        full[width : width + outputs, :columns] = cross.mT[:, :columns]
        full[width + outputs : width + 2 * outputs, :columns] = cross.mT[:, :columns]
        full[:width, columns : columns + outputs] = cross
        found = rows.flatten(0, 1) @ full
        sizes = geometry.outputs(inputs[2:])
        found = found.view(inputs[0], *sizes, -1)
        scale = precision.view(-1, *[1] * (len(sizes) + 1))
        by_targets = (found[..., columns : columns + outputs] * scale).movedim(-1, 1)
        padded = [size + sum(pad) for size, pad in zip(inputs[2:], geometry.padding, strict=True)]
        total = precision.new_zeros(inputs[0], *padded, inputs[1])
        seen = found[..., :columns].unflatten(-1, (*geometry.kernel, inputs[1]))
        view = _windows(total, geometry, sizes)
        for offset in geometry.offsets:
            index = (..., *offset, slice(None))
            view[index].add_(seen[index])
        for axis, (size, pad) in enumerate(zip(inputs[2:], geometry.padding, strict=True), start=1):
            total = total.narrow(axis, pad[0], size)
        return (total * scale).to(rows.dtype).movedim(-1, 1), by_targets, by_precision, None, None


def _rows(x: Tensor, targets: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    """Patches, ones, V and what bfloat16 loses of it beside each other, in a multiple of eight columns, [M, o, ...]."""
    columns, outputs = x.shape[1] * math.prod(geometry.kernel), targets.shape[1]
    width = columns + bias
    sizes = tuple(targets.shape[2:])
    rows = x.new_empty(x.shape[0], *sizes, -(-(width + 2 * outputs) // 8) * 8)
    padded, bare = geometry.padded(x)
    view = _windows(padded.movedim(1, -1).contiguous(), bare, sizes)
    rows[..., :columns].unflatten(-1, (*geometry.kernel, x.shape[1])).copy_(view)
    if bias:
        rows[..., columns] = 1
    values = targets.movedim(1, -1)
    rows[..., width : width + outputs] = values
    rows[..., width + outputs : width + 2 * outputs] = values - rows[..., width : width + outputs]
    rows[..., width + 2 * outputs :] = 0
    return rows.flatten(1, -2)
