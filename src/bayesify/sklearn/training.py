"""Training of named methods, on one table or on several tables at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.conversion import bayesianize
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Point
from bayesify.predictor import Predictor
from bayesify.running.generators import own_generators
from bayesify.sklearn.rows import Rows, stacked
from bayesify.sklearn.settings import FULL_BATCH_ROWS, Settings
from bayesify.training.arguments import Steps
from bayesify.training.fitting import fit
from bayesify.training.hold_out import make_folds
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack
from bayesify.training.task import TrainingTask, search_point

LEARNING_RATE = 0.03
NUM_FOLDS, NUM_FOLDS_OF_FEW, MAX_FEW_ROWS = 3, 6, 200
"""Number of folds for recalibration and for fitting a temperature; each fold is predicted by a model that was trained on the
other folds. With at most `MAX_FEW_ROWS` rows there are more folds. If the data do not fit into one batch, or if the method is a
Markov chain, only one of `NUM_FOLDS` folds is predicted, because the models would train one after the other."""
NUM_INDUCING_ROWS = 100
"""Default number of global inducing inputs; each starts at a row of the data."""
MAX_SCALING = 5.0
"""Upper limit of the fitted factor on logits or standard deviations; the lower limit is its reciprocal."""
Fold = tuple[int, int]
"""Index of a fold, and the number of folds."""


@dataclass(frozen=True)
class Start:
    """The starting point of a named method.

    Args:
        network: Network in float64.
        likelihood: Likelihood p(y | outputs), in the units of training. If the noise is learned, its initial value is an upper
            bound. Variational posteriors learn a smaller value. All other methods use the initial noise unchanged.
        rows: Encoded rows, with targets in the units of training.
        settings: Settings of the method and its training.
        leverage: Leverage h of each row from which the noise was estimated, [N, O], between 0 and 1: the change of the row's
            prediction per unit change of the row's own target. `None` if the noise was not estimated.
    """

    network: nn.Module
    likelihood: Likelihood
    rows: Rows
    settings: Settings
    leverage: Tensor | None = None

    @property
    def fixed_likelihood(self) -> Likelihood:
        """The likelihood with fixed noise. If a point estimate learned the noise, the noise would shrink to the residuals of a
        network that fits every row."""
        if not isinstance(self.likelihood, Gaussian):
            return self.likelihood
        return Gaussian(self.likelihood.noise.detach().tolist(), learn=False).double()

    def folds(self) -> list[Fold]:
        """The folds that are to be predicted."""
        few, is_chain = len(self.rows) <= MAX_FEW_ROWS, _method(self).is_chain
        count = min(NUM_FOLDS_OF_FEW if few and not is_chain else NUM_FOLDS, len(self.rows))
        return [(index, count) for index in range(1 if is_chain or len(self.rows) > FULL_BATCH_ROWS else count)]

    def holds_out(self, fold: Fold | None) -> np.ndarray:
        """For each row, whether it is in a fold, [N]."""
        if fold is None:
            return np.zeros(len(self.rows), dtype=bool)
        (index, count), seed = fold, derive_seed(self.settings.seed, "folds")
        if self.settings.temperature:  # spread the classes evenly over the folds
            of_row = make_folds(len(self.rows), count, seed, self.rows.y if self.settings.num_classes else None)
        else:  # `partial_fit` must find the old rows in their old folds
            of_row = self.rows.folds(count, seed)
        held: np.ndarray = of_row == index
        return held

    def without(self, fold: Fold | None) -> Start:
        """The start of a training run without the rows of a fold, with as many steps per epoch as with these rows."""
        if fold is None:
            return self
        rows, num_batches = self.rows[~self.holds_out(fold)], len(self.settings.batches(self.rows))
        size = self.settings.batch_size if num_batches == 1 else max(1, math.ceil(len(rows) / num_batches))
        return replace(self, rows=rows, settings=replace(self.settings, batch_size=size))

    def point(self) -> BayesianNetwork:
        """The untrained network from which the search for the maximum a posteriori starts."""
        return bayesianize(self.network, Point(), likelihood=self.fixed_likelihood, prior=self.settings.prior)

    def task(self, point: BayesianNetwork | None = None) -> TrainingTask:
        """The training task of a method that has its own training recipe."""
        batches = self.settings.batches(self.rows)
        return TrainingTask(
            self.network,
            self.fixed_likelihood,
            batches,
            prior=self.settings.prior,
            num_data=len(self.rows),  # weights are not scaled, so the data term of all batches is a weighted sum
            epochs=self.settings.count_epochs(len(batches)),
            seed=self.settings.seed,
            point=point,
        )


def _method(start: Start) -> Any:
    assert start.settings.method is not None
    return start.settings.method


def train_methods(starts: Sequence[Start]) -> list[Predictor]:
    """Train one method on several tables, from networks of one architecture. The results are the same as from separate training
    runs.

    The posteriors of all tables train together as a `ModelStack`; so do deep Gaussian processes, and the maximum a posteriori
    networks from which other methods start. All other methods train on one table after the other. The settings may differ only in
    seeds and priors.
    """
    method, settings = _method(starts[0]), starts[0].settings
    if method.fit is None:
        bnns = [_seeded(start.settings, make_bayesian, start) for start in starts]
        for bnn in bnns:
            if not all(part.starts_at_network for part in bnn.posteriors):
                bnn.given_weights = {}  # `fit` would warn of a network that the user did not give
        settled = all(start.leverage is not None for start in starts)
        train_posteriors(bnns, [start.rows for start in starts], [start.settings for start in starts],
                         start=not (method.is_point or settled))  # fmt: skip
        return bnns
    alike = len(starts) > 1 and len(_shapes([start.network for start in starts])) == 1
    alike = alike and not _has_state(starts[0].network)
    alone = not alike or any(len(start.settings.batches(start.rows)) > 1 for start in starts)
    if not alone and method.make is not None:
        found = _train_stack(starts)
        if found is not None:
            return found
    points: list[BayesianNetwork | None] = [None] * len(starts)
    if not alone and method.starts_at_point:
        stack, batch = ModelStack([start.point() for start in starts]), stacked([start.rows for start in starts])
        search_point(stack, [batch], num_data=len(batch), epochs=settings.count_epochs(1), seed=settings.seed)
        points = stack.unstack()
    return [_seeded(start.settings, _train_one, start, point) for start, point in zip(starts, points, strict=True)]


def _train_one(start: Start, point: BayesianNetwork | None) -> Predictor:
    method, settings = _method(start), start.settings
    more = {"num_draws": settings.step_draws} if method.draws_in_steps else {}
    found: Predictor = method.fit(start.task(point), **{**more, **method.options, **settings.options})
    return found


def _train_stack(starts: Sequence[Start]) -> list[Predictor] | None:
    """Train several models together with `fit`. The result is `None` if the models differ in size. Models can differ in size
    because small tables limit the number of inducing points."""
    method, settings = _method(starts[0]), starts[0].settings
    options = {**method.options, **settings.options}
    rate = options.pop("learning_rate")
    models = [_seeded(start.settings, method.make, start.task(), **options) for start in starts]
    if len(_shapes(models)) > 1:
        return None
    batch = stacked([start.rows for start in starts])
    stack = ModelStack(models, seeds=[derive_seed(start.settings.seed, "draws", 0) for start in starts])
    fit(stack, [batch], epochs=settings.count_epochs(1), learning_rate=rate, num_draws=settings.step_draws, progress=False,
        num_data=len(batch), seed=settings.seed)  # fmt: skip
    return list(stack.unstack())


def _seeded(settings: Settings, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call a function after seeding the global generator with the seed of the settings."""
    with own_generators(seed=derive_seed(settings.seed, "training")):
        return function(*given, **more)


def make_bayesian(start: Start) -> BayesianNetwork:
    """The untrained Bayesian network of a method that is a posterior."""
    method, settings = _method(start), start.settings
    options = {**method.options, **settings.options}
    likelihood = start.likelihood if method.learns_noise else start.fixed_likelihood
    if method.starts_at_rows is not None:
        count = settings.options.get(method.starts_at_rows, NUM_INDUCING_ROWS)
        if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
            # Start the inducing inputs at rows of the data, because standard normal numbers may be far from all rows.
            seed = derive_seed(settings.seed, "inducing inputs")
            count = torch.from_numpy(start.rows.thinned(count, seed).x)
        options[method.starts_at_rows] = count
    return bayesianize(start.network, method.posterior(**options), likelihood=likelihood, prior=settings.prior)


# -- posteriors --------------------------------------------------------------------------------------------------------


def train_posteriors(
    bnns: Sequence[BayesianNetwork],
    rows: Sequence[Rows],
    settings: Sequence[Settings],
    *,
    effort: float = 1.0,
    start: bool = True,
) -> None:
    r"""Maximize the evidence lower bound of each network's weighted rows.

    $$ \sum_n \omega_n \mathbb{E}_q \log p(y_n | f(x_n)) - \mathrm{KL}(q \| p) $$

    Networks whose rows fit into one batch train together, each with the random numbers that it would have in a separate training
    run; see `ModelStack`. The noise variance is capped at its initial value. Otherwise, on few rows, a factorized posterior
    attributes all target variance to noise.

    Args:
        bnns: Networks of one architecture, changed in place.
        rows: Rows of each network, with weights $\omega$.
        settings: Settings of each network; they differ only in seeds, priors and options of the posterior.
        effort: Number of epochs as a share of the usual number.
        start: Whether a first phase, with a quarter as many epochs, trains the posterior's mean to the maximum a posteriori. This
            phase keeps the noise fixed, because learned noise would shrink with the residuals.
    """
    one_batch = all(len(own.batches(part)) == 1 for own, part in zip(settings, rows, strict=True))
    if len(bnns) > 1 and len(_shapes(bnns)) == 1 and one_batch and not _has_state(bnns[0].network):
        seeds = [derive_seed(own.seed, "draws", 0) for own in settings]  # the seeds that `fit` uses
        stack, batch = ModelStack(bnns, seeds=seeds), stacked(rows)
        noises = [stack.stacked(name) for name, _ in _noise_parameters(bnns[0])]
        _train_phases(stack, [batch], noises, settings[0], effort, start, num_data=len(batch))
        stack.unstack()
        return
    for bnn, part, own in zip(bnns, rows, settings, strict=True):
        # `fit` takes the mean over rows, so the weights are scaled to mean 1, and the KL is divided by the number of examples
        # per row.
        share = len(part) / part.num_data
        batches = own.batches(Rows(part.x, part.y, part.weights * share))
        noises = [parameter for _, parameter in _noise_parameters(bnn)]
        with own_generators(seed=derive_seed(own.seed, "training")):
            _train_phases(bnn, batches, noises, own, effort, start, num_data=len(part), kl_weight=share)


def _has_state(network: nn.Module) -> bool:
    """Whether a network has buffers, such as the statistics of BatchNorm. In a stack, they would also see padding rows."""
    return next(network.buffers(), None) is not None


def _shapes(models: Sequence[nn.Module]) -> set[tuple[torch.Size, ...]]:
    return {tuple(parameter.shape for parameter in model.parameters()) for model in models}


def _train_phases(
    model: BayesianNetwork | ModelStack,
    batches: Any,
    noises: Sequence[Tensor],
    settings: Settings,
    effort: float,
    start: bool,
    **shares: Any,
) -> None:
    """The two phases of `train_posteriors`."""
    epochs = max(1, round(effort * settings.count_epochs(len(batches))))
    rate = settings.learning_rate or LEARNING_RATE
    shares |= {"learning_rate": rate, "seed": settings.seed, "progress": settings.progress}
    limits = [noise.detach().clone() for noise in noises]
    model.train()
    if start:
        for noise in noises:
            noise.requires_grad_(False)
        fit(model, batches, epochs=0, map_epochs=max(1, epochs // 4), **shares)
        for noise in noises:
            noise.requires_grad_(True)

    def cap(*_: object) -> None:
        with torch.no_grad():
            for noise, limit in zip(noises, limits, strict=True):
                noise.copy_(torch.minimum(noise, limit))

    total = epochs * len(batches)
    fit(
        model,
        batches,
        epochs=epochs,
        num_draws=max(settings.step_draws, model.training_draws),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        steps=Steps(scheduler="step"),
        callbacks=[cap],
        **shares,
    )
    model.eval()


def _noise_parameters(bnn: BayesianNetwork) -> list[tuple[str, nn.Parameter]]:
    found = ((name, entry) for name, entry in bnn.named_parameters() if name.startswith("likelihood."))
    return [(name, entry) for name, entry in found if entry.requires_grad]


# -- predictions of rows that a model has not seen ------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """A trained model of a named method, and the start of its training.

    Args:
        model: Trained model. It predicts in the units of training.
        network: Plain network from which the noise was estimated, or the untrained network if the noise was not estimated.
        likelihood: Likelihood with the estimated noise.
        fold: Fold whose rows the model has not seen; `None` if it has seen all rows.
    """

    model: Predictor
    network: nn.Module
    likelihood: Likelihood
    fold: Fold | None = None


def out_of_fold(settled: Sequence[Settled], start: Start) -> Iterator[tuple[Settled, Rows]]:
    """The models that have not seen all rows of `start`, each with the rows that it has not seen."""
    for part in settled:
        held = start.holds_out(part.fold)
        if held.any():
            yield part, start.rows[held]


def scale_temperature(settled: Sequence[Settled], start: Start) -> TemperatureScaling:
    """Give a plain network, which was trained on all rows, a temperature or a noise factor that is fitted to out-of-fold
    predictions. `settled` has this network first, followed by the networks of the folds."""
    found = list(out_of_fold(settled, start))
    outputs = torch.cat([part.model.predict(torch.from_numpy(rows.x)).outputs[0] for part, rows in found])
    held, own = Rows.of([rows for _, rows in found]), replace(start, likelihood=settled[0].likelihood)
    # A temperature depends only on the outputs, so the identity stands in for the network.
    same = nn.Linear(outputs.shape[1], outputs.shape[1], bias=False).to(outputs)
    nn.init.eye_(same.weight)
    batch = outputs, torch.from_numpy(held.y), torch.from_numpy(held.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `fit` warns about bounds that are wider than the bounds below
        fitted = TemperatureScaling(same, own.fixed_likelihood).fit([batch])
    scaled = TemperatureScaling(cast(BayesianNetwork, settled[0].model))
    # Clamp the temperature: if few rows are all predicted correctly, the fit diverges.
    scaled.temperature = min(max(fitted.temperature, 1 / MAX_SCALING), MAX_SCALING)
    scaled.variance_scale = min(max(fitted.variance_scale, 1 / MAX_SCALING**2), MAX_SCALING**2)
    return scaled
