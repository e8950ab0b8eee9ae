"""Triton kernels of draws: parameters are read once, noise is made in registers, draws are written once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from bayesify.maths import philox as stream

GROUP = tl.constexpr(stream.GROUP)
TILE = tl.constexpr(stream.TILE)
UNIT = tl.constexpr(2.0**-32)
HALF = tl.constexpr(2.0**-33)
TURN = tl.constexpr(math.pi * 2.0**-31)
COLUMNS = tl.constexpr(8)


@triton.jit
def _box_muller(radius, angle, FAST: tl.constexpr):
    """See `philox_normals`."""
    u = radius.to(tl.float32) * UNIT + HALF
    turn = angle.to(tl.int32, bitcast=True).to(tl.float32) * TURN
    r = tl.sqrt(-2.0 * tl.log(u))
    if FAST:  # within 5e-7 between -pi and pi
        cosine = libdevice.fast_cosf(turn)
        sine = libdevice.fast_sinf(turn)
    else:
        cosine = tl.cos(turn)
        sine = tl.sin(turn)
    return r * cosine, r * sine


@triton.jit
def _normals(seed, tile, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """The four quarters of a tile of the stream, [GROUP] each."""
    within = tl.arange(0, GROUP)
    zero = within * 0
    a, b, c, d = tl.philox(seed, within, zero + tile, zero, zero, ROUNDS)
    n0, n1 = _box_muller(a, b, FAST)
    n2, n3 = _box_muller(c, d, FAST)
    return n0, n1, n2, n3


@triton.jit
def _load(pointer, at, size, MASKED: tl.constexpr):
    if MASKED:  # noqa: SIM108 (Triton knows no such expression)
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
def _divergence(mean, log_std, std, at, size, half_precision, MASKED: tl.constexpr):
    """What each entry adds to the KL, but for constants."""
    each = (mean * mean + std * std) * half_precision - log_std
    if MASKED:
        each = tl.where(at < size, each, 0.0)
    return tl.sum(each, 0)


@triton.jit
def _draw_tile(
    mean, log_std, out, size, start, seed, tile, stride, num_draws, half_precision,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draw one tile of a weight `num_draws` times; its part of the KL."""
    a0 = start + tl.arange(0, GROUP)
    a1 = a0 + GROUP
    a2 = a1 + GROUP
    a3 = a2 + GROUP
    m0 = _load(mean, a0, size, MASKED)
    m1 = _load(mean, a1, size, MASKED)
    m2 = _load(mean, a2, size, MASKED)
    m3 = _load(mean, a3, size, MASKED)
    l0 = _load(log_std, a0, size, MASKED)
    l1 = _load(log_std, a1, size, MASKED)
    l2 = _load(log_std, a2, size, MASKED)
    l3 = _load(log_std, a3, size, MASKED)
    s0 = tl.exp(l0)
    s1 = tl.exp(l1)
    s2 = tl.exp(l2)
    s3 = tl.exp(l3)
    for draw in range(num_draws):
        sign = 1.0
        turn = draw
        if PAIRS:
            turn = draw // 2
            sign = 1.0 - 2.0 * (draw % 2)
        n0, n1, n2, n3 = _normals(seed, tile + turn * stride, ROUNDS, FAST)
        here = out + draw * size.to(tl.int64)
        _store(here, a0, size, m0 + s0 * (sign * n0), MASKED)
        _store(here, a1, size, m1 + s1 * (sign * n1), MASKED)
        _store(here, a2, size, m2 + s2 * (sign * n2), MASKED)
        _store(here, a3, size, m3 + s3 * (sign * n3), MASKED)
    total = _divergence(m0, l0, s0, a0, size, half_precision, MASKED)
    total += _divergence(m1, l1, s1, a1, size, half_precision, MASKED)
    total += _divergence(m2, l2, s2, a2, size, half_precision, MASKED)
    total += _divergence(m3, l3, s3, a3, size, half_precision, MASKED)
    return total


@triton.jit
def _slope(grad, noise, total, slope):
    return total + grad, slope + grad * noise


@triton.jit
def _give(to_mean, to_log_std, at, size, mean, log_std, total, slope, pull, weight, MASKED: tl.constexpr):
    """Gradients by mean and log std: d KL / d log s = s^2 / sigma^2 - 1, and d w / d log s = s * noise."""
    std = tl.exp(log_std)
    _store(to_mean, at, size, total + mean * pull, MASKED)
    _store(to_log_std, at, size, (slope + std * pull) * std - weight, MASKED)


@triton.jit
def _gradient_tile(
    mean, log_std, grads, to_mean, to_log_std, size, start, seed, tile, stride, num_draws, precision, weight,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    a0 = start + tl.arange(0, GROUP)
    a1 = a0 + GROUP
    a2 = a1 + GROUP
    a3 = a2 + GROUP
    t0 = tl.zeros([GROUP], tl.float32)
    t1 = t0
    t2 = t0
    t3 = t0
    g0 = t0
    g1 = t0
    g2 = t0
    g3 = t0
    for draw in range(num_draws):
        sign = 1.0
        turn = draw
        if PAIRS:
            turn = draw // 2
            sign = 1.0 - 2.0 * (draw % 2)
        n0, n1, n2, n3 = _normals(seed, tile + turn * stride, ROUNDS, FAST)
        here = grads + draw * size.to(tl.int64)
        t0, g0 = _slope(_load(here, a0, size, MASKED), sign * n0, t0, g0)
        t1, g1 = _slope(_load(here, a1, size, MASKED), sign * n1, t1, g1)
        t2, g2 = _slope(_load(here, a2, size, MASKED), sign * n2, t2, g2)
        t3, g3 = _slope(_load(here, a3, size, MASKED), sign * n3, t3, g3)
    pull = weight * precision
    m0 = _load(mean, a0, size, MASKED)
    m1 = _load(mean, a1, size, MASKED)
    m2 = _load(mean, a2, size, MASKED)
    m3 = _load(mean, a3, size, MASKED)
    l0 = _load(log_std, a0, size, MASKED)
    l1 = _load(log_std, a1, size, MASKED)
    l2 = _load(log_std, a2, size, MASKED)
    l3 = _load(log_std, a3, size, MASKED)
    _give(to_mean, to_log_std, a0, size, m0, l0, t0, g0, pull, weight, MASKED)
    _give(to_mean, to_log_std, a1, size, m1, l1, t1, g1, pull, weight, MASKED)
    _give(to_mean, to_log_std, a2, size, m2, l2, t2, g2, pull, weight, MASKED)
    _give(to_mean, to_log_std, a3, size, m3, l3, t3, g3, pull, weight, MASKED)


@triton.jit
def _owner(owners, table):
    """The tile of this program: row of the table, mean, log std, size, first entry, first tile of noise, tiles of a draw."""
    place = tl.program_id(0)
    row = table + tl.load(owners + 2 * place) * COLUMNS
    start = tl.load(owners + 2 * place + 1) * TILE
    mean = tl.load(row).to(tl.pointer_type(tl.float32))
    log_std = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(row + 2).to(tl.int32)
    first = tl.load(row + 3).to(tl.int32)
    stride = tl.load(row + 4).to(tl.int32)
    return row, mean, log_std, size, start, first, stride


@triton.jit
def draw_kernel(
    owners, table, precisions, seed, out, parts, num_draws,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draws of many diagonal Gaussians, one tile of one of them a program; see `fused_draws.Plan` for the table."""
    row, mean, log_std, size, start, first, stride = _owner(owners, table)
    key = tl.load(seed)
    half = 0.5 * tl.load(precisions + tl.load(owners + 2 * tl.program_id(0)))
    to = out + tl.multiple_of(tl.load(row + 5), 8)
    tile = first + start // TILE
    if (start + TILE <= size) & (tl.load(row + 7) > 0):
        mean = tl.multiple_of(mean, 16)
        log_std = tl.multiple_of(log_std, 16)
        whole = tl.multiple_of(size, 8)
        total = _draw_tile(
            mean, log_std, to, whole, start, key, tile, stride, num_draws, half, PAIRS, False, ROUNDS, FAST
        )
    else:
        total = _draw_tile(
            mean, log_std, to, size, start, key, tile, stride, num_draws, half, PAIRS, True, ROUNDS, FAST
        )
    tl.store(parts + tl.program_id(0), total)


@triton.jit
def gradient_kernel(
    owners, table, precisions, seed, grads, weight, to_mean, to_log_std, num_draws,
    PAIRS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of the draws and of the KL, whose own gradient is `weight`, by means and log stds; noise is made again."""
    row, mean, log_std, size, start, first, stride = _owner(owners, table)
    key = tl.load(seed)
    pull = tl.load(weight)
    precision = tl.load(precisions + tl.load(owners + 2 * tl.program_id(0)))
    given = grads + tl.multiple_of(tl.load(row + 5), 8)
    place = tl.multiple_of(tl.load(row + 6), 8)
    tile = first + start // TILE
    if (start + TILE <= size) & (tl.load(row + 7) > 0):
        mean = tl.multiple_of(mean, 16)
        log_std = tl.multiple_of(log_std, 16)
        whole = tl.multiple_of(size, 8)
        _gradient_tile(
            mean, log_std, given, to_mean + place, to_log_std + place, whole, start, key, tile, stride, num_draws,
            precision, pull, PAIRS, False, ROUNDS, FAST,
        )  # fmt: skip
    else:
        _gradient_tile(
            mean, log_std, given, to_mean + place, to_log_std + place, size, start, key, tile, stride, num_draws,
            precision, pull, PAIRS, True, ROUNDS, FAST,
        )  # fmt: skip


@triton.jit
def normal_kernel(seed, out, count, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """Numbers of the stream from its start, [count]."""
    tile = tl.program_id(0)
    n0, n1, n2, n3 = _normals(tl.load(seed), tile, ROUNDS, FAST)
    at = tile.to(tl.int64) * TILE + tl.arange(0, GROUP)
    tl.store(out + at, n0, mask=at < count)
    tl.store(out + at + GROUP, n1, mask=at + GROUP < count)
    tl.store(out + at + 2 * GROUP, n2, mask=at + 2 * GROUP < count)
    tl.store(out + at + 3 * GROUP, n3, mask=at + 3 * GROUP < count)
