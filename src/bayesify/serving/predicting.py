"""Predictions for the rows of a table, part by part, as CSV."""

from __future__ import annotations

import csv
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import numpy as np

from bayesify.serving.chunks import PART_ROWS, Parts, read_parts
from bayesify.serving.folder import ModelFolder
from bayesify.sklearn import BayesianClassifier
from bayesify.sklearn.scores import Scores
from bayesify.storage.atomic import remove_leftovers, write_atomically
from bayesify.tables.columns import Contents, as_numbers, cells_of
from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading
from bayesify.tables.targets import label_of
from bayesify.tables.written_numbers import is_number

if TYPE_CHECKING:
    from pandas import DataFrame

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""What begins a cell that a spreadsheet would run."""
UNUSUAL_SHARE = 0.01
"""Share of rows like the training rows that are called unusual."""


@dataclass(frozen=True)
class Outcome:
    """What was predicted.

    Args:
        num_rows: Rows in the file.
        num_unusual: Those unlike the training rows.
        scores: Of the rows with a target; none where the table has no such column.
        notes: What was assumed, in sentences.
        warnings: What makes predictions worse than the model's scores, in sentences.
    """

    num_rows: int
    num_unusual: int
    scores: Scores
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def predict_table(
    model: ModelFolder,
    new: Path,
    out: Path,
    *,
    level: float = 0.9,
    rows: int = PART_ROWS,
    reading: Reading | None = None,
) -> Outcome:
    """Predict the rows of a table and write them, in order, as CSV.

    A regression has the columns `prediction`, `lower`, `upper`, `std` and `unusual`; a classification `prediction`, one
    `probability_CLASS` for each class, and `unusual`. Texts that a spreadsheet would run as a formula begin with an apostrophe.
    Memory holds one part of the table. The file appears when it is whole.

    Args:
        model: What `ModelFolder.read` gives.
        new: The table; columns are found by name, others do not matter, and a target among them is scored.
        out: The file to write.
        level: Of the intervals.
        rows: Number of rows of a part.
        reading: How the file is to be read.

    Raises:
        InputError: If the table cannot be read, lacks a column that had no empty cell in training, or holds other kinds of cells
            than the training rows; the words do not depend on the parts.
        OSError: If the file cannot be written.
    """
    if not 0 < level < 1:
        raise InputError(f"--level {level:g}: give a number between 0 and 1, such as 0.9")
    if out.exists() and new.exists() and out.samefile(new):
        raise InputError(f"--out {out}: is the table itself; give another file")
    if out.parent.is_dir():
        remove_leftovers(out)
    elif not out.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {out.parent}; make it first")
    parts = read_parts(new, rows, _as_in_training(model, reading or Reading()))
    found = _Predicted(model, level)
    with _told_of(model, new):
        _check(model, parts)
    try:
        with write_atomically(out) as draft, draft.open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_header(model))
            for _, frame, remarks in parts:
                with _told_of(model, new):
                    cells = found.add(frame, remarks)
                writer.writerows(cells)
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"--out {error}") from error
    return found.outcome()


@contextmanager
def _told_of(model: ModelFolder, new: Path) -> Iterator[None]:
    """Errors about a table, as the command tells them."""
    try:
        yield
    except ValueError as error:
        reason = str(error).removeprefix(f"{type(model.estimator).__name__}: ").partition(" with --ignore ")[0]
        raise InputError(f"{new.name}: {reason}") from error


def _check(model: ModelFolder, parts: Parts) -> None:
    """Refuse a table whose columns are not those of the training rows, by the whole of it.

    Raises:
        InputError: If a column is not there, or holds other kinds of cells.
    """
    kinds = {column.name: column.kind for column in model.about.columns if column.kind != "text"}
    days = model.estimator.fitted_.columns.schema.day_first if model.estimator.fitted_.columns is not None else ()
    contents = {name: Contents(name) for name in kinds}
    for _, frame, _ in parts:
        inputs, _ = _fitting(model, frame)
        for name, found in contents.items():
            found.add(inputs[name])
    for name, found in contents.items():
        found.check_like(kinds[name], name in days)


class _Predicted:
    """Predictions of the parts of a table so far."""

    def __init__(self, model: ModelFolder, level: float) -> None:
        self._model, self._level = model, level
        self._num_rows, self._num_unusual, self._scores = 0, 0, Scores()
        self._notes: dict[str, None] = {}
        self._warnings: dict[str, None] = {}
        self._unseen: dict[str, tuple[int, str]] = {}

    def add(self, frame: DataFrame, remarks: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Cells of the file for one more part."""
        self._notes |= dict.fromkeys((*remarks, *_others(self._model, frame)))
        inputs, found = _fitting(self._model, frame)
        self._warnings |= dict.fromkeys(found)
        for name, (count, text) in _unseen(self._model, frame).items():
            before, example = self._unseen.get(name, (0, text))
            self._unseen[name] = before + count, example
        with catch_warnings(record=True) as told:  # they belong to the outcome
            simplefilter("always")
            cells, flags, part = _predict(self._model, inputs, frame, self._level)
        owner = f"{type(self._model.estimator).__name__}: "
        self._warnings |= dict.fromkeys(f"{str(entry.message).removeprefix(owner)}." for entry in told)
        self._num_rows += len(frame)
        self._num_unusual += int(flags.sum())
        self._scores += part
        return cells

    def outcome(self) -> Outcome:
        """What was predicted in all."""
        unseen = (
            f"column {name!r}: {count:,} cells hold texts that training never had, such as {example[:40]!r}."
            for name, (count, example) in self._unseen.items()
        )
        warnings = (*self._warnings, *unseen)
        return Outcome(self._num_rows, self._num_unusual, self._scores, tuple(self._notes), warnings)


def _header(model: ModelFolder) -> list[str]:
    if isinstance(model.estimator, BayesianClassifier):
        return ["prediction", *(f"probability_{label}" for label in model.estimator.classes_), "unusual"]
    return ["prediction", "lower", "upper", "std", "unusual"]


def _predict(
    model: ModelFolder, inputs: DataFrame, frame: DataFrame, level: float
) -> tuple[Iterator[Sequence[Any]], np.ndarray, Scores]:
    """Cells of the file, which rows are unusual, and scores of those with a target."""
    estimator, target = model.estimator, model.about.target
    # Among few rows the most unusual one is a larger share than usual.
    flags = estimator.unusual(inputs, max(UNUSUAL_SHARE, 1.01 / (model.about.num_rows + 1)))
    if isinstance(estimator, BayesianClassifier):
        probs = estimator.predict_proba(inputs)
        labels = [_cell(label) for label in estimator.classes_[probs.argmax(1)]]
        cells = zip(labels, *(_texts(column) for column in probs.T), flags.tolist(), strict=True)
        known = frame[target].notna().to_numpy() if target in frame else np.zeros(len(frame), dtype=bool)
        values = np.array([label_of(cell) for cell in cells_of(frame[target][known])]) if known.any() else np.empty(0)
        part = Scores.of_classes(probs[known], list(map(str, estimator.classes_)), values) if known.any() else Scores()
        return cells, flags, part
    found = estimator.predictive(inputs)
    lower, upper = found.interval(level)
    columns = [values.detach().numpy()[:, 0] for values in (found.mean, lower, upper, found.std)]
    cells = zip(*(_texts(column) for column in columns), flags.tolist(), strict=True)
    if target not in frame:
        return cells, flags, Scores()
    try:
        values = as_numbers(frame[target])
    except ValueError as error:
        raise InputError(
            f"the target {target!r} is to be scored, and holds texts: {error}; correct or drop it"
        ) from error
    known = np.isfinite(values)
    if not known.any():
        return cells, flags, Scores()
    some = found if known.all() else estimator.predictive(inputs[known])
    return cells, flags, Scores.of_numbers(some, values[known], (level,))


def _as_in_training(model: ModelFolder, reading: Reading) -> Reading:
    """With what the training table says about cells that can be read in several ways."""
    texts = tuple(column.name for column in model.about.columns if column.kind == "text")
    missing = (*model.about.missing, *reading.missing)
    return replace(reading, missing=missing, texts=texts, commas=model.about.commas)


def _fitting(model: ModelFolder, frame: DataFrame) -> tuple[DataFrame, list[str]]:
    """The model's columns, and warnings about those that are not there: they are filled with empty cells where training had some.

    Raises:
        InputError: If a column is not there that had no empty cell in training.
    """
    from pandas import DataFrame, Series

    names = [column.name for column in model.about.columns]
    if not any(name in frame.columns for name in names):
        found = ", ".join(map(str, frame.columns[:5])) + (", ..." if len(frame.columns) > 5 else "")
        raise InputError(f"holds none of the columns that the model needs ({', '.join(names[:5])}), but {found}")
    columns, warnings = {}, []
    for column in model.about.columns:
        if column.name in frame.columns:
            cells = frame[column.name]
            if not column.num_missing and cells.isna().any():
                warnings.append(f"column {column.name!r} has empty cells, which it never had in training.")
        else:
            if not column.num_missing:
                near = [name for name in map(str, frame.columns) if name.lower() == column.name.lower()]
                hint = f"; there is {near[0]!r}: rename it" if near else ""
                raise InputError(
                    f"column {column.name!r} is missing, and had no empty cell in training, so that the model does not know what "
                    f"its absence means; give the column, empty where it is not known{hint}"
                )
            cells = Series(np.nan, index=frame.index)
            warnings.append(
                f"column {column.name!r} is missing; it counts as empty in every row, and predictions are less accurate "
                "than the model's scores."
            )
        if column.kind == "date" and not cells.notna().any():
            cells = cells.astype("datetime64[ns]")  # without a cell nothing says that these are dates
        columns[column.name] = cells
    return DataFrame(columns), warnings


def _unseen(model: ModelFolder, frame: DataFrame) -> dict[str, tuple[int, str]]:
    """Cells with texts that a column has never had in training, as far as the folder names them all: how many, and one of them."""
    found = {}
    for column in model.about.columns:
        if column.kind == "text" and column.num_different == len(column.texts) and column.name in frame.columns:
            cells = frame[column.name].dropna().astype(str)
            strange = cells[~cells.isin(column.texts)]
            if len(strange):
                found[column.name] = len(strange), strange.iloc[0]
    return found


def _others(model: ModelFolder, frame: DataFrame) -> list[str]:
    known = {column.name for column in model.about.columns} | {model.about.target}
    return [f"Column {name!r} is not used." for name in frame.columns if name not in known]


def _texts(values: np.ndarray) -> list[str]:
    return [f"{value:.6g}" for value in values.tolist()]


def _cell(text: object) -> str:
    """A text for a cell: one that a spreadsheet would run begins with an apostrophe."""
    found = str(text)
    return f"'{found}" if found.startswith(FORMULA_STARTS) and not is_number(found) else found
