"""The Walsh-Hadamard transform as one Triton kernel that reads and writes each number once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayesify.transforms.sign_matrices import sign_matrix

SIDE = 64
"""Side of the square tile that matrix products transform; a group of four warps handles one tile."""
MAX_VECTOR_SIZE = 4 * SIDE**2
"""Longest vector in one program; for longer vectors, a matrix product applies the outer factor."""

_COMPILED: dict[Any, Any] = {}


@triton.jit
def _signs(left, right):
    """The sign for two indices below 256: 1 if the number of bits that are 1 in both is even, and -1 if it is odd."""
    both = left & right
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1 - 2 * (both & 1)


@triton.jit
def _sandwich(outer, x, inner, scale, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Compute scale * outer @ x @ inner. x is a sum of n bfloat16 terms, which hold 8 n bits; signs are exact in bfloat16."""
    head = x.to(tl.bfloat16)
    y = tl.dot(head, inner)
    for _ in tl.static_range(FIRST - 1):
        x = x - head.to(tl.float32)
        head = x.to(tl.bfloat16)
        y = tl.dot(head, inner, y)
    head = y.to(tl.bfloat16)
    z = tl.dot(outer, head)
    for _ in tl.static_range(SECOND - 1):
        y = y - head.to(tl.float32)
        head = y.to(tl.bfloat16)
        z = tl.dot(outer, head, z)
    return z * scale


@triton.jit(do_not_specialize=["count"])
def _kernel(
    source, target, count, scale,
    OUTER: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Transform PARTS tiles of SIDE rows, by butterflies between tiles and products within a tile.

    A vector fills either PARTS tiles, or only OUTER of the SIDE rows of one tile. Therefore H = H_PARTS x H_OUTER x H_SIDE.
    `count` is the total number of rows, each with SIDE numbers.
    """
    index = tl.arange(0, SIDE)
    inner = _signs(index[:, None], index[None, :]).to(tl.bfloat16)
    outer = inner
    if OUTER < SIDE:
        same = (index[:, None] // OUTER) == (index[None, :] // OUTER)
        outer = tl.where(same, _signs(index[:, None] % OUTER, index[None, :] % OUTER), 0).to(tl.bfloat16)
    tile = SIDE * SIDE
    at = tl.program_id(0).to(tl.int64) * (PARTS * tile) + index[:, None] * SIDE + index[None, :]
    kind = target.dtype.element_ty
    if PARTS == 1:
        inside = tl.program_id(0) * SIDE + index[:, None] < count
        x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + at, _sandwich(outer, x, inner, scale, FIRST, SECOND).to(kind), mask=inside)
    if PARTS == 2:
        a = tl.load(source + at).to(tl.float32)
        b = tl.load(source + at + tile).to(tl.float32)
        tl.store(target + at, _sandwich(outer, a + b, inner, scale, FIRST, SECOND).to(kind))
        tl.store(target + at + tile, _sandwich(outer, a - b, inner, scale, FIRST, SECOND).to(kind))
    if PARTS == 4:
        a = tl.load(source + at).to(tl.float32)
        b = tl.load(source + at + tile).to(tl.float32)
        c = tl.load(source + at + 2 * tile).to(tl.float32)
        d = tl.load(source + at + 3 * tile).to(tl.float32)
        even, odd = a + c, b + d
        tl.store(target + at, _sandwich(outer, even + odd, inner, scale, FIRST, SECOND).to(kind))
        tl.store(target + at + tile, _sandwich(outer, even - odd, inner, scale, FIRST, SECOND).to(kind))
        even, odd = a - c, b - d
        tl.store(target + at + 2 * tile, _sandwich(outer, even + odd, inner, scale, FIRST, SECOND).to(kind))
        tl.store(target + at + 3 * tile, _sandwich(outer, even - odd, inner, scale, FIRST, SECOND).to(kind))


def terms(dtype: torch.dtype) -> tuple[int, int]:
    """Number of bfloat16 terms in the two products: three (24 bits) for float32, two with tf32, one or two for 16-bit types."""
    if dtype == torch.bfloat16:
        return 1, 2
    if dtype == torch.float16:
        return 2, 2
    return (2, 2) if torch.backends.cuda.matmul.allow_tf32 else (3, 3)


def fused_transform(x: Tensor, scale: float) -> Tensor:
    """`scale` times the Walsh-Hadamard transform, with entries 1 and -1, of vectors [..., D] on a CUDA device.

    D is a power of two of at least 128, and numbers have 16 or 32 bits. For float32, sums in tensor cores have a relative error of
    1e-6 with three bfloat16 terms per number, and of 4e-6 with two terms. With tf32 the error would be 8e-4.
    """
    size = x.shape[-1]
    if size > MAX_VECTOR_SIZE:
        count = size // MAX_VECTOR_SIZE
        parts = fused_transform(x.reshape(-1, MAX_VECTOR_SIZE), scale).view(-1, count, MAX_VECTOR_SIZE)
        return (sign_matrix(count, parts) @ parts).view(x.shape)
    source = x.contiguous()
    target = torch.empty_like(source)
    tiles, rows = max(1, size // SIDE**2), x.numel() // SIDE
    grid = (triton.cdiv(rows, SIDE * tiles), 1, 1)
    arguments = (source, target, rows, scale, min(size // SIDE, SIDE), SIDE, tiles, *terms(x.dtype))
    # The compiled kernel is stored under this key, because launching it by its handle is much cheaper than by its function.
    key = (x.device.index, x.dtype, arguments[4:], rows < 2**31, source.data_ptr() % 16)
    known = _COMPILED.get(key)
    with nullcontext() if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device):
        if known is None:
            _COMPILED[key] = _kernel[grid](*arguments, num_warps=4)
        else:
            known[grid](*arguments)
    return target
