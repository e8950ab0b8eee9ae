"""Triton kernels for draws by the extended Matheron rule, which generate noise of the weights' size in registers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from bayesify.maths import philox as stream
from bayesify.maths.philox_kernels import box_muller

QUADS = tl.constexpr(stream.TILE // 4)
COLUMNS = tl.constexpr(21)


@triton.jit
def _dot(a, b, total, LOW: tl.constexpr):
    """Add a matrix product to a sum. The product is computed in bfloat16, or as three tf32 products that together reach
    float32 precision."""
    if LOW:  # noqa: SIM108 (Triton has no conditional expressions)
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a, b, total, input_precision="tf32x3")
    return total


@triton.jit
def _read(row, column):
    """Entry of the plan's table; the entry must fit into 32 bits."""
    return tl.load(row + column).to(tl.int32)


@triton.jit
def _noise(key, quad, sign, COLS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """Noise [ROWS, COLS] whose rows begin at the given quads (groups of four numbers) of the stream; see
    `bayesify.maths.philox`."""
    at = quad[:, None] + tl.arange(0, COLS // 4)[None, :]
    tile = at // QUADS
    zero = at * 0
    a, b, c, d = tl.philox(key, at - tile * QUADS, tile, zero, zero, ROUNDS)
    n0, n1 = box_muller(a, b, FAST)
    n2, n3 = box_muller(c, d, FAST)
    return sign * tl.join(tl.join(n0, n2), tl.join(n1, n3)).reshape(quad.shape[0], COLS)


@triton.jit
def _noise_rows(row, at, draw, PAIRS: tl.constexpr):
    """For some rows of a matrix, the first quad (four numbers) of the row's noise in a draw, and the sign of the draw's
    noise."""
    if PAIRS:
        half = draw // 2
        sign = 1.0 - 2.0 * (draw % 2)
    else:
        half = draw
        sign = 1.0
    return _read(row, 9) + half * _read(row, 10) + at * _read(row, 11), sign


@triton.jit
def _matrix(flat, row, column, one, other, ones, others):
    """Entries of a matrix in rows `one` and columns `other`; 0 outside the matrix. Column `column` of the table contains the
    position of the matrix in memory, and the next column contains its row length."""
    place = flat + tl.load(row + column) + (one[:, None] * _read(row, column + 1) + other[None, :])
    return tl.load(place, mask=(one < ones)[:, None] & (other < others)[None, :], other=0.0)


@triton.jit
def _small(flat, row, draw, m_r, m_c, SIZE: tl.constexpr):
    """One draw of a matrix of U's size, [SIZE, SIZE]; 0 outside the matrix."""
    i = tl.arange(0, SIZE)
    place = flat + tl.load(row + 8) + (draw * m_r * m_c + i[:, None] * m_c + i[None, :])
    return tl.load(place, mask=(i < m_r)[:, None] & (i < m_c)[None, :], other=0.0)


@triton.jit
def _place(row, i, j, draw, LOOKUP: tl.constexpr):
    """Indices of some entries of W in the flat tensor of all draws: [rows, cols]."""
    first = _read(row, 13) + draw * _read(row, 16)
    step = _read(row, 14)
    if LOOKUP:  # noqa: SIM108 (Triton has no conditional expressions)
        place = first + j[None, :] * step + i[:, None]
    else:
        place = first + i[:, None] * step + j[None, :]
    return place


@triton.jit
def _store(out, row, i, j, draw, drawn, ratio, d_out, d_in, LOOKUPS: tl.constexpr):
    """Write entries of `[W b]`, with columns in memory order."""
    width = _read(row, 12)
    exist = (i < d_out)[:, None] & ((j >= 0) & (j < width))[None, :]
    low = drawn.to(out.dtype.element_ty)
    if LOOKUPS:
        if _read(row, 20) == 1:
            tl.store(out + _place(row, i, j, draw, True), low, mask=exist)
        else:
            tl.store(out + _place(row, i, j, draw, False), low, mask=exist)
    else:
        tl.store(out + _place(row, i, j, draw, False), low, mask=exist)
    if (tl.min(j, 0) <= width) & (tl.max(j, 0) >= width) & (width < d_in):
        bias = ratio * tl.sum(tl.where((j == width)[None, :], drawn, 0.0), 1)
        tl.store(out + (_read(row, 15) + draw * _read(row, 17)) + i, bias.to(out.dtype.element_ty), mask=i < d_out)


@triton.jit
def _grads(grads, row, i, j, draw, ratio, d_out, d_in, LOOKUPS: tl.constexpr):
    """Gradients with respect to entries of `[W b]`, with columns in memory order; 0 outside the matrix."""
    width = _read(row, 12)
    exist = (i < d_out)[:, None] & ((j >= 0) & (j < width))[None, :]
    if LOOKUPS:
        if _read(row, 20) == 1:
            grad = tl.load(grads + _place(row, i, j, draw, True), mask=exist, other=0.0).to(tl.float32)
        else:
            grad = tl.load(grads + _place(row, i, j, draw, False), mask=exist, other=0.0).to(tl.float32)
    else:
        grad = tl.load(grads + _place(row, i, j, draw, False), mask=exist, other=0.0).to(tl.float32)
    place = grads + (_read(row, 15) + draw * _read(row, 17)) + i
    here = (tl.min(j, 0) <= width) & (tl.max(j, 0) >= width) & (width < d_in)
    bias = ratio * tl.load(place, mask=i < tl.where(here, d_out, 0), other=0.0).to(tl.float32)
    return tl.where((j == width)[None, :], bias[:, None], grad)


@triton.jit
def reach_kernel(
    units, table, rows, cols, seed, parts, num_draws, thin,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, LOW: tl.constexpr,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Part of $A_r o$ that comes from a block of rows and some columns of $[E_3 E]$."""
    unit = units + 4 * tl.program_id(0)
    draw = tl.program_id(1)
    row = table + tl.load(unit) * COLUMNS
    i = tl.load(unit + 1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, SIZE)
    m_c = _read(row, 3)
    length = thin + _read(row, 1)
    key = tl.load(seed)
    quad, sign = _noise_rows(row, i, draw, PAIRS)
    outer = tl.zeros([BLOCK, SIZE], tl.float32)
    for begin in range(tl.load(unit + 2), tl.load(unit + 3), STEP):
        noise = _noise(key, quad + begin // 4, sign, STEP, ROUNDS, FAST)
        right = _matrix(cols, row, 6, m, begin + tl.arange(0, STEP), m_c, length)
        outer = _dot(noise, tl.trans(right), outer, LOW)
    left = _matrix(rows, row, 4, m, i, _read(row, 2), _read(row, 0))
    to = parts + (tl.program_id(0) * num_draws + draw).to(tl.int64) * (SIZE * SIZE)
    tl.store(to + (m[:, None] * SIZE + m[None, :]), _dot(left, outer, tl.zeros([SIZE, SIZE], tl.float32), False))


@triton.jit
def _summed(parts, row, draw, num_draws, at, SIZE: tl.constexpr):
    first = _read(row, 18)
    total = tl.zeros(at.shape, tl.float32)
    for part in range(first, first + _read(row, 19)):
        total += tl.load(parts + (part * num_draws + draw).to(tl.int64) * (SIZE * SIZE) + at)
    return total


@triton.jit
def inner_kernel(table, start, size, parts, inner, reached, num_draws, SIZE: tl.constexpr, PART: tl.constexpr):
    """Some rows of $A_r o$ and of $i = V - s A_r o$, for one matrix and one draw."""
    row = table + tl.program_id(0) * COLUMNS
    draw = tl.program_id(1)
    m_r = _read(row, 2)
    m_c = _read(row, 3)
    i = tl.program_id(2) * PART + tl.arange(0, PART)
    m = tl.arange(0, SIZE)
    total = _summed(parts, row, draw, num_draws, i[:, None] * SIZE + m[None, :], SIZE)
    place = tl.load(row + 8) + (draw * m_r * m_c + i[:, None] * m_c + m[None, :])
    mask = (i < m_r)[:, None] & (m < m_c)[None, :]
    begun = tl.load(start + place, mask=mask, other=0.0)
    tl.store(inner + place, begun - tl.load(size + tl.program_id(0)) * total, mask=mask)
    tl.store(reached + place, total, mask=mask)


@triton.jit
def matheron_kernel(
    units, table, rows, cols, size, ratios, inner, seed, out, thin,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, LOW: tl.constexpr,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """$W = s E + A_r^T i A_c$ for a block of rows and some columns, written in the network's layout."""
    unit = units + 4 * tl.program_id(0)
    draw = tl.program_id(1)
    owner = tl.load(unit)
    row = table + owner * COLUMNS
    d_out = _read(row, 0)
    d_in = _read(row, 1)
    m_c = _read(row, 3)
    length = thin + _read(row, 1)
    i = tl.load(unit + 1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, SIZE)
    key = tl.load(seed)
    quad, sign = _noise_rows(row, i, draw, PAIRS)
    sign *= tl.load(size + owner)
    ratio = tl.load(ratios + owner)
    left = tl.trans(_matrix(rows, row, 4, m, i, _read(row, 2), d_out))
    left = _dot(left, _small(inner, row, draw, _read(row, 2), m_c, SIZE), tl.zeros([BLOCK, SIZE], tl.float32), False)
    for begin in range(tl.load(unit + 2), tl.load(unit + 3), STEP):
        at = begin + tl.arange(0, STEP)
        noise = _noise(key, quad + begin // 4, sign, STEP, ROUNDS, FAST)
        drawn = _dot(left, _matrix(cols, row, 6, m, at, m_c, length), noise, LOW)
        _store(out, row, i, at - thin, draw, drawn, ratio, d_out, d_in, LOOKUPS)


@triton.jit
def through_kernel(
    units, table, rows, cols, ratios, seed, grads, parts, sides, sums, num_draws, thin,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, LOW: tl.constexpr,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    r"""Parts of $\bar l$, o, $A_r \bar l$ and $\langle \bar W, E \rangle$ from a block of rows and some columns."""
    unit = units + 4 * tl.program_id(0)
    draw = tl.program_id(1)
    owner = tl.load(unit)
    row = table + owner * COLUMNS
    d_out = _read(row, 0)
    d_in = _read(row, 1)
    m_c = _read(row, 3)
    length = thin + _read(row, 1)
    i = tl.load(unit + 1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, SIZE)
    key = tl.load(seed)
    quad, sign = _noise_rows(row, i, draw, PAIRS)
    ratio = tl.load(ratios + owner)
    through = tl.zeros([BLOCK, SIZE], tl.float32)
    outer = tl.zeros([BLOCK, SIZE], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for begin in range(tl.load(unit + 2), tl.load(unit + 3), STEP):
        at = begin + tl.arange(0, STEP)
        grad = _grads(grads, row, i, at - thin, draw, ratio, d_out, d_in, LOOKUPS)
        noise = _noise(key, quad + begin // 4, sign, STEP, ROUNDS, FAST)
        product += tl.sum(grad * noise, 1)
        right = tl.trans(_matrix(cols, row, 6, m, at, m_c, length))
        through = _dot(grad, right, through, LOW)
        outer = _dot(noise, right, outer, LOW)
    place = (tl.program_id(0) * num_draws + draw).to(tl.int64)
    side = sides + place * (2 * BLOCK * SIZE) + (tl.arange(0, BLOCK)[:, None] * SIZE + m[None, :])
    tl.store(side, through)
    tl.store(side + BLOCK * SIZE, outer)
    left = _matrix(rows, row, 4, m, i, _read(row, 2), d_out)
    to = parts + place * (SIZE * SIZE) + (m[:, None] * SIZE + m[None, :])
    tl.store(to, _dot(left, through, tl.zeros([SIZE, SIZE], tl.float32), False))
    tl.store(sums + place, tl.sum(product, 0))


@triton.jit
def settle_kernel(table, parts, sums, reached, to_start, to_size, num_draws, SIZE: tl.constexpr, PART: tl.constexpr):
    r"""Some rows of $\bar i$ for one matrix and one draw, and their part of $\bar s$."""
    owner = tl.program_id(0)
    row = table + owner * COLUMNS
    draw = tl.program_id(1)
    slice_of = tl.program_id(2)
    m_r = _read(row, 2)
    m_c = _read(row, 3)
    i = slice_of * PART + tl.arange(0, PART)
    m = tl.arange(0, SIZE)
    through = _summed(parts, row, draw, num_draws, i[:, None] * SIZE + m[None, :], SIZE)
    place = tl.load(row + 8) + (draw * m_r * m_c + i[:, None] * m_c + m[None, :])
    mask = (i < m_r)[:, None] & (m < m_c)[None, :]
    tl.store(to_start + place, through, mask=mask)
    by_size = -tl.sum(tl.sum(through * tl.load(reached + place, mask=mask, other=0.0), 1), 0)
    if slice_of == 0:
        first = _read(row, 18)
        for part in range(first, first + _read(row, 19)):
            by_size += tl.load(sums + part * num_draws + draw)
    tl.store(to_size + (owner * num_draws + draw) * (SIZE // PART) + slice_of, by_size)


@triton.jit
def row_kernel(blocks, table, size, inner, through, sides, to_rows, num_draws, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    r"""$\bar A_r = i \bar l^T - s \bar i o^T$ for a block of rows."""
    block = blocks + 4 * tl.program_id(0)
    owner = tl.load(block)
    row = table + owner * COLUMNS
    m_r = _read(row, 2)
    m_c = _read(row, 3)
    i = tl.load(block + 1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, SIZE)
    at = tl.arange(0, BLOCK)[:, None] * SIZE + m[None, :]
    scale = -tl.load(size + owner)
    total = tl.zeros([SIZE, BLOCK], tl.float32)
    first = tl.load(block + 2)
    for draw in range(num_draws):
        by_left = tl.zeros([BLOCK, SIZE], tl.float32)
        outer = tl.zeros([BLOCK, SIZE], tl.float32)
        for part in range(first, first + tl.load(block + 3)):
            side = sides + (part * num_draws + draw).to(tl.int64) * (2 * BLOCK * SIZE) + at
            by_left += tl.load(side)
            outer += tl.load(side + BLOCK * SIZE)
        total = _dot(_small(inner, row, draw, m_r, m_c, SIZE), tl.trans(by_left), total, False)
        total = _dot(scale * _small(through, row, draw, m_r, m_c, SIZE), tl.trans(outer), total, False)
    place = to_rows + tl.load(row + 4) + (m[:, None] * _read(row, 5) + i[None, :])
    tl.store(place, total, mask=(m < m_r)[:, None] & (i < _read(row, 0))[None, :])


@triton.jit
def column_kernel(
    blocks, table, rows, size, ratios, inner, through, seed, grads, to_cols, count, thin,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, LOW: tl.constexpr,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    r"""Gradient with respect to $[B_c A_c]$ for a block of columns of a draw: $i^T (A_r [0 \bar W]) - s \bar i^T (A_r [E_3 E])$."""
    block = blocks + 2 * tl.program_id(0)
    draw = tl.program_id(1)
    owner = tl.load(block)
    row = table + owner * COLUMNS
    d_out = _read(row, 0)
    d_in = _read(row, 1)
    m_r = _read(row, 2)
    m_c = _read(row, 3)
    length = thin + _read(row, 1)
    begin = tl.load(block + 1) * STEP
    at = begin + tl.arange(0, STEP)
    m = tl.arange(0, SIZE)
    key = tl.load(seed)
    ratio = tl.load(ratios + owner)
    scale = -tl.load(size + owner)
    by_grad = tl.zeros([SIZE, STEP], tl.float32)
    by_noise = tl.zeros([SIZE, STEP], tl.float32)
    for top in range(0, d_out, BLOCK):
        i = top + tl.arange(0, BLOCK)
        left = _matrix(rows, row, 4, m, i, m_r, d_out)
        grad = _grads(grads, row, i, at - thin, draw, ratio, d_out, d_in, LOOKUPS)
        by_grad = _dot(left, grad, by_grad, LOW)
        quad, sign = _noise_rows(row, i, draw, PAIRS)
        by_noise = _dot(left, _noise(key, quad + begin // 4, sign, STEP, ROUNDS, FAST), by_noise, LOW)
    total = tl.zeros([SIZE, STEP], tl.float32)
    total = _dot(tl.trans(_small(inner, row, draw, m_r, m_c, SIZE)), by_grad, total, False)
    total = _dot(scale * tl.trans(_small(through, row, draw, m_r, m_c, SIZE)), by_noise, total, False)
    place = to_cols + draw.to(tl.int64) * count + tl.load(row + 6) + (m[:, None] * _read(row, 7) + at[None, :])
    tl.store(place, total, mask=(m < m_c)[:, None] & (at < length)[None, :])
