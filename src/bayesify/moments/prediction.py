"""A predictive distribution from one pass of means and variances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.likelihoods import Likelihood
from bayesify.maths.gamma import as_float
from bayesify.moments.tensors import Moments, NoRule, Pass
from bayesify.posteriors.common.base import Posterior
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.running.inputs_and_outputs import batch_size, check_lengths, select_output, split_rows
from bayesify.running.light_copies import leaves_inputs
from bayesify.running.memory import MEMORY_BUDGET, count_activation_bytes, parse_bytes
from bayesify.running.runner import RowCost, Runner
from bayesify.weights.catalog import owner_of
from bayesify.weights.layout import NetworkLayout

Weights = dict[str, tuple[Tensor, Tensor | None]]

MAX_COST_RATIO = 3.0
"""Times the products of the plain network that means, variances and covariances together may take; elementwise functions and the
integral over outputs come on top, up to another pass."""

MAX_CORRELATED_OUTPUTS = 64
"""Outputs of an example above which they count as independent."""


def predict_moments(
    runner: Runner,
    posteriors: Iterable[Posterior],
    layout: NetworkLayout,
    likelihood: Likelihood,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: str | int | None = None,
    memory: int | str | None = None,
    split_batch: bool = True,
) -> Predictive:
    """The predictive distribution from the moments of the outputs; see `BayesianNetwork.predict`.

    Raises:
        ValueError: If a posterior is not one of independent Gaussians, a layer has no rule, or the batch is empty.
    """
    weights = _weights(runner.network, posteriors, layout)
    if batch_size(args, kwargs) == 0:
        raise ValueError("predict: the batch is empty; give at least one example")
    means, spreads = [], []
    with runner.evaluating().alone(hooks=False, share=True) as own:
        for part_args, part_kwargs in _pieces(own, weights, args, kwargs, memory, split_batch):
            mean, spread = _run(own, weights, part_args, part_kwargs, output)
            means.append(as_float(mean))
            spreads.append(as_float(spread))
    gaussian = OutputGaussian(torch.cat(means), spreads[0] if len(spreads) == 1 else torch.cat(spreads), 0)
    if likelihood.integrates_gaussians:
        return likelihood.closed_form(gaussian)
    return likelihood.predictive(Outputs(kept=_points(gaussian)))


def _weights(network: nn.Module, posteriors: Iterable[Posterior], layout: NetworkLayout) -> Weights:
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
            spreads = {name: value for name, value in posterior.variance().items() if value.any()}
            return tuple(
                {name: _for_products(network, name, value)[None] for name, value in values.items()}
                for values in (posterior.mean(), spreads)
            )

        found = posterior.cached("moments", compute)
        means |= found[0]
        spreads |= found[1]
    layout.cast(means)
    layout.cast(spreads, spread=True)
    return {name: (mean[0], spreads[name][0] if name in spreads else None) for name, mean in means.items()}


def _for_products(network: nn.Module, name: str, value: Tensor) -> Tensor:
    """A matrix with its columns next to each other in memory, on a processor: units times its transpose read it as it lies."""
    if value.ndim != 2 or value.device.type != "cpu" or isinstance(owner_of(network, name)[0], nn.Embedding):
        return value
    return value.mT.contiguous().mT


def _pieces(
    runner: Runner,
    weights: Weights,
    args: Any,
    kwargs: Any,
    memory: int | str | None,
    split_batch: bool,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The batch in pieces whose activations stay within the budget."""
    total = batch_size(args, kwargs)
    if not split_batch or total == 1:
        return iter([(args, dict(kwargs))])
    check_lengths(args, kwargs)
    budget = MEMORY_BUDGET if memory is None else parse_bytes(memory)
    values = {name: mean for name, (mean, _) in weights.items()}
    shapes = tuple(leaf.shape[1:] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    known, kind = runner.decisions().row_costs, ("moments", *shapes)
    if kind not in known:
        known[kind] = RowCost(count_activation_bytes(runner, args, kwargs, values)[0], 0.0)
    per_row = known[kind].activations
    return split_rows(args, kwargs, max(1, math.floor(budget / (4 * max(1.0, per_row)))))


def _run(runner: Runner, weights: Weights, args: Any, kwargs: Any, output: str | int | None) -> tuple[Tensor, Tensor]:
    """Means of the outputs, [B, ...], and their covariance, [B, O, O], or variances, [B, O]."""
    counter = Pass()
    values = {
        name: mean if spread is None else Moments(mean, spread, pass_=counter, name=name)
        for name, (mean, spread) in weights.items()
    }
    _check_recurrent(runner.network)
    try:
        protect = not leaves_inputs(runner.network)
        found = select_output(runner.call(values, args, kwargs, protect=protect), output)
    except NoRule as refusal:
        raise _refusal(_layer(runner.network, refusal), refusal) from refusal
    if not isinstance(found, Moments):
        return found, torch.zeros_like(found).flatten(1)
    if found.ndim != 2 or found.shape[1] > MAX_CORRELATED_OUTPUTS:
        return found.mean_, found.variance_.flatten(1)
    return found.mean_, covariance(found, MAX_COST_RATIO * counter.plain - counter.spent)


def _refusal(place: str, reason: object) -> ValueError:
    return ValueError(f"predict: method='moments' cannot pass {place}: {reason}; use method='draws'")


def _check_recurrent(network: nn.Module) -> None:
    """Refuse recurrent layers by name: their kernels take plain weights, and use them at every step."""
    for name, module in network.named_modules():
        if isinstance(module, nn.RNNBase):
            place = f"{name or 'the network'} ({type(module).__name__})"
            raise _refusal(place, "recurrent layers have no rule")


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

    With J the derivative of the outputs by the units of a layer, $C = \sum_l J_l \operatorname{diag}(a_l) J_l^\top$ over the layers
    from the outputs backwards, where $a_l$ is what of the units' variance does not come from the layer before. Where it ends,
    $J \operatorname{diag}(v) J^\top$ has all their variance: at a layer that is no linear map, or where one more would exceed the
    budget.

    Args:
        outputs: [B, O].
        budget: Products that it may take.

    Returns:
        [B, O, O].
    """
    rows, size = outputs.shape
    units: Moments | None = outputs
    total, back = outputs.mean_.new_zeros(rows, size, size), Derivative(size, outputs.mean_)
    while units is not None:
        start, spread, gain = units, units.variance_, None
        origin = units.origin_
        # Elementwise functions first.
        while origin is not None and origin.gain is not None and origin.input is not None:
            gain = origin.gain if gain is None else gain * origin.gain
            units, origin = origin.input, origin.input.origin_
        if origin is None or origin.weight is None or budget < back.cost(origin.weight):
            return total + back.around(spread, start.channels_[-1])
        budget -= back.cost(origin.weight)
        through = units.variance_ - origin.own  # what the linear map hands on
        total += back.around(spread - (through if gain is None else gain.square() * through))
        if gain is not None:
            back.scale(gain)
        back.times(origin.weight)
        units = origin.input
    return total


class Derivative:
    """J of an example's outputs by the units of a layer: a matrix that all examples share, with a number for each unit, or not.

    Args:
        size: O.
        like: A tensor [B, O] whose type and device it has.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        self.rows, self.size = len(like), size
        self.shared: Tensor | None = torch.eye(size, dtype=like.dtype, device=like.device)  # [O, I]
        self.gain: Tensor | None = None  # [B or 1, I]
        self.own: Tensor | None = None  # [B, O, I], in place of both
        self.is_identity = True

    def cost(self, weight: Tensor) -> float:
        """Products that one more linear map takes."""
        return 0 if self.is_identity else self.rows * self.size * weight.numel()

    def scale(self, gain: Tensor) -> None:
        """Through an elementwise function."""
        if self.own is not None:
            self.own = self.own * gain.expand(gain.shape[0], self.own.shape[-1]).unsqueeze(1)
        else:
            self.gain = gain if self.gain is None else self.gain * gain

    def times(self, weight: Tensor) -> None:
        """Through a linear map [O, I]."""
        if self.is_identity and self.gain is None:
            self.shared, self.is_identity = weight, False
        else:
            self.own = self._whole() @ weight

    def _whole(self) -> Tensor:
        if self.own is not None:
            return self.own
        assert self.shared is not None
        return self.shared.unsqueeze(0) if self.gain is None else self.shared * self.gain.unsqueeze(1)

    def around(self, variance: Tensor, block: int = 1) -> Tensor:
        """J diag(v) J^T for units that vary together in blocks: [B, O, O]."""
        if block != 1:
            moved = self._whole() * variance.sqrt().unsqueeze(1)
            moved = torch.unflatten(moved, -1, (-1, block or variance.shape[1])).sum(-1)
            return moved @ moved.mT.contiguous()  # a transposed view is up to a hundred times slower on ARM
        if self.shared is None or self.own is not None:
            whole = self._whole()
            return (whole * variance.unsqueeze(1)) @ whole.mT.contiguous()
        if self.gain is not None:
            variance = variance * self.gain.square()
        if self.is_identity:
            return torch.diag_embed(variance)
        first, second, places = _pairs(self.size, variance.device)
        below = variance @ (self.shared[first] * self.shared[second]).mT  # one product for all examples
        return below.index_select(1, places).view(-1, self.size, self.size)


@lru_cache(maxsize=16)
def _pairs(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of a lower triangle, and where in it each entry of the whole symmetric matrix is."""
    first, second = torch.tril_indices(size, size, device=device)
    at = torch.arange(size, device=device)
    row, column = torch.maximum(at[:, None], at), torch.minimum(at[:, None], at)
    return first, second, (row * (row + 1) // 2 + column).flatten()


@lru_cache(maxsize=16)
def _rule(size: int) -> Tensor:
    r"""Points with the first three moments of standard normal numbers, [n, size].

    $\pm\sqrt{O}$ along the axes of a random rotation, the spherical cubature of degree 3; where these would be few, 32 of a Sobol
    sequence, whitened.
    """
    generator = torch.Generator().manual_seed(0)
    if size >= 8:
        rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        half = math.sqrt(size) * rotation
    else:
        uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(16, dtype=torch.float64)
        half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        half = half @ torch.linalg.inv(torch.linalg.cholesky(half.mT @ half / len(half))).mT
    return torch.cat((half, -half))


def _points(gaussian: OutputGaussian) -> Tensor:
    """Outputs at the points of a rule of integration over their Gaussian: [n, B, ...]. Its covariance is changed, by 1e-6 of it."""
    mean, spread = gaussian.mean, gaussian.covariance
    if spread.ndim == 2:
        half = torch.randn(16, spread.shape[1], generator=torch.Generator().manual_seed(0)).to(mean)
        noise = torch.cat((half, -half)) / half.square().mean(0).sqrt()
        return mean + (noise.unsqueeze(1) * spread.sqrt()).view(len(noise), *mean.shape)
    diagonal = spread.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + torch.finfo(spread.dtype).tiny  # outputs may be fixed, or sums
    factor = torch.linalg.cholesky_ex(spread).L
    noise = _rule(spread.shape[1]).to(mean)
    found = torch.addmm(mean.mT.flatten(), noise, factor.permute(2, 1, 0).flatten(1))  # [n, O B]
    return found.view(len(noise), -1, len(mean)).mT  # examples next to each other in memory
