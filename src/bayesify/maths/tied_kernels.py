"""Triton kernels of Gaussians with low-rank standard deviations. Standard deviations and noise are computed in registers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from bayesify.maths import philox as stream
from bayesify.maths.philox_kernels import noise_of_draw

TILE = tl.constexpr(stream.TILE)
COLUMNS = tl.constexpr(21)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also accurate for small values, because the rounding error of 1 + exp(x) is divided out."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0))))


@triton.jit
def _entries(owners, table, base, factors, RANK: tl.constexpr):
    """Facts about this program's tile: its row of the table and its number within the matrix. For each entry: the position,
    whether it exists, the row, the column, the mean and the std."""
    place = tl.program_id(0)
    row = table + tl.load(owners + 2 * place) * COLUMNS
    chunk = tl.load(owners + 2 * place + 1)
    at = chunk * TILE + tl.arange(0, TILE)
    exist = at < tl.load(row + 3).to(tl.int32)
    cols = tl.load(row + 4).to(tl.int32)
    i = at // cols
    j = at - i * cols
    mean = tl.load(base + tl.load(row) + at, mask=exist, other=0.0)
    left = factors + tl.load(row + 17) + i * RANK
    right = factors + tl.load(row + 18) + j * RANK
    std = tl.zeros([TILE], tl.float32)
    for k in tl.static_range(RANK):
        std += tl.load(left + k, mask=exist, other=1.0) * tl.load(right + k, mask=exist, other=1.0)
    return row, chunk, at, exist, i, j, mean, std


@triton.jit
def _outputs(row, i, j):
    """Whether entries belong to the bias (the last column), their positions among the draws, and the distance between draws."""
    width = tl.load(row + 7).to(tl.int32)
    positions = tl.load(row + 10).to(tl.int32)
    channel = j // positions
    weight = tl.load(row + 8) + i * tl.load(row + 9) + channel * tl.load(row + 11)
    weight += (j - channel * positions) * tl.load(row + 12)
    bias = j >= width
    where = tl.where(bias, tl.load(row + 13) + i, weight)
    return bias, where, tl.where(bias, tl.load(row + 15), tl.load(row + 14))


@triton.jit
def tied_draw_kernel(
    owners, table, precisions, base, factors, seed, out, parts, num_draws,
    PAIRS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draws of many matrices, one tile per program; see `tied_draws.TiedPlan` for the table."""
    row, chunk, _, exist, i, j, mean, std = _entries(owners, table, base, factors, RANK)
    bias, where, between = _outputs(row, i, j)
    tile = tl.load(row + 5).to(tl.int32) + chunk
    key = tl.load(seed)
    for draw in range(num_draws):
        noise = noise_of_draw(key, tile, tl.load(row + 6).to(tl.int32), draw, PAIRS, ROUNDS, FAST)
        tl.store(out + where + draw * between, (mean + std * noise).to(out.dtype.element_ty), mask=exist)
    scale = precisions + 2 * tl.load(owners + 2 * tl.program_id(0))
    half = 0.5 * tl.where(bias, tl.load(scale + 1), tl.load(scale))
    each = (mean * mean + std * std) * half - tl.log(std)
    tl.store(parts + tl.program_id(0), tl.sum(tl.where(exist, each, 0.0), 0))


@triton.jit
def tied_gradient_kernel(
    owners, table, precisions, base, factors, seed, grads, weight, to_mean, to_std, num_draws,
    PAIRS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients with respect to means and standard deviations, with noise generated again; d KL / d s = s / sigma^2 - 1 / s."""
    row, chunk, at, exist, i, j, mean, std = _entries(owners, table, base, factors, RANK)
    bias, where, between = _outputs(row, i, j)
    tile = tl.load(row + 5).to(tl.int32) + chunk
    key = tl.load(seed)
    total = tl.zeros([TILE], tl.float32)
    slope = tl.zeros([TILE], tl.float32)
    for draw in range(num_draws):
        noise = noise_of_draw(key, tile, tl.load(row + 6).to(tl.int32), draw, PAIRS, ROUNDS, FAST)
        grad = tl.load(grads + where + draw * between, mask=exist, other=0.0).to(tl.float32)
        total += grad
        slope += grad * noise
    scale = precisions + 2 * tl.load(owners + 2 * tl.program_id(0))
    pull = tl.load(weight)
    precision = tl.where(bias, tl.load(scale + 1), tl.load(scale))
    place = tl.load(row + 16) + at
    tl.store(to_mean + place, total + mean * pull * precision, mask=exist)
    tl.store(to_std + place, slope + pull * (std * precision - 1.0 / std), mask=exist)


@triton.jit
def positive_kernel(owners, table, base, to, BLOCK: tl.constexpr):
    """The factors of all matrices as positive numbers. Each program processes a block of row factors or of column
    factors of one matrix."""
    place = owners + 3 * tl.program_id(0)
    row = table + tl.load(place) * COLUMNS
    side = tl.load(place + 1)
    at = tl.load(place + 2) * BLOCK + tl.arange(0, BLOCK)
    exist = at < tl.load(row + 19 + side)
    raw = tl.load(base + tl.load(row + 1 + side) + at, mask=exist, other=0.0)
    tl.store(to + tl.load(row + 17 + side) + at, _softplus(raw), mask=exist)


@triton.jit
def _by_rows(
    row, base, factors, slopes, to, one, rows, cols, k, RANK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients with respect to factor k of the rows in `one`."""
    sums = tl.zeros([BLOCK, CHUNK], tl.float32)
    given = factors + tl.load(row + 18) + k
    for start in range(0, cols, CHUNK):
        other = start + tl.arange(0, CHUNK)
        factor = tl.load(given + other * RANK, mask=other < cols, other=0.0)
        both = (one < rows)[:, None] & (other < cols)[None, :]
        sums += tl.load(slopes + one[:, None] * cols + other[None, :], mask=both, other=0.0) * factor[None, :]
    raw = tl.load(base + tl.load(row + 1) + one * RANK + k, mask=one < rows, other=0.0)
    tl.store(to + tl.load(row + 17) + one * RANK + k, tl.sum(sums, 1) * tl.sigmoid(raw), mask=one < rows)


@triton.jit
def _by_cols(
    row, base, factors, slopes, to, one, rows, cols, k, RANK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients with respect to factor k of the columns in `one`."""
    sums = tl.zeros([CHUNK, BLOCK], tl.float32)
    given = factors + tl.load(row + 17) + k
    for start in range(0, rows, CHUNK):
        other = start + tl.arange(0, CHUNK)
        factor = tl.load(given + other * RANK, mask=other < rows, other=0.0)
        both = (other < rows)[:, None] & (one < cols)[None, :]
        sums += tl.load(slopes + other[:, None] * cols + one[None, :], mask=both, other=0.0) * factor[:, None]
    raw = tl.load(base + tl.load(row + 2) + one * RANK + k, mask=one < cols, other=0.0)
    tl.store(to + tl.load(row + 18) + one * RANK + k, tl.sum(sums, 0) * tl.sigmoid(raw), mask=one < cols)


@triton.jit
def factor_kernel(
    owners, table, base, factors, slopes, to, RANK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients with respect to the factors, computed from the gradients with respect to the standard deviations.

    Each program takes a block of rows or columns.
    """
    place = owners + 3 * tl.program_id(0)
    row = table + tl.load(place) * COLUMNS
    one = tl.load(place + 2) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.load(row + 4).to(tl.int32)
    rows = tl.load(row + 3).to(tl.int32) // cols
    given = slopes + tl.load(row + 16)
    if tl.load(place + 1) == 0:
        _by_rows(row, base, factors, given, to, one, rows, cols, tl.program_id(1), RANK, BLOCK, CHUNK)
    else:
        _by_cols(row, base, factors, given, to, one, rows, cols, tl.program_id(1), RANK, BLOCK, CHUNK)
