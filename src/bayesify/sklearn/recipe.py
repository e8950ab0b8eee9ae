"""The default of the estimators: networks that each hold out a part of the rows, with a distribution that fits the row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.conversion import bayesianize
from bayesify.likelihoods import REGISTRY, Categorical, Gaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Point
from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictive.transformed import TargetTransform
from bayesify.priors import Neal
from bayesify.sklearn.recalibration import Recalibration, ensemble_places
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.scores import LEVELS as LEVELS_OF_SCORES
from bayesify.sklearn.scores import Scores
from bayesify.sklearn.training import make_network
from bayesify.sklearn.units import TRANSFORMS, UnitsPredictive
from bayesify.training.hold_out import make_folds, train_held_out
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack

MEMBERS = 5
DROPOUT_OF_CLASSES = 0.1
"""Networks of numbers have none: on tables with little noise it costs up to half of the CRPS, elsewhere it changes nothing."""
HIDDEN, HIDDEN_OF_MANY, MANY = (64, 64), (128, 128), 1_500
BATCH, BATCH_OF_MANY = 128, 256
"""Units of the hidden layers and rows of a batch, and those for more rows than `MANY`."""
ACTIVATION, ACTIVATION_OF_CLASSES = "silu_relu", "silu"
ROWS_TO_CHOOSE, FOLDS_TO_CHOOSE, STEPS_TO_CHOOSE, PATIENCE_TO_CHOOSE = 1_500, 2, 300, 5
"""What transform and likelihood are chosen by: rows at most, how many of the folds are predicted, steps at most, patience."""
FEW_TO_STOP_BY = 250
"""Rows up to which those that a member holds out look better than they are, since it stopped where it predicts them best; they are
predicted at the step that other ones are predicted best at."""
STEPS, PATIENCE = 2_000, 15
"""Steps at most, and looks at the rows held out without a better one after which training ends."""
LEARNING_RATE, LEARNING_RATE_OF_CLASSES = 7e-3, 5e-3
WIDER = 5.0
"""The factor by which the members' prior is wider than that of methods by name: each stops by the rows that it holds out, and the
narrow prior costs 15 % of the CRPS on tables with little noise."""
LEVELS = tuple(level / 20 for level in range(1, 20))
"""Probabilities whose quantiles the CRPS is made of."""
COUNTS = ("negative_binomial", "poisson")
"""Likelihoods of whole numbers from 0 on."""
SMALL_COUNT = 10
"""A tenth of the targets lie at or below it where they are tried; larger whole numbers are as good as real ones."""
FROM_THE_NETWORK: dict[str, dict[str, Any]] = {"student_t": {"scale": None}, "negative_binomial": {"dispersion": None}}
"""Arguments with which a likelihood's spread depends on the row."""
NUMBER_LIKELIHOODS = tuple(name for name, kind in REGISTRY.items() if kind.task == "regression")
DEFAULT_LIKELIHOOD = "heteroscedastic_gaussian"
REAL_LIKELIHOODS = {
    DEFAULT_LIKELIHOOD: ("none", "log", "log1p", "sqrt"),
    "student_t": ("none", "log", "log1p"),
    "quantiles": ("none",),
}
"""Among which out-of-fold predictions choose, with the transforms that each is tried with."""
WORTH = 0.005
"""Share by which a score must be better to give up the simpler choice."""


@dataclass(frozen=True)
class Settings:
    """What an estimator's parameters say about its members.

    Args:
        hidden: Units of each hidden layer; by the number of rows by default.
        activation: Of the hidden layers; by the task by default.
        dropout: Share of the hidden units that a step leaves out.
        prior_scale: Of the `Neal` prior.
        members: K networks, each of which holds out another Kth of the rows.
        steps: Of the optimizer, at most.
        patience: Looks at the rows held out without a better one after which training ends.
        learning_rate: At the first step; by the task by default.
        batch_size: Rows of each member in a step; by the number of rows by default.
        noise: Variance of the targets' noise, in their squared unit, where it is known.
        seed: Of everything random.
        progress: Whether to show a progress bar.
    """

    hidden: tuple[int, ...] | None = None
    activation: str | None = None
    dropout: float = 0.0
    prior_scale: float = 2.0
    members: int = MEMBERS
    steps: int = STEPS
    patience: int = PATIENCE
    learning_rate: float | None = None
    batch_size: int = 0
    noise: float | None = None
    seed: int = 0
    progress: bool = False

    def suited(self, num_rows: int, classes: bool = False) -> Settings:
        """With what suits a task and a number of rows where nothing is given."""
        hidden, batch = (HIDDEN, BATCH) if num_rows <= MANY else (HIDDEN_OF_MANY, BATCH_OF_MANY)
        return replace(
            self,
            hidden=hidden if self.hidden is None else self.hidden,
            activation=self.activation or (ACTIVATION_OF_CLASSES if classes else ACTIVATION),
            dropout=DROPOUT_OF_CLASSES if classes else 0.0,
            learning_rate=self.learning_rate or (LEARNING_RATE_OF_CLASSES if classes else LEARNING_RATE),
            batch_size=self.batch_size or batch,
        )

    def network(self, num_inputs: int, num_outputs: int, member: int = 0) -> nn.Module:
        """The network of a member before training."""
        seed = derive_seed(self.seed, "network", member)
        activation = self.activation or ACTIVATION
        return make_network(num_inputs, self.hidden or (), activation, num_outputs, seed, self.dropout).float()

    def folds(self, rows: Rows, labels: np.ndarray | None = None) -> np.ndarray:
        """The member that holds out each row, [N]."""
        return make_folds(len(rows), min(self.members, len(rows)), derive_seed(self.seed, "folds"), labels)


@dataclass(frozen=True)
class Fitted:
    """What the recipe leaves.

    Args:
        model: A network whose members are the ensemble.
        likelihood: Name of the likelihood.
        transform: Name of the targets' transform; `"none"` for classes.
        shift: Of transformed targets, [O].
        scale: Of transformed targets, [O].
        recalibration: Of the probabilities.
        floor: Below which no quantile lies.
        score: Out of fold, each row by the member that has not seen it: CRPS in the targets' unit, or log-loss.
        scores: The same of each choice that was tried, on fewer rows.
        out_of_fold: All scores of rows by the member that has not seen them, recalibrated on the others; see `Scores.means`. Empty
            for several targets.
        steps: At which each member was best.
        hidden: Units of each hidden layer.
        activation: Of the hidden layers.
        dropout: Between them.
        num_outputs: Of the network.
    """

    model: BayesianNetwork
    likelihood: str
    transform: str = "none"
    shift: Tensor = field(default_factory=lambda: torch.zeros(1))
    scale: Tensor = field(default_factory=lambda: torch.ones(1))
    recalibration: Recalibration = field(default_factory=Recalibration)
    floor: float = -math.inf
    score: float = math.nan
    scores: Mapping[str, float] = field(default_factory=dict)
    out_of_fold: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    hidden: tuple[int, ...] = HIDDEN
    activation: str = ACTIVATION
    dropout: float = 0.0
    num_outputs: int = 1

    def config(self) -> dict[str, Any]:
        """Everything but the model as plain data."""
        plain = ("likelihood", "transform", "score", "steps", "hidden", "activation", "dropout", "num_outputs")
        return {
            **{key: getattr(self, key) for key in plain},
            "shift": self.shift.tolist(),
            "scale": self.scale.tolist(),
            "recalibration": self.recalibration.config(),
            "floor": None if self.floor == -math.inf else self.floor,
            "scores": dict(self.scores),
            "out_of_fold": dict(self.out_of_fold),
        }

    @classmethod
    def restore(
        cls, config: Mapping[str, Any], num_inputs: int, stored: Mapping[str, Any], state: dict[str, Tensor]
    ) -> Fitted:
        """From `config`, with the model's own configuration and tensors."""
        given = dict(config)
        hidden, num_outputs = tuple(int(width) for width in given["hidden"]), int(given["num_outputs"])
        net = make_network(
            num_inputs, hidden, str(given["activation"]), num_outputs, 0, float(given["dropout"])
        ).float()
        given |= {
            "hidden": hidden,
            "shift": torch.tensor(given["shift"], dtype=torch.float64),
            "scale": torch.tensor(given["scale"], dtype=torch.float64),
            "recalibration": Recalibration.restore(given["recalibration"]),
            "floor": -math.inf if given["floor"] is None else float(given["floor"]),
        }
        if given["transform"] not in TRANSFORMS:
            raise ValueError(f"transform {given['transform']!r} is unknown")
        return cls(BayesianNetwork.restore(net, stored, state).eval(), **given)


def make_likelihood(name: str) -> Likelihood:
    """A likelihood by name, with a spread that depends on the row where it has one."""
    return REGISTRY[name](**FROM_THE_NETWORK.get(name, {}))


# -- classes -----------------------------------------------------------------------------------------------------------


def fit_classes(rows: Rows, num_classes: int, settings: Settings) -> Fitted:
    """Members with a softmax.

    Args:
        rows: Encoded inputs, and positions of classes.
        num_classes: C.
        settings: The rest.
    """
    settings, y = settings.suited(len(rows), classes=True), torch.from_numpy(rows.y)
    trained = _train(rows, [y], settings.folds(rows, rows.y), [Categorical()], num_classes, settings, settings.members)
    found = Categorical().predictive(Outputs(kept=trained.outputs[0]))
    probs, labels = found.class_probs.double().numpy(), [str(code) for code in range(num_classes)]
    scores = Scores.of_classes(probs, labels, rows.y, LEVELS_OF_SCORES, rows.weights).means()
    return Fitted(
        trained.members.as_ensemble(),
        "categorical",
        score=scores["log_loss"],
        out_of_fold=scores,
        steps=trained.steps,
        hidden=settings.hidden or (),
        activation=settings.activation or ACTIVATION,
        dropout=settings.dropout,
        num_outputs=num_classes,
    )


# -- numbers -----------------------------------------------------------------------------------------------------------


def fit_numbers(rows: Rows, likelihood: str, transform: str, settings: Settings) -> Fitted:
    """Members with the likelihood and transform that predict rows best that they have not seen, recalibrated on these.

    Args:
        rows: Encoded inputs, and targets [N, O] in their own units.
        likelihood: A name, or `"auto"`.
        transform: A key of `TRANSFORMS`, or `"auto"`.
        settings: The rest.
    """
    given, settings = settings, settings.suited(len(rows))
    pairs = _candidates(rows.y, likelihood, transform) if settings.noise is None else [("gaussian", "none")]
    scores: dict[tuple[str, str], float] = {}
    best = pairs[0]
    if len(pairs) > 1:
        part = rows.thinned(ROWS_TO_CHOOSE, derive_seed(settings.seed, "choose"))
        steps = min(STEPS_TO_CHOOSE, settings.steps)
        short = replace(given.suited(len(part)), steps=steps, patience=PATIENCE_TO_CHOOSE)
        found = _train_numbers(part, pairs, short, FOLDS_TO_CHOOSE)
        scores = {pair: one.score for pair, one in zip(pairs, found, strict=True)}
        best = min(scores, key=scores.__getitem__)
        if scores[best] > (1 - WORTH) * scores[pairs[0]]:
            best = pairs[0]
    tried = {f"{name}, {other}": score for (name, other), score in scores.items()}
    return _train_numbers(rows, [best], settings, settings.members)[0].finished(rows, *best, settings, tried)


def _candidates(y: np.ndarray, likelihood: str, transform: str) -> list[tuple[str, str]]:
    """Pairs of likelihood and transform that can be, the simplest first."""
    whole = y.shape[1] == 1 and bool((y >= 0).all() and (y == np.round(y)).all() and np.quantile(y, 0.1) <= SMALL_COUNT)
    if transform != "auto":
        transforms = [transform]
    else:
        possible = [name for name in TRANSFORMS if TargetTransform.takes(name, torch.from_numpy(y))]
        transforms = possible if y.shape[1] == 1 else ["none"]
        if "log" in transforms:
            transforms.remove("log1p")
    if likelihood != "auto":
        return [(likelihood, other) for other in (["none"] if likelihood in COUNTS else transforms)]
    pairs = [
        (name, other)
        for name, tried in REAL_LIKELIHOODS.items()
        for other in transforms
        if other in tried or transform != "auto"
    ]
    return pairs + [(name, "none") for name in COUNTS if whole and transform in ("auto", "none")]


@dataclass(frozen=True)
class _Trained:
    """Trained members: networks of each likelihood, and outputs of the rows that each has not seen.

    Args:
        members: The networks.
        every: Outputs of all K networks of each likelihood for all rows, [K, N, outputs].
        outputs: One [1, N, outputs] for each likelihood; 0 for rows that nobody has held out.
        steps: At which each network was best.
    """

    members: ModelStack
    every: list[Tensor]
    outputs: list[Tensor]
    steps: tuple[int, ...]


def _train(
    rows: Rows,
    targets: Sequence[Tensor],
    folds: np.ndarray,
    likelihoods: Sequence[Likelihood],
    num_outputs: int,
    settings: Settings,
    used: int,
    starts: Sequence[Tensor | None] = (None,),
) -> _Trained:
    """Members that hold out the first `used` folds, for each of some likelihoods with targets of the same rows, all at once."""
    count = min(int(folds.max()) + 1, used)
    nets = [settings.network(rows.x.shape[1], num_outputs, member) for _ in targets for member in range(count)]
    for index, net in enumerate(nets):
        start = starts[index // count]
        if start is not None:
            with torch.no_grad():
                net[-1].bias[: len(start)] = start  # type: ignore[index]
    scale = WIDER * settings.prior_scale
    points = [bayesianize(net, Point(), prior=Neal(scale)) for net in nets]
    members = ModelStack(points, likelihoods=[likelihood.float() for likelihood in likelihoods])
    x, own = torch.from_numpy(rows.x), np.arange(count)[:, None] == folds[None]
    held = np.concatenate([own] * len(targets))
    steps, judged = train_held_out(
        members,
        x,
        torch.stack([target for target in targets for _ in range(count)]),
        held,
        weights=torch.from_numpy(rows.weights),
        batch_size=settings.batch_size,
        max_steps=settings.steps,
        patience=settings.patience,
        learning_rate=settings.learning_rate or LEARNING_RATE,
        seed=settings.seed,
        progress=settings.progress,
        halves=len(rows) <= FEW_TO_STOP_BY,
    )
    with torch.no_grad():
        every = members(x.expand(len(nets), -1, -1))
        if judged is not None:
            every = torch.where(torch.from_numpy(held).unsqueeze(-1), judged, every)
        every = every.unflatten(0, (len(targets), count))  # [G, K, N, outputs]
    mine = torch.from_numpy(own).unsqueeze(-1).to(every)
    outputs = [(mine * group).sum(0, keepdim=True) for group in every]
    return _Trained(members, list(every), outputs, tuple(int(step) for step in steps))


@dataclass(frozen=True)
class _Numbers:
    """Members of a regression, with the out-of-fold predictive and its score."""

    trained: _Trained
    group: int
    predictive: UnitsPredictive
    shift: Tensor
    scale: Tensor
    score: float

    def finished(
        self, rows: Rows, likelihood: str, transform: str, settings: Settings, scores: Mapping[str, float]
    ) -> Fitted:
        """With probabilities recalibrated on the rows, and the members as one network."""
        y = torch.from_numpy(rows.y)
        u = self.predictive.cdf(y)
        if likelihood in COUNTS:  # what a whole number leaves open is drawn
            generator = torch.Generator().manual_seed(derive_seed(settings.seed, "ties"))
            below = self.predictive.cdf((y - 1).clamp_min(0)) * (y > 0)
            u = below + (u - below) * torch.rand(u.shape, generator=generator, dtype=u.dtype)
        folds = settings.folds(rows)
        single = y.shape[1] == 1 and settings.noise is None
        recalibration = Recalibration.of(u[:, 0].numpy(), rows.weights) if single else Recalibration()
        if single and likelihood not in COUNTS and len(self.trained.every[self.group]) > 2:
            z = TargetTransform.scaled(transform, self.shift, self.scale).forward(y)
            trained, likelihood_of = self.trained, self.trained.members.likelihoods[self.group]
            places = ensemble_places(likelihood_of, trained.every[self.group], folds, z, rows.weights)
            recalibration = Recalibration.of(places, rows.weights)
        least = float(rows.y.min())
        floor = -math.inf if least < 0 or y.shape[1] > 1 else 0.5 * least
        found = Scores()
        for fold in range(int(folds.max()) + 1) if y.shape[1] == 1 else ():
            own, others = folds == fold, folds != fold
            map_of_others = Recalibration.of(u[others, 0].numpy(), rows.weights[others]) if single else None
            part = self.predictive.of_rows(torch.from_numpy(np.flatnonzero(own)), map_of_others, floor)
            found += Scores.of_numbers(part, rows.y[own, 0], LEVELS_OF_SCORES, rows.weights[own])
        return Fitted(
            self.trained.members.as_ensemble(self.group),
            likelihood,
            transform,
            self.shift,
            self.scale,
            recalibration,
            floor,
            self.score,
            scores,
            found.means(),
            self.trained.steps,
            settings.hidden or (),
            settings.activation or ACTIVATION,
            settings.dropout,
            self.trained.outputs[self.group].shape[-1],
        )


def _train_numbers(rows: Rows, pairs: Sequence[tuple[str, str]], settings: Settings, used: int) -> list[_Numbers]:
    """Members of each likelihood and transform, all trained at once; `used` of the folds are predicted."""
    y = torch.from_numpy(rows.y)
    weights = torch.from_numpy(rows.weights / rows.weights.sum()).unsqueeze(1)
    units: list[tuple[Tensor, Tensor]] = []
    targets, starts, likelihoods = [], [], []
    for likelihood, transform in pairs:
        one = torch.ones(y.shape[1], dtype=y.dtype)
        t = TargetTransform.scaled(transform, 0 * one, one).forward(y)
        shift = (weights * t).sum(0)
        scale = (weights * (t - shift).square()).sum(0).sqrt()
        scale = torch.where(scale > 1e-12 * shift.abs(), scale, torch.ones_like(scale))
        start = None
        if likelihood in COUNTS:
            start = shift.clamp_min(1e-2).log().float()
            shift, scale = torch.zeros_like(shift), torch.ones_like(scale)
        noise = settings.noise
        likelihoods.append(
            make_likelihood(likelihood) if noise is None else Gaussian((noise / scale.square()).tolist(), learn=False)
        )
        units.append((shift, scale))
        starts.append(start)
        targets.append(((t - shift) / scale).float())
    num_outputs = y.shape[1] * max(likelihood.outputs_per_target for likelihood in likelihoods)
    folds = settings.folds(rows)
    trained = _train(rows, targets, folds, likelihoods, num_outputs, settings, used, starts)
    seen = torch.from_numpy(folds < used)
    found = []
    for group, ((_, transform), own, (shift, scale)) in enumerate(zip(pairs, likelihoods, units, strict=True)):
        outputs = trained.outputs[group][:, seen, : y.shape[1] * own.outputs_per_target]
        predictive = own.predictive(Outputs(kept=outputs))
        assert isinstance(predictive, RegressionPredictive)
        made = UnitsPredictive(predictive, shift, scale, transform)
        score = pinball(made, y[seen], rows.weights[folds < used])
        found.append(_Numbers(trained, group, made, shift, scale, score))
    return found


def pinball(predictive: RegressionPredictive, y: Tensor, weights: np.ndarray) -> float:
    """CRPS by 19 quantiles, a weighted mean over rows; summed over targets."""
    error = y - predictive.quantile(list(LEVELS))  # [Q, N, O]
    level = torch.tensor(LEVELS, dtype=error.dtype).view(-1, 1, 1)
    loss = 2 * torch.maximum(level * error, (level - 1) * error).mean(0).sum(-1)
    return float(np.average(loss.numpy(), weights=weights))
