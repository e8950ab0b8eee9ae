"""How an estimator trains a method: budgets by the number of rows, a phase for the start, and the method itself."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.conversion import bayesianize
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.methods import Method
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Point
from bayesify.predictive.base import Predictive
from bayesify.predictor import Predictor
from bayesify.priors import Neal
from bayesify.running.generators import own_generators
from bayesify.sklearn.rows import BATCH_SIZE, FULL_BATCH, Batches, Rows, stacked
from bayesify.training.arguments import Steps
from bayesify.training.fitting import fit
from bayesify.training.maximum_a_posteriori import search_point
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack
from bayesify.training.task import TrainingTask

STEPS, SLOW_STEPS = 500, 200
"""Optimizer steps of the main phase where the rows fit into one batch, and steps of a chain."""
LEAST_EPOCHS = 20
"""Passes over larger data, at least."""
LEARNING_RATE = 0.03


class SiLUReLU(nn.Module):
    """SiLU for the first half of the units, ReLU for the others: smooth functions of a table and those with kinks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Entry by entry, [..., units]."""
        half = x.shape[-1] // 2
        first, second = x.split((half, x.shape[-1] - half), dim=-1)  # slices have gradients as large as x
        return torch.cat((F.silu(first), F.relu(second)), dim=-1)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "silu_relu": SiLUReLU,
}
FOLDS, FEW, FOLDS_OF_FEW = 3, 200, 6
"""Parts of the rows, each predicted from the others, that a temperature is fitted to; up to how many rows there are more
parts, and how many. Of data that do not fit into a batch one part is predicted."""
INDUCING_ROWS = 100
"""Rows that global inducing inputs start at, where their number is not given."""
TEMPERATURE = "temperature_scaled"
"""A method of estimators and comparisons: the plain network with one number fitted to rows not seen (Guo et al. 2017)."""
MOST_SCALING = 5.0
"""Factor on logits or standard deviations by which that may differ from the plain network."""


@dataclass(frozen=True)
class Plan:
    """What an estimator's parameters say about training.

    Args:
        method: From the registry.
        options: Of the posterior or the recipe; the registry's for small problems fill what is missing.
        prior_scale: Of the `Neal` prior.
        epochs: Of the main phase; by the number of rows if `None`.
        learning_rate: Of the first step, from which it falls to 0 as half a cosine.
        batch_size: All rows up to `FULL_BATCH` if `None`, else `BATCH_SIZE`.
        num_draws: Of the weights in a step.
        seed: Of everything random.
        progress: Whether to show a progress bar.
    """

    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)
    prior_scale: float = 1.0
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    num_draws: int = 4
    seed: int = 0
    progress: bool = False

    def batches(self, rows: Rows) -> Batches:
        """The rows as a loader."""
        size = self.batch_size or (len(rows) if len(rows) <= FULL_BATCH else BATCH_SIZE)
        return Batches(rows, min(size, len(rows)))

    def count_epochs(self, batches: int) -> int:
        """Epochs of the main phase for a number of batches per epoch."""
        if self.epochs is not None:
            return self.epochs
        if self.method.slow:
            return SLOW_STEPS
        return max(math.ceil(STEPS / batches), min(STEPS, LEAST_EPOCHS))


def train(net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan, *, settled: bool = False) -> Any:
    """Train a method from a network's weights.

    Args:
        net: In float64.
        likelihood: p(y | outputs). Noise that can be learned is what it is at most: variational posteriors learn how much less,
            all other methods keep it.
        rows: Standardized.
        plan: The rest.
        settled: Whether the network comes from `settling.settle`: posteriors then need no phase to the maximum a posteriori.

    Returns:
        Something with `predict(x)`.

    Raises:
        ValueError: If a chain is wanted and weights are not integers.
    """
    method = plan.method
    if method.fit is None:
        bnn = make_bayesian(net, likelihood, rows, plan)
        train_posteriors([bnn], [rows], [plan], start=not (method.is_point or settled))
        return bnn
    return _by_recipe(net, likelihood, rows, plan)


def _by_recipe(net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan, point: Any = None) -> Any:
    method = plan.method
    assert method.fit is not None
    if method.is_chain:  # its recipe does not weigh rows
        rows = rows.repeated()
    more = {"num_draws": plan.num_draws} if method.draws_in_steps else {}
    return method.fit(_problem(net, likelihood, rows, plan, point), **{**more, **method.options, **plan.options})


def _problem(net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan, point: Any = None) -> TrainingTask:
    batches = plan.batches(rows)
    return TrainingTask(
        net,
        _fixed(likelihood),
        batches,
        prior=Neal(plan.prior_scale),
        num_data=len(rows),  # with weights as they are, the data term of all batches is their weighted sum
        epochs=plan.count_epochs(len(batches)),
        seed=plan.seed,
        point=point,
    )


def train_several(
    nets: Sequence[nn.Module], likelihoods: Sequence[Likelihood], rows: Sequence[Rows], plans: Sequence[Plan]
) -> list[Any]:
    """Train one method on several problems from networks of one architecture, with the results that `train` has on each.

    Posteriors and deep Gaussian processes train together as a `ModelStack`, and so do the networks at the maximum a posteriori that
    other methods start from; whatever else they do comes one after the other.

    Args:
        nets: In float64.
        likelihoods: Of each problem; see `train`.
        rows: Of each problem, standardized.
        plans: Of each problem; they differ in nothing but seeds and priors.
    """
    method, problems = plans[0].method, list(zip(nets, likelihoods, rows, plans, strict=True))
    alone = len(nets) == 1 or any(len(plan.batches(part)) > 1 for _, _, part, plan in problems)
    if method.fit is None:
        bnns = [_seeded(make_bayesian, *problem) for problem in problems]
        train_posteriors(bnns, rows, plans, start=not method.is_point)
        return bnns
    if alone or not (method.make or method.starts_at_point):
        return [_seeded(train, *problem) for problem in problems]
    batch, epochs = stacked(rows), plans[0].count_epochs(1)
    shares: dict[str, Any] = {"num_data": len(batch), "seed": plans[0].seed}
    if method.make is None:
        points = [
            bayesianize(net, Point(), likelihood=_fixed(likelihood), prior=Neal(plan.prior_scale))
            for net, likelihood, _, plan in problems
        ]
        stack = ModelStack(points)
        search_point(stack, [batch], epochs=epochs, **shares)
        return [
            _seeded(_by_recipe, *problem, point=point) for problem, point in zip(problems, stack.unstack(), strict=True)
        ]
    options = {**method.options, **plans[0].options}
    rate = options.pop("learning_rate")
    models = [_seeded(_make, method, net, likelihood, part, plan, options) for net, likelihood, part, plan in problems]
    if len(_shapes(models)) > 1:  # of few rows: as many inducing points as rows
        return [_seeded(train, *problem) for problem in problems]
    stack = ModelStack(models, seeds=[derive_seed(plan.seed, "draws", 0) for plan in plans])
    fit(stack, [batch], epochs=epochs, learning_rate=rate, num_draws=plans[0].num_draws, progress=False, **shares)
    return stack.unstack()


def _make(
    method: Method, net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan, options: Mapping[str, Any]
) -> Any:
    assert method.make is not None
    return method.make(_problem(net, likelihood, rows, plan), **options)


def _seeded(function: Callable[..., Any], *problem: Any, **more: Any) -> Any:
    """A function's result with the global generator at the seed of the problem's plan."""
    plan = next(part for part in problem if isinstance(part, Plan))
    with own_generators(seed=derive_seed(plan.seed, "training")):
        return function(*problem, **more)


def make_bayesian(net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan) -> BayesianNetwork:
    """The network of a method that is a posterior, before training; see `train`."""
    method, options = plan.method, {**plan.method.options, **plan.options}
    assert method.posterior is not None
    if not method.learns_noise:
        likelihood = _fixed(likelihood)
    if method.starts_at_rows is not None:
        given = plan.options.get(method.starts_at_rows, INDUCING_ROWS)
        options[method.starts_at_rows] = _inducing_inputs(given, rows, plan.seed)
    return bayesianize(net, method.posterior(**options), likelihood=likelihood, prior=Neal(plan.prior_scale))


def _inducing_inputs(given: Any, rows: Rows, seed: int) -> Any:
    """Rows of the data where only their number is given: they start where the data are, as standard normal numbers do not."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        return given
    return torch.from_numpy(rows.thinned(given, derive_seed(seed, "inducing inputs")).x)


def _fixed(likelihood: Likelihood) -> Likelihood:
    """A likelihood that learns nothing, for methods under which noise would shrink to what a network that fits every row leaves."""
    if not isinstance(likelihood, Gaussian):
        return likelihood
    return Gaussian(likelihood.noise.detach().tolist(), learn=False).double()


def scale_temperature(
    model: BayesianNetwork, net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan
) -> TemperatureScaling:
    """A trained plain network with the temperature, or factor on the noise, that suits rows which networks like it have not seen.

    Args:
        model: Trained on all rows.
        net: Where every fold's training starts.
        likelihood: p(y | outputs).
        rows: Standardized; a row that stands for k examples counts k times.
        plan: How to train.
    """
    scaled = TemperatureScaling(model)
    if len(rows) >= 2:
        outputs, held = _out_of_fold(net, _fixed(likelihood), rows, plan)
        # Outputs are all that a temperature sees.
        same = nn.Linear(outputs.shape[1], outputs.shape[1], bias=False).to(outputs)
        nn.init.eye_(same.weight)
        copies = np.maximum(1, np.round(held.weights)).astype(np.int64)
        batch = outputs.repeat_interleave(torch.from_numpy(copies), 0), torch.from_numpy(np.repeat(held.y, copies, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bounds that `limit_scaling` is narrower than
            found = TemperatureScaling(same, _fixed(likelihood)).fit([batch])
        scaled.temperature, scaled.variance_scale = found.temperature, found.variance_scale
    return limit_scaling(scaled)


def limit_scaling(scaled: TemperatureScaling) -> TemperatureScaling:
    """The same within limits: a few rows that are all right would else make it sure beyond all bounds."""
    scaled.temperature = min(max(scaled.temperature, 1 / MOST_SCALING), MOST_SCALING)
    scaled.variance_scale = min(max(scaled.variance_scale, 1 / MOST_SCALING**2), MOST_SCALING**2)
    return scaled


def _out_of_fold(net: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan) -> tuple[torch.Tensor, Rows]:
    """Outputs [N, O] of networks at the maximum a posteriori for rows that they have not seen, and these rows."""
    folds = min(FOLDS_OF_FEW if len(rows) <= FEW else FOLDS, len(rows))
    of_row = np.random.default_rng(derive_seed(plan.seed, "folds")).permutation(len(rows)) % folds
    used = range(folds if len(rows) <= FULL_BATCH else 1)
    bnns = [bayesianize(net, Point(), likelihood=likelihood, prior=Neal(plan.prior_scale)) for _ in used]
    train_posteriors(bnns, [rows[of_row != fold] for fold in used], [plan] * len(bnns), start=False)
    held = [rows[of_row == fold] for fold in used]
    found = [bnn.predict(torch.from_numpy(part.x)).outputs[0] for bnn, part in zip(bnns, held, strict=True)]
    return torch.cat(found), Rows.of(held)


def train_posteriors(
    bnns: Sequence[BayesianNetwork],
    rows: Sequence[Rows],
    plans: Sequence[Plan],
    *,
    effort: float = 1.0,
    start: bool = True,
) -> None:
    r"""Maximize the evidence lower bound of each network's weighted rows.

    $$ \sum_n \omega_n \mathbb{E}_q \log p(y_n | f(x_n)) - \mathrm{KL}(q \| p) $$

    Networks whose rows fit into one batch train together, with the random numbers that each has alone; see `ModelStack`.

    Args:
        bnns: The networks, of one architecture, changed in place.
        rows: Of each network, standardized, with weights $\omega$.
        plans: Of each network; they differ in nothing but seeds, priors and options of the posterior.
        effort: Share of the epochs.
        start: Whether a phase of a quarter as many epochs comes first, in which the posterior's mean goes to the maximum a
            posteriori, with the noise where it is: learned there, it would shrink with the residuals.

    Noise stays at most what it is at the start: a factorized posterior of few rows else takes all of the targets' variance for it.
    """
    one_batch = all(len(plan.batches(part)) == 1 for plan, part in zip(plans, rows, strict=True))
    together = len(bnns) > 1 and len(_shapes(bnns)) == 1 and one_batch
    if together and not any(isinstance(module, _BatchNorm) for module in bnns[0].modules()):  # rows are padded
        seeds = [derive_seed(plan.seed, "draws", 0) for plan in plans]  # those of `fit`
        stack, batch = ModelStack(bnns, seeds=seeds), stacked(rows)
        learned = [stack.stacked(name) for name, _ in _learned(bnns[0])]
        _train_phases(stack, [batch], learned, plans[0], {"num_data": len(batch)}, effort, start)
        stack.unstack()
        return
    for bnn, part, plan in zip(bnns, rows, plans, strict=True):
        # `fit` works with the mean over rows: weights of mean 1, and a KL divided by what the rows stand for.
        share = len(part) / part.num_data
        batches = plan.batches(Rows(part.x, part.y, part.weights * share))
        learned = [parameter for _, parameter in _learned(bnn)]
        _train_phases(bnn, batches, learned, plan, {"num_data": len(part), "kl_weight": share}, effort, start)


def _shapes(models: Sequence[nn.Module]) -> set[tuple[torch.Size, ...]]:
    return {tuple(parameter.shape for parameter in model.parameters()) for model in models}


def _train_phases(
    model: Any, batches: Any, learned: list[Any], plan: Plan, options: dict[str, Any], effort: float, start: bool
) -> None:
    """The two phases of `train_posteriors`; `learned` are the noise's parameters."""
    epochs = max(1, round(effort * plan.count_epochs(len(batches))))
    shares: dict[str, Any] = {
        **options,
        "learning_rate": plan.learning_rate or LEARNING_RATE,
        "seed": plan.seed,
        "progress": plan.progress,
    }
    most = [parameter.detach().clone() for parameter in learned]
    model.train()
    if start:
        for parameter in learned:
            parameter.requires_grad_(False)
        fit(model, batches, epochs=0, map_epochs=max(1, epochs // 4), **shares)
        for parameter in learned:
            parameter.requires_grad_(True)

    def cap(*_: Any) -> None:
        with torch.no_grad():
            for parameter, limit in zip(learned, most, strict=True):
                parameter.copy_(torch.minimum(parameter, limit))

    total = epochs * len(batches)
    fit(
        model,
        batches,
        epochs=epochs,
        num_draws=max(plan.num_draws, model.training_draws),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        steps=Steps(scheduler="step"),
        callbacks=[cap],
        **shares,
    )
    model.eval()


def _learned(bnn: BayesianNetwork) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the noise, by name."""
    return [
        (name, entry)
        for name, entry in bnn.named_parameters()
        if name.startswith("likelihood.") and entry.requires_grad
    ]


def predict(model: Predictor, x: torch.Tensor, num_draws: int, seed: int) -> Predictive:
    """A model's predictive, with the same draws for every x.

    Args:
        model: What `train` returned.
        x: Standardized, [B, D].
        num_draws: Where the model draws; members of an ensemble and draws of a chain as far as they go.
        seed: Of the draws.
    """
    if model.num_distinct_draws is not None:
        num_draws = min(num_draws, model.num_distinct_draws)
    return model.predict(x, num_draws, generator=torch.Generator().manual_seed(seed))


def make_network(
    num_inputs: int, hidden: tuple[int, ...], activation: str, num_outputs: int, seed: int, dropout: float = 0.0
) -> nn.Module:
    """A network of linear layers in float64, the same for the same seed.

    Args:
        num_inputs: Of the first layer.
        hidden: Units of each hidden layer; none for a linear model.
        activation: A key of `ACTIVATIONS`.
        num_outputs: Of the last layer.
        seed: Of the weights.
        dropout: Share of the hidden units that a training step leaves out.
    """
    widths = [num_inputs, *hidden, num_outputs]
    with own_generators(seed=seed):
        layers: list[nn.Module] = []
        for d_in, d_out in pairwise(widths):
            layers += [nn.Linear(d_in, d_out), ACTIVATIONS[activation](), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1]).double()


def own_network(net: nn.Module, num_inputs: int, num_outputs: int, owner: str) -> nn.Module:
    """A copy of the user's network in float64, once it is clear that it fits the data.

    Raises:
        ValueError: If it does not take rows of that width or gives another number of outputs.
    """
    copied = copy.deepcopy(net).double()
    modes = [(module, module.training) for module in copied.modules()]
    try:
        with torch.no_grad(), own_generators():
            outputs = copied.eval()(torch.zeros(2, num_inputs, dtype=torch.float64))
    except RuntimeError as error:
        raise ValueError(f"{owner}: network does not take rows of {num_inputs} columns: {error}") from error
    for module, mode in modes:
        module.training = mode
    if tuple(outputs.shape) != (2, num_outputs):
        raise ValueError(
            f"{owner}: network gives outputs of shape {tuple(outputs.shape)} for 2 rows where y needs (2, {num_outputs}); "
            f"give it a last layer of {num_outputs}"
        )
    return copied
