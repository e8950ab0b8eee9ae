"""Correlations between feature maps at given lags, through their Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Lag = tuple[int, ...]
CHUNK = 2**24
"""Complex numbers of the spectrum of correlations that are held at once."""


def lag_correlations(
    x: Tensor, y: Tensor, own_lags: Sequence[Lag], cross_lags: Sequence[Lag], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    r"""$\sum_{m, q} x_{mgc}(q)\, x_{mge}(q + \delta)$ and $\sum_{m, q} x_{mgc}(q)\, y_{mgr}(q + \delta)$; maps are zero outside.

    A correlation at few lags is the sum over frequencies of a product over examples, so the work is that of two
    transforms and one product of C x M with M x (C + R) for each frequency, whatever the number of lags.

    Args:
        x: [M, G, C, *n].
        y: [M, G, R, *o].
        own_lags: $\delta$ of the first kind.
        cross_lags: $\delta$ of the second kind.
        sizes: Period in each axis, at least so large that no pair of positions meets at a lag it does not have.

    Returns:
        [own lags, G, C, C] and [cross lags, G, C, R].
    """
    found: tuple[Tensor, Tensor] = _Correlations.apply(x, y, tuple(own_lags), tuple(cross_lags), tuple(sizes))
    return found


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


class _Correlations(torch.autograd.Function):
    """The gradient is a sum of shifted maps, by the same transforms.

    Spectra are real matrices of examples x (real parts, imaginary parts), so that all products are real, and no operand but a
    left one is transposed: both matter more on some processors than the number of operations.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, own_lags: tuple[Lag, ...], cross_lags: tuple[Lag, ...], sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        left, right = _spectrum(x, sizes), _spectrum(y, sizes)  # [F, G, M, 2 C] and [F, G, M, 2 R]
        own, cross = (_waves(lags, sizes, x.dtype, x.device) for lags in (own_lags, cross_lags))  # [2, lags, F]
        scale = _weights(sizes, x.dtype, x.device) / math.prod(sizes)
        own_found: Any = 0.0
        cross_found: Any = 0.0
        for part in _chunks(left, right):
            turned = left[part].mT
            own_found = own_found + _real_sum(own[..., part] * scale[part], turned @ left[part])
            cross_found = cross_found + _real_sum(cross[..., part] * scale[part], turned @ right[part])
        ctx.save_for_backward(left, right, own, cross)
        ctx.sizes, ctx.shapes = sizes, (x.shape, y.shape)
        return own_found, cross_found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        left, right, own, cross = ctx.saved_tensors
        both = grads[0] + grads[0].mT  # an own lag stands for its opposite too
        odd = grads[0].mT - grads[0]
        by_left, by_right = torch.empty_like(left), torch.empty_like(right)
        for part in _chunks(left, right):
            mine = _block(own[0, :, part], own[1, :, part], both, odd)
            theirs = _block(cross[0, :, part], cross[1, :, part], grads[1].mT, grads[1].mT)
            torch.matmul(left[part], mine, out=by_left[part])
            by_left[part].flatten(0, 1).baddbmm_(right[part].flatten(0, 1), theirs.flatten(0, 1))
            back = _block(cross[0, :, part], -cross[1, :, part], grads[1], grads[1])
            torch.matmul(left[part], back, out=by_right[part])
        by_x, by_y = (
            _map(value, shape, ctx.sizes) for value, shape in zip((by_left, by_right), ctx.shapes, strict=True)
        )
        return by_x, by_y, None, None, None


def _spectrum(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """[M, G, C, *n] -> [F, G, M, 2 C], F the frequencies that a real transform keeps, real parts before imaginary ones."""
    found = torch.fft.rfftn(x, s=tuple(sizes), dim=tuple(range(3, x.ndim))).flatten(3)
    return torch.view_as_real(found).permute(3, 1, 0, 4, 2).flatten(3).contiguous()


def _map(spectrum: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
    """[F, G, M, 2 C] -> [M, G, C, *n]."""
    half = (*sizes[:-1], sizes[-1] // 2 + 1)
    parts = spectrum.unflatten(3, (2, -1)).permute(2, 1, 4, 0, 3).contiguous()
    full = torch.view_as_complex(parts).unflatten(3, half)
    values = torch.fft.irfftn(full, s=tuple(sizes), dim=tuple(range(3, full.ndim)))
    for axis, size in enumerate(shape[3:], start=3):
        values = values.narrow(axis, 0, size)
    return values


@lru_cache(maxsize=64)
def _waves(lags: tuple[Lag, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Real and imaginary part of $e^{2 \pi i f \cdot \delta}$ for the frequencies f that a real transform keeps, [2, lags, F]."""
    axes = [torch.arange(size, dtype=torch.float64) / size for size in sizes]
    axes[-1] = axes[-1][: sizes[-1] // 2 + 1]
    turns = torch.tensor(lags, dtype=torch.float64) @ torch.cartesian_prod(*axes).view(-1, len(sizes)).T
    angles = 2 * math.pi * (turns - turns.round())
    return torch.stack((angles.cos(), angles.sin())).to(device, dtype)


@lru_cache(maxsize=64)
def _weights(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """How many frequencies of a full transform each one of a real transform stands for, [F]."""
    last = torch.full((sizes[-1] // 2 + 1,), 2.0)
    last[0] = 1.0
    if sizes[-1] % 2 == 0:
        last[-1] = 1.0
    return last.expand(*sizes[:-1], -1).flatten().to(device, dtype)


def _chunks(left: Tensor, right: Tensor) -> list[slice]:
    count = max(1, CHUNK // max(1, left.shape[1] * left.shape[2] * (left.shape[2] + right.shape[2])))
    return [slice(start, start + count) for start in range(0, left.shape[0], count)]


def _real_sum(waves: Tensor, product: Tensor) -> Tensor:
    """Real part of the sum over frequencies of waves times conjugate left times right.

    Args:
        waves: [2, lags, F].
        product: Left transposed times right, [F, G, 2 C, 2 R].

    Returns:
        [lags, G, C, R].
    """
    blocks = product.unflatten(-1, (2, -1)).unflatten(-3, (2, -1))  # [F, G, 2, C, 2, R]
    real = (blocks[:, :, 0, :, 0] + blocks[:, :, 1, :, 1]).flatten(1)
    imaginary = (blocks[:, :, 1, :, 0] - blocks[:, :, 0, :, 1]).flatten(1)  # with the sign that the real part takes
    found = torch.addmm(waves[0] @ real, waves[1], imaginary)
    return found.unflatten(1, (product.shape[1], product.shape[2] // 2, product.shape[3] // 2))


def _block(cosines: Tensor, sines: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """The real form of sums over lags of waves times real matrices, to multiply rows of real and imaginary parts.

    Args:
        cosines: [lags, F].
        sines: [lags, F].
        even: What the cosines multiply, [lags, G, R, C].
        odd: What the sines multiply.

    Returns:
        [F, G, 2 R, 2 C].
    """
    real, imaginary = (
        (wave.T @ part.flatten(1)).unflatten(1, part.shape[1:]) for wave, part in ((cosines, even), (sines, odd))
    )
    return torch.cat((torch.cat((real, imaginary), -1), torch.cat((-imaginary, real), -1)), -2)
