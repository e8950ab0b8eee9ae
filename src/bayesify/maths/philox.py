"""Standard normal numbers on a GPU by a counter: any number of a stream is made where it is needed, and made again later."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 2048
"""Numbers that one program of a kernel makes."""

ROUNDS = 10
"""Of the generator: as torch, numpy and Random123 have it."""


def philox_normals(count: int, seed: Tensor) -> Tensor:
    r"""Standard normal numbers in plain torch: the definition of the stream, and the reference of the kernels.

    Numbers 4 j to 4 j + 3 of tile t come from Philox4x32 (Salmon et al. 2011) with the seed as key and the counter
    (j, t, 0, 0). Of its four words a, b, c, d they are
    $r(a) \cos(b), r(a) \sin(b), r(c) \cos(d), r(c) \sin(d)$ (Box & Muller 1958), where
    $r(a) = \sqrt{-2 \log (a + 1/2) 2^{-32}}$, and an angle is the word as a signed integer times $2 \pi / 2^{32}$.

    Args:
        count: How many.
        seed: An integer below $2^{63}$, [1], on the device where the numbers shall be.

    Returns:
        [count] in float32.
    """
    tiles = -(-count // TILE)
    within = torch.arange(TILE // 4, device=seed.device).expand(tiles, -1)
    tile = torch.arange(tiles, device=seed.device)[:, None].expand(-1, TILE // 4)
    a, b, c, d = philox(within, tile, seed)
    parts = [part for pair in (_box_muller(a, b), _box_muller(c, d)) for part in pair]
    return torch.stack(parts, -1).reshape(-1)[:count]  # [tiles, TILE / 4, 4]


def philox(low: Tensor, high: Tensor, seed: Tensor) -> list[Tensor]:
    """The four words of Philox4x32 for the counters (low, high, 0, 0), as integers below 2^32 in int64."""
    zero = torch.zeros_like(low)
    c0, c1, c2, c3 = low, high, zero, zero
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(ROUNDS):
        first, second = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = second[0] ^ c1 ^ k0, second[1], first[0] ^ c3 ^ k1, first[1]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a product, in halves that int64 holds."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & 0xFFFFFFFF


def _box_muller(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    r = (-2 * (radius.float() * 2.0**-32 + 2.0**-33).log()).sqrt()
    signed = torch.where(angle >= 2**31, angle - 2**32, angle)
    turn = signed.float() * (math.pi * 2.0**-31)
    return r * turn.cos(), r * turn.sin()
