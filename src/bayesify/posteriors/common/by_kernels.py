"""A few kernels that draw all weights of a posterior directly from its parameters."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesify.maths.fused_draws import DrawPlan, fused_draws
from bayesify.maths.noise import NoiseSource, SeededNoise
from bayesify.maths.value_checks import transforming
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.weights.layout import PlacedWeights


def kernels_suit(request: DrawRequest, like: Tensor) -> bool:
    """Whether kernels can make the requested draws. This requires that kernels generate the noise, and that the prior has fixed
    scales and mean 0."""
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
    """Draw weights with the kernels of a `DrawPlan`, or return `None` if `make` returns no plan. For the same seed, the draws
    equal those of `posterior.draw`.

    `names` are in the order of the plan, and `parameters` in the order of the plan's gradients. `make` makes a plan from the
    prior standard deviations of the weights `names`. `make` is called once for each set of parameter addresses and each kind of
    request.
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
    # The backward pass must not hold the draws of the request: such a reference cycle would outlive the step.
    alone = replace(request, weights=None, networks={}, runner=None)

    def reference(seed: Tensor) -> tuple[list[Tensor], Tensor]:
        drawn, kl = posterior.draw(replace(alone, noise=SeededNoise(seed)))
        return [drawn[name] for name in names], kl

    draws, kl = fused_draws(plan, reference, seed, parameters)
    return dict(zip(names, draws, strict=True)), kl
