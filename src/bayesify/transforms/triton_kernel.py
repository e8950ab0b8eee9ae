"""The Walsh-Hadamard transform as one Triton kernel, which reads and writes each number once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 2**14
"""Longest vector that one program holds; longer ones get their outer factor from a matrix product."""
ROWS = 128
"""Rows of the tile that a program transforms: as many as a tensor core product takes at once."""


@triton.jit
def _parity_signs(left, right):
    """1 or -1 by the parity of the bits that two indices below 256 share."""
    both = left & right
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1 - 2 * (both & 1)).to(tl.float32)


@triton.jit
def _times_signs(x, signs, TERMS: tl.constexpr):
    """x @ signs with x as a sum of bfloat16 terms: signs are exact in bfloat16, so two terms carry 16 bits, three 24."""
    head = x.to(tl.bfloat16)
    total = tl.dot(head, signs)
    for _ in tl.static_range(TERMS - 1):
        x = x - head.to(tl.float32)
        head = x.to(tl.bfloat16)
        total = tl.dot(head, signs, total)
    return total


@triton.jit
def _signs_times(signs, x, TERMS: tl.constexpr):
    """signs @ x in the same way."""
    head = x.to(tl.bfloat16)
    total = tl.dot(signs, head)
    for _ in tl.static_range(TERMS - 1):
        x = x - head.to(tl.float32)
        head = x.to(tl.bfloat16)
        total = tl.dot(signs, head, total)
    return total


@triton.jit
def _kernel(
    source,
    target,
    count,
    scale,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Transform a tile of TILE rows of INNER numbers, OUTER rows to a vector: (I x H_OUTER) X H_INNER."""
    row = tl.arange(0, TILE)
    col = tl.arange(0, INNER)
    start = tl.program_id(0).to(tl.int64) * TILE
    where = (start + row)[:, None] * INNER + col[None, :]
    inside = (start + row)[:, None] < count
    x = tl.load(source + where, mask=inside, other=0.0).to(tl.float32)
    y = _times_signs(x, _parity_signs(col[:, None], col[None, :]).to(tl.bfloat16), FIRST)
    within = (row[:, None] // OUTER) == (row[None, :] // OUTER)
    signs = tl.where(within, _parity_signs(row[:, None] % OUTER, row[None, :] % OUTER), 0.0).to(tl.bfloat16)
    y = _signs_times(signs, y, SECOND) * scale
    tl.store(target + where, y.to(target.dtype.element_ty), mask=inside)


def terms(dtype: torch.dtype) -> tuple[int, int]:
    """Bfloat16 terms in the two products: all 24 bits of float32, 16 where torch allows tf32, what 16-bit types need."""
    if dtype == torch.bfloat16:
        return 1, 2
    if dtype == torch.float16:
        return 2, 2
    return (2, 2) if torch.backends.cuda.matmul.allow_tf32 else (3, 3)


def fused_transform(x: Tensor, scale: float) -> Tensor:
    """`scale` times the transform with entries 1 and -1 of the last dimension, a power of two of at least 256.

    Args:
        x: [..., D] on a CUDA device, of 16-bit or 32-bit floats.
        scale: Factor on the result.
    """
    size = x.shape[-1]
    if size > LARGEST:
        from bayesify.transforms.walsh import hadamard_matrix

        outer = size // LARGEST
        parts = fused_transform(x.reshape(-1, LARGEST), scale).view(-1, outer, LARGEST)
        signs = hadamard_matrix(outer, parts)
        return (signs @ parts).view(x.shape)
    source = x.contiguous()
    target = torch.empty_like(source)
    inner = max(32, size // ROWS)
    outer = size // inner
    count = x.numel() // inner
    first, second = terms(x.dtype)
    with torch.cuda.device(x.device):
        _kernel[(triton.cdiv(count, ROWS),)](
            source, target, count, scale, outer, inner, ROWS, first, second, num_warps=8 if inner >= 128 else 4
        )
    return target
