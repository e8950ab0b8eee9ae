"""Correlations between feature maps at given lags, through their Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Lag = tuple[int, ...]
CHUNK = 2**24
"""Complex numbers of the spectrum of correlations that are held at once."""
LARGEST_MATRIX = 64
"""Period up to which a transform is a product with a matrix, in the layout that is needed, in place of a fast transform."""


@dataclass(frozen=True)
class Spectra:
    """What the gradient of `correlate` needs.

    Args:
        left: Spectrum of x, [F, G, 2, M, C]: real and imaginary parts of the F frequencies that a real transform keeps.
        right: Spectrum of y, [F, G, 2, M, R].
        own: Waves of the first kind of lags, [2, lags, F].
        cross: Waves of the second kind.
        sizes: Period in each axis.
    """

    left: Tensor
    right: Tensor
    own: Tensor
    cross: Tensor
    sizes: tuple[int, ...]

    def right_sums(self) -> Tensor:
        """Sums over the positions of y, [G, M, R]: its frequency 0."""
        return self.right[0, :, 0]


def correlate(
    x: Tensor, y: Tensor, own_lags: Sequence[Lag], cross_lags: Sequence[Lag], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Spectra]:
    r"""$\sum_{m, q} x_{mgc}(q)\, x_{mge}(q + \delta)$ and $\sum_{m, q} x_{mgc}(q)\, y_{mgr}(q + \delta)$; maps are zero outside.

    A correlation at few lags is the sum over frequencies of a product over examples, so the work is that of two
    transforms and one product of C x M with M x (C + R) for each frequency, whatever the number of lags. Products are real,
    and no operand but a left one is transposed: both matter more on some processors than the number of operations.

    Args:
        x: [M, G, C, *n].
        y: [M, G, R, *o].
        own_lags: $\delta$ of the first kind.
        cross_lags: $\delta$ of the second kind.
        sizes: Period in each axis, at least so large that no pair of positions meets at a lag it does not have.

    Returns:
        [own lags, G, C, C], [cross lags, G, C, R], and what `correlate_gradient` needs.
    """
    period = tuple(sizes)
    left, right = _spectrum(x, period), _spectrum(y, period)
    own, cross = (_waves(tuple(lags), period, x.dtype, x.device) for lags in (own_lags, cross_lags))
    scale = _weights(period, x.dtype, x.device) / math.prod(period)
    own_found: Any = 0.0
    cross_found: Any = 0.0
    for part in _chunks(left, right):
        mine, other, weights = left[part], right[part], scale[part]
        even = mine.flatten(2, 3).mT @ mine.flatten(2, 3)  # real part of the conjugate times itself, [F, G, C, C]
        odd = _wave_sum(own[1, :, part] * weights, mine[:, :, 0].mT @ mine[:, :, 1])
        own_found = own_found + _wave_sum(own[0, :, part] * weights, even) - odd + odd.mT
        even = mine.flatten(2, 3).mT @ other.flatten(2, 3)
        turned = mine[:, :, 1].mT @ other[:, :, 0] - mine[:, :, 0].mT @ other[:, :, 1]
        cross_found = cross_found + _wave_sum(cross[0, :, part] * weights, even)
        cross_found = cross_found + _wave_sum(cross[1, :, part] * weights, turned)
    return own_found, cross_found, Spectra(left, right, own, cross, period)


def correlate_gradient(
    spectra: Spectra,
    own: Tensor,
    cross: Tensor,
    shapes: tuple[Sequence[int], Sequence[int]],
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients by x and y: sums of shifted maps, by the same transforms.

    Args:
        spectra: From `correlate`.
        own: Gradient by its first result.
        cross: Gradient by its second result.
        shapes: Of x and y.
        sums: A gradient by the sum over positions of y, [G, M, R], where that was taken from its spectrum.
    """
    left, right = spectra.left, spectra.right
    by_left, by_right = torch.empty_like(left), torch.empty_like(right)
    even, odd = own + own.mT, own.mT - own  # a lag stands for its opposite too
    turned = cross.mT.contiguous()
    for part in _chunks(left, right):
        cosines, sines = spectra.own[:, :, part]
        _rotate(left[part], _lag_sum(cosines, even), _lag_sum(sines, odd), by_left[part], add=False)
        cosines, sines = spectra.cross[:, :, part]
        _rotate(right[part], _lag_sum(cosines, turned), _lag_sum(sines, turned), by_left[part], add=True)
        _rotate(left[part], _lag_sum(cosines, cross), _lag_sum(-sines, cross), by_right[part], add=False)
    if sums is not None:
        by_right[0, :, 0] += math.prod(spectra.sizes) * sums
    return _maps(by_left, shapes[0], spectra.sizes), _maps(by_right, shapes[1], spectra.sizes)


def _rotate(spectrum: Tensor, real: Tensor, imaginary: Tensor, out: Tensor, add: bool) -> None:
    """Rows of complex numbers times complex matrices [F, G, R, C], into `out`, [F, G, 2, M, C]."""
    rows, found = spectrum.flatten(0, 1), out.flatten(0, 1)
    real, imaginary = real.flatten(0, 1), imaginary.flatten(0, 1)
    found.flatten(1, 2).baddbmm_(rows.flatten(1, 2), real, beta=1 if add else 0)
    found[:, 0].baddbmm_(rows[:, 1], imaginary, alpha=-1)
    found[:, 1].baddbmm_(rows[:, 0], imaginary)


def _wave_sum(waves: Tensor, product: Tensor) -> Tensor:
    """Sum over frequencies, [lags, F] and [F, ...] -> [lags, ...]."""
    return (waves @ product.flatten(1)).unflatten(1, product.shape[1:])


def _lag_sum(waves: Tensor, values: Tensor) -> Tensor:
    """Sum over lags, [lags, F] and [lags, ...] -> [F, ...]."""
    return (waves.T @ values.flatten(1)).unflatten(1, values.shape[1:])


def fast_size(least: int) -> int:
    """The smallest size of at least `least` whose prime factors are 2, 3 and 5, which transforms are fast for."""
    size = max(1, least)
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


def _chunks(left: Tensor, right: Tensor) -> list[slice]:
    count = max(1, CHUNK // max(1, left.shape[1] * left.shape[-1] * (left.shape[-1] + right.shape[-1])))
    return [slice(start, start + count) for start in range(0, left.shape[0], count)]


# -- transforms --------------------------------------------------------------------------------------------------------


def _spectrum(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[M, G, C, *n] -> [F, G, 2, M, C]: the first axis of a map keeps half of its frequencies, the others all."""
    axes = x.ndim - 3
    if max(sizes) > LARGEST_MATRIX:
        found = torch.fft.rfftn(x, s=(*sizes[1:], sizes[0]), dim=(*range(4, x.ndim), 3)).flatten(3)
        return torch.view_as_real(found).permute(3, 1, 4, 0, 2).contiguous()
    values = x.permute(*range(3, x.ndim), 1, 0, 2).contiguous()  # [*n, G, M, C]
    matrix = _matrices(sizes[0], x.shape[3], True, x.dtype, x.device)[0]
    values = matrix @ values.flatten(1)  # [(f, 2), n_2 ... C]
    for axis in range(1, axes):
        matrix = _matrices(sizes[axis], x.shape[3 + axis], False, x.dtype, x.device)[0]
        rest = values.view(-1, matrix.shape[1], values.numel() // (values.shape[0] // 2 * matrix.shape[1]))
        values = torch.bmm(matrix.expand(rest.shape[0], -1, -1), rest).flatten(0, 1)
    found = values.view(-1, 2, x.shape[1], x.shape[0], x.shape[2])
    return found.transpose(1, 2).contiguous()


def _maps(spectrum: Tensor, shape: Sequence[int], sizes: tuple[int, ...]) -> Tensor:
    """[F, G, 2, M, C] -> [M, G, C, *n]."""
    if max(sizes) > LARGEST_MATRIX:
        half = (sizes[0] // 2 + 1, *sizes[1:])
        parts = torch.view_as_complex(spectrum.permute(3, 1, 4, 0, 2).contiguous()).unflatten(3, half)
        values = torch.fft.irfftn(parts, s=(*sizes[1:], sizes[0]), dim=(*range(4, parts.ndim), 3))
        for axis, size in enumerate(shape[3:], start=3):
            values = values.narrow(axis, 0, size)
        return values
    values = spectrum.transpose(1, 2).contiguous()
    for axis in range(len(sizes) - 1, 0, -1):
        matrix = _matrices(sizes[axis], shape[3 + axis], False, spectrum.dtype, spectrum.device)[1]
        before = (sizes[0] // 2 + 1) * math.prod(sizes[1:axis])
        values = torch.bmm(matrix.expand(before, -1, -1), values.view(before, matrix.shape[1], -1))
    matrix = _matrices(sizes[0], shape[3], True, spectrum.dtype, spectrum.device)[1]
    values = matrix @ values.view(matrix.shape[1], -1)
    values = values.view(*shape[3:], shape[1], shape[0], shape[2])
    return values.permute(-2, -3, -1, *range(len(sizes))).contiguous()


@lru_cache(maxsize=64)
def _matrices(size: int, length: int, real: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A Fourier transform of `length` positions with period `size`, and the way back, as real matrices.

    For real inputs: [2 f, n] and [n, 2 f] with half of the frequencies, rows by frequency, then part. For complex ones: [2 s, 2 n]
    and [2 n, 2 s], columns by part, then position.
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
    """How many frequencies of a full transform each one of a real transform stands for."""
    weights = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    weights[0] = 1.0
    if size % 2 == 0:
        weights[-1] = 1.0
    return weights


@lru_cache(maxsize=64)
def _weights(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same over all frequencies of a map, [F]."""
    return _half_weights(sizes[0]).repeat_interleave(math.prod(sizes[1:])).to(device, dtype)


@lru_cache(maxsize=64)
def _waves(lags: tuple[Lag, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Real and imaginary part of $e^{2 \pi i f \cdot \delta}$, [2, lags, F]."""
    axes = [torch.arange(size, dtype=torch.float64) / size for size in sizes]
    axes[0] = axes[0][: sizes[0] // 2 + 1]
    turns = torch.tensor(lags, dtype=torch.float64) @ torch.cartesian_prod(*axes).view(-1, len(sizes)).T
    angles = 2 * math.pi * (turns - turns.round())
    return torch.stack((angles.cos(), angles.sin())).to(device, dtype)
