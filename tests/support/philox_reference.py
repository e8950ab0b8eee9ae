"""The numbers of `bayesify.maths.fused_draws.kernel_normals` in plain torch: the reference of the kernels."""

import math

import torch
from torch import Tensor

from bayesify.maths.philox import ROUNDS, TILE


def philox_normals(count: int, seed: Tensor) -> Tensor:
    """The stream of a seed [1], on its device: [count] in float32."""
    tiles = -(-count // TILE)
    within = torch.arange(TILE // 4, device=seed.device).expand(tiles, -1)
    tile = torch.arange(tiles, device=seed.device)[:, None].expand(-1, TILE // 4)
    a, b, c, d = philox(within, tile, seed)
    parts = [part for pair in (box_muller(a, b), box_muller(c, d)) for part in pair]
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
    """Upper and lower 32 bits of a product, computed in halves that fit into int64."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & 0xFFFFFFFF


def box_muller(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    r = (-2 * (radius.float() * 2.0**-32 + 2.0**-33).log()).sqrt()
    signed = torch.where(angle >= 2**31, angle - 2**32, angle)
    turn = signed.float() * (math.pi * 2.0**-31)
    return r * turn.cos(), r * turn.sin()
