"""Standard normal noise for a draw of all layers: first the noise that has the size of U, then the noise that has the size of W.
The module also contains draws that are made by kernels."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.fused_draws import ALIGNMENT_NUMBERS
from bayesify.maths.fused_matheron import (
    MAX_INDUCING_SIZE,
    MatheronDraw,
    MatheronPlan,
    Matrix,
    has_products,
    positions_outside,
)
from bayesify.maths.matheron import Factors, noise_shapes, start_and_size
from bayesify.maths.noise import SeededNoise
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.posteriors.common.gpu_draws import kernels_suit
from bayesify.posteriors.inducing_weights.augmentation import InducingMatrix
from bayesify.weights.catalog import Layer
from bayesify.weights.layout import NetworkLayout, PlacedWeights, strides_of

Shape = tuple[int, ...]


class NoiseShapes:
    """Shapes of the noise of a draw, each [G, S, ...], in the order in which the noise is drawn.

    If kernels generate the noise, each group's $E_3$ and E are adjacent, and each is padded to a multiple of four columns. The
    columns of E then follow the order of the weights in memory. A drawing kernel can therefore generate each number itself when
    it needs this number.

    `factors` is empty if W equals its mean given U. `cols` is the largest number of columns of any U, and $E_3$ has room for this
    number of columns. `own` contains the shapes for U, and `second` contains the shapes for $E_2$. `large` contains, for each
    group, the shape of $[E_3 E]$ if kernels generate the noise, and otherwise the shapes of E and of $E_3$. `thin` is the number
    of columns of $E_3$ if $E_3$ comes before E, otherwise 0.
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
        """Two lists of noise tensors: the noise of U for each family q(U), and the noise of W for each block.

        If `seed` is given, the noise that has the size of W is omitted, because a kernel generates it. The seed has shape [1].
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
    """Noise [S, count * numel], reshaped to [count, S, *size]. The two draws of an antithetic pair still have noise of opposite
    sign."""
    if antithetic:
        return flat.view(flat.shape[0], count, *size).transpose(0, 1).contiguous()
    return flat.view(count, flat.shape[0], *size)


def _in_matrix_order(noise: Tensor, group: Sequence[Layer], layout: NetworkLayout | None) -> Tensor:
    """Noise of a group, [G, ..., d_in]. The columns of the noise are moved from the order in memory to the order of
    `Layer.to_matrix`."""
    weights = [layer.weights[0] for layer in group]
    places = [(*strides_of(layout, weight.name, weight.shape), weight.balanced) for weight in weights]
    positions = [positions_outside(*place) for place in places]
    if max(positions) == 1:
        return noise
    found = []
    for part, count, weight in zip(noise, positions, weights, strict=True):
        inside, bias = part.tensor_split([weight.matrix_shape[1]], -1)
        found.append(torch.cat([inside.unflatten(-1, (count, -1)).mT.flatten(-2), bias], -1))
    return torch.stack(found)


# -- draws by kernels, which write each weight in the network's layout ------------------------------------------------


def kernels_draw(posterior: Posterior, request: DrawRequest, largest: int) -> bool:
    """Whether kernels can draw all layers. `largest` is the larger of U's number of rows and its number of columns.

    Each layer must have exactly one weight and at most one bias, each row of a weight's matrix must be contiguous in memory, all
    weights must have the same dtype, and U must be small.
    """
    like = next(posterior.parameters())
    return (
        kernels_suit(request, like)
        and has_products(like.device)
        and largest <= MAX_INDUCING_SIZE
        and all(_is_plain(layer, request.layout) for layer in posterior.layers)
        and not len(request.prior.factor)
        and len({request.dtype(weight.name) for weight in posterior.weights}) == 1
        and request.num_draws * sum(weight.numel + ALIGNMENT_NUMBERS for weight in posterior.weights) < 2**31
    )


def _is_plain(layer: Layer, layout: NetworkLayout | None) -> bool:
    """Whether a layer has one weight that is not transposed, at most one bias, and contiguous rows of the weight's matrix."""
    weight, *others = layer.weights
    contiguous = not weight.balanced or strides_of(layout, weight.name, weight.shape)[1][1] == 1
    return len(others) <= 1 and not weight.transposed and contiguous


def draw_by_kernels(
    posterior: Posterior,
    request: DrawRequest,
    blocks: Sequence[list[tuple[Layer, ...]]],
    given: Sequence[Any],
    shapes: NoiseShapes,
    seed: Tensor,
    low: bool,
) -> MutableMapping[str, Tensor]:
    """Drawn weights [S, *shape] by name; for the same seed, they equal the draws of `conditional_draw`.

    A block contains all layers whose U has the same size, grouped by the size of the layers. For each block, `given`
    contains the arguments of `conditional_draw`, but with only the noise $E_2$. If `low` is true, products with matrices as large
    as W use bfloat16.
    """
    groups = [group for block in blocks for group in block]
    names = [weight.name for group in groups for layer in group for weight in layer.weights]
    factors = [part for part, *_ in given]
    stack = factors[0].stack
    begun = [start_and_size(part, u, scale, sigma, noise[0]) for part, u, scale, sigma, noise in given]
    start, size = (torch.cat([part.flatten() for part in side]) for side in zip(*begun, strict=True))

    def make() -> MatheronPlan:
        filled = None if stack is None else (*stack.row_reach.shape[1:], stack.col_reach.shape[2])
        inducing = [(part.row_rest.shape[-1], part.col_rest.shape[-1]) for part in factors for _ in part.counts]
        matrices = _matrices(groups, inducing, request, shapes)
        kind = (request.num_draws, request.antithetic, request.dtype(names[0]), seed.device)
        return MatheronPlan(matrices, [len(group) for group in groups], filled, shapes.thin, *kind)

    layout = (id(request.layout), stack is None)
    key = (tuple(request.prior.std.values()), request.num_draws, request.antithetic, seed.device, *layout)
    plan = posterior.results.recent(key, make)
    sides = posterior.cached(("operands", *layout), lambda: plan.operands(factors))
    if not torch.is_grad_enabled():
        return PlacedWeights(names, plan.draw(low, seed, *sides, start, size)[0])
    return dict(zip(names, MatheronDraw.apply(plan, low, seed, *sides, start, size), strict=True))


def _matrices(
    groups: Sequence[Sequence[Layer]],
    inducing: Sequence[tuple[int, int]],
    request: DrawRequest,
    shapes: NoiseShapes,
) -> list[Matrix]:
    """For each layer, the positions of its weights and its noise in memory."""
    found = []
    for group, u, shape, start in zip(groups, inducing, shapes.large, shapes.starts(request), strict=True):
        numbers = shape[-2] * shape[-1]
        each, step = (1, len(group)) if request.antithetic else (request.num_draws, 1)
        for member, layer in enumerate(group):
            stds = [float(request.prior.std[weight.name]) for weight in layer.weights]
            outputs = [strides_of(request.layout, weight.name, weight.shape) for weight in layer.weights]
            lookup = layer.weights[0].kind == "lookup"
            noise = (start + member * each * numbers, step * numbers, shape[-1])
            kind = (stds[-1] / stds[0], (layer.rows, layer.cols, *u), noise, layer.weights[0].balanced)
            found.append(Matrix(outputs, lookup, *kind))
    return found
