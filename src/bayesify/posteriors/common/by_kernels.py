"""Draws of a whole posterior by a few kernels, where its parameters are what they read."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesify.maths.fused_draws import DrawPlan, fused_draws
from bayesify.maths.noise import NoiseSource, SeededNoise
from bayesify.maths.value_checks import transforming
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.weights.placed import PlacedWeights


def kernels_suit(request: DrawRequest, like: Tensor) -> bool:
    """Whether kernels can make what is asked for: their own noise, and a KL to a prior with fixed scales around 0."""
    return (
        type(request.noise) is NoiseSource
        and request.noise.by_kernel(like)
        and request.prior.fixed
        and not transforming()
    )


def draw_by_kernels(
    posterior: Posterior,
    request: DrawRequest,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    make: Callable[[list[float]], DrawPlan | None],
) -> tuple[MutableMapping[str, Tensor], Tensor] | None:
    """The numbers that `posterior.draw` has for the same seed, or `None` where there is no plan.

    Args:
        posterior: Whose draws.
        request: What is asked for.
        names: Names of the weights, in the plan's order.
        parameters: In the order of the plan's gradients.
        make: The plan for prior standard deviations of the names; made once for each place of the parameters and kind of request.
    """
    addresses = tuple(map(Tensor.data_ptr, parameters))
    key = (addresses, tuple(request.prior.std.values()), request.num_draws, request.antithetic, id(request.layout))
    plan = posterior.results.recent(key, lambda: make([float(request.prior.std[name]) for name in names]))
    if plan is None:
        return None
    seed = request.noise.seed(parameters[0].device)
    if not torch.is_grad_enabled():
        places, kl = plan.draw(seed)
        return PlacedWeights(names, places), kl
    # What the backward pass keeps must not hold the draws, which the request does: a cycle would outlive its step.
    alone = replace(request, weights=None, networks={}, runner=None)

    def reference(seed: Tensor) -> tuple[list[Tensor], Tensor]:
        drawn, kl = posterior.draw(replace(alone, noise=SeededNoise(seed)))
        return [drawn[name] for name in names], kl

    draws, kl = fused_draws(plan, reference, seed, parameters)
    return dict(zip(names, draws, strict=True)), kl
