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
    """The gradient is a sum of shifted maps, by the same transforms."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, own_lags: tuple[Lag, ...], cross_lags: tuple[Lag, ...], sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        left, right = _spectrum(x, sizes), _spectrum(y, sizes)  # [F, G, C, M] and [F, G, R, M]
        own, cross = (_waves(lags, sizes, x.dtype, x.device) for lags in (own_lags, cross_lags))  # [lags, F], complex
        scale = _weights(sizes, x.dtype, x.device) / math.prod(sizes)
        own_found: Any = 0.0
        cross_found: Any = 0.0
        for part in _chunks(left, right):
            conjugate = left[part].conj()
            own_found = own_found + _real_sum(own[:, part] * scale[part], conjugate @ left[part].mT)
            cross_found = cross_found + _real_sum(cross[:, part] * scale[part], conjugate @ right[part].mT)
        ctx.save_for_backward(left, right, own, cross)
        ctx.sizes, ctx.shapes = sizes, (x.shape, y.shape)
        return own_found, cross_found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        left, right, own, cross = ctx.saved_tensors
        parts = []
        for part in _chunks(left, right):
            mine, theirs = _wave_sum(own[:, part], grads[0]), _wave_sum(cross[:, part], grads[1])
            by_left = (mine + mine.mH) @ left[part]
            by_left += theirs @ right[part]
            parts.append((by_left, theirs.mH @ left[part]))
        by_left, by_right = parts[0] if len(parts) == 1 else (torch.cat(both) for both in zip(*parts, strict=True))
        by_x, by_y = (
            _map(value, shape, ctx.sizes) for value, shape in zip((by_left, by_right), ctx.shapes, strict=True)
        )
        return by_x, by_y, None, None, None


def _spectrum(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """[M, G, C, *n] -> [F, G, C, M], F the frequencies that a real transform keeps."""
    dims = tuple(range(3, x.ndim))
    return torch.fft.rfftn(x, s=tuple(sizes), dim=dims).flatten(3).permute(3, 1, 2, 0).contiguous()


def _map(spectrum: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
    """[F, G, C, M] -> [M, G, C, *n]."""
    half = (*sizes[:-1], sizes[-1] // 2 + 1)
    full = spectrum.permute(3, 1, 2, 0).unflatten(3, half)
    values = torch.fft.irfftn(full, s=tuple(sizes), dim=tuple(range(3, full.ndim)))
    for axis, size in enumerate(shape[3:], start=3):
        values = values.narrow(axis, 0, size)
    return values


@lru_cache(maxsize=64)
def _waves(lags: tuple[Lag, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""$e^{2 \pi i f \cdot \delta}$ for the frequencies f that a real transform keeps, [lags, F]."""
    axes = [torch.arange(size, dtype=torch.float64) / size for size in sizes]
    axes[-1] = axes[-1][: sizes[-1] // 2 + 1]
    turns = torch.tensor(lags, dtype=torch.float64) @ torch.cartesian_prod(*axes).view(-1, len(sizes)).T
    waves = torch.polar(torch.ones_like(turns), 2 * math.pi * (turns - turns.round()))
    return waves.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)


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
    """Real part of the sum over frequencies, [lags, F] and [F, ...] -> [lags, ...]."""
    return (waves @ product.flatten(1)).real.unflatten(1, product.shape[1:])


def _wave_sum(waves: Tensor, grad: Tensor) -> Tensor:
    """Sum over lags of waves times real numbers, [lags, F] and [lags, ...] -> [F, ...], complex."""
    flat = grad.flatten(1)
    return torch.complex(waves.real.T @ flat, waves.imag.T @ flat).unflatten(1, grad.shape[1:])
