"""A predictive distribution from one pass of means and variances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import bayesify.moments.attention
import bayesify.moments.linear
import bayesify.moments.pointwise
import bayesify.moments.shapes
from bayesify.likelihoods import Likelihood
from bayesify.moments.tensors import Moments, NoRule, Pass
from bayesify.posteriors.base import Posterior
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.running.caching import cached
from bayesify.running.memory import MEMORY_BUDGET, batch_size, check_lengths, count_activation_bytes, parse_bytes, split_rows
from bayesify.running.outputs import select_output
from bayesify.running.runner import Runner
from bayesify.weights.layout import NetworkLayout

Weights = dict[str, tuple[Tensor, Tensor | None]]

PASSES = 3.5
"""Products of the plain network that mean, variance and covariance together may take."""

LARGEST_COVARIANCE = 64
"""Outputs of an example above which they count as independent."""

LARGEST_SEQUENCE = 1000
"""Outputs up to which the points of that rule are a Sobol sequence."""

POINTS = 32
"""Of the rule by which nonlinear likelihoods are integrated over a Gaussian of outputs."""


def predict_moments(
    runner: Runner,
    posteriors: Iterable[Posterior],
    layout: NetworkLayout,
    likelihood: Likelihood,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    output: str | int | None = None,
    memory: int | str | None = None,
    split_batch: bool = True,
) -> Predictive:
    """The predictive distribution from the moments of the outputs; see `BayesianNetwork.predict`.

    Raises:
        ValueError: If a posterior is not one of independent Gaussians, a layer has no rule, or the batch is empty.
    """
    weights = _weights(posteriors, layout)
    if batch_size(args, kwargs) == 0:
        raise ValueError("predict: the batch is empty; give at least one example")
    means, spreads = [], []
    with runner.evaluating().alone(hooks=False) as own:
        for part_args, part_kwargs in _pieces(own, weights, args, kwargs, memory, split_batch):
            mean, spread = _run(own, weights, part_args, part_kwargs, output)
            means.append(mean)
            spreads.append(spread)
    gaussian = OutputGaussian(torch.cat(means), torch.cat(spreads), 0)
    if likelihood.integrates_gaussians:
        return likelihood.closed_form(gaussian)
    return likelihood.predictive(Outputs(kept=_points(gaussian)))


def _weights(posteriors: Iterable[Posterior], layout: NetworkLayout) -> Weights:
    """Mean of each weight by name, and its variance where it has one."""
    means: dict[str, Tensor] = {}
    spreads: dict[str, Tensor] = {}
    for posterior in posteriors:
        if not posterior.independent:
            raise ValueError(
                f"predict: {type(posterior).__name__} is no posterior of independent Gaussians, which method='moments' is for "
                "(MeanField, KTied, Point); use method='draws'"
            )

        def compute(posterior: Posterior = posterior) -> tuple[dict[str, Tensor], ...]:
            known = {name: value[None] for name, value in posterior.variance().items() if value.any()}
            return {name: value[None] for name, value in posterior.mean().items()}, known

        found = cached(posterior, "moments", compute)
        means |= found[0]
        spreads |= found[1]
    means, spreads = layout.cast(means), layout.cast(spreads, spread=True)
    return {name: (mean[0], spreads[name][0] if name in spreads else None) for name, mean in means.items()}


def _pieces(
    runner: Runner, weights: Weights, args: Any, kwargs: Any, memory: int | str | None, split_batch: bool
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The batch in pieces whose activations stay within the budget."""
    total = batch_size(args, kwargs)
    if not split_batch or total == 1:
        return iter([(args, dict(kwargs))])
    check_lengths(args, kwargs)
    budget = MEMORY_BUDGET if memory is None else parse_bytes(memory)
    per_row, _ = count_activation_bytes(runner, args, kwargs, {name: mean for name, (mean, _) in weights.items()})
    return split_rows(args, kwargs, max(1, math.floor(budget / (4 * max(1.0, per_row)))))


def _run(
    runner: Runner, weights: Weights, args: Any, kwargs: Any, output: str | int | None
) -> tuple[Tensor, Tensor]:
    """Means of the outputs, [B, ...], and their covariance, [B, O, O], or variances, [B, O]."""
    counter = Pass()
    values = {
        name: mean if spread is None else Moments(mean, spread, pass_=counter, name=name)
        for name, (mean, spread) in weights.items()
    }
    try:
        found = select_output(runner.call(values, args, kwargs), output)
    except NoRule as refusal:
        place = _layer(runner.network, refusal)
        raise ValueError(
            f"predict: method='moments' cannot pass {place}: {refusal}; use method='draws'"
        ) from refusal
    if not isinstance(found, Moments):
        return found, torch.zeros_like(found).flatten(1)
    if found.ndim != 2 or found.shape[1] > LARGEST_COVARIANCE:
        return found.mean_, found.variance_.flatten(1)
    return found.mean_, covariance(found, PASSES * counter.plain - counter.spent)


def _layer(network: nn.Module, error: BaseException) -> str:
    """The innermost module whose code was running when an error was raised, in words."""
    names = {id(module): name for name, module in network.named_modules()}
    place, trace = type(network).__name__, error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            place = f"{names[id(module)]} ({type(module).__name__})"
        trace = trace.tb_next
    return place


def covariance(outputs: Moments, budget: float) -> Tensor:
    r"""Covariance of an example's outputs, pulled back through linear maps and elementwise functions.

    With $J$ the derivative of the outputs by the units of a layer, $C = \sum_l J_l \operatorname{diag}(\text{own}_l) J_l^\top$ over the steps
    from the outputs backwards, and $J \operatorname{diag}(v) J^\top$ with the variances of the units where it ends: at a layer that is no such
    step, or where one step more would exceed the budget.

    Args:
        outputs: [B, O].
        budget: Products that it may take.

    Returns:
        [B, O, O].
    """
    rows, size = outputs.shape
    units, total = outputs, None
    back = torch.eye(size, dtype=outputs.dtype, device=outputs.device).unsqueeze(0)  # [1 or B, O, I]
    while (origin := units.origin_) is not None:
        if origin.weight is not None:
            budget -= len(back) * size * origin.weight.numel()
            if budget < 0:
                break
        added = _around(back, origin.own)
        total = added if total is None else total + added
        if origin.weight is not None:
            back = back @ origin.weight
        elif origin.gain is not None:
            back = back * origin.gain.expand(-1, units.shape[1]).unsqueeze(1)
        if origin.input is None:
            assert total is not None
            return total
        units = origin.input
    block = units.channels_[-1]
    if block == 1:
        added = _around(back, units.variance_)
    else:
        moved = (back * units.variance_.sqrt().unsqueeze(1)).unflatten(-1, (-1, block or units.shape[1])).sum(-1)
        added = moved @ moved.mT
    return (added if total is None else total + added).expand(rows, -1, -1)


def _around(back: Tensor, variance: Tensor) -> Tensor:
    """J diag(v) J^T, [B, O, O]."""
    return (back * variance.unsqueeze(1)) @ back.mT


@lru_cache(maxsize=16)
def _rule(size: int) -> Tensor:
    """Points of a Sobol sequence as standard normal numbers, with their opposites and unit variance: [POINTS, size]."""
    if size <= LARGEST_SEQUENCE:
        uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(POINTS // 2, dtype=torch.float64)
        half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    else:
        half = torch.randn(POINTS // 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    half = half / half.square().mean(0).sqrt()
    return torch.cat((half, -half))


def _points(gaussian: OutputGaussian) -> Tensor:
    """Outputs at the points of a rule of integration over their Gaussian: [POINTS, B, ...]."""
    mean, spread = gaussian.mean, gaussian.covariance
    noise = _rule(spread.shape[1]).to(mean)
    if spread.ndim == 2:
        return mean + (noise.unsqueeze(1) * spread.sqrt()).view(len(noise), *mean.shape)
    spread = spread.clone()
    diagonal = spread.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + torch.finfo(spread.dtype).tiny  # outputs may be fixed, or each other's sums
    factor = torch.linalg.cholesky_ex(spread).L
    return mean + torch.einsum("bij,sj->sbi", factor, noise).view(len(noise), *mean.shape)
