"""Training of one method on the rows of one split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.compare.method_facts import TUNED_WITHOUT_TRAINING
from bayesify.compare.splits import thinned
from bayesify.compare.tuning import BASELINES, PRIOR_SCALE, TEMPERATURE, effort, method_of
from bayesify.datasets.scaling import Standardization
from bayesify.likelihoods import Categorical, Gaussian, Likelihood
from bayesify.predictive.base import Predictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.running.generators import own_generators
from bayesify.sklearn.rows import BATCH_SIZE, FULL_BATCH, Rows, standardization
from bayesify.sklearn.settling import ROUND_EFFORT, ROUNDS, settle
from bayesify.sklearn.training import Plan, limit_scaling, make_network, predict, train_several
from bayesify.sklearn.units import UnitsPredictive
from bayesify.training.random_streams import derive_seed

HIDDEN = (50,)
"""Units of the network's hidden layer, with tanh."""
PREDICTION_DRAWS = 100
FAILURES = (ArithmeticError, RuntimeError, ValueError)
"""What training that diverges or does not suit the data raises."""


@dataclass(frozen=True)
class Data:
    """Rows of one split as a network takes them, with the units of the rows that are trained on.

    Args:
        x: Inputs of the rows to train on, in their own units, [N, D].
        y: Targets, [N] numbers or positions of classes.
        num_classes: 0 for a regression.
    """

    x: np.ndarray
    y: np.ndarray
    num_classes: int

    @property
    def x_units(self) -> Standardization:
        """Shift and scale of the inputs."""
        return standardization(self.x, np.ones(len(self.x)))

    @property
    def y_units(self) -> Standardization:
        """Shift and scale of a regression's targets."""
        return standardization(self.y[:, None], np.ones(len(self.y)))

    @property
    def num_outputs(self) -> int:
        """Outputs of the network."""
        return self.num_classes or 1

    def rows(self, x: np.ndarray, y: np.ndarray) -> Rows:
        """Rows of the table in standardized units."""
        return Rows(self.x_units(x), y if self.num_classes else self.y_units(y[:, None]), np.ones(len(x)))

    def thinned(self, most: int, seed: int) -> Data:
        """At most N of the rows, chosen at random."""
        chosen = thinned(len(self.x), most, seed)
        return Data(self.x[chosen], self.y[chosen], self.num_classes)


@dataclass(frozen=True)
class Trained:
    """A model with the units that it was trained in.

    Args:
        model: Something with `predict`.
        data: What it was trained on.
        seed: Of its draws.
        num_draws: Of a prediction.
    """

    model: Any
    data: Data
    seed: int
    num_draws: int

    def __call__(self, x: np.ndarray) -> Predictive:
        """The predictive distribution of rows in the units of the table."""
        with own_generators(seed=derive_seed(self.seed, "prediction")), torch.no_grad():
            inputs = torch.from_numpy(self.data.x_units(x))
            found = predict(self.model, inputs, self.num_draws, derive_seed(self.seed, "draws"))
        if not isinstance(found, RegressionPredictive):
            return found
        units = self.data.y_units
        return UnitsPredictive(found, torch.from_numpy(units.mean[0]), torch.from_numpy(units.std[0]))


def noise_of(data: Data, *, quick: bool, seed: int) -> float:
    """Noise variance of standardized targets, at most, by the evidence of the plain network; see `sklearn.settling.settle`."""
    net = make_network(data.x.shape[1], HIDDEN, "tanh", 1, derive_seed(seed, "network"))
    with own_generators(seed=derive_seed(seed, "noise")):
        plan = _plan("point", len(data.x), quick, seed, {}, False)
        all_rounds = ROUNDS * ROUND_EFFORT  # together as long as methods train, which start at the network too
        shorter = replace(plan, epochs=math.ceil(plan.count_epochs(1) / all_rounds))
        likelihood = settle(net, data.rows(data.x, data.y), shorter).likelihood
        assert isinstance(likelihood, Gaussian)
        return float(likelihood.noise.detach())


@dataclass(frozen=True)
class Case:
    """What a method is trained on.

    Args:
        data: To train on.
        noise: From `noise_of`; `None` for a classification.
        validation: Inputs and targets of validation rows, for what is fitted without training again.
        seed: Of network, training and draws; the same for all methods, so that they start from the same network.
    """

    data: Data
    noise: float | None
    validation: tuple[np.ndarray, np.ndarray]
    seed: int


def train_models(
    name: str, cases: Sequence[Case], choices: Sequence[Mapping[str, Any]], *, quick: bool, tuning: bool = False
) -> list[Trained | Exception]:
    """Train a method on several cases: together as far as it can be where networks are of one size, with the same results.

    Args:
        name: From the registry, or the temperature-scaled baseline.
        cases: Each with its rows, noise and seed.
        choices: Of each case, from `tuning.candidates`.
        quick: How much work to do.
        tuning: Whether this is a try, with fewer steps.

    Returns:
        For each case what was trained, or what went wrong.
    """
    groups: dict[Any, list[int]] = {}
    for place, (case, choice) in enumerate(zip(cases, choices, strict=True)):
        alike = case.data.x.shape[1], repr(choice["options"])
        groups.setdefault(alike, []).append(place)
    found: dict[int, Trained | Exception] = {}
    for places in groups.values():
        try:
            models = _train(name, [(cases[place], choices[place]) for place in places], quick, tuning)
            found |= dict(zip(places, models, strict=True))
        except FAILURES as error:
            for place in places:
                found[place] = error
                if len(places) > 1:
                    alone = train_models(name, [cases[place]], [choices[place]], quick=quick, tuning=tuning)
                    found[place] = alone[0]
    return [found[place] for place in range(len(cases))]


def _train(name: str, entries: Sequence[tuple[Case, Mapping[str, Any]]], quick: bool, tuning: bool) -> list[Trained]:
    method, problems, datas = method_of(name), [], []
    for case, choice in entries:
        data, seed = case.data, case.seed
        if method.is_chain:
            data = data.thinned(effort(quick).chain_rows, derive_seed(seed, "chain"))
        net = make_network(data.x.shape[1], HIDDEN, "tanh", data.num_outputs, derive_seed(seed, "network"))
        likelihood: Likelihood = Categorical()
        if case.noise is not None:
            likelihood = Gaussian(case.noise * choice["noise_factor"]).double()
        plan = _plan(name, len(data.x), quick, seed, choice, tuning)
        problems.append((net, likelihood, data.rows(data.x, data.y), plan))
        datas.append(data)
    made = train_several(*map(list, zip(*problems, strict=True)))
    trained = []
    for (case, _), model, data in zip(entries, made, datas, strict=True):
        batch = data.rows(*case.validation).tensors()[:2]
        if name in TUNED_WITHOUT_TRAINING and not tuning:
            model.tune_prior_precision([batch])
        if name == TEMPERATURE and not tuning:
            model = limit_scaling(TemperatureScaling(model).fit([batch], num_draws=1))
        trained.append(Trained(model, data, case.seed, PREDICTION_DRAWS))
    return trained


def _plan(name: str, rows: int, quick: bool, seed: int, choice: Mapping[str, Any], tuning: bool) -> Plan:
    amount, method = effort(quick), method_of(name)
    in_full, in_tuning = (
        (amount.slow_steps, amount.slow_tuning_steps) if method.slow else (amount.steps, amount.tuning_steps)
    )
    steps = in_tuning if tuning else in_full
    batches = 1 if rows <= FULL_BATCH else -(-rows // BATCH_SIZE)
    least = amount.least_epochs // 4 if tuning else amount.least_epochs
    epochs = max(-(-steps // batches), min(steps, least))
    if method.is_chain:
        epochs = amount.chain_steps
    options, scale = dict(choice.get("options", {})), float(choice.get("prior_scale", PRIOR_SCALE))
    batch_size, num_draws = rows if method.is_chain else None, 1 if name in BASELINES else amount.num_draws
    return Plan(method, options, scale, epochs, None, batch_size, num_draws, seed)
