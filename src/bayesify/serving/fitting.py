"""Training on a table: reading, the estimator, its scores, and the folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.serving.about import MAX_TEXT_SIGNS, About, Column
from bayesify.serving.folder import ModelFolder, used_columns
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.scores import LEVELS, Scores
from bayesify.sklearn.settings import AUTO
from bayesify.tables.columns import date_of, kind_of, times_of
from bayesify.tables.errors import InputError
from bayesify.tables.targets import Target, Task, find_column, read_target
from bayesify.tables.written_numbers import DECIMAL_COMMAS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

HELD_OUT_FRACTION = 5
"""One row in this number is held out to score a method by name."""
MIN_ROWS = 20
MAX_TEXTS = 20
"""Texts of a column that the folder names."""
NUM_KNOTS = 21
"""Quantiles of a column that the folder keeps, to tell how far new rows have moved."""


@dataclass(frozen=True)
class Scored:
    """How well a method does on rows that it has not seen.

    Args:
        scores: By name, see `Scores.means`.
        where: Which rows these were, in words.
    """

    scores: Mapping[str, float]
    where: str


def fit_table(
    frame: DataFrame,
    target: str | None,
    *,
    name: str = "the table",
    notes: Sequence[str] = (),
    method: str = AUTO,
    task: Task | None = None,
    ignore: Sequence[str] = (),
    seed: int = 0,
    scored: Scored | None = None,
    missing: Sequence[str] = (),
    **options: Any,
) -> ModelFolder:
    """Train an estimator on a table.

    The default method scores itself: each of its members holds out other rows. A method by name whose scores are not known is
    trained a first time without a fifth of the rows, which score it.

    Args:
        frame: The table.
        target: The column to predict.
        name: Name of the table.
        notes: How the table was read, in sentences.
        method: `"auto"`, or the name of a method.
        task: If it is not to be detected.
        ignore: Columns to leave out.
        seed: Seed of everything random.
        scored: How well the method does on rows that it has not seen, where that is known.
        missing: Texts that stand for empty cells, in the table and in those to predict.
        options: More parameters of the estimator, such as `effort`.

    Raises:
        InputError: If table, target, method or columns do not fit.
    """
    target = find_column(frame, target, name)
    found, inputs = _read(frame, target, name, task, ignore)
    values = np.array(found.classes)[found.values] if found.classes else found.values
    make = BayesianClassifier if found.classes else BayesianRegressor
    cells = as_cells(inputs)
    try:
        if method != AUTO and scored is None:
            scored = _hold_out(make(method, random_state=seed, **options), cells, values, seed)
        estimator = make(method, random_state=seed, **options).fit(cells, values)
    except (ValueError, ImportError) as error:
        raise InputError(getattr(error, "for_command", "") or str(error).removeprefix(f"{make.__name__}: ")) from error
    choices = _plain(estimator.choices_)
    if scored is None:
        scored = Scored(choices["out_of_fold"], "each row by the network that had not seen it")
    columns = tuple(describe(column, inputs[column]) for column in used_columns(estimator))
    target_column = describe(target, frame[target].iloc[found.rows], classes=found.classes)
    commas = tuple(column for column in frame.attrs.get(DECIMAL_COMMAS, ()) if column in inputs or column == target)
    about = About(
        name, target, found.task, len(values), fingerprint(inputs, values), columns, target_column, choices,
        scored.scores, scored.where, (*notes, *found.notes), seed, tuple(missing), commas,
    )  # fmt: skip
    return ModelFolder(estimator, about)


def _read(
    frame: DataFrame, target: str, name: str, task: Task | None, ignore: Sequence[str]
) -> tuple[Target, DataFrame]:
    """The target, and the inputs of the rows that have one."""
    for column in ignore:
        if column not in frame.columns or column == target:
            what = "that is the target" if column == target else suggest(column, list(frame.columns))
            raise InputError(f"--ignore {column}: {name} has no such column to leave out; {what}")
    found = read_target(frame[target], task)
    if len(found.rows) < MIN_ROWS:
        raise InputError(f"{name}: {len(found.rows)} rows with a target; a model needs at least {MIN_ROWS}")
    return found, frame.drop(columns=[target, *ignore]).iloc[found.rows].reset_index(drop=True)


def _hold_out(
    estimator: BayesianRegressor | BayesianClassifier, cells: DataFrame, values: np.ndarray, seed: int
) -> Scored:
    """Scores of a first training without some rows, on these."""
    held = np.random.default_rng(seed).permutation(len(values)) % HELD_OUT_FRACTION == 0
    estimator.fit(cells[~held], values[~held])
    if isinstance(estimator, BayesianClassifier):
        probs, labels = estimator.predict_proba(cells[held]), list(map(str, estimator.classes_))
        found = Scores.of_classes(probs, labels, values[held], LEVELS)
    else:
        found = Scores.of_numbers(estimator.predictive(cells[held]), values[held])
    return Scored(found.means(), f"{int(held.sum()):,} rows held out of a first training")


def as_cells(frame: DataFrame) -> DataFrame:
    """A frame whose columns may hold anything later: estimators take one of finite numbers alone for an array of numbers, which
    new rows with an empty cell would not fit."""
    from pandas.api import types

    numbers = [name for name in frame.columns if types.is_numeric_dtype(frame[name])]
    return frame.astype(dict.fromkeys(numbers[:1], object)) if len(numbers) == frame.shape[1] else frame


def describe(name: str, column: Series, classes: Sequence[str] = ()) -> Column:
    """What a column holds."""
    missing = int(column.isna().sum())
    kind = "text" if classes else kind_of(name, column)
    if kind == "text":
        counts = column.dropna().astype(str).value_counts()
        texts = tuple(classes[:MAX_TEXTS]) or tuple(str(text)[:MAX_TEXT_SIGNS] for text in counts.index[:MAX_TEXTS])
        shares = () if classes else tuple((counts.iloc[:MAX_TEXTS] / counts.sum()).tolist())
        return Column(name, kind, None, None, texts, len(classes) or len(counts), missing, (), shares)
    values = np.sort(times_of(column)) if missing < len(column) else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return Column(name, kind, num_missing=missing)
    knots = np.unique(np.quantile(values, np.linspace(0, 1, NUM_KNOTS), method="inverted_cdf"))
    shares = np.searchsorted(values, knots, side="right") / len(values)
    low, high = float(values[0]), float(values[-1])
    ends: tuple[Any, Any] = (date_of(low), date_of(high)) if kind == "date" else (low, high)
    return Column(name, kind, *ends, (), int(column.nunique()), missing, tuple(knots.tolist()), tuple(shares.tolist()))


def fingerprint(inputs: DataFrame, values: np.ndarray) -> str:
    """A hash of rows and target, which tells whether a model was made from the same data."""
    from pandas.util import hash_pandas_object

    digest = hashlib.sha256(repr([str(name) for name in inputs.columns]).encode())
    digest.update(hash_pandas_object(inputs.astype(str), index=False).to_numpy().tobytes())
    digest.update("\n".join(map(str, values.tolist())).encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Plain data of what an estimator chose; what is not finite is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) else str(value)
