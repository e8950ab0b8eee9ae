"""A predictive distribution, computed in one pass that propagates means and variances through the network."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.likelihoods import Likelihood
from bayesify.maths.gamma import as_float
from bayesify.moments.responses import Node, Plan, covariance, plain_cost, variances
from bayesify.moments.tensors import UNKNOWN, Moments, NoRule, Pass, SameSizes, Value, nonlinear, value_of
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

MAX_COST_RATIO = 0.3
"""If the covariance of the outputs costs more than this many passes of the plain network, an approximation is tried."""

MIN_COST_BUDGET = 2e5
"""A covariance that needs at most this many products per example is always computed without an approximation."""

MAX_CORRELATED_OUTPUTS = 64
"""If an example has more outputs than this, the outputs are treated as independent."""

MAX_ESTIMATED_SHARE = 0.45
"""Maximum share of an output's variance that may depend on an estimated correlation between positions. The rest of the variance,
a share of 1 / 1.35^2, is exact, so the standard deviation is right up to a factor of 1.35."""

NUM_COMPARED_ROWS, NUM_COMPARED_OUTPUTS = 8, 16
"""An approximation is compared with the exact linear responses for this many examples and outputs."""

MAX_APPROXIMATION_RATIO = 1.2
"""The approximation is accepted if no standard deviation differs from the exact one by more than this factor."""


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
    """The predictive distribution, computed from the moments of the outputs; see `BayesianNetwork.predict`.

    Raises:
        ValueError: If a posterior does not have independent Gaussian weights, if a layer is not supported, or if the
            batch is empty.
    """
    weights, decisions = _weights(runner.network, posteriors, layout)
    if batch_size(args, kwargs) == 0:
        raise ValueError("predict: the batch is empty; give at least one example")
    _check_recurrent(runner.network)
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, (args, dict(kwargs)))
    means, spreads = [], []
    with runner.evaluating().alone(hooks=False, share=True) as own, torch.inference_mode(False), torch.no_grad():
        network = _Network(own, weights, output, decisions)
        for part_args, part_kwargs in _pieces(own, weights, args, kwargs, memory, split_batch):
            for mean, spread in network.predict(part_args, part_kwargs, split_batch):
                means.append(as_float(mean))
                spreads.append(as_float(spread))
    gaussian = OutputGaussian(torch.cat(means), spreads[0] if len(spreads) == 1 else torch.cat(spreads), 0)
    if likelihood.integrates_gaussians:
        return likelihood.closed_form(gaussian)
    return likelihood.predictive(Outputs(kept=_points(gaussian)))


def _weights(
    network: nn.Module, posteriors: Iterable[Posterior], layout: NetworkLayout
) -> tuple[Weights, tuple[dict[Any, Any], ...]]:
    """For each weight name, the mean and the variance; a variance of 0 is `None`. The second result is one cache per posterior,
    in which `_Network` stores whether approximations are accurate enough; a cache is valid until its posterior's parameters
    change."""
    means: dict[str, Tensor] = {}
    spreads: dict[str, Tensor] = {}
    decisions: list[dict[Any, Any]] = []
    for posterior in posteriors:
        if not posterior.independent:
            raise ValueError(
                f"predict: method='moments' needs independent Gaussian weights (MeanField, KTied, Point), but the posterior is "
                f"{type(posterior).__name__}; use method='draws'"
            )

        def compute(posterior: Posterior = posterior) -> tuple[dict[Any, Any], ...]:
            spreads = {name: value for name, value in posterior.variance().items() if value.any()}
            with torch.inference_mode(False):
                found = (
                    {name: _for_products(network, name, value.clone())[None] for name, value in values.items()}
                    for values in (posterior.mean(), spreads)
                )
                return *found, {}

        found = posterior.cached("moments", compute)
        means |= found[0]
        spreads |= found[1]
        decisions.append(found[2])
    layout.cast(means)
    layout.cast(spreads, spread=True)
    weights = {name: (mean[0], spreads[name][0] if name in spreads else None) for name, mean in means.items()}
    return weights, tuple(decisions)


def _for_products(network: nn.Module, name: str, value: Tensor) -> Tensor:
    """The matrix; on a CPU it is stored by columns, so that a product of units with the transposed matrix reads memory in order."""
    if value.ndim != 2 or value.device.type != "cpu" or isinstance(owner_of(network, name)[0], nn.Embedding):
        return value
    return value.mT.contiguous().mT


def _pieces(
    runner: Runner, weights: Weights, args: Any, kwargs: Any, memory: int | str | None, split_batch: bool
) -> Iterator[tuple[Any, dict[str, Any]]]:
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


@dataclass(frozen=True)
class _Network:
    runner: Runner
    weights: Weights
    output: str | int | None  # name or index of the output to use, if the network has several
    decisions: tuple[dict[Any, Any], ...]  # decisions for the current state of each posterior

    def _run(self, args: Any, kwargs: Any) -> Tensor | Value:
        counter = Pass(batch_size(args, kwargs))
        values = {
            name: mean if spread is None else Moments(mean, spread, pass_=counter, name=name)
            for name, (mean, spread) in self.weights.items()
        }
        network = self.runner.network
        try:
            protect = not leaves_inputs(network)
            found = select_output(self.runner.call(values, args, kwargs, protect=protect), self.output)
            if not isinstance(found, Moments):
                return found
            value = value_of(found)
        except NoRule as refusal:
            raise _refusal(_layer(network, refusal), refusal) from refusal
        except RuntimeError as error:
            if "TorchScript" not in str(error):
                raise
            raise _refusal(_layer(network, error), "a TorchScript function is not supported") from error
        if value.batch != 0:
            raise _refusal(type(network).__name__, "the first axis of the output is not the batch")
        return value

    def predict(self, args: Any, kwargs: Any, split_batch: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the means of the outputs, [B, ...], together with their covariances, [B, O, O], or their variances, [B, O].

        There is one result, or several results if the batch has to be split.
        """
        rows = batch_size(args, kwargs)
        try:
            found = self._run(args, kwargs)
        except SameSizes as error:  # split the batch, so that its length differs from the other axis
            if not split_batch or rows == 1:
                reason = f"another axis has the same length as the batch ({rows}), so the axis of examples is ambiguous"
                raise _refusal(_layer(self.runner.network, error), reason) from error
            for part_args, part_kwargs in split_rows(args, kwargs, -(-rows // 2)):
                yield from self.predict(part_args, part_kwargs, split_batch)
            return
        if isinstance(found, Tensor):
            yield found, torch.zeros_like(_rows(found))
            return
        name = type(self.runner.network).__name__
        try:
            spread = self._spread(found, args, kwargs)
        except NoRule as refusal:
            raise _refusal(name, refusal) from refusal
        if not (found.mean.isfinite().all() and spread.isfinite().all()):
            raise _refusal(name, "a mean or a variance of the outputs is not finite")
        yield found.mean, spread

    def _spread(self, value: Value, args: Any, kwargs: Any) -> Tensor:
        """Covariances of each example's outputs, [B, O, O]. If there are many outputs, only their variances, [B, O]."""
        flat = _rows(value.mean)
        size, budget = flat.shape[1], _budget(value)
        if size > MAX_CORRELATED_OUTPUTS:
            value = nonlinear(value, "an output")
            if not self._serves(args, kwargs):
                reason = f"the noise of {size} outputs is correlated, and computing its covariance would take one pass per output"
                raise _refusal(type(self.runner.network).__name__, reason)
            return _rows(value.variance)
        whole = Plan(_flat(value), size)
        if whole.cost > budget and value.doubt != UNKNOWN and self._serves(args, kwargs):
            whole = Plan(_flat(value), size, budget)
        found, sure = covariance(whole, flat)
        all_noise, estimated = (part.diagonal(dim1=1, dim2=2) for part in (found, found - sure))
        share = float((estimated / all_noise.clamp_min(1e-30)).max())
        if share > MAX_ESTIMATED_SHARE:
            reason = (
                f"up to {share:.0%} of an output's variance (more than {MAX_ESTIMATED_SHARE:.0%}) is nonlinear noise whose "
                "correlation between positions is unknown"
            )
            raise _refusal(type(self.runner.network).__name__, reason)
        return found if value.mean.ndim == 2 else found.diagonal(dim1=1, dim2=2)

    def _serves(self, args: Any, kwargs: Any) -> bool:
        """Whether the approximate variances of the outputs are close to the exact variances, for the first examples of the batch.
        The answer is cached for the current state of the posteriors."""
        shapes = tuple(leaf.shape[1:] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        first, *others = self.decisions
        known = first.get(shapes)
        if known is None or any(one is not other for one, other in zip(known[0], others, strict=True)):
            known = first[shapes] = (others, self._compare(args, kwargs))
        return bool(known[1])

    def _compare(self, args: Any, kwargs: Any) -> bool:
        value: Any = None
        for rows in range(NUM_COMPARED_ROWS, 0, -1):
            try:
                value = self._run(*next(iter(split_rows(args, kwargs, rows))))
                break
            except SameSizes:
                continue
        if value is None:
            return False
        flat = _rows(value.mean)
        size, budget = flat.shape[1], _budget(value)
        if size > MAX_CORRELATED_OUTPUTS:
            spread = _rows(value.variance)
        else:
            spread = covariance(Plan(_flat(value), size, budget), flat)[0].diagonal(dim1=1, dim2=2)
        chosen = torch.linspace(0, size - 1, min(size, NUM_COMPARED_OUTPUTS)).long().tolist()
        exact = variances(Plan(_flat(value, chosen), len(chosen)), flat[:, chosen])[0]
        ratio = (spread[:, chosen] / exact.clamp_min(torch.finfo(exact.dtype).tiny)).sqrt()
        return bool(torch.maximum(ratio, 1 / ratio).max() < MAX_APPROXIMATION_RATIO)


def _budget(value: Value) -> float:
    return max(MIN_COST_BUDGET * len(value.mean), MAX_COST_RATIO * plain_cost(value.node))


def _rows(outputs: Tensor) -> Tensor:
    return outputs.reshape(len(outputs), -1)


def _flat(value: Value, chosen: list[int] | None = None) -> Node:
    """Node, in the graph of responses, that holds all outputs or the chosen outputs, reshaped to [B, O]."""
    if value.mean.ndim == 2 and chosen is None:
        return value.node
    size = value.mean[0].numel() if chosen is None else len(chosen)

    def push(change: Tensor) -> Tensor:
        return _rows(change) if chosen is None else _rows(change)[:, chosen]

    return Node(torch.Size((len(value.mean), size)), (value.node,), push)


def _refusal(place: str, reason: object) -> ValueError:
    return ValueError(f"predict: method='moments' does not support {place}: {reason}; use method='draws'")


def _check_recurrent(network: nn.Module) -> None:
    """Refuse recurrent layers, because their kernels need plain weights and use the same weights at every step. The
    message names the layer."""
    for name, module in network.named_modules():
        if isinstance(module, nn.RNNBase):
            place = f"{name or 'the network'} ({type(module).__name__})"
            raise _refusal(place, "recurrent layers are not supported")


def _layer(network: nn.Module, error: BaseException) -> str:
    """Name and type of the innermost module whose code was running when an error was raised."""
    names = {id(module): name for name, module in network.named_modules()}
    place, trace = type(network).__name__, error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            place = f"{names[id(module)]} ({type(module).__name__})"
        trace = trace.tb_next
    return place


@lru_cache(maxsize=16)
def _rule(size: int) -> Tensor:
    r"""Points [n, size] whose first three moments are those of a standard normal vector.

    The points are $\pm\sqrt{O}$ along the axes of a randomly rotated coordinate system (the spherical cubature of degree 3). In
    fewer than 8 dimensions, the points are 32 whitened points of a Sobol sequence.
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
    """Points [n, B, ...] of an integration rule for the Gaussian distribution of the outputs."""
    mean, spread = gaussian.mean, gaussian.covariance
    if spread.ndim == 2:
        half = torch.randn(16, spread.shape[1], generator=torch.Generator().manual_seed(0)).to(mean)
        noise = torch.cat((half, -half)) / half.square().mean(0).sqrt()
        return mean + (noise.unsqueeze(1) * spread.sqrt()).view(len(noise), *mean.shape)
    diagonal = spread.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + torch.finfo(spread.dtype).tiny  # it may be singular
    factor = torch.linalg.cholesky_ex(spread).L
    noise = _rule(spread.shape[1]).to(mean)
    found = torch.addmm(mean.mT.flatten(), noise, factor.permute(2, 1, 0).flatten(1))  # [n, O B]
    return found.view(len(noise), -1, len(mean)).mT  # examples are contiguous in memory
