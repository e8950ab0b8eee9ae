"""Standard normal noise for a draw of all layers: first the noise of U's size, then the noise of W's size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from bayesify.maths.fused_matheron import positions_outside
from bayesify.maths.matheron import Factors, noise_shapes
from bayesify.maths.noise import SeededNoise
from bayesify.posteriors.common.base import DrawRequest
from bayesify.posteriors.inducing_weights.matrix import InducingMatrix
from bayesify.weights.catalog import Layer
from bayesify.weights.layout import NetworkLayout, strides_of

Shape = tuple[int, ...]


class NoiseShapes:
    """Shapes of the noise of a draw, each [G, S, ...], in the order in which the noise is drawn.

    If kernels generate the noise, $E_3$ and E of a group are adjacent, and each is padded to a multiple of four
    columns. The columns of E then follow the order of the weights in memory. A drawing kernel can therefore generate
    each number itself when it needs this number.

    `factors` are empty if W equals its mean given U. $E_3$ has room for `cols` columns, the largest number in any U.

    Attributes:
        own: Shape of the noise for U of each family.
        second: Shape of $E_2$ of each block.
        large: Shape of $[E_3 E]$ of each group, or the shapes of E and of $E_3$, in this order.
        thin: Number of columns of $E_3$ if $E_3$ comes before E, otherwise 0.
    """

    def __init__(
        self,
        families: Sequence[InducingMatrix],
        factors: Sequence[Factors],
        cols: int,
        request: DrawRequest,
        like: Tensor,
    ) -> None:
        draws = request.num_draws
        self.own: list[Shape] = [(family.count, draws, *family.noise_shape()) for family in families]
        blocks = [noise_shapes(factor, draws) for factor in factors]
        self.second, self.large = [block[0] for block in blocks], [shape for block in blocks for shape in block[1:]]
        self.pairs = [list(zip(block[1::2], block[2::2], strict=True)) for block in blocks]
        self.thin = 0
        if request.noise.by_kernel(like):
            self.thin = -(-cols // 4) * 4
            self.large = [(*wide[:-1], self.thin + -(-wide[-1] // 4) * 4) for wide in self.large[::2]]

    def starts(self, request: DrawRequest) -> list[int]:
        """Start of each group's noise in the stream of random numbers."""
        shapes = [*self.own, *self.second, *self.large]
        room = request.room([math.prod(shape) // request.num_draws for shape in shapes])
        return list(accumulate(room, initial=0))[len(self.own) + len(self.second) : -1]

    def draw(
        self, request: DrawRequest, like: Tensor, blocks: Sequence[Sequence[Sequence[Layer]]], seed: Tensor | None
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The noise for U of each family, and the noise of each block, with the shapes of this object.

        If a `seed`, [1], is given, the result omits the noise of W's size, because a kernel generates it.
        """
        source = request if seed is None else replace(request, noise=SeededNoise(seed))
        shapes = [*self.own, *self.second, *(self.large if seed is None else [])]
        flat = source.normals([math.prod(shape) // request.num_draws for shape in shapes], like)
        made = iter(
            [_gathered(part, shape[0], shape[2:], request.antithetic) for part, shape in zip(flat, shapes, strict=True)]
        )
        own = [next(made) for _ in self.own]
        found = [[next(made)] for _ in self.second]
        for at, (block, pairs) in enumerate(zip(found, self.pairs if seed is None else [], strict=False)):
            for number, (wide, thin) in enumerate(pairs):
                first = next(made)
                if self.thin:
                    second, first = first.tensor_split([self.thin], -1)
                    first, second = first[..., : wide[-1]], second[..., : thin[-1]]
                    if at < len(blocks):  # the shared matrix belongs to no layer
                        first = _in_matrix_order(first, blocks[at][number], request.layout)
                else:
                    second = next(made)
                block += [first, second]
        return own, found or [[] for _ in blocks]


def _gathered(flat: Tensor, count: int, size: tuple[int, ...], antithetic: bool) -> Tensor:
    """Noise [S, count * numel], reshaped to [count, S, *size]. Noise vectors of opposite sign still belong to two paired draws."""
    if antithetic:
        return flat.view(flat.shape[0], count, *size).transpose(0, 1).contiguous()
    return flat.view(count, flat.shape[0], *size)


def _in_matrix_order(noise: Tensor, group: Sequence[Layer], layout: NetworkLayout | None) -> Tensor:
    """Noise of a group, [G, ..., d_in]. Its columns are moved from the order in memory to the order of `Layer.to_matrix`."""
    weights = [layer.weights[0] for layer in group]
    positions = [positions_outside(*strides_of(layout, weight.name, weight.shape)) for weight in weights]
    if max(positions) == 1:
        return noise
    found = []
    for part, count, weight in zip(noise, positions, weights, strict=True):
        inside, bias = part.tensor_split([weight.matrix_shape[1]], -1)
        found.append(torch.cat([inside.unflatten(-1, (count, -1)).mT.flatten(-2), bias], -1))
    return torch.stack(found)
