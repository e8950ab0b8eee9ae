"""The recipe that turns the rows of a table into a fitted method.

Every method takes the same steps: encode the inputs, list the possible likelihoods and transforms of the target, choose the
target's units, choose the shape of the network, train, and recalibrate. Classes have only one possible likelihood and no units.
The default method trains several networks, called members, on different rows. Each row is held out by one network or, for classes,
by two networks that see different inputs. The predictions of the held-out rows decide which likelihood and transform are used and
when training stops. The predictions of the held-out rows are also used to recalibrate the probabilities. Every other method is a
"named method". A named method trains on all rows. A named method starts with the noise variance that maximizes the evidence of a
plain network. To recalibrate the probabilities of a named method, all its steps are repeated several times, each time without one
fold of the rows. The predictions of the rows that were left out give the recalibration.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.baselines.temperature_scaling import rescale
from bayesify.conversion import bayesianize
from bayesify.likelihoods import REGISTRY, Gaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, Point
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictive.transformed import TargetTransform
from bayesify.priors import Neal
from bayesify.running.generators import own_generators
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.empty_cells import MIN_EMPTY_ROWS, EmptyCells, Mark, is_empty, marks_of
from bayesify.sklearn.fitted import FitReport, FittedTable, HeldOut, as_inputs, predict_scaled
from bayesify.sklearn.later_rows import LaterRows, find_time, latest_rows
from bayesify.sklearn.networks import NetworkShape, own_network
from bayesify.sklearn.recalibration import MIN_ROWS, Recalibration, ensemble_places
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.scores import LEVELS, Scores
from bayesify.sklearn.settings import AUTO, EFFORTS, FULL_BATCH_ROWS, Settings
from bayesify.sklearn.settling import START_NOISE, settle, settle_further
from bayesify.sklearn.training import (
    Fold,
    Settled,
    Start,
    out_of_fold,
    scale_temperature,
    train_methods,
    train_posteriors,
)
from bayesify.sklearn.units import TRANSFORMS, TargetUnits
from bayesify.tables.encoding import Encoding
from bayesify.training.hold_out import StoppedSteps, make_folds, train_held_out
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack

# # -- the list of likelihoods ------------------------------------------------------------------------------------------

REAL_LIKELIHOODS = {
    "heteroscedastic_gaussian": ("none", "log", "log1p", "sqrt"),
    "student_t": ("none", "log", "log1p"),
    "quantiles": ("none",),
}
"""Likelihoods of numbers that the default method tries, and the transforms tried with each; the simplest comes first."""
COUNT_LIKELIHOODS = ("negative_binomial", "poisson")
"""Likelihoods of counts, which are whole numbers of at least 0. Counts are not transformed."""
HURDLE = "hurdle"
"""Likelihood of amounts that are often exactly zero."""
UNSHIFTED_LIKELIHOODS = (*COUNT_LIKELIHOODS, HURDLE)
"""Likelihoods that treat zero in a special way. Their targets are neither shifted nor transformed."""
MIN_ZERO_SHARE, MIN_AMOUNTS = 0.05, 3
"""The hurdle is tried if at least this share of the targets is exactly 0 and at least this many targets are above 0. It then
counts as the simplest choice, because the score of a trial hardly depends on the amounts if only one row in twenty has one."""
MAX_SMALL_COUNT = 10
"""Likelihoods of counts are tried if at least a tenth of the targets above 0 are at most this large. Larger whole numbers
behave like real numbers, and amounts in whole units are not counts merely because many of them are zero."""
NUMBER_LIKELIHOODS = tuple(name for name, kind in REGISTRY.items() if kind.task == "regression")
Pair = tuple[str, str]
"""Names of a likelihood and a transform."""

# -- networks and training of the default method, and of named methods --------------------------------------------------

NUM_MEMBERS = 5
HIDDEN, HIDDEN_OF_MANY, HIDDEN_BY_NAME = (64, 64), (128, 128), (50,)
MAX_ROWS_FOR_SMALL_NETWORKS = 1_500
MEMBER_BATCH_ROWS, MEMBER_BATCH_ROWS_OF_MANY = 128, 256
"""Units of the hidden layers and rows per batch. The first value holds for tables with at most `MAX_ROWS_FOR_SMALL_NETWORKS`
rows, the second for larger tables, and the third for named methods."""
ACTIVATION, ACTIVATION_OF_CLASSES, ACTIVATION_BY_NAME = "silu_relu", "silu", "tanh"
DROPOUT_OF_CLASSES = 0.1
"""Dropout rate of classifiers. Regression networks have no dropout: it raises the CRPS by up to half on tables with little
noise and changes nothing on other tables."""
MEMBER_LEARNING_RATE, MEMBER_LEARNING_RATE_OF_CLASSES = 7e-3, 8e-3
PLAIN_INPUT_FACTOR = 2.0
"""Of the two classifiers of each fold, one sees only the scaled numbers, times this factor, and no piecewise-linear encodings.
The factor makes up for its fewer inputs: without it, this network learns more slowly than the other one."""
MEMBER_PRIOR_FACTOR = 5.0
"""The members' prior is wider than the prior of named methods by this factor. Early stopping on held-out rows already prevents
overfitting, and the narrow prior raises the CRPS by 15 % on tables with little noise."""
CHECK_EVERY_STEPS, MEMBER_PATIENCE = 20, 15
"""Number of steps between two checks of the held-out rows, and number of checks without improvement after which training ends."""
MAX_FULL_BATCH_ROWS, MAX_FULL_BATCH_ROWS_OF_CLASSES, FULL_BATCH_PACE = 250, 60, 3
"""With at most this many rows (of numbers, of classes), every step sees all rows. Members then tolerate a learning rate that is
`FULL_BATCH_PACE` times as high. The maximum number of steps and the number of steps between checks are divided by the same
factor."""
EARLY_PATIENCE, FULL_BATCH_PATIENCE, FULL_BATCH_EARLY_PATIENCE = 8, 7, 5
"""Minimum number of checks without improvement after which training ends, and both numbers if every step sees all rows."""
MAX_TINY_ROWS = 60
"""With at most this many rows, the tails of the targets cannot be seen. Of the likelihoods of numbers, only the simplest one is
then tried. Its transform is chosen from the distribution of all targets, without a trial. If this choice fails, no second one
is tried."""
MAX_ROWS_FOR_SPLIT_STOPPING = 250
"""With at most this many rows, early stopping makes a member's held-out scores optimistic. Each half of the held-out rows is
then predicted at the step that was best for the other half."""
CHOICE_MAX_ROWS, CHOICE_FOLDS, CHOICE_MAX_STEPS, CHOICE_PATIENCE = 1_500, 2, 300, 5
"""Limits of the trial that chooses likelihood and transform: maximum number of rows, number of predicted folds, maximum number
of steps, and patience in checks."""
ENCODING_MAX_ROWS = 6_000
"""Maximum number of rows in the trial that chooses the encoding of texts with many levels. With fewer rows, most levels would
have too few rows."""
MAX_MEAN_RATIO = 1.5
"""If all targets are at least 0, means ignore the part of a tail beyond this multiple of the largest target."""
MAX_TRIAL_RATIO, GOOD_CONSTANT_RATIO, MAX_CONSTANT_RATIO, MAX_CHOICES = 2.0, 0.75, 1.1, 2
"""A choice of likelihood and transform fails in two cases. Its final score exceeds `MAX_TRIAL_RATIO` times the trial's score
and `GOOD_CONSTANT_RATIO` times the score of a constant guess, or it exceeds `MAX_CONSTANT_RATIO` times the score of the
constant guess. After `MAX_CHOICES` failures, the columns are not used."""
NOTHING, MAX_BLANK_STEPS = "nothing", 100
"""Name of the encoding of networks that use no column and predict one distribution for all rows, and the maximum number of
steps of these networks."""
MIN_GAIN_SHARE = 0.005
"""A more complex choice replaces a simpler one only if its score is better by at least this share."""
PINBALL_LEVELS = tuple(level / 20 for level in range(1, 20))
"""Probabilities of the quantiles from which the CRPS is computed."""
NUM_MEMBERS_OF_EARLIER_ROWS = 3
"""Number of networks that predict the latest training rows from earlier rows."""
MAX_LINEAR_RATIO = 0.98
"""Linear models replace the networks if the score of their held-out rows is at most this multiple of the networks' score. Each
held-out row is predicted by one model; predictions by all of them are more accurate for networks and equal for linear models."""
MIN_TEMPERATURE, NUM_TEMPERATURES, LOG_TEMPERATURE_STD = 0.2, 41, 0.35
"""Smallest temperature of class probabilities, number of tried temperatures from 1 to the smallest, and prior standard deviation
of the temperature's logarithm."""
LATER_EFFORT_SHARE = 0.25
"""Number of epochs in a later call of `partial_fit`, as a share of the usual number."""


@dataclass(frozen=True)
class TrainingTable:
    """Training data of an estimator.

    Args:
        rows: Inputs as numbers, and targets: numbers [N, O] in their own units, or indices of classes [N].
        classes: Labels, sorted; `None` for a regression.
        columns: Rules that turned a data frame into the inputs of `rows`; `None` if there was no data frame.
        flat: Whether targets were [N] instead of [N, O].
        time: Index of the input that is the time, if there is one.
        ordered: Whether the rows are in the order in which they were given.
    """

    rows: Rows
    classes: np.ndarray | None = None
    columns: Columns | None = None
    flat: bool = True
    time: int | None = None
    ordered: bool = True


def fit_tables(tables: Sequence[TrainingTable], settings: Sequence[Settings]) -> list[FittedTable]:
    """Fit one method to each of several tables; the results are the same as from separate calls. Named methods train
    together if possible.

    Args:
        tables: Training data. Equal rows are merged into one row, and their weights are added. A weighted row therefore gives the
            same result as copies of the row.
        settings: Settings for each table. The settings differ only in seeds and priors.

    Raises:
        ValueError: If the user's network or the weights do not suit the data or the method.
    """
    given, tables = tables, [_merged(table, own) for table, own in zip(tables, settings, strict=True)]
    settings = [
        replace(own, num_classes=0 if table.classes is None else len(table.classes))
        for table, own in zip(tables, settings, strict=True)
    ]
    encodings = [list_encodings(table, own) for table, own in zip(tables, settings, strict=True)]
    if settings[0].method is None:
        fitted = []
        for each in zip(tables, settings, encodings, strict=True):
            with own_generators(seed=derive_seed(each[1].seed, "training")):
                fitted.append(_train_default(*each))
    else:
        fitted = _train_by_name(tables, settings, encodings)
    return [
        one if one.held_out is None else replace(one, held_out=one.held_out[_places(first.rows)])
        for first, one in zip(given, fitted, strict=True)
    ]


def _merged(table: TrainingTable, settings: Settings) -> TrainingTable:
    """Merge the equal rows of a table. A weighted row and copies of the row then give bitwise equal results."""
    rows, inputs = merge_rows(table.rows), table.rows.x
    if len(inputs) <= FULL_BATCH_ROWS:
        inputs = inputs[
            np.sort(table.rows.distinct()[0])
        ]  # in the given order, each row at the place of its first copy
    time = find_time(inputs, table.columns, table.ordered)
    most = EFFORTS[settings.effort].max_chain_rows
    if settings.method is not None and settings.method.is_chain and len(rows) > most:
        warnings.warn(
            f"{settings.owner}: Markov chains are slow, so the model is trained on only {most:,} of the "
            f"{len(rows):,} rows, chosen at random; to use all rows, choose another method",
            stacklevel=6,
        )
        chosen = np.random.default_rng(derive_seed(settings.seed, "chain")).choice(len(rows), most, replace=False)
        rows = rows[np.sort(chosen)]
    return replace(table, rows=rows, time=time)


def merge_rows(rows: Rows) -> Rows:
    """Merge equal rows. A table with many rows is returned unchanged."""
    return rows.merged() if len(rows) <= FULL_BATCH_ROWS else rows


def _places(rows: Rows) -> np.ndarray:
    """For each row, its index in the result of `merge_rows`, [N]."""
    return rows.distinct()[1] if len(rows) <= FULL_BATCH_ROWS else np.arange(len(rows))


# -- the steps that all methods share --------------------------------------------------------------------------------------


def encode_inputs(rows: Rows, settings: Settings) -> Encoding:
    """The encoding of numbers as network inputs: piecewise-linear for the default method, scaled numbers for named methods and
    for linear models."""
    if settings.method is None and not settings.linear:
        if settings.standardize:
            return Encoding.piecewise(rows.x, rows.weights)
        return replace(Encoding.scaled(rows.x, rows.weights), soft_limit=True)
    if settings.standardize or settings.linear:
        return Encoding.scaled(rows.x, rows.weights)
    return Encoding(np.zeros(rows.x.shape[1]), np.ones(rows.x.shape[1]))


def list_encodings(table: TrainingTable, settings: Settings) -> dict[str, Encoding]:
    """Possible encodings of the inputs. Each key of the dict says how text columns with many levels are treated. Named
    methods use the first encoding.
    """
    every = encode_inputs(table.rows, settings)
    levels, means = ((), ()) if table.columns is None else table.columns.preparation.alternatives
    blank = {NOTHING: replace(every, left_out=tuple(range(table.rows.x.shape[1])))}
    if not levels or not means:
        return {"": every, **blank}
    return {"means": replace(every, left_out=levels), "levels": replace(every, left_out=means), **blank}


def _encoded(rows: Rows, encoding: Encoding) -> Rows:
    return Rows(as_inputs(encoding, rows.x).numpy(), rows.y, rows.weights)


def list_candidates(rows: Rows, settings: Settings) -> list[Pair]:
    """Possible likelihoods and transforms, simplest first. A named method has only one candidate, by default Gaussian noise
    without a transform."""
    likelihood, transform = settings.likelihood, settings.transform
    if settings.num_classes:
        return [("categorical", "none")]
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
    names = list(REAL_LIKELIHOODS)[: 1 if len(rows) <= MAX_TINY_ROWS else None]
    pairs = [
        (name, other) for name in names for other in transforms if other in REAL_LIKELIHOODS[name] or transform != AUTO
    ]
    if transform not in (AUTO, "none"):
        return pairs
    if small:
        return pairs + [(name, "none") for name in COUNT_LIKELIHOODS]
    return [(HURDLE, "none"), *pairs] if one and _has_zeros(rows) else pairs


def _has_zeros(rows: Rows) -> bool:
    """Whether the targets are amounts of which some are exactly zero."""
    zero = rows.y[:, 0] == 0
    share = rows.weights[zero].sum() / rows.num_data
    return bool((rows.y >= 0).all()) and share >= MIN_ZERO_SHARE and rows.weights[~zero].sum() >= MIN_AMOUNTS


def make_likelihood(name: str) -> Likelihood:
    """The likelihood with this name. Except for `"gaussian"`, the spread of the likelihood (if it has one) depends on the row."""
    options: dict[str, dict[str, float | None]] = {
        "gaussian": {"noise": START_NOISE}, "student_t": {"scale": None}, "negative_binomial": {"dispersion": None}
    }  # fmt: skip
    return REGISTRY[name](**options.get(name, {}))


def take_units(rows: Rows, pair: Pair, settings: Settings) -> TargetUnits:
    """The units of the targets in training, for one likelihood and transform. Counts are not scaled, and amounts are divided by
    their geometric mean."""
    if pair[0] == HURDLE:
        logs, shares = np.log(np.where(rows.y > 0, rows.y, 1.0)), rows.weights[:, None] * (rows.y > 0)
        return TargetUnits(
            "none", np.zeros(rows.y.shape[1]), np.exp((shares * logs).sum(0) / shares.sum(0).clip(min=1e-300))
        )
    scaled = pair[0] not in COUNT_LIKELIHOODS and (settings.standardize or settings.method is None)
    return TargetUnits.of(rows.y, rows.weights, pair[1], standardize=scaled)


@dataclass(frozen=True)
class Candidate:
    """A likelihood and a transform of the targets.

    Args:
        pair: Names of the likelihood and the transform.
        likelihood: Likelihood p(y | outputs), in the units of training.
        units: Conversion from the units of training to the targets' units; `None` for classes.
        rows: Encoded rows, with targets in the units of training.
        num_outputs: Number of outputs that the likelihood needs.
    """

    pair: Pair
    likelihood: Likelihood
    units: TargetUnits | None
    rows: Rows
    num_outputs: int

    @classmethod
    def of(cls, rows: Rows, pair: Pair, settings: Settings) -> Self:
        """Make a candidate from rows whose targets are not yet converted to the units of training."""
        likelihood = make_likelihood(pair[0])
        if settings.num_classes:
            return cls(pair, likelihood, None, rows, settings.num_classes)
        units = take_units(rows, pair, settings)
        if pair[0] == "gaussian" and settings.noise is not None:
            likelihood = Gaussian((settings.noise / np.square(units.scale)).tolist(), learn=False)
        scaled = Rows(rows.x, units(rows.y).numpy(), rows.weights)
        return cls(pair, likelihood, units, scaled, rows.y.shape[1] * likelihood.outputs_per_target)


def shape_network(rows: Rows, num_outputs: int, settings: Settings) -> NetworkShape:
    """The shape of the network. The defaults depend on the method and on the number of rows, and the user's choices
    override them.
    """
    activation, dropout = ACTIVATION_BY_NAME, 0.0
    if settings.method is None:
        activation = ACTIVATION_OF_CLASSES if settings.num_classes else ACTIVATION
        dropout = DROPOUT_OF_CLASSES if settings.num_classes else 0.0
    hidden: tuple[int, ...] | None = () if settings.linear else settings.hidden
    if hidden is None:
        few = len(rows) <= MAX_ROWS_FOR_SMALL_NETWORKS
        hidden = HIDDEN_BY_NAME if settings.method is not None else HIDDEN if few else HIDDEN_OF_MANY
    return NetworkShape(rows.x.shape[1], hidden, settings.activation or activation, num_outputs, dropout)


# -- a named method --------------------------------------------------------------------------------------------------


def _train_by_name(
    tables: Sequence[TrainingTable], settings: Sequence[Settings], encodings: Sequence[Mapping[str, Encoding]]
) -> list[FittedTable]:
    """Train one named method on several tables: estimate the noise from the evidence of a plain network, train, and recalibrate."""
    chosen, shapes, begun = [], [], []
    names = [next(iter(found)) for found in encodings]
    for table, own, found, name in zip(tables, settings, encodings, names, strict=True):
        rows = _encoded(table.rows, found[name])
        candidate = Candidate.of(rows, list_candidates(rows, own)[0], own)
        shape, net = _make_network(rows, candidate.num_outputs, own)
        chosen.append(candidate)
        shapes.append(shape)
        begun.append(Start(net, candidate.likelihood.double(), candidate.rows, own))
    estimated = chosen[0].pair[0] == "gaussian" and settings[0].noise is None
    trained, fitted = _train_several(begun, [[None, *_list_folds(start, estimated)] for start in begun], estimated), []
    for place, (table, own, name) in enumerate(zip(tables, settings, names, strict=True)):
        start, settled, (likelihood, _) = begun[place], trained[place], chosen[place].pair
        model = scale_temperature(settled, start) if own.temperature else settled[0].model
        encoding, report = encodings[place][name], FitReport(categories=name)
        one = FittedTable(own.method_name, likelihood, model, encoding, chosen[place].units, shapes[place], own.seed,
                          report, table.columns, table.classes, table.flat)  # fmt: skip
        fitted.append(_recalibrated(one, settled, start) if estimated and not own.temperature else one)
    return fitted


def _make_network(rows: Rows, num_outputs: int, settings: Settings) -> tuple[NetworkShape | None, nn.Module]:
    """The untrained network of a named method, and its shape unless the network is the user's own."""
    if settings.network is not None:
        return None, own_network(settings.network, rows.x.shape[1], num_outputs, settings.owner)
    shape = shape_network(rows, num_outputs, settings)
    return shape, shape.make(derive_seed(settings.seed, "network"))


def _list_folds(start: Start, estimated: bool) -> list[Fold]:
    """The folds to predict, for a temperature or to recalibrate a method whose noise is estimated; empty if neither needs them."""
    recalibrated = estimated and min(len(start.rows), start.rows.num_data) >= MIN_ROWS
    return start.folds() if recalibrated or start.settings.temperature else []


def _train_several(
    begun: Sequence[Start], folds: Sequence[Sequence[Fold | None]], estimated: bool
) -> list[tuple[Settled, ...]]:
    """Train one named method several times on each table: for each of its folds, without the fold's rows, and for `None`, on all
    rows. All training runs of a table start from the same untrained network and estimate their own noise. They train together if
    possible."""
    starts = [start.without(fold) for start, own in zip(begun, folds, strict=True) for fold in own]
    starts = settle(starts) if estimated else starts
    found = iter(zip(starts, train_methods(starts), strict=True))
    trained = []
    for own in folds:
        parts = [(*next(found), fold) for fold in own]
        trained.append(tuple(Settled(model, start.network, start.likelihood, fold) for start, model, fold in parts))
    return trained


def _recalibrated(fitted: FittedTable, settled: tuple[Settled, ...], start: Start) -> FittedTable:
    """The fitted table with probabilities that are recalibrated on out-of-fold predictions of the rows of `start`.

    If the method is a posterior, its models are stored for `fit_further`.
    """
    units, settings = fitted.units, start.settings
    assert units is not None
    assert settings.method is not None
    places, weights = list[np.ndarray](), list[np.ndarray]()
    for part, rows in out_of_fold(settled, start):
        x, y, share = rows.tensors()
        found = predict_scaled(part.model, x, settings.prediction_draws, settings.seed)
        assert isinstance(found, RegressionPredictive)
        places.append(found.cdf(y).detach().double().flatten().numpy())
        weights.append(share.unsqueeze(-1).expand_as(y).flatten().numpy())
    if places:
        u, shares = np.concatenate(places), np.concatenate(weights)
        fit = Recalibration.of if min(len(shares), shares.sum()) >= MIN_ROWS else Recalibration.of_few
        units = replace(units, recalibration=fit(u, shares))
    return replace(fitted, units=units, settled=settled if settings.method.posterior is not None else ())


def fit_further(fitted: FittedTable, table: TrainingTable, settings: Settings) -> FittedTable:
    """Continue the training of a posterior on a table of old and new rows, with a quarter of the usual number of epochs.

    The targets keep the units of the first fit, and the noise is estimated again. The models of the folds continue as well, and
    old rows stay in their folds. If there are no folds yet, because there were too few rows, their models train from the start.
    """
    model, units = fitted.model, fitted.units
    assert isinstance(model, BayesianNetwork)
    y = table.rows.y if units is None else units(table.rows.y).numpy()
    rows = Rows(fitted.encode(table.rows.x).numpy(), y, table.rows.weights)
    begun = Start(nn.Identity(), model.require_likelihood("partial_fit"), rows, settings)
    if not fitted.settled:
        train_posteriors([model], [rows], [settings], effort=LATER_EFFORT_SHARE, start=False)
        return fitted
    most = None if len(begun.folds()) > 1 else 2  # only one fold if the rows no longer fit into one batch
    settled = tuple(part for part in fitted.settled[:most] if len(begun.without(part.fold).rows))
    starts = [replace(begun.without(part.fold), network=part.network, likelihood=part.likelihood) for part in settled]
    starts, models = settle_further(starts), [cast(BayesianNetwork, part.model) for part in settled]
    for start, one in zip(starts, models, strict=True):
        one.require_likelihood("partial_fit").load_state_dict(start.likelihood.state_dict())
    parts, own = [start.rows for start in starts], [start.settings for start in starts]
    train_posteriors(models, parts, own, effort=LATER_EFFORT_SHARE, start=False)
    settled = tuple(
        replace(part, network=start.network, likelihood=start.likelihood)
        for part, start in zip(settled, starts, strict=True)
    )
    folds = _list_folds(begun, True) if len(settled) == 1 else []
    if folds:
        shape, seed = fitted.network, derive_seed(fitted.seed, "network")
        net = _make_network(rows, y.shape[1], settings)[1] if shape is None else shape.make(seed)
        settled += _train_several([replace(begun, network=net)], [folds], True)[0]
    return _recalibrated(fitted, settled, begun)


# -- the default method ------------------------------------------------------------------------------------------------


def _train_default(table: TrainingTable, settings: Settings, encodings: Mapping[str, Encoding]) -> FittedTable:
    """Train members with the likelihood, transform and encoding that predict held-out rows best, and recalibrate on these rows."""
    name = next(iter(encodings))
    rows = _encoded(table.rows, encodings[name])
    ranked, tried = _rank_pairs(rows, settings)
    if len(encodings) > 2:
        part = table.rows.thinned(ENCODING_MAX_ROWS, derive_seed(settings.seed, "encode"))
        scores = {}
        for other in ("means", "levels"):
            (one,) = _train_candidates(_encoded(part, encodings[other]), ranked[:1], settings, brief=True)
            scores[other] = one.score
        name = min(scores, key=scores.__getitem__)
        rows = _encoded(table.rows, encodings[name])
        tried |= {f"categories by {other}": score for other, score in scores.items()}
    settings = replace(settings, num_scaled=encodings[name].num_scaled)
    chosen, blank, notes = _train_ranked(rows, _encoded(table.rows, encodings[NOTHING]), ranked, settings, tried)
    name = NOTHING if blank else name
    encoding = encodings[name]
    linear = None if blank else _train_linear(table, encoding, settings, tried, chosen)
    if linear is not None:
        chosen, encoding, settings = linear
    report = FitReport(chosen.score, tried, steps=chosen.steps, notes=notes, categories=name)
    model, own = chosen.members.as_ensemble(chosen.group).double(), chosen.candidate
    fitted = FittedTable(AUTO, own.pair[0], model, encoding, own.units, chosen.shape, settings.seed, report,
                         table.columns, table.classes, table.flat)  # fmt: skip
    fitted = _judged_out_of_fold(fitted, chosen, table.rows, settings)
    return fitted if blank else _stretched_later(fitted, table, own.pair, settings)


def _train_linear(
    table: TrainingTable, encoding: Encoding, settings: Settings, tried: dict[str, float], networks: _Members
) -> tuple[_Members, Encoding, Settings] | None:
    """Linear models with their encoding and settings, if the targets are real numbers and the models predict held-out rows
    clearly better than the networks; otherwise `None`.

    The linear models are trained only if they score better than the networks in a short trial, whose scores are added to `tried`.
    `encoding` is the networks' encoding.
    """
    if settings.hidden is not None or networks.candidate.pair[0] not in REAL_LIKELIHOODS:
        return None
    settings = replace(settings, linear=True)
    encoding = replace(encode_inputs(table.rows, settings), left_out=encoding.left_out)
    rows, best = _encoded(table.rows, encoding), min(tried.values(), default=np.inf)
    ranked, scores = _rank_pairs(rows, settings)
    tried |= {f"linear, {pair}": score for pair, score in scores.items()}
    if ranked[0][0] not in REAL_LIKELIHOODS or min(scores.values(), default=0.0) > best:
        return None
    (one,) = _train_candidates(rows, ranked[:1], settings)
    return (one, encoding, settings) if one.score <= MAX_LINEAR_RATIO * networks.score else None


def _stretched_later(fitted: FittedTable, table: TrainingTable, pair: Pair, settings: Settings) -> FittedTable:
    """The fitted table, with a factor for rows after the training period if the rows have a time. The factor widens the
    distributions of the later rows; see `LaterRows`."""
    units, rows, place = fitted.units, table.rows, table.time
    latest = None if place is None else latest_rows(rows.x[:, place], rows.weights)
    if latest is None or place is None or units is None or rows.y.shape[1] > 1 or settings.noise is not None:
        return fitted
    earlier, rest = rows[~latest], rows[latest]
    encoding = replace(encode_inputs(earlier, settings), left_out=fitted.encoding.left_out)
    few = min(int(settings.options.get("members", NUM_MEMBERS)), NUM_MEMBERS_OF_EARLIER_ROWS)
    settings = replace(settings, options={**settings.options, "members": few})
    (chosen,) = _train_candidates(_encoded(earlier, encoding), [pair], settings)
    model = chosen.members.as_ensemble(chosen.group).double()
    made = replace(fitted, model=model, encoding=encoding, units=chosen.candidate.units)
    found = _judged_out_of_fold(made, chosen, earlier, settings).predict(rest.x, settings.prediction_draws)
    assert isinstance(found, RegressionPredictive)
    u = _drawn_places(found, torch.from_numpy(rest.y), settings)[0]
    later = LaterRows.of(place, rows.x[:, place], u[:, 0].numpy(), rest.weights)
    notes = tuple(filter(None, (*fitted.report.notes, later.note(fitted.columns))))
    return replace(fitted, later=later, report=replace(fitted.report, notes=notes))


def _train_ranked(
    rows: Rows, blank: Rows, ranked: Sequence[Pair], settings: Settings, tried: Mapping[str, float]
) -> tuple[_Members, bool, tuple[str, ...]]:
    """Train members with the best likelihood and transform. If these members score far worse than in the trial, try the second
    best likelihood and transform.

    A short trial on few rows can overlook rows whose quantiles explode. If both choices fail, linear models with the best
    likelihood and transform are trained on `blank`, a copy of the rows with 0 as the only input. These models predict one
    distribution for all rows. The members with the best score are returned. `ranked` lists likelihoods and transforms, best
    first, and `tried` contains their scores in the trial.

    Returns:
        The members, whether they were trained on `blank`, and sentences that say what failed.
    """
    if len(ranked) == 1 and (settings.num_classes or settings.likelihood != AUTO or settings.noise is not None):
        return _train_candidates(rows, ranked, settings)[0], False, ()
    constant, found, failed = _constant_score(rows), list[tuple[_Members, bool]](), list[str]()
    for pair in ranked[: 1 if len(rows) <= MAX_TINY_ROWS else MAX_CHOICES]:
        (one,) = _train_candidates(rows, [pair], settings)
        found.append((one, False))
        promised = max(MAX_TRIAL_RATIO * tried.get(", ".join(pair), np.inf), GOOD_CONSTANT_RATIO * constant)
        if one.score <= min(promised, MAX_CONSTANT_RATIO * constant):
            break
        failed.append(f"{', '.join(pair)} (CRPS {one.score:.4g})")
    if len(failed) == len(found):
        linear = replace(settings, hidden=(), epochs=min(settings.epochs or MAX_BLANK_STEPS, MAX_BLANK_STEPS))
        found.append((_train_candidates(blank, ranked[:1], linear)[0], True))
    chosen, is_blank = min(found, key=lambda entry: entry[0].score if np.isfinite(entry[0].score) else np.inf)
    if not failed:
        return chosen, is_blank, ()
    said = " with one distribution for all rows" if is_blank else ""
    note = (
        f"These likelihoods failed on held-out rows: {'; '.join(failed)}; a constant guess has CRPS {constant:.4g}. "
        f"The model uses {', '.join(chosen.candidate.pair)}{said} (CRPS {chosen.score:.4g})."
    )
    warnings.warn(f"{settings.owner}: {note}", stacklevel=8)
    return chosen, is_blank, (note,)


def _constant_score(rows: Rows) -> float:
    """CRPS of a prediction that gives every row the distribution of all targets. It is computed as in `pinball`."""
    total = 0.0
    for column in rows.y.T:
        order = np.argsort(column, kind="stable")
        share = np.cumsum(rows.weights[order]) / rows.num_data
        for level in PINBALL_LEVELS:
            error = column - column[order][np.searchsorted(share, level * (1 - 1e-12))]
            total += float(np.average(2 * np.maximum(level * error, (level - 1) * error), weights=rows.weights))
    return total / len(PINBALL_LEVELS)


def _rank_pairs(rows: Rows, settings: Settings) -> tuple[list[Pair], dict[str, float]]:
    """Likelihoods and transforms, best first, and their scores. The scores come from a short trial, or from `_score_start` for
    tiny tables."""
    pairs, tried = list_candidates(rows, settings), dict[str, float]()
    if len(pairs) > 1:
        if len(rows) <= MAX_TINY_ROWS:
            found = [_score_start(rows, Candidate.of(rows, pair, settings)) for pair in pairs]
        else:
            part = rows.thinned(CHOICE_MAX_ROWS, derive_seed(settings.seed, "choose"))
            found = [one.score for one in _train_candidates(part, pairs, settings, brief=True)]
        scores = dict(zip(pairs, found, strict=True))
        simple = [pairs[0]] if (1 - MIN_GAIN_SHARE) * scores[pairs[0]] < min(scores.values()) else []
        pairs = list(dict.fromkeys((*simple, *sorted(pairs, key=scores.__getitem__))))
        tried = {f"{name}, {other}": score for (name, other), score in scores.items()}
    return pairs, tried


def _score_start(rows: Rows, own: Candidate) -> float:
    """CRPS of an untrained network. The network predicts the same distribution for every row, and this distribution is
    fitted to all targets.
    """
    outputs, bias = torch.zeros(own.num_outputs), _start_bias(rows, own)
    if bias is not None:
        outputs[: len(bias)] = bias
    found = own.likelihood.predictive(Outputs(kept=outputs.expand(1, len(rows), -1)))
    assert isinstance(found, RegressionPredictive)
    assert own.units is not None
    return pinball(own.units.predictive(found), torch.from_numpy(rows.y), rows.weights)


@dataclass(frozen=True)
class _Members:
    """Members with one likelihood and transform, the members' out-of-fold predictive in the units of training, and its score.

    Args:
        members: All networks that were trained in the same run, including the networks of other likelihoods.
        group: Index of this likelihood among the likelihoods of the run.
        candidate: Likelihood, transform and rows.
        every: Outputs of the networks of this likelihood for all rows, [networks, N, outputs].
        folds: For each row, the index of the fold that contains it, [N]. In a trial, some folds have no network.
        found: Predictive of the held-out rows.
        score: Score of the held-out rows: CRPS in the targets' unit, summed over targets; for classes, log-loss.
        shape: Shape of the networks.
        steps: For each network, the step at which it predicted its held-out rows best.
    """

    members: ModelStack
    group: int
    candidate: Candidate
    every: Tensor
    folds: np.ndarray
    found: RegressionPredictive | ClassificationPredictive
    score: float
    shape: NetworkShape
    steps: tuple[int, ...]


def _member_steps(num_rows: int, settings: Settings, *, brief: bool) -> StoppedSteps:
    """The number of steps and the patience of the members' training; see `_train_candidates`."""
    rows = MEMBER_BATCH_ROWS if num_rows <= MAX_ROWS_FOR_SMALL_NETWORKS else MEMBER_BATCH_ROWS_OF_MANY
    pace, patience, early_patience = 1, MEMBER_PATIENCE, EARLY_PATIENCE
    most = MAX_FULL_BATCH_ROWS_OF_CLASSES if settings.num_classes else MAX_FULL_BATCH_ROWS
    if num_rows <= most and settings.learning_rate is None:
        rows, pace = num_rows, FULL_BATCH_PACE
        patience, early_patience = FULL_BATCH_PATIENCE, FULL_BATCH_EARLY_PATIENCE
    steps = settings.epochs or EFFORTS[settings.effort].member_steps // pace
    rate = pace * (MEMBER_LEARNING_RATE_OF_CLASSES if settings.num_classes else MEMBER_LEARNING_RATE)
    return StoppedSteps(
        settings.batch_size or rows,
        min(CHOICE_MAX_STEPS // pace, steps) if brief else steps,
        check_every=round(CHECK_EVERY_STEPS / pace),
        patience=CHOICE_PATIENCE if brief else patience,
        early_patience=early_patience,
        learning_rate=settings.learning_rate or rate,
    )


def _train_candidates(rows: Rows, pairs: Sequence[Pair], settings: Settings, *, brief: bool = False) -> list[_Members]:
    """Train members for several likelihoods and transforms in one run. Each member holds out one fold. Classes have two members
    per fold; see `_input_factors`.

    If `brief` is true, the run is a trial with fewer folds and steps, and one member per fold.
    """
    candidates = [Candidate.of(rows, pair, settings) for pair in pairs]
    shape = shape_network(rows, max(own.num_outputs for own in candidates), settings)
    most = min(int(settings.options.get("members", NUM_MEMBERS)), len(rows))
    folds = make_folds(len(rows), most, derive_seed(settings.seed, "folds"), rows.y if settings.num_classes else None)
    count = min(most, CHOICE_FOLDS) if brief else most
    per_fold = 2 if settings.num_classes and not brief else 1
    seeds = [derive_seed(settings.seed, "network", index) for index in range(per_fold * count)]
    members = _make_members(rows, candidates, shape, seeds, settings)
    targets = [torch.from_numpy(own.rows.y) for own in candidates]
    targets = targets if settings.num_classes else [target.float() for target in targets]
    x, mine = torch.from_numpy(rows.x).float(), np.arange(count)[:, None] == folds[None]
    held = np.concatenate([mine] * per_fold * len(candidates))
    best_steps, judged = train_held_out(
        members,
        x,
        torch.stack([target for target in targets for _ in seeds]),
        held,
        _member_steps(len(rows), settings, brief=brief),
        weights=torch.from_numpy(rows.weights),
        seed=settings.seed,
        progress=("choosing the model" if brief else f"training {len(seeds)} networks") if settings.progress else "",
        halves=len(rows) <= MAX_ROWS_FOR_SPLIT_STOPPING,
        factors=_input_factors(x.shape[1], settings.num_scaled).repeat_interleave(count, 0) if per_fold > 1 else None,
    )
    with torch.no_grad():
        every = members(x.expand(len(members), -1, -1))
        if judged is not None:
            every = torch.where(torch.from_numpy(held).unsqueeze(-1), judged, every)
        groups = every.unflatten(0, (len(candidates), per_fold, count))  # [G, P, K, N, outputs]
    steps, result = tuple(int(step) for step in best_steps), []
    for group, (own, outputs) in enumerate(zip(candidates, groups, strict=True)):
        found, score = _score_held_out(own, outputs, folds, rows)
        result.append(_Members(members, group, own, outputs.flatten(0, 1), folds, found, score, shape, steps))
    return result


def _make_members(
    rows: Rows, candidates: Sequence[Candidate], shape: NetworkShape, seeds: Sequence[int], settings: Settings
) -> ModelStack:
    """Untrained networks: for each candidate, one network per seed."""
    nets = []
    for own in candidates:
        bias = _start_bias(rows, own)
        for seed in seeds:
            nets.append(shape.make(seed, torch.float32))
            if bias is not None:
                with torch.no_grad():
                    cast(nn.Linear, nets[-1][-1]).bias[: len(bias)] = bias
    prior = Neal(MEMBER_PRIOR_FACTOR * settings.prior_scale)
    points = [bayesianize(net, Point(), prior=prior) for net in nets]
    return ModelStack(points, likelihoods=[own.likelihood.float() for own in candidates])


def _input_factors(num_inputs: int, num_scaled: int) -> Tensor:
    """Factors of the inputs of the two classifiers of a fold, [2, E]: the first sees all inputs, the second only the scaled
    numbers."""
    factors = torch.ones(2, num_inputs)
    factors[1, :num_scaled], factors[1, num_scaled:] = PLAIN_INPUT_FACTOR, 0.0
    return factors


def _score_held_out(
    own: Candidate, every: Tensor, folds: np.ndarray, rows: Rows
) -> tuple[RegressionPredictive | ClassificationPredictive, float]:
    """The predictive of the held-out rows and its score. Each row is predicted by the P networks that have not seen it.

    `every` has the outputs of the P networks of each of K folds for all rows, [P, K, N, outputs].
    """
    seen = np.flatnonzero(folds < every.shape[1])
    outputs = every[:, torch.from_numpy(folds[seen]), torch.from_numpy(seen), : own.num_outputs]
    found = own.likelihood.predictive(Outputs(kept=outputs))
    if own.units is None:
        assert isinstance(found, ClassificationPredictive)
        return found, _score_classes(found, rows[seen])["log_loss"]
    assert isinstance(found, RegressionPredictive)
    return found, pinball(own.units.predictive(found), torch.from_numpy(rows.y[seen]), rows.weights[seen])


def _score_classes(found: ClassificationPredictive, rows: Rows) -> dict[str, float]:
    probs = found.class_probs.double().numpy()
    return Scores.of_classes(probs, [str(code) for code in range(probs.shape[1])], rows.y, LEVELS, rows.weights).means()


def _start_bias(rows: Rows, own: Candidate) -> Tensor | None:
    """Initial bias of the last layer, chosen so that the first outputs fit the distribution of all rows; `None` for 0."""
    if own.pair[0] in COUNT_LIKELIHOODS:
        return torch.from_numpy(TargetUnits.of(rows.y, rows.weights, own.pair[1]).shift).clamp_min(1e-2).log().float()
    if own.pair[0] != HURDLE or own.units is None:
        return None
    above, share = rows.y > 0, rows.weights[:, None]
    logs = np.log(np.where(above, rows.y / own.units.scale, 1.0))
    amounts = (share * above).sum(0).clip(min=1e-300)
    spread, zeros = (share * above * np.square(logs)).sum(0) / amounts, (share * ~above).sum(0)
    start = np.concatenate((0 * spread, np.log(spread.clip(min=1e-2)), np.log(zeros.clip(min=1e-2) / amounts)))
    return torch.from_numpy(start).float()


def pinball(predictive: RegressionPredictive, y: Tensor, weights: np.ndarray) -> float:
    """CRPS computed from 19 quantiles: summed over targets, then averaged over rows with their weights."""
    error = y - predictive.quantile(list(PINBALL_LEVELS))  # [Q, N, O]
    level = torch.tensor(PINBALL_LEVELS, dtype=error.dtype).view(-1, 1, 1)
    loss = 2 * torch.maximum(level * error, (level - 1) * error).mean(0).sum(-1)
    return float(np.average(loss.numpy(), weights=weights))


def _judged_out_of_fold(fitted: FittedTable, chosen: _Members, rows: Rows, settings: Settings) -> FittedTable:
    """The fitted table with out-of-fold scores and with probabilities recalibrated on held-out rows."""
    found, units, folds = chosen.found, fitted.units, chosen.folds
    if units is None:
        return _sharpened(fitted, chosen, rows)
    assert isinstance(found, RegressionPredictive)
    y, one = torch.from_numpy(rows.y), rows.y.shape[1] == 1
    bounded = rows.y.min() >= 0 and one
    floor, ceiling = (0.5 * float(rows.y.min()), MAX_MEAN_RATIO * float(rows.y.max())) if bounded else (None, None)
    units = replace(units, floor=floor, ceiling=ceiling)
    if one and fitted.likelihood not in UNSHIFTED_LIKELIHOODS and settings.noise is None:
        units = replace(units, extremes=(float(chosen.candidate.rows.y.min()), float(chosen.candidate.rows.y.max())))
    u, ties = _drawn_places(units.predictive(found), y, settings)
    recalibrated = one and settings.noise is None
    marks = marks_of(fitted.columns)
    recalibration, empty = (
        _recalibrate(u[:, 0].numpy(), rows, marks) if recalibrated else (Recalibration(), EmptyCells())
    )
    if recalibrated and fitted.likelihood not in UNSHIFTED_LIKELIHOODS and len(chosen.every) > 2:
        places = ensemble_places(chosen.candidate.likelihood, chosen.every, folds, units(rows.y), rows.weights)
        places = np.where(rows.y[:, 0] == floor, ties[:, 0].numpy(), 1.0) * places
        if rows.num_data >= MIN_ROWS:
            recalibration, empty = _recalibrate(places, rows, marks)
        else:
            recalibration = Recalibration.of_few(places, rows.weights)
    units = replace(units, recalibration=recalibration)
    scores, judged = Scores(), list[HeldOut]()
    for fold in range(int(folds.max()) + 1) if one else ():
        own, others = folds == fold, folds != fold
        of_others, wide = Recalibration(), EmptyCells()
        if recalibrated:
            of_others, wide = _recalibrate(u[others, 0].numpy(), rows[others], marks)
        outputs = found.outputs[:, torch.from_numpy(np.flatnonzero(own))]
        part = replace(units, recalibration=of_others).predictive(found.with_outputs(outputs), wide(rows.x[own]))
        scores += Scores.of_numbers(part, rows.y[own, 0], LEVELS, rows.weights[own])
        judged.append(HeldOut.of_numbers(part, rows.y[own, 0]))
    held_out = HeldOut.joined(judged)[np.argsort(np.argsort(folds, kind="stable"))] if judged else None
    notes = tuple(filter(None, (*fitted.report.notes, empty.note(fitted.columns))))
    report = replace(fitted.report, out_of_fold=scores.means(), notes=notes)
    return replace(fitted, units=units, report=report, held_out=held_out, empty=empty)


def _sharpened(fitted: FittedTable, chosen: _Members, rows: Rows) -> FittedTable:
    """The fitted table of classes with out-of-fold scores. The logits are divided by the temperature, inside the last layer.

    Each fold is scored with the temperature of the other folds.
    """
    found, model, notes = chosen.found, fitted.model, fitted.report.notes
    assert isinstance(found, ClassificationPredictive)
    assert isinstance(model, BayesianNetwork)
    assert isinstance(model.posterior, Ensemble)
    temperatures = fit_temperatures(found, rows, chosen.folds)
    temperature = float(temperatures[0])
    if temperature < 1:
        with torch.no_grad():
            for value in model.posterior.value.values()[-2:]:  # weight and bias of the last layer
                value /= temperature
        notes += (
            f"The probabilities of each network were made more extreme (temperature {temperature:.2f}), because this lowers "
            "the log-loss of out-of-fold predictions.",
        )
    found = found.map_outputs(lambda logits: logits / temperatures[1:][torch.from_numpy(chosen.folds), None])
    report = replace(fitted.report, out_of_fold=_score_classes(found, rows), notes=notes)
    return replace(fitted, report=report, held_out=HeldOut(rows.y, probs=found.class_probs.double().numpy()))


def fit_temperatures(found: ClassificationPredictive, rows: Rows, folds: np.ndarray) -> Tensor:
    r"""Temperatures [1 + K]: one is fitted to all held-out rows, and for each of the K folds, one is fitted to the held-out rows
    of the other folds.

    $$ \hat T = \arg\min_{T \le 1} -\sum_n \omega_n \log p_T(y_n | x_n) + (\log T)^2 / (2 \sigma^2) $$

    $\omega$ are the weights of the rows, and $\sigma$ is `LOG_TEMPERATURE_STD`. A held-out row is predicted by two networks. The
    mean prediction of all networks is less certain, so a temperature above 1 would often be wrong for the mean prediction.
    """
    logs = torch.linspace(0.0, math.log(MIN_TEMPERATURE), NUM_TEMPERATURES, dtype=torch.float64)
    y, weights, fold_of_row = (torch.from_numpy(each) for each in (rows.y, rows.weights, folds))
    losses = [torch.bincount(fold_of_row, -weights * rescale(found, log.exp()).log_prob(y)) for log in logs]
    by_fold = torch.stack(losses)  # [NUM_TEMPERATURES, K]
    # Sum the other folds instead of subtracting a fold from the total: a fold with huge weights would cancel all digits.
    others = 1 - torch.eye(by_fold.shape[1], dtype=by_fold.dtype)
    total, penalty = by_fold.sum(1, keepdim=True), logs.square() / (2 * LOG_TEMPERATURE_STD**2)
    return logs.exp()[(torch.cat((total, by_fold @ others), 1) + penalty[:, None]).argmin(0)]


def _recalibrate(u: np.ndarray, rows: Rows, marks: Sequence[Mark]) -> tuple[Recalibration, EmptyCells]:
    """A recalibration map that is fitted to the stated probabilities u [N], and factors for rows with empty cells.

    Factors are computed only for columns with at least `MIN_EMPTY_ROWS` empty cells. The map is fitted without the rows that have
    an empty cell in such a column, if at least half of all rows and at least `MIN_ROWS` rows remain. The larger errors of rows
    with empty cells would otherwise widen the intervals of all rows.
    """
    marks = [mark for mark in marks if rows.weights[is_empty(rows.x, mark)].sum() >= MIN_EMPTY_ROWS]
    complete = ~np.any([np.zeros(len(u), bool), *(is_empty(rows.x, mark) for mark in marks)], axis=0)
    used = complete if rows.weights[complete].sum() >= max(MIN_ROWS, 0.5 * rows.num_data) else np.full(len(u), True)
    found = Recalibration.of(u[used], rows.weights[used])
    seen = found(torch.from_numpy(u)).numpy()
    return found, EmptyCells.of(marks, rows.x, seen, rows.weights)


def _drawn_places(found: RegressionPredictive, y: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Two tensors [N, O] for targets y: P(Y < y) plus a random fraction of P(Y = y), and this fraction.

    For a value y of positive probability, such as a count, the first tensor is thus uniform between P(Y < y) and P(Y <= y).
    """
    u, below = found.cdf(y), found.below(y)
    generator = torch.Generator().manual_seed(derive_seed(settings.seed, "ties"))
    ties = torch.rand(u.shape, generator=generator, dtype=u.dtype)
    return below + (u - below) * ties, ties
