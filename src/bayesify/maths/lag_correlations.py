r"""Correlations between feature maps at given lags, through their Fourier transforms.

Regression on the patches of a convolution needs $A^\top A$, where A has a row for each position and a column for each
channel and kernel position. Away from borders, the entry of kernel positions a and b is $\sum_q x_c(q + a)\, x_e(q + b)$. The
entry depends only on the lag $\delta = b - a$, and the 81 pairs of a 3 x 3 kernel have 25 lags (see `convolution_moments` for
borders).

Method: let $X(f)$ be the Fourier transform of x over a period P, where x is padded with zeros so that no lag wraps
around. Then

$$ \sum_q x_c(q)\, x_e(q + \delta) = \frac1P \sum_f \overline{X_c(f)}\, X_e(f)\, e^{2 \pi i f \delta / P}. $$

1. `_spectrum` computes the Fourier transforms of x and y, with the channels of x and y concatenated, and real and imaginary parts
on an axis of length 2. For real maps, half of the frequencies suffice.
2. For each frequency, `correlate` multiplies all pairs of channels in one matrix product, which sums over examples.
3. `_waves` contains cosine and sine of $2 \pi f \delta / P$ for the requested lags; one more product sums over f.
4. `correlate_gradient` reverses these steps: a sum over lags, one product per frequency, and `_maps` from spectra to maps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Lag = tuple[int, ...]
MAX_SPECTRUM_NUMBERS = 2**24
"""Maximum number of complex numbers of the correlations' spectrum that are in memory at once."""
MAX_MATRIX_PERIOD = 64
"""Up to this period, a transform is computed as a matrix product, which gives the required layout. For longer periods, it is a
fast Fourier transform."""


@dataclass(frozen=True)
class Spectra:
    """Values for the gradient of `correlate`.

    The axis of length 2 holds real and imaginary parts, and F is the number of frequencies of a real transform.
    """

    both: Tensor  # spectra of x and y, concatenated, [F, G, 2, M, C + R]
    own: Tensor  # waves of the lags between x and x, [2, lags, F]
    cross: Tensor  # waves of the lags between x and y
    sizes: tuple[int, ...]  # period in each axis
    channels: int  # C


def correlate(
    x: Tensor,  # [M, G, C, *n]
    y: Tensor,  # [M, G, R, *o]
    own_lags: Sequence[Lag],  # lags between x and x
    cross_lags: Sequence[Lag],  # lags between x and y
    sizes: Sequence[int],  # period in each axis, so large that no lag wraps around
) -> tuple[Tensor, Tensor, Spectra]:
    r"""The correlations $\sum_{m, q} x_{mgc}(q)\, x_{mge}(q + \delta)$ and $\sum_{m, q} x_{mgc}(q)\, y_{mgr}(q +
    \delta)$, where maps are 0 outside their borders.

    A correlation at a few lags is a sum over frequencies; each term is a matrix product that sums over examples. For any number
    of lags, the work is therefore two transforms and, for each frequency, one product of C x M with M x (C + R). The products are
    real, few and large, and only their left operands are transposed. On some processors these properties matter more than the
    number of operations.

    The results are the correlations of x with itself [own lags, G, C, C], the correlations of x with y [cross lags, G, C, R], and
    the values for `correlate_gradient`.
    """
    period, channels = tuple(sizes), x.shape[2]
    both = _spectrum(x, y, period)
    own, cross = (_waves(tuple(lags), period, x.dtype, x.device) for lags in (own_lags, cross_lags))
    counts = _weights(period, x.dtype, x.device) / math.prod(period)
    own_found: Any = 0.0
    cross_found: Any = 0.0
    for part in _chunks(both, channels):
        rows = both[part]
        left = rows[..., :channels]
        even = left.flatten(2, 3).mT @ rows.flatten(2, 3)  # real part of the products, [F, G, C, C + R]
        odd = left[:, :, 0].mT @ rows[:, :, 1]
        back = left[:, :, 1].mT @ rows[:, :, 0, :, channels:]
        cosines, sines = own[:, :, part] * counts[part]
        turned = _wave_sum(sines, odd[..., :channels])
        own_found = own_found + _wave_sum(cosines, even[..., :channels]) - turned + turned.mT
        cosines, sines = cross[:, :, part] * counts[part]
        cross_found = cross_found + _wave_sum(cosines, even[..., channels:])
        cross_found = cross_found + _wave_sum(sines, back - odd[..., channels:])
    return own_found, cross_found, Spectra(both, own, cross, period, channels)


def correlate_gradient(
    spectra: Spectra, own: Tensor, cross: Tensor, shapes: tuple[Sequence[int], Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to x and y: sums of shifted maps, computed by the same transforms.

    `own` and `cross` are gradients with respect to the results of `correlate`.
    """
    both, channels = spectra.both, spectra.channels
    grad = torch.empty_like(both)
    even, odd = own + own.mT, own.mT - own  # a lag also represents its opposite
    turned = cross.mT.contiguous()
    for part in _chunks(both, channels):
        cosines, sines = spectra.own[:, :, part]
        theirs, others = spectra.cross[:, :, part]
        real = torch.cat((_lag_sum(cosines, even), _lag_sum(theirs, turned)), -2)
        imaginary = torch.cat((_lag_sum(sines, odd), _lag_sum(others, turned)), -2)
        _rotate(both[part], real, imaginary, grad[part, ..., :channels])
        left = both[part, ..., :channels]
        _rotate(left, _lag_sum(theirs, cross), _lag_sum(-others, cross), grad[part, ..., channels:])
    return _maps(grad, channels, shapes, spectra.sizes)


def _rotate(spectrum: Tensor, real: Tensor, imaginary: Tensor, out: Tensor) -> None:
    """Product of rows of complex numbers with complex matrices [F, G, R, C], written to `out`, [F, G, 2, M, C]."""
    rows, found = spectrum.flatten(0, 1), out.flatten(0, 1)
    real, imaginary = real.flatten(0, 1), imaginary.flatten(0, 1)
    found.flatten(1, 2).baddbmm_(rows.flatten(1, 2), real, beta=0)
    found[:, 0].baddbmm_(rows[:, 1], imaginary, alpha=-1)
    found[:, 1].baddbmm_(rows[:, 0], imaginary)


def _wave_sum(waves: Tensor, product: Tensor) -> Tensor:
    """Sum over frequencies, [lags, F] and [F, ...] -> [lags, ...]."""
    return torch.unflatten(waves @ product.flatten(1), 1, product.shape[1:])


def _lag_sum(waves: Tensor, values: Tensor) -> Tensor:
    """Sum over lags, [lags, F] and [lags, ...] -> [F, ...]."""
    return torch.unflatten(waves.T @ values.flatten(1), 1, values.shape[1:])


def fast_size(least: int) -> int:
    """Smallest size of at least `least` whose prime factors are only 2, 3 and 5, so that its Fourier transform is fast."""
    size = max(1, least)
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


def _chunks(both: Tensor, channels: int) -> list[slice]:
    count = max(1, MAX_SPECTRUM_NUMBERS // max(1, both.shape[1] * both.shape[-1] * channels))
    return [slice(start, start + count) for start in range(0, both.shape[0], count)]


# -- transforms --------------------------------------------------------------------------------------------------------


def _spectrum(x: Tensor, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Fourier transforms [F, G, 2, M, C + R] of the maps x [M, G, C, *n] and y [M, G, R, *o].

    Along the first axis of the maps, only half of the frequencies are computed; along the other axes, all are.
    """
    examples, groups, channels = x.shape[:3]
    width = channels + y.shape[2]
    if max(sizes) > MAX_MATRIX_PERIOD:
        dims, period = (*range(4, x.ndim), 3), (*sizes[1:], sizes[0])
        found = torch.cat([torch.fft.rfftn(maps, s=period, dim=dims).flatten(3) for maps in (x, y)], 2)
        return torch.view_as_real(found).permute(3, 1, 4, 0, 2).contiguous()
    lengths = [max(n, o) for n, o in zip(x.shape[3:], y.shape[3:], strict=True)]
    make = x.new_empty if x.shape[3:] == y.shape[3:] else x.new_zeros
    values = make(*lengths, groups, examples, width)
    for maps, part in ((x, slice(channels)), (y, slice(channels, None))):
        corner = values[(*(slice(size) for size in maps.shape[3:]), ..., part)]
        corner.copy_(maps.permute(*range(3, maps.ndim), 1, 0, 2))
    matrix = _matrices(sizes[0], lengths[0], True, x.dtype, x.device)[0]
    values = matrix @ values.flatten(1)  # [(f, 2), n_2 ... C + R]
    for size, length in zip(sizes[1:], lengths[1:], strict=True):
        matrix = _matrices(size, length, False, x.dtype, x.device)[0]
        rest = values.view(values.shape[0] // 2, matrix.shape[1], -1)
        values = torch.bmm(matrix.expand(rest.shape[0], -1, -1), rest).flatten(0, 1)
    return values.view(-1, 2, groups, examples, width).transpose(1, 2).contiguous()


def _maps(
    spectrum: Tensor, channels: int, shapes: tuple[Sequence[int], Sequence[int]], sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Convert the spectrum of two maps to the maps, [F, G, 2, M, C + R] -> [M, G, C, *n] and [M, G, R, *o]."""
    lengths = [max(n, o) for n, o in zip(shapes[0][3:], shapes[1][3:], strict=True)]
    half = (sizes[0] // 2 + 1, *sizes[1:])
    if max(sizes) > MAX_MATRIX_PERIOD:
        parts = torch.view_as_complex(spectrum.permute(3, 1, 4, 0, 2).contiguous()).unflatten(3, half)
        found = torch.fft.irfftn(parts, s=(*sizes[1:], sizes[0]), dim=(*range(4, parts.ndim), 3))
    else:
        values = spectrum.transpose(1, 2).contiguous()
        for axis in range(len(sizes) - 1, 0, -1):
            matrix = _matrices(sizes[axis], lengths[axis], False, spectrum.dtype, spectrum.device)[1]
            rest = values.view(math.prod(half[:axis]), matrix.shape[1], -1)
            values = torch.bmm(matrix.expand(rest.shape[0], -1, -1), rest)
        matrix = _matrices(sizes[0], lengths[0], True, spectrum.dtype, spectrum.device)[1]
        values = matrix @ values.view(matrix.shape[1], -1)
        values = values.view(*lengths, shapes[0][1], shapes[0][0], spectrum.shape[-1])
        found = values.permute(-2, -3, -1, *range(len(sizes)))
    by_x, by_y = (
        part[(..., *(slice(size) for size in shape[3:]))].contiguous()
        for part, shape in zip(found.split((channels, found.shape[2] - channels), 2), shapes, strict=True)
    )
    return by_x, by_y


@lru_cache(maxsize=64)
def _matrices(size: int, length: int, real: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Real matrices of a Fourier transform of `length` positions with period `size`, and of its inverse.

    For real inputs: [2 f, n] and [n, 2 f] with half of the frequencies; rows are ordered by frequency, then by real or
    imaginary part. For complex inputs: [2 s, 2 n] and [2 n, 2 s]; columns are ordered by real or imaginary part, then
    by position.
    """
    count = size // 2 + 1 if real else size
    angles = 2 * math.pi * ((torch.arange(count)[:, None] * torch.arange(length)) % size).double() / size  # [f, n]
    cosines, sines = angles.cos(), angles.sin()
    if real:
        forward = torch.stack((cosines, -sines), 1).flatten(0, 1)
        back = forward.T * _half_weights(size).repeat_interleave(2) / size
    else:
        forward = torch.stack((torch.cat((cosines, sines), 1), torch.cat((-sines, cosines), 1)), 1).flatten(0, 1)
        back = forward.T / size
    return forward.contiguous().to(device, dtype), back.contiguous().to(device, dtype)


def _half_weights(size: int) -> Tensor:
    """Number of frequencies of a full transform that each frequency of a real transform represents."""
    weights = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    weights[0] = 1.0
    if size % 2 == 0:
        weights[-1] = 1.0
    return weights


@lru_cache(maxsize=64)
def _weights(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _half_weights(sizes[0]).repeat_interleave(math.prod(sizes[1:])).to(device, dtype)


@lru_cache(maxsize=64)
def _waves(lags: tuple[Lag, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Real and imaginary part of $e^{2 \pi i f \cdot \delta}$, [2, lags, F]."""
    axes = [torch.arange(size, dtype=torch.float64) / size for size in sizes]
    axes[0] = axes[0][: sizes[0] // 2 + 1]
    turns = torch.tensor(lags, dtype=torch.float64) @ torch.cartesian_prod(*axes).view(-1, len(sizes)).T
    angles = 2 * math.pi * (turns - turns.round())
    return torch.stack((angles.cos(), angles.sin())).to(device, dtype)
