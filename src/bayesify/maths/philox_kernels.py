"""Triton kernels of draws: they read parameters once, generate noise in registers and write draws once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from bayesify.maths import philox as stream

TILE = tl.constexpr(stream.TILE)
UNIT = tl.constexpr(2.0**-32)
HALF = tl.constexpr(2.0**-33)
TURN = tl.constexpr(math.pi * 2.0**-31)
COLUMNS = tl.constexpr(8)


@triton.jit
def box_muller(radius, angle, FAST: tl.constexpr):
    """Two normal numbers from two words; see `bayesify.maths.philox`."""
    u = radius.to(tl.float32) * UNIT + HALF
    turn = angle.to(tl.int32, bitcast=True).to(tl.float32) * TURN
    r = tl.sqrt(-2.0 * tl.log(u))
    if FAST:  # accurate to 5e-7 between -pi and pi
        cosine = libdevice.fast_cosf(turn)
        sine = libdevice.fast_sinf(turn)
    else:
        cosine = tl.cos(turn)
        sine = tl.sin(turn)
    return r * cosine, r * sine


@triton.jit
def _normals(seed, tile, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """A tile of the stream, [TILE]; each thread holds the four adjacent numbers of one Philox call, as vector loads require."""
    within = tl.arange(0, TILE // 4)
    zero = within * 0
    a, b, c, d = tl.philox(seed, within, zero + tile, zero, zero, ROUNDS)
    n0, n1 = box_muller(a, b, FAST)
    n2, n3 = box_muller(c, d, FAST)
    return tl.join(tl.join(n0, n2), tl.join(n1, n3)).reshape(TILE)


@triton.jit
def noise_of_draw(seed, tile, stride, draw, PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """Noise of a draw. The tiles of two successive draws are `stride` tiles apart. If PAIRS is true, every second draw
    uses the negative noise of the draw before it."""
    if PAIRS:
        noise = (1.0 - 2.0 * (draw % 2)) * _normals(seed, tile + (draw // 2) * stride, ROUNDS, FAST)
    else:
        noise = _normals(seed, tile + draw * stride, ROUNDS, FAST)
    return noise


@triton.jit
def _load(pointer, at, size, MASKED: tl.constexpr):
    if MASKED:  # noqa: SIM108 (Triton has no conditional expressions)
        value = tl.load(pointer + at, mask=at < size, other=0.0)
    else:
        value = tl.load(pointer + at)
    return value.to(tl.float32)


@triton.jit
def _store(pointer, at, size, value, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=at < size)
    else:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty))


@triton.jit
def _draw_tile(
    mean, log_std, out, size, between, start, seed, tile, stride, num_draws, half_precision,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Make `num_draws` draws of one tile, which are `between` elements apart in memory; return the tile's part of the KL without
    constants."""
    at = start + tl.arange(0, TILE)
    m = _load(mean, at, size, MASKED)
    log_s = _load(log_std, at, size, MASKED)
    s = tl.exp(log_s)
    for draw in range(num_draws):
        noise = noise_of_draw(seed, tile, stride, draw, PAIRS, ROUNDS, FAST)
        _store(out + draw * between, at, size, m + s * noise, MASKED)
    each = (m * m + s * s) * half_precision - log_s
    if MASKED:
        each = tl.where(at < size, each, 0.0)
    return tl.sum(each, 0)


@triton.jit
def _gradient_tile(
    mean, log_std, grads, to_mean, to_log_std, size, between, start, seed, tile, stride, num_draws, precision, weight,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile: d KL / d log s = s^2 / sigma^2 - 1, and d w / d log s = s * noise."""
    at = start + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    slope = tl.zeros([TILE], tl.float32)
    for draw in range(num_draws):
        noise = noise_of_draw(seed, tile, stride, draw, PAIRS, ROUNDS, FAST)
        grad = _load(grads + draw * between, at, size, MASKED)
        total += grad
        slope += grad * noise
    pull = weight * precision
    s = tl.exp(_load(log_std, at, size, MASKED))
    _store(to_mean, at, size, total + _load(mean, at, size, MASKED) * pull, MASKED)
    _store(to_log_std, at, size, (slope + s * pull) * s - weight, MASKED)


@triton.jit
def _owner(owners, table):
    """Facts about this program's tile: its Gaussian, the Gaussian's row of the table, the Gaussian's size, the tile's first
    entry, the index of its noise in the first draw, and the number of noise tiles per draw."""
    place = tl.program_id(0)
    owner = tl.load(owners + 2 * place)
    chunk = tl.load(owners + 2 * place + 1)
    row = table + owner * COLUMNS
    size = tl.load(row + 2).to(tl.int32)
    tile = tl.load(row + 3).to(tl.int32) + chunk
    stride = tl.load(row + 4).to(tl.int32)
    return owner, row, size, chunk * TILE, tile, stride


@triton.jit
def _multiple(pointer, UNIT_OF: tl.constexpr):
    """A number from memory that is a multiple of UNIT_OF, in a form that lets the compiler use vector loads."""
    return (tl.load(pointer) // UNIT_OF) * UNIT_OF


@triton.jit
def draw_kernel(
    owners, table, precisions, base, seed, out, parts, num_draws,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draws of many diagonal Gaussians, one tile per program. `fused_draws.Plan` describes the argument `table`."""
    owner, row, size, start, tile, stride = _owner(owners, table)
    key = tl.load(seed)
    half = 0.5 * tl.load(precisions + owner)
    to = out + _multiple(row + 5, 8)
    if (start + TILE <= size) & (tl.load(row + 7) > 0):
        total = _draw_tile(
            base + _multiple(row, 4), base + _multiple(row + 1, 4), to, size, _multiple(row + 2, 8), start,
            key, tile, stride, num_draws, half, PAIRS, False, ROUNDS, FAST,
        )  # fmt: skip
    else:
        total = _draw_tile(
            base + tl.load(row), base + tl.load(row + 1), to, size, tl.load(row + 2), start,
            key, tile, stride, num_draws, half, PAIRS, True, ROUNDS, FAST,
        )  # fmt: skip
    tl.store(parts + tl.program_id(0), total)


@triton.jit
def gradient_kernel(
    owners, table, precisions, base, seed, grads, weight, to_mean, to_log_std, num_draws,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients with respect to means and log stds, from those with respect to the draws (`grads`) and the KL (`weight`). Noise
    is generated again."""
    owner, row, size, start, tile, stride = _owner(owners, table)
    key = tl.load(seed)
    pull = tl.load(weight)
    precision = tl.load(precisions + owner)
    given = grads + _multiple(row + 5, 8)
    place = _multiple(row + 6, 8)
    if (start + TILE <= size) & (tl.load(row + 7) > 0):
        _gradient_tile(
            base + _multiple(row, 4), base + _multiple(row + 1, 4), given, to_mean + place, to_log_std + place,
            size, _multiple(row + 2, 8), start, key, tile, stride, num_draws,
            precision, pull, PAIRS, False, ROUNDS, FAST,
        )  # fmt: skip
    else:
        _gradient_tile(
            base + tl.load(row), base + tl.load(row + 1), given, to_mean + place, to_log_std + place,
            size, tl.load(row + 2), start, key, tile, stride, num_draws,
            precision, pull, PAIRS, True, ROUNDS, FAST,
        )  # fmt: skip


@triton.jit
def normal_kernel(seed, out, count, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """First numbers of the stream, [count]."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + at, _normals(tl.load(seed), tile, ROUNDS, FAST), mask=at < count)
