"""Training on a table: read the rows, fit the estimator, score it, and describe the result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.serving.about import MAX_TEXT_CHARACTERS, About, Column
from bayesify.serving.folder import Estimator, ModelFolder, pack_rows, used_columns
from bayesify.serving.judged import Judged
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.fitted import HeldOut
from bayesify.sklearn.scores import LEVELS, Scores
from bayesify.sklearn.settings import AUTO
from bayesify.tables.columns import date_of, kind_of, times_of
from bayesify.tables.errors import InputError
from bayesify.tables.targets import Target, Task, find_column, read_target
from bayesify.tables.written_numbers import DECIMAL_COMMAS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

HELD_OUT_FRACTION = 5
"""To score a named method, one in this many rows is held out."""
MIN_ROWS = 20
OUT_OF_FOLD = "all rows, each predicted by a model that had not seen it"
MAX_TEXTS = 20
"""Maximum number of texts of a column that the folder lists."""
NUM_KNOTS = 21
"""Number of quantiles of a column that the folder keeps. They serve to measure how far new rows differ from the training rows."""


@dataclass(frozen=True)
class Scored:
    """Scores of a method on rows that it has not seen."""

    scores: Mapping[str, float]  # mapping from names to scores; see `Scores.means`
    where: str  # description of the scored rows
    held_out: HeldOut | None = None  # predictions of the scored rows, if they are known
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # indices in the table, [N]


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
    keep_rows: bool = False,
    **options: Any,
) -> ModelFolder:
    """Train an estimator on a table.

    The default method needs no extra training run for its scores, because each network of its ensemble holds out different rows.
    Any other method without known scores is first trained without a fifth of the rows, on which it is scored, and then on all.

    Args:
        frame: The table.
        target: Name of the column to predict.
        name: Name of the table.
        notes: Sentences that say how the table was read.
        method: `"auto"`, or the name of a method.
        task: Kind of target; `None` to detect the kind.
        ignore: Columns to leave out.
        seed: Seed of everything random.
        scored: Scores of the method on rows that it has not seen; `None` if they are not known.
        missing: Texts that stand for empty cells in this table and in tables that will be predicted.
        keep_rows: Whether the folder stores the training rows, with only the columns that the model uses, for `update_table`.
        options: Further parameters of the estimator, such as `effort`.

    Raises:
        InputError: If the table, the target, the method or the columns cannot be used.
    """
    target = find_column(frame, target, name)
    found, values, inputs = read_rows(frame, target, name, task, ignore)
    make = BayesianClassifier if found.classes else BayesianRegressor
    cells = as_cells(inputs)
    try:
        if method != AUTO and scored is None:
            scored = _hold_out(make(method, random_state=seed, **options), cells, values, seed)
        estimator = make(method, random_state=seed, **options).fit(cells, values)
    except (ValueError, ImportError) as error:
        raise InputError(getattr(error, "for_command", "") or str(error).removeprefix(f"{make.__name__}: ")) from error
    out_of_fold = _plain(estimator.choices_).get("out_of_fold", {})
    own = Scored(out_of_fold, OUT_OF_FOLD, estimator.fitted_.held_out, np.arange(len(values)))
    scored = scored or own
    about = _describe(frame, inputs, found, values, estimator, scored, name)
    about = replace(about, notes=(*notes, *found.notes), missing=tuple(missing), seed=seed)
    rows = pack_rows(frame[[*used_columns(estimator), target]].iloc[found.rows]) if keep_rows else b""
    return _with_judged(ModelFolder(estimator, about, rows=rows), inputs, own if own.held_out is not None else scored)


def _describe(
    frame: DataFrame, inputs: DataFrame, target: Target, values: np.ndarray, made: Estimator, scored: Scored, name: str
) -> About:
    used, decimal = list(used_columns(made)), frame.attrs.get(DECIMAL_COMMAS, ())
    columns = tuple(describe(column, inputs[column]) for column in used)
    target_column = describe(target.name, frame[target.name].iloc[target.rows], classes=target.classes)
    return About(
        name, target.name, target.task, len(values), fingerprint(inputs[used], values), columns, target_column,
        _plain(made.choices_), scored.scores, scored.where,
        commas=tuple(column for column in decimal if column in inputs or column == target.name),
        identifiers=tuple(column for column in frame.columns if column not in (*used, target.name) and _identifies(frame[column])),
    )  # fmt: skip


def _identifies(column: Series) -> bool:
    """Whether a column identifies rows: no cell is empty, all cells differ, and none is a fraction or a long text."""
    texts = column.astype(str)
    if not (column.notna().all() and texts.is_unique and texts.str.len().max() <= MAX_TEXT_CHARACTERS):
        return False
    return not any(isinstance(cell, float) and not cell.is_integer() for cell in column.tolist())


def _with_judged(model: ModelFolder, inputs: DataFrame, seen: Scored) -> ModelFolder:
    """Add scores of groups, a confusion table and figures to a model, if its predictions of unseen rows are known."""
    if seen.held_out is None:
        return model
    about, estimator = model.about, model.estimator
    classes = list(map(str, estimator.classes_)) if isinstance(estimator, BayesianClassifier) else []
    judged = Judged(seen.held_out, inputs.iloc[seen.rows], classes)
    groups = judged.groups([column.name for column in about.columns if column.kind == "text"])
    confusion = judged.confusion(about.target_column.texts)
    about = replace(about, groups=groups, groups_on=seen.where, confusion=confusion)
    return replace(model, about=about, figure=judged.figure(about.target))


def read_rows(
    frame: DataFrame, target: str, name: str, task: Task | None, ignore: Sequence[str]
) -> tuple[Target, np.ndarray, DataFrame]:
    """For the rows that have a target: the `Target`, the target as an array of numbers or labels, and the input columns."""
    for column in ignore:
        if column not in frame.columns or column == target:
            what = "that is the target" if column == target else suggest(column, list(frame.columns))
            raise InputError(f"--ignore {column}: {name} has no input column with this name; {what}")
    found = read_target(frame[target], task)
    if len(found.rows) < MIN_ROWS:
        raise InputError(f"{name}: only {len(found.rows)} rows have a target; a model needs at least {MIN_ROWS} rows")
    values = np.array(found.classes)[found.values] if found.classes else found.values
    return found, values, frame.drop(columns=[target, *ignore]).iloc[found.rows].reset_index(drop=True)


def _hold_out(estimator: Estimator, cells: DataFrame, values: np.ndarray, seed: int) -> Scored:
    """Train the estimator a first time without some rows, and return its scores on these rows."""
    held = np.random.default_rng(seed).permutation(len(values)) % HELD_OUT_FRACTION == 0
    estimator.fit(cells[~held], values[~held])
    if isinstance(estimator, BayesianClassifier):
        probs, labels = estimator.predict_proba(cells[held]), list(map(str, estimator.classes_))
        found = Scores.of_classes(probs, labels, values[held], LEVELS)
        known = np.isin(values[held].astype(str), labels)
        codes = np.array([labels.index(label) for label in values[held][known].astype(str)], dtype=np.int64)
        predicted, rows = HeldOut(codes, probs=probs[known]), np.flatnonzero(held)[known]
    else:
        predictive = estimator.predictive(cells[held])
        found = Scores.of_numbers(predictive, values[held])
        predicted, rows = HeldOut.of_numbers(predictive, values[held]), np.flatnonzero(held)
    where = f"{int(held.sum()):,} rows that were held out of a first training run"
    return Scored(found.means(), where, predicted, rows)


def as_cells(frame: DataFrame) -> DataFrame:
    """The frame in a form in which an estimator trained on it accepts new rows with empty cells, even if all cells are numbers."""
    from pandas.api import types

    numbers = [name for name in frame.columns if types.is_numeric_dtype(frame[name])]
    return frame.astype(dict.fromkeys(numbers[:1], object)) if len(numbers) == frame.shape[1] else frame


def describe(name: str, column: Series, classes: Sequence[str] = ()) -> Column:
    """Contents of a column."""
    missing = int(column.isna().sum())
    kind = "text" if classes else kind_of(name, column)
    if kind == "text":
        cells = column.dropna().astype(str)
        counts = cells.str.slice(stop=MAX_TEXT_CHARACTERS).value_counts()
        texts = tuple(classes[:MAX_TEXTS]) or tuple(map(str, counts.index[:MAX_TEXTS]))
        shares = () if classes else tuple((counts.iloc[:MAX_TEXTS] / counts.sum()).tolist())
        return Column(name, kind, None, None, texts, len(classes) or cells.nunique(), missing, (), shares)
    values = np.sort(times_of(column)) if missing < len(column) else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return Column(name, kind, num_missing=missing)
    knots = np.unique(np.quantile(values, np.linspace(0, 1, NUM_KNOTS), method="inverted_cdf"))
    up_to = np.searchsorted(values, knots, side="right") / len(values)
    low, high = float(values[0]), float(values[-1])
    ends: tuple[Any, Any] = (date_of(low), date_of(high)) if kind == "date" else (low, high)
    return Column(name, kind, *ends, (), int(column.nunique()), missing, tuple(knots.tolist()), tuple(up_to.tolist()))


def fingerprint(inputs: DataFrame, values: np.ndarray) -> str:
    """A hash of the rows and the target. Equal hashes mean that models were trained on the same data; 1 and 1.0 count as equal."""
    from pandas.api import types
    from pandas.util import hash_pandas_object

    kinds = inputs.dtypes.items()
    numbers = [name for name, kind in kinds if types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind)]
    inputs = inputs.astype(dict.fromkeys(numbers, float))
    digest = hashlib.sha256(repr([str(name) for name in inputs.columns]).encode())
    digest.update(hash_pandas_object(inputs.astype(str), index=False).to_numpy().tobytes())
    digest.update("\n".join(map(str, values.tolist())).encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """An estimator's choices as plain data; numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) else str(value)
