"""Draws of all layers, made by kernels that write each weight in the network's layout."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.fused_draws import ALIGNMENT_NUMBERS
from bayesify.maths.fused_matheron import MAX_INDUCING_SIZE, MatheronDraw, MatheronPlan, Matrix, has_products
from bayesify.maths.matheron import start_and_size
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.posteriors.common.by_kernels import kernels_suit
from bayesify.posteriors.inducing_weights.noise import NoiseShapes
from bayesify.weights.catalog import Layer
from bayesify.weights.layout import strides_of
from bayesify.weights.placed import PlacedWeights


def kernels_draw(posterior: Posterior, request: DrawRequest, largest: int) -> bool:
    """Whether kernels can draw all layers. `largest` is the number of rows or of columns of U, whichever is larger.

    Each layer must have exactly one weight and at most one bias, all weights must have the same dtype, and U must be
    small.
    """
    like = next(posterior.parameters())
    return (
        kernels_suit(request, like)
        and has_products(like.device)
        and largest <= MAX_INDUCING_SIZE
        and all(len(layer.weights) <= 2 and not layer.weights[0].transposed for layer in posterior.layers)
        and not len(request.prior.factor)
        and len({request.dtype(weight.name) for weight in posterior.weights}) == 1
        and request.num_draws * sum(weight.numel + ALIGNMENT_NUMBERS for weight in posterior.weights) < 2**31
    )


def draw_by_kernels(
    posterior: Posterior,
    request: DrawRequest,
    blocks: Sequence[list[tuple[Layer, ...]]],
    given: Sequence[Any],
    shapes: NoiseShapes,
    seed: Tensor,
    low: bool,
) -> MutableMapping[str, Tensor]:
    """The same draws as `conditional_draws` for the same seed, as weights [S, *shape] by name.

    A block holds all layers with the same size of U, in groups of equal-sized layers. `given` is as in
    `conditional_draws`, with no noise except $E_2$. With `low`, products with matrices of W's size use bfloat16.
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
    """Positions in memory of the weights and the noise of each layer."""
    found = []
    for group, u, shape, start in zip(groups, inducing, shapes.large, shapes.starts(request), strict=True):
        numbers = shape[-2] * shape[-1]
        each, step = (1, len(group)) if request.antithetic else (request.num_draws, 1)
        for member, layer in enumerate(group):
            stds = [float(request.prior.std[weight.name]) for weight in layer.weights]
            outputs = [strides_of(request.layout, weight.name, weight.shape) for weight in layer.weights]
            lookup = layer.weights[0].kind == "lookup"
            noise = (start + member * each * numbers, step * numbers, shape[-1])
            found.append(Matrix(outputs, lookup, stds[-1] / stds[0], (layer.rows, layer.cols, *u), noise))
    return found
