"""Triton kernels of `patch_products` for maps with two axes. One kernel gathers patches and another sums their
gradients, each in one pass over memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    x, targets, rows, count, height, width, out_height, out_width,
    channels: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, full: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows [A, 1, V, 0] from maps [M, H, W, C] and targets [M, H', W', R]; see `_rows`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)[None, :]
    place = row % (out_height * out_width)
    example = (row // (out_height * out_width))[:, None]
    position = column // channels
    y = (place // out_width)[:, None] * SY - PY + position // KW * DY
    z = (place % out_width)[:, None] * SX - PX + position % KW * DX
    there = (row < count)[:, None]
    inside = there & (column < columns) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
    at = ((example * height + y) * width + z) * channels + column % channels
    found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    start = columns + BIAS
    if BIAS:
        found = tl.where(column == columns, 1.0, found)
    is_target = (column >= start) & (column < start + outputs)
    at = row.to(tl.int64)[:, None] * outputs + column - start
    found = tl.where(is_target, tl.load(targets + at, mask=there & is_target, other=0.0), found)
    tl.store(rows + row.to(tl.int64)[:, None] * full + column, found.to(tl.bfloat16), mask=there & (column < full))


@triton.jit
def fold_kernel(
    grads, precision, out, count, height, width, out_height, out_width,
    channels: tl.constexpr, full: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For each position of a map [M, H, W, C], the sum over all patches that contain it, multiplied by the example's precision."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDE)[None, :]
    place = row % (height * width)
    example = row // (height * width)
    y = place // width + PY
    z = place % width + PX
    known = row < count
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for k in tl.static_range(KH * KW):
        up = y - (k // KW) * DY
        left = z - (k % KW) * DX
        fits = known & (up >= 0) & (left >= 0) & (up % SY == 0) & (left % SX == 0)
        up = up // SY
        left = left // SX
        fits = fits & (up < out_height) & (left < out_width)
        at = ((example * out_height + up) * out_width + left).to(tl.int64)[:, None] * full + k * channels + channel
        total += tl.load(grads + at, mask=fits[:, None] & (channel < channels), other=0.0).to(tl.float32)
    scale = tl.load(precision + example, mask=known, other=0.0)
    at = row.to(tl.int64)[:, None] * channels + channel
    tl.store(out + at, (total * scale[:, None]).to(tl.bfloat16), mask=known[:, None] & (channel < channels))


@triton.jit
def scale_kernel(
    found, precision, out, count, positions,
    start: tl.constexpr, outputs: tl.constexpr, full: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The columns of a matrix, beginning with column `start`, in float32, with each row multiplied by its example's precision."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)[None, :]
    mask = (row < count)[:, None] & (column < outputs)
    scale = tl.load(precision + row // positions, mask=row < count, other=0.0)[:, None]
    row = row.to(tl.int64)[:, None]
    tl.store(
        out + row * outputs + column,
        scale * tl.load(found + row * full + start + column, mask=mask, other=0.0),
        mask=mask,
    )
