"""The recipe for tables, from rows to a fitted method.

Every method takes the same steps: encode the inputs, list the possible likelihoods and transforms of the target, choose the
target's units, shape the network, train, recalibrate. The default method trains members that each hold out different rows. The
predictions of held-out rows choose likelihood and transform, decide when to stop, and recalibrate. A method by name trains on all
rows. It starts from the noise that maximizes the evidence of a plain network, and this evidence also recalibrates it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.conversion import bayesianize
from bayesify.likelihoods import REGISTRY, Categorical, Gaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Point
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictive.transformed import TargetTransform
from bayesify.predictor import Predictor
from bayesify.priors import Neal
from bayesify.running.generators import own_generators
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.fitted import FitReport, FittedTable, HeldOut, as_inputs, predict_scaled
from bayesify.sklearn.networks import NetworkShape, own_network
from bayesify.sklearn.recalibration import Recalibration, ensemble_places
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.scores import LEVELS, Scores
from bayesify.sklearn.settings import AUTO, EFFORTS, FULL_BATCH_ROWS, Settings
from bayesify.sklearn.settling import START_NOISE, recalibrate_by_leverage, settle, settle_further
from bayesify.sklearn.training import Start, scale_temperatures, train_methods, train_posteriors
from bayesify.sklearn.units import TRANSFORMS, TargetUnits
from bayesify.tables.encoding import Encoding
from bayesify.training.hold_out import StoppedSteps, make_folds, train_held_out
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack

# -- likelihoods, the one list ------------------------------------------------------------------------------------------

REAL_LIKELIHOODS = {
    "heteroscedastic_gaussian": ("none", "log", "log1p", "sqrt"),
    "student_t": ("none", "log", "log1p"),
    "quantiles": ("none",),
}
"""Likelihoods of numbers that the default method tries, simplest first, each with its transforms."""
COUNT_LIKELIHOODS = ("negative_binomial", "poisson")
"""Likelihoods of whole numbers of at least 0; their targets are not transformed."""
HURDLE = "hurdle"
"""Likelihood of amounts that are often exactly zero."""
UNSHIFTED_LIKELIHOODS = (*COUNT_LIKELIHOODS, HURDLE)
"""Likelihoods for which zero is special; their targets are neither shifted nor transformed."""
MIN_ZERO_SHARE, MIN_AMOUNTS = 0.05, 3
"""Minimum share of targets that are exactly 0, and minimum number of targets above 0, for which the hurdle is tried. It is then
the simplest choice, because the score of a trial hardly depends on amounts that one row in twenty has."""
MAX_SMALL_COUNT = 10
"""Counts are tried if a tenth of the targets above 0 are at most this large. Larger whole numbers behave like real numbers, and
amounts in whole units are not counts merely because many are zero."""
NUMBER_LIKELIHOODS = tuple(name for name, kind in REGISTRY.items() if kind.task == "regression")
Pair = tuple[str, str]
"""Names of a likelihood and a transform."""

# -- networks and training of the default method, and of methods by name --------------------------------------------------

NUM_MEMBERS = 5
HIDDEN, HIDDEN_OF_MANY, HIDDEN_BY_NAME = (64, 64), (128, 128), (50,)
MAX_ROWS_FOR_SMALL_NETWORKS = 1_500
MEMBER_BATCH_ROWS, MEMBER_BATCH_ROWS_OF_MANY = 128, 256
"""Units of the hidden layers, and rows of a batch: up to `MAX_ROWS_FOR_SMALL_NETWORKS` rows, above it, and for methods by name."""
ACTIVATION, ACTIVATION_OF_CLASSES, ACTIVATION_BY_NAME = "silu_relu", "silu", "tanh"
DROPOUT_OF_CLASSES = 0.1
"""Dropout of classifiers. Regression networks have none: on tables with little noise it costs up to half of the CRPS, and
otherwise it changes nothing."""
MEMBER_LEARNING_RATE, MEMBER_LEARNING_RATE_OF_CLASSES = 7e-3, 5e-3
MEMBER_PRIOR_FACTOR = 5.0
"""The members' prior is wider than the prior of methods by name by this factor. Held-out rows stop each member, and the narrow
prior costs 15 % of the CRPS on tables with little noise."""
CHECK_EVERY_STEPS, MEMBER_PATIENCE = 20, 15
"""Steps between two checks of the held-out rows, and number of checks without improvement after which training ends."""
MAX_TINY_ROWS, TINY_PACE, TINY_PATIENCE = 60, 3, 10
"""With at most this many rows, every step sees all rows, so that members tolerate a learning rate `TINY_PACE` times as high. They
take fewer steps by the same factor, in total and between checks, and stop after `TINY_PATIENCE` checks without improvement."""
MAX_ROWS_FOR_SPLIT_STOPPING = 250
"""With at most this many rows, early stopping makes a member's held-out scores optimistic. Each half is then predicted at the
step that was best for the other half."""
CHOICE_MAX_ROWS, CHOICE_FOLDS, CHOICE_MAX_STEPS, CHOICE_PATIENCE = 1_500, 2, 300, 5
"""Limits of the choice of likelihood and transform: maximum number of rows, number of predicted folds, maximum steps, patience."""
ENCODING_MAX_ROWS = 6_000
"""Maximum number of rows that choose the encoding of texts with many levels; fewer rows would leave levels with too few rows."""
MAX_MEAN_RATIO = 1.5
"""For targets of at least 0, tails count in means only up to this multiple of the largest target."""
MAX_TRIAL_RATIO, GOOD_CONSTANT_RATIO, MAX_CONSTANT_RATIO, MAX_CHOICES = 2.0, 0.75, 1.1, 2
"""A choice has failed if its final score exceeds the first multiple of the trial's score and the second multiple of the score
of a constant guess, or if it exceeds the third multiple of the latter. After `MAX_CHOICES` failures, the columns are not used."""
NOTHING = "nothing"
"""Encoding of networks without inputs, which predict one distribution for all rows."""
MIN_GAIN_SHARE = 0.005
"""A score must be better by this share to replace the simpler choice."""
PINBALL_LEVELS = tuple(level / 20 for level in range(1, 20))
"""Probabilities whose quantiles approximate the CRPS."""
LATER_EFFORT_SHARE = 0.25
"""Share of the epochs that a later call of `partial_fit` trains."""


@dataclass(frozen=True)
class TrainingTable:
    """Training data of an estimator.

    Args:
        rows: Inputs as numbers, and targets [N, O] in their own units or [N] indices of classes.
        classes: Labels, sorted; `None` for a regression.
        columns: Rules that turned a data frame into these inputs, if there was one.
        flat: Whether targets were [N] instead of [N, O].
    """

    rows: Rows
    classes: np.ndarray | None = None
    columns: Columns | None = None
    flat: bool = True


@dataclass(frozen=True)
class _Trained:
    """The parts of a `FittedTable` that training makes."""

    model: Predictor
    likelihood: str
    units: TargetUnits | None
    network: NetworkShape | None
    report: FitReport = field(default_factory=FitReport)
    settled: tuple[nn.Module, Likelihood] | None = None
    held_out: HeldOut | None = None


def fit_tables(tables: Sequence[TrainingTable], settings: Sequence[Settings]) -> list[FittedTable]:
    """Fit one method to each of several tables, with the results of separate calls; methods by name train together if possible.

    Args:
        tables: Training data. Equal rows are merged into one with their weights added, so that copies and weights give the same
            result.
        settings: Settings of each table; they differ only in seeds and priors.

    Raises:
        ValueError: If the user's network or the weights do not suit the data or the method.
    """
    given, tables = tables, [_merged(table, own) for table, own in zip(tables, settings, strict=True)]
    encodings = [list_encodings(table, own) for table, own in zip(tables, settings, strict=True)]
    if settings[0].method is None:
        trained = []
        for table, own, found in zip(tables, settings, encodings, strict=True):
            with own_generators(seed=derive_seed(own.seed, "training")):
                trained.append(_train_default(table, own, found))
    else:
        names = [next(iter(found)) for found in encodings]
        encoded = [_encoded(t.rows, found[name]) for t, found, name in zip(tables, encodings, names, strict=True)]
        trained = _train_by_name(encoded, tables, settings)
        trained = [
            replace(one, report=replace(one.report, categories=name)) for one, name in zip(trained, names, strict=True)
        ]
    return [
        FittedTable(
            own.method_name, one.likelihood, one.model, found[one.report.categories], one.units, one.network, own.seed,
            one.report, table.columns, table.classes, table.flat, settled=one.settled,
            held_out=None if one.held_out is None else one.held_out[_places(first.rows)],
        )
        for first, table, own, found, one in zip(given, tables, settings, encodings, trained, strict=True)
    ]  # fmt: skip


def _merged(table: TrainingTable, settings: Settings) -> TrainingTable:
    """A table with merged rows, so that copies and weights will give the same units to the last bit."""
    rows = merge_rows(table.rows)
    most = EFFORTS[settings.effort].max_chain_rows
    if settings.method is not None and settings.method.is_chain and len(rows) > most:
        warnings.warn(
            f"{settings.owner}: a Markov chain is slow, so it uses {most:,} of {len(rows):,} rows, chosen at random",
            stacklevel=6,
        )
        chosen = np.random.default_rng(derive_seed(settings.seed, "chain")).choice(len(rows), most, replace=False)
        rows = rows[np.sort(chosen)]
    return replace(table, rows=rows)


def merge_rows(rows: Rows) -> Rows:
    """Equal rows merged into one, if there are few rows."""
    return rows.merged() if len(rows) <= FULL_BATCH_ROWS else rows


def _places(rows: Rows) -> np.ndarray:
    """The index in `merge_rows` of each row, [N]."""
    return rows.distinct()[1] if len(rows) <= FULL_BATCH_ROWS else np.arange(len(rows))


# -- the steps that all methods share --------------------------------------------------------------------------------------


def encode_inputs(rows: Rows, settings: Settings) -> Encoding:
    """The encoding of numbers for the network: piecewise-linear for the default method, scaled for methods by name."""
    if settings.method is None:
        if settings.standardize:
            return Encoding.piecewise(rows.x, rows.weights)
        return replace(Encoding.scaled(rows.x, rows.weights), soft_limit=True)
    if settings.standardize:
        return Encoding.scaled(rows.x, rows.weights)
    return Encoding(np.zeros(rows.x.shape[1]), np.ones(rows.x.shape[1]))


def list_encodings(table: TrainingTable, settings: Settings) -> dict[str, Encoding]:
    """Possible encodings of inputs, by their treatment of texts with many levels; methods by name use the first."""
    every = encode_inputs(table.rows, settings)
    levels, means = ((), ()) if table.columns is None else table.columns.preparation.alternatives
    blank = {NOTHING: replace(every, left_out=tuple(range(table.rows.x.shape[1])))}
    if not levels or not means:
        return {"": every, **blank}
    return {"means": replace(every, left_out=levels), "levels": replace(every, left_out=means), **blank}


def _encoded(rows: Rows, encoding: Encoding) -> Rows:
    return Rows(as_inputs(encoding, rows.x).numpy(), rows.y, rows.weights)


def list_candidates(rows: Rows, settings: Settings) -> list[Pair]:
    """Possible likelihoods and transforms, simplest first; a method by name has one, Gaussian noise by default."""
    likelihood, transform = settings.likelihood, settings.transform
    if settings.method is not None:
        return [("gaussian" if likelihood == AUTO else likelihood, "none" if transform == AUTO else transform)]
    if settings.noise is not None:
        return [("gaussian", "none")]
    y, one = rows.y, rows.y.shape[1] == 1
    small = one and (y >= 0).all() and (y == np.round(y)).all()
    above = y[:, 0] > 0
    small = small and rows.weights[above & (y[:, 0] <= MAX_SMALL_COUNT)].sum() >= 0.1 * rows.weights[above].sum()
    transforms = [transform]
    if transform == AUTO:
        possible = TRANSFORMS if one else ("none",)
        transforms = [name for name in possible if TargetTransform.takes(name, torch.from_numpy(y))]
        if "log" in transforms:
            transforms.remove("log1p")
    if likelihood != AUTO:
        return [(likelihood, other) for other in (["none"] if likelihood in UNSHIFTED_LIKELIHOODS else transforms)]
    pairs = [
        (name, other)
        for name, tried in REAL_LIKELIHOODS.items()
        for other in transforms
        if other in tried or transform != AUTO
    ]
    if transform not in (AUTO, "none"):
        return pairs
    if small:
        return pairs + [(name, "none") for name in COUNT_LIKELIHOODS]
    return [(HURDLE, "none"), *pairs] if one and _has_zeros(rows) else pairs


def _has_zeros(rows: Rows) -> bool:
    """Whether targets are amounts and some are exactly zero."""
    zero = rows.y[:, 0] == 0
    share = rows.weights[zero].sum() / rows.num_data
    return bool((rows.y >= 0).all()) and share >= MIN_ZERO_SHARE and rows.weights[~zero].sum() >= MIN_AMOUNTS


def make_likelihood(name: str) -> Likelihood:
    """A likelihood by name, whose spread, if it has one, depends on the row."""
    options: dict[str, dict[str, float | None]] = {
        "gaussian": {"noise": START_NOISE}, "student_t": {"scale": None}, "negative_binomial": {"dispersion": None}
    }  # fmt: skip
    return REGISTRY[name](**options.get(name, {}))


def take_units(rows: Rows, pair: Pair, settings: Settings) -> TargetUnits:
    """The units in which a candidate is trained; counts stay as they are, and amounts are divided by their geometric mean."""
    if pair[0] == HURDLE:
        logs, shares = np.log(np.where(rows.y > 0, rows.y, 1.0)), rows.weights[:, None] * (rows.y > 0)
        return TargetUnits(
            "none", np.zeros(rows.y.shape[1]), np.exp((shares * logs).sum(0) / shares.sum(0).clip(min=1e-300))
        )
    scaled = pair[0] not in COUNT_LIKELIHOODS and (settings.standardize or settings.method is None)
    return TargetUnits.of(rows.y, rows.weights, pair[1], standardize=scaled)


def shape_network(rows: Rows, num_outputs: int, settings: Settings, classes: bool) -> NetworkShape:
    """The shape of the network: the user's choice, or the default for a method and a number of rows."""
    if settings.method is not None:
        activation, dropout = ACTIVATION_BY_NAME, 0.0
    else:
        activation = ACTIVATION_OF_CLASSES if classes else ACTIVATION
        dropout = DROPOUT_OF_CLASSES if classes else 0.0
    hidden: tuple[int, ...] | None = settings.hidden
    if hidden is None:
        few = len(rows) <= MAX_ROWS_FOR_SMALL_NETWORKS
        hidden = HIDDEN_BY_NAME if settings.method is not None else HIDDEN if few else HIDDEN_OF_MANY
    return NetworkShape(rows.x.shape[1], hidden, settings.activation or activation, num_outputs, dropout)


# -- a method by name --------------------------------------------------------------------------------------------------


def _train_by_name(
    encoded: Sequence[Rows], tables: Sequence[TrainingTable], settings: Sequence[Settings]
) -> list[_Trained]:
    """Train one method on several tables: noise by the evidence of a plain network, the method, its recalibration."""
    drafts = [_begin(rows, table.classes, own) for rows, table, own in zip(encoded, tables, settings, strict=True)]
    begun = [draft.start for draft in drafts]
    starts = settle(begun) if drafts[0].likelihood == "gaussian" and settings[0].noise is None else begun
    models = train_methods(starts)
    if settings[0].temperature:
        networks = [replace(start, network=first.network) for start, first in zip(starts, begun, strict=True)]
        models = list(scale_temperatures(cast(list[BayesianNetwork], models), networks))
        starts = [replace(start, evidence=None) for start in starts]
    return [
        _recalibrated(_Trained(model, draft.likelihood, draft.units, draft.network), start)
        for model, draft, start in zip(models, drafts, starts, strict=True)
    ]


@dataclass(frozen=True)
class _Draft:
    """A method by name before training."""

    start: Start
    likelihood: str
    units: TargetUnits | None
    network: NetworkShape | None


def _begin(rows: Rows, classes: np.ndarray | None, settings: Settings) -> _Draft:
    """Likelihood, units and network of a method by name."""
    units, name, likelihood = None, "categorical", cast(Likelihood, Categorical())
    num_outputs = 0 if classes is None else len(classes)
    if classes is None:
        name, transform = list_candidates(rows, settings)[0]
        units, likelihood = take_units(rows, (name, transform), settings), make_likelihood(name).double()
        num_outputs = rows.y.shape[1] * likelihood.outputs_per_target
        if name == "gaussian" and settings.noise is not None:
            likelihood = Gaussian((settings.noise / np.square(units.scale)).tolist(), learn=False).double()
        rows = Rows(rows.x, units(rows.y).numpy(), rows.weights)
    shape = None
    if settings.network is None:
        shape = shape_network(rows, num_outputs, settings, classes is not None)
        net: nn.Module = shape.make(derive_seed(settings.seed, "network"))
    else:
        net = own_network(settings.network, rows.x.shape[1], num_outputs, settings.owner)
    return _Draft(Start(net, likelihood, rows, settings), name, units, shape)


def _recalibrated(trained: _Trained, start: Start) -> _Trained:
    """A model with recalibrated probabilities if the noise was settled, and with what settled it, for `fit_further`."""
    units, settings = trained.units, start.settings
    if start.evidence is not None and units is not None:
        x = torch.from_numpy(start.evidence.rows.x)
        found = predict_scaled(trained.model, x, settings.prediction_draws, settings.seed)
        assert isinstance(found, RegressionPredictive)
        recalibration = recalibrate_by_leverage(start.evidence, found)
        settled = start.network, start.likelihood
        return replace(trained, units=replace(units, recalibration=recalibration), settled=settled)
    return trained


def fit_further(fitted: FittedTable, table: TrainingTable, settings: Settings) -> FittedTable:
    """Continue the training of a posterior, for a quarter as long, on a table of the old and the new rows.

    The units stay, and the noise is estimated again.
    """
    model, units = fitted.model, fitted.units
    assert isinstance(model, BayesianNetwork)
    y = table.rows.y if units is None else units(table.rows.y).numpy()
    rows = Rows(fitted.encode(table.rows.x).numpy(), y, table.rows.weights)
    likelihood = model.require_likelihood("partial_fit")
    start = Start(nn.Identity(), likelihood, rows, settings)
    if fitted.settled is not None:
        network, settled = fitted.settled
        start = settle_further(Start(network, settled, rows, settings))
        likelihood.load_state_dict(start.likelihood.state_dict())
    train_posteriors([model], [rows], [settings], effort=LATER_EFFORT_SHARE, start=False)
    found = _recalibrated(_Trained(model, fitted.likelihood, units, fitted.network), start)
    return replace(fitted, units=found.units, settled=found.settled)


# -- the default method ------------------------------------------------------------------------------------------------


def _train_default(table: TrainingTable, settings: Settings, encodings: Mapping[str, Encoding]) -> _Trained:
    """Members with the likelihood, transform and inputs that predict held-out rows best, recalibrated on these rows."""
    name, num_classes = next(iter(encodings)), 0 if table.classes is None else len(table.classes)
    rows = _encoded(table.rows, encodings[name])
    ranked, tried = ([], dict[str, float]()) if num_classes else _rank_pairs(rows, settings)
    if len(encodings) > 2:
        part = table.rows.thinned(ENCODING_MAX_ROWS, derive_seed(settings.seed, "encode"))
        scores = {}
        for other in ("means", "levels"):
            encoded = _encoded(part, encodings[other])
            if not ranked:
                scores[other] = _train_classes(encoded, num_classes, settings, brief=True).report.score or 0.0
            else:
                scores[other] = _train_numbers(encoded, ranked[:1], settings, brief=True)[0].score
        name = min(scores, key=scores.__getitem__)
        rows = _encoded(table.rows, encodings[name])
        tried |= {f"categories by {other}": score for other, score in scores.items()}
    if ranked:
        made = _train_ranked(rows, _encoded(table.rows, encodings[NOTHING]), ranked, settings, tried)
    else:
        made = _train_classes(rows, num_classes, settings)
    return replace(made, report=replace(made.report, tried=tried, categories=made.report.categories or name))


def _train_ranked(
    rows: Rows, blank: Rows, ranked: Sequence[Pair], settings: Settings, tried: Mapping[str, float]
) -> _Trained:
    """Members with the first of two likelihoods and transforms whose final score keeps the promise of the trial.

    A short trial on few rows can miss that the quantiles of a few rows explode. If both choices fail, networks without inputs are
    trained on `blank`, the same rows with a single input, which is 0. They predict one distribution for all rows, and the best of
    all is used. `ranked` are likelihoods and transforms, best first, and `tried` their scores in the trial.
    """
    constant, found, failed = _constant_score(rows), list[tuple[float, str, Pair, _Numbers]](), list[str]()
    for pair in ranked[:MAX_CHOICES]:
        (one,) = _train_numbers(rows, [pair], settings)
        found.append((one.score if np.isfinite(one.score) else np.inf, "", pair, one))
        promised = max(MAX_TRIAL_RATIO * tried.get(", ".join(pair), np.inf), GOOD_CONSTANT_RATIO * constant)
        if len(ranked) == 1 or found[-1][0] <= min(promised, MAX_CONSTANT_RATIO * constant):
            break
        failed.append(f"{', '.join(pair)} (CRPS {one.score:.4g})")
    if len(failed) == len(found):
        scores = [one.score for one in _train_numbers(blank, ranked, settings, brief=True)]
        pair = ranked[int(np.argmin(scores))]
        (one,) = _train_numbers(
            blank, [pair], replace(settings, epochs=min(settings.epochs or CHOICE_MAX_STEPS, CHOICE_MAX_STEPS))
        )
        found.append((one.score, NOTHING, pair, one))
    _, categories, pair, chosen = min(found, key=lambda entry: entry[0])
    made = _recalibrated_out_of_fold(chosen, rows, pair[0], settings)
    if not failed:
        return made
    said = " with one distribution for all rows" if categories else ""
    note = (
        f"These likelihoods failed on held-out rows: {'; '.join(failed)}; a constant guess has CRPS {constant:.4g}. "
        f"The model uses {', '.join(pair)}{said} (CRPS {chosen.score:.4g})."
    )
    warnings.warn(f"{settings.owner}: {note}", stacklevel=8)
    return replace(made, report=replace(made.report, notes=(note,), categories=categories))


def _constant_score(rows: Rows) -> float:
    """CRPS, computed as in `pinball`, of predicting the distribution of all targets for every row."""
    total = 0.0
    for column in rows.y.T:
        order = np.argsort(column, kind="stable")
        share = np.cumsum(rows.weights[order]) / rows.num_data
        for level in PINBALL_LEVELS:
            error = column - column[order][np.searchsorted(share, level * (1 - 1e-12))]
            total += float(np.average(2 * np.maximum(level * error, (level - 1) * error), weights=rows.weights))
    return total / len(PINBALL_LEVELS)


def _rank_pairs(rows: Rows, settings: Settings) -> tuple[list[Pair], dict[str, float]]:
    """Likelihoods and transforms, best first, and the scores of all trials."""
    pairs, tried = list_candidates(rows, settings), dict[str, float]()
    if len(pairs) > 1:
        part = rows.thinned(CHOICE_MAX_ROWS, derive_seed(settings.seed, "choose"))
        found = _train_numbers(part, pairs, settings, brief=True)
        scores = {pair: one.score for pair, one in zip(pairs, found, strict=True)}
        simple = [pairs[0]] if (1 - MIN_GAIN_SHARE) * scores[pairs[0]] < min(scores.values()) else []
        pairs = list(dict.fromkeys((*simple, *sorted(pairs, key=scores.__getitem__))))
        tried = {f"{name}, {other}": score for (name, other), score in scores.items()}
    return pairs, tried


def _train_classes(rows: Rows, num_classes: int, settings: Settings, *, brief: bool = False) -> _Trained:
    """Train members with a softmax."""
    shape, y = shape_network(rows, num_classes, settings, classes=True), torch.from_numpy(rows.y)
    folds = _folds(rows, settings, rows.y)
    trained = _train_members(rows, [y], folds, [Categorical()], shape, settings, brief=brief)
    seen = folds < len(trained.every[0])
    found = Categorical().predictive(Outputs(kept=trained.outputs[0][:, torch.from_numpy(seen)]))
    assert isinstance(found, ClassificationPredictive)
    probs, labels = found.class_probs.double().numpy(), [str(code) for code in range(num_classes)]
    scores = Scores.of_classes(probs, labels, rows.y[seen], LEVELS, rows.weights[seen]).means()
    report = FitReport(scores["log_loss"], out_of_fold=scores, steps=trained.steps)
    held_out = HeldOut(rows.y[seen], probs=probs)
    return _Trained(trained.members.as_ensemble().double(), "categorical", None, shape, report, held_out=held_out)


@dataclass(frozen=True)
class _Members:
    """Trained members: networks of each likelihood, and their outputs for the rows that each has not seen.

    Args:
        members: The networks.
        every: Outputs of all K networks of each likelihood for all rows, [K, N, outputs].
        outputs: Out-of-fold outputs [1, N, outputs] of each likelihood; 0 for rows that no network held out.
        steps: Step at which each network was best.
    """

    members: ModelStack
    every: list[Tensor]
    outputs: list[Tensor]
    steps: tuple[int, ...]


def _folds(rows: Rows, settings: Settings, labels: np.ndarray | None = None) -> np.ndarray:
    """Index of the member that holds out each row, [N]."""
    count = int(settings.options.get("members", NUM_MEMBERS))
    return make_folds(len(rows), min(count, len(rows)), derive_seed(settings.seed, "folds"), labels)


def _member_steps(num_rows: int, settings: Settings, *, classes: bool, brief: bool) -> StoppedSteps:
    """The steps of the members' training; see `_train_members`."""
    rows = MEMBER_BATCH_ROWS if num_rows <= MAX_ROWS_FOR_SMALL_NETWORKS else MEMBER_BATCH_ROWS_OF_MANY
    tiny = num_rows <= MAX_TINY_ROWS and settings.learning_rate is None
    pace, patience = (TINY_PACE, TINY_PATIENCE) if tiny else (1, MEMBER_PATIENCE)
    steps = settings.epochs or EFFORTS[settings.effort].member_steps // pace
    rate = pace * (MEMBER_LEARNING_RATE_OF_CLASSES if classes else MEMBER_LEARNING_RATE)
    return StoppedSteps(
        settings.batch_size or rows,
        min(CHOICE_MAX_STEPS // pace, steps) if brief else steps,
        check_every=round(CHECK_EVERY_STEPS / pace),
        patience=CHOICE_PATIENCE if brief else patience,
        learning_rate=settings.learning_rate or rate,
    )


def _train_members(
    rows: Rows,
    targets: Sequence[Tensor],
    folds: np.ndarray,
    likelihoods: Sequence[Likelihood],
    shape: NetworkShape,
    settings: Settings,
    *,
    brief: bool = False,
    biases: Sequence[Tensor | None] = (None,),
) -> _Members:
    """Train members that each hold out a fold, for several likelihoods with targets of the same rows, all at once.

    Each likelihood has targets in its units and an initial bias of the last layer. `folds` [N] are the members that hold out the
    rows. A brief training is a trial, with fewer folds and steps.
    """
    count = min(int(folds.max()) + 1, CHOICE_FOLDS) if brief else int(folds.max()) + 1
    nets = [shape.make(derive_seed(settings.seed, "network", k), torch.float32) for _ in targets for k in range(count)]
    for index, net in enumerate(nets):
        bias = biases[index // count]
        if bias is not None:
            with torch.no_grad():
                cast(nn.Linear, net[-1]).bias[: len(bias)] = bias
    prior = Neal(MEMBER_PRIOR_FACTOR * settings.prior_scale)
    points = [bayesianize(net, Point(), prior=prior) for net in nets]
    members = ModelStack(points, likelihoods=[own.float() for own in likelihoods])
    x, own = torch.from_numpy(rows.x).float(), np.arange(count)[:, None] == folds[None]
    held = np.concatenate([own] * len(targets))
    best_steps, judged = train_held_out(
        members,
        x,
        torch.stack([target for target in targets for _ in range(count)]),
        held,
        _member_steps(len(rows), settings, classes=targets[0].ndim == 1, brief=brief),
        weights=torch.from_numpy(rows.weights),
        seed=settings.seed,
        progress=("choosing the model" if brief else f"training {count} networks") if settings.progress else "",
        halves=len(rows) <= MAX_ROWS_FOR_SPLIT_STOPPING,
    )
    with torch.no_grad():
        every = members(x.expand(len(nets), -1, -1))
        if judged is not None:
            every = torch.where(torch.from_numpy(held).unsqueeze(-1), judged, every)
        every = every.unflatten(0, (len(targets), count))  # [G, K, N, outputs]
    mine = torch.from_numpy(own).unsqueeze(-1).to(every)
    outputs = [(mine * group).sum(0, keepdim=True) for group in every]
    return _Members(members, list(every), outputs, tuple(int(step) for step in best_steps))


@dataclass(frozen=True)
class _Numbers:
    """Members of one likelihood and transform, with their out-of-fold predictive in the units of training and its score.

    Args:
        trained: Members of all likelihoods.
        group: Index of this likelihood among them.
        likelihood: Likelihood of these members.
        units: Conversion from the units of training to the targets' units.
        found: Predictive of the held-out rows, in the units of training.
        score: CRPS in the targets' unit, summed over targets.
        shape: Shape of the networks.
    """

    trained: _Members
    group: int
    likelihood: Likelihood
    units: TargetUnits
    found: RegressionPredictive
    score: float
    shape: NetworkShape


def _train_numbers(rows: Rows, pairs: Sequence[Pair], settings: Settings, *, brief: bool = False) -> list[_Numbers]:
    """Train members of each likelihood and transform, all at once."""
    units, targets, biases, likelihoods = [], [], [], []
    for pair in pairs:
        own = take_units(rows, pair, settings)
        likelihood = make_likelihood(pair[0])
        if settings.noise is not None:
            likelihood = Gaussian((settings.noise / np.square(own.scale)).tolist(), learn=False)
        units.append(own)
        likelihoods.append(likelihood)
        targets.append(own(rows.y).float())
        biases.append(_start_bias(rows, pair, own))
    y, folds = torch.from_numpy(rows.y), _folds(rows, settings)
    num_outputs = y.shape[1] * max(likelihood.outputs_per_target for likelihood in likelihoods)
    shape = shape_network(rows, num_outputs, settings, classes=False)
    trained = _train_members(rows, targets, folds, likelihoods, shape, settings, brief=brief, biases=biases)
    seen = folds < len(trained.every[0])
    result = []
    for group, (likelihood, own) in enumerate(zip(likelihoods, units, strict=True)):
        outputs = trained.outputs[group][:, torch.from_numpy(seen), : y.shape[1] * likelihood.outputs_per_target]
        found = likelihood.predictive(Outputs(kept=outputs))
        assert isinstance(found, RegressionPredictive)
        score = pinball(own.predictive(found), y[torch.from_numpy(seen)], rows.weights[seen])
        result.append(_Numbers(trained, group, likelihood, own, found, score, shape))
    return result


def _start_bias(rows: Rows, pair: Pair, units: TargetUnits) -> Tensor | None:
    """Initial bias of the last layer, with which the first outputs fit all rows together; `None` for 0."""
    if pair[0] in COUNT_LIKELIHOODS:
        return torch.from_numpy(TargetUnits.of(rows.y, rows.weights, pair[1]).shift).clamp_min(1e-2).log().float()
    if pair[0] != HURDLE:
        return None
    above, share = rows.y > 0, rows.weights[:, None]
    logs = np.log(np.where(above, rows.y / units.scale, 1.0))
    amounts = (share * above).sum(0).clip(min=1e-300)
    spread, zeros = (share * above * np.square(logs)).sum(0) / amounts, (share * ~above).sum(0)
    start = np.concatenate((0 * spread, np.log(spread.clip(min=1e-2)), np.log(zeros.clip(min=1e-2) / amounts)))
    return torch.from_numpy(start).float()


def pinball(predictive: RegressionPredictive, y: Tensor, weights: np.ndarray) -> float:
    """CRPS from 19 quantiles: a weighted mean over rows, summed over targets."""
    error = y - predictive.quantile(list(PINBALL_LEVELS))  # [Q, N, O]
    level = torch.tensor(PINBALL_LEVELS, dtype=error.dtype).view(-1, 1, 1)
    loss = 2 * torch.maximum(level * error, (level - 1) * error).mean(0).sum(-1)
    return float(np.average(loss.numpy(), weights=weights))


def _recalibrated_out_of_fold(chosen: _Numbers, rows: Rows, likelihood: str, settings: Settings) -> _Trained:
    """A model with probabilities recalibrated on rows that members have not seen, and with the members as one network."""
    y, folds, every = torch.from_numpy(rows.y), _folds(rows, settings), chosen.trained.every[chosen.group]
    bounded = rows.y.min() >= 0 and y.shape[1] == 1
    floor, ceiling = (0.5 * float(rows.y.min()), MAX_MEAN_RATIO * float(rows.y.max())) if bounded else (None, None)
    units = replace(chosen.units, floor=floor, ceiling=ceiling)
    plain = units.predictive(chosen.found)
    u, below = plain.cdf(y), plain.below(y)
    # A value of positive probability (a count, or a zero at the floor) leaves an interval of u, from which u is drawn.
    generator = torch.Generator().manual_seed(derive_seed(settings.seed, "ties"))
    ties = torch.rand(u.shape, generator=generator, dtype=u.dtype)
    u = below + (u - below) * ties
    recalibrated = y.shape[1] == 1 and settings.noise is None
    recalibration = Recalibration.of(u[:, 0].numpy(), rows.weights) if recalibrated else Recalibration()
    if recalibrated and likelihood not in UNSHIFTED_LIKELIHOODS and len(every) > 2:
        places = ensemble_places(chosen.likelihood, every, folds, chosen.units(rows.y), rows.weights)
        places = np.where(rows.y[:, 0] == floor, ties[:, 0].numpy(), 1.0) * places
        recalibration = Recalibration.of(places, rows.weights)
    units = replace(units, recalibration=recalibration)
    scores, judged = Scores(), list[HeldOut]()
    for fold in range(int(folds.max()) + 1) if y.shape[1] == 1 else ():
        own, others = folds == fold, folds != fold
        of_others = Recalibration.of(u[others, 0].numpy(), rows.weights[others]) if recalibrated else Recalibration()
        outputs = chosen.found.outputs[:, torch.from_numpy(np.flatnonzero(own))]
        part = replace(units, recalibration=of_others).predictive(chosen.found.with_outputs(outputs))
        scores += Scores.of_numbers(part, rows.y[own, 0], LEVELS, rows.weights[own])
        judged.append(HeldOut.of_numbers(part, rows.y[own, 0]))
    report = FitReport(chosen.score, out_of_fold=scores.means(), steps=chosen.trained.steps)
    model = chosen.trained.members.as_ensemble(chosen.group).double()
    held_out = HeldOut.joined(judged)[np.argsort(np.argsort(folds, kind="stable"))] if judged else None
    return _Trained(model, likelihood, units, chosen.shape, report, held_out=held_out)
