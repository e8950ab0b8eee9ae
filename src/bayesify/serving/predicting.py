"""Predictions for the rows of a table, computed part by part and written as CSV."""

from __future__ import annotations

import csv
import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import numpy as np

from bayesify.arguments.suggestions import closest
from bayesify.serving.about import About
from bayesify.serving.drift import Drift
from bayesify.serving.folder import ModelFolder
from bayesify.serving.questions import Costs, Questions, check_level, reasons_of
from bayesify.serving.sources import PART_ROWS, Parts, read_parts
from bayesify.serving.updating import like_training
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.reasons import Explanation
from bayesify.sklearn.scores import Scores
from bayesify.storage.atomic import remove_leftovers, write_atomically
from bayesify.tables import InputError, Reading
from bayesify.tables.columns import Contents, as_numbers, cells_of
from bayesify.tables.targets import label_of
from bayesify.tables.written_numbers import DECIMAL_COMMAS, DIALECT, is_number, significant

if TYPE_CHECKING:
    from pandas import DataFrame

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would run a cell that begins with one of these characters as a formula."""
UNUSUAL_SHARE = 0.01
"""About this share of rows like the training rows is marked as unusual."""
MAX_TYPICAL_CELLS = 10
"""Maximum number of cells that are printed of the typical row."""
RENAMED_SIMILARITY = 0.75
"""Minimum similarity of names, regardless of case, for a warning that a missing column may have another name in the table."""
_Answers = tuple[dict[str, Sequence[Any]], Scores]
"""Columns of the file, and scores of the rows with a target."""


@dataclass(frozen=True)
class Outcome:
    """Summary of a table's predictions.

    Args:
        num_rows: Number of rows in the file.
        num_unusual: Number of rows unlike the training rows.
        scores: Scores of the rows with a target; empty if the table has no target column.
        notes: Sentences that name assumptions and say how columns were read.
        moved: Sentences about columns that differ from the training rows; the largest difference comes first.
        warnings: Sentences that say why the predictions are worse than the model's scores suggest.
    """

    num_rows: int
    num_unusual: int
    scores: Scores
    notes: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def predict_table(
    model: ModelFolder,
    new: Path,
    out: Path,
    *,
    level: float = 0.9,
    rows: int = PART_ROWS,
    reading: Reading | None = None,
    asked: Questions | None = None,
) -> Outcome:
    """Predict the rows of a table and write the predictions, in the order of the rows, as CSV.

    The first columns of the file identify the row. They are the table's identifiers, such as customer numbers. If the table has no
    identifiers, the first column is `row`, which counts from 1. For a regression, the next columns are `prediction`, `lower`,
    `upper`, `std` and `unusual`. For a classification, the next columns are `prediction`, one `probability_CLASS` for each class,
    and `unusual`. Columns requested by `asked` come last. The file has the separator and the decimal mark of the table. If a
    spreadsheet would run a text as a formula, an apostrophe is put before the text. Only one part is in memory at a time.

    Args:
        model: The model, from `ModelFolder.read`.
        new: The table. The model's columns are found by their names, and all other columns are ignored. If the table has the
            target, predictions are scored.
        out: File to write.
        level: Level of the intervals.
        rows: Number of rows per part.
        reading: Options for reading the file.
        asked: What else to write for each row, such as quantiles or decisions; see `Questions`.

    Raises:
        InputError: If the model cannot answer a question, if the table cannot be read, if the table lacks a column that had no
            empty cells in training, or if a column has other kinds of cells than in training, for any value of `rows`.
        OSError: If the file cannot be written.
    """
    check_level("--level", level)
    asked = asked or Questions()
    asked.check(model.about)
    if out.exists() and new.exists() and out.samefile(new):
        raise InputError(f"--out {out}: this is the table whose rows are predicted; give another file")
    if out.parent.is_dir():
        remove_leftovers(out)
    elif not out.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"the folder {out.parent} does not exist; create it first")
    parts = read_parts(new, rows, like_training(model.about, reading or Reading()))
    found = _Predicted(model, level, asked)
    with _told_of(model, new):
        found.notes |= dict.fromkeys(_check(model, parts))
    try:
        with write_atomically(out) as draft, draft.open("x", newline="", encoding="utf-8") as file:
            for first, frame, remarks in parts:
                separator, decimal = _dialect(model.about, frame)
                writer = csv.writer(file, delimiter=separator)
                with _told_of(model, new):
                    columns = found.add(frame, remarks)
                if not first:
                    writer.writerow(columns)
                writer.writerows(zip(*(_written(cells, decimal) for cells in columns.values()), strict=True))
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"--out {error}") from error
    return found.outcome()


@contextmanager
def _told_of(model: ModelFolder, new: Path) -> Iterator[None]:
    """Context manager that rewords errors about a table for the command line."""
    try:
        yield
    except ValueError as error:
        found = getattr(error, "for_command", "") or str(error).removeprefix(f"{type(model.estimator).__name__}: ")
        reason = found.partition(", or leave the column out with --ignore ")[0].partition(" with --ignore ")[0]
        raise InputError(f"{new.name}: {reason}") from error


def _check(model: ModelFolder, parts: Parts) -> list[str]:
    """Check all parts against the columns of the training rows, and return notes about how dates are read."""
    kinds = {column.name: column.kind for column in model.about.columns if column.kind != "text"}
    days = day_first(model)
    contents = {name: Contents(name) for name in kinds}
    for _, frame, _ in parts:
        inputs, _ = _fitting(model, frame)
        for name, found in contents.items():
            found.add(inputs[name])
    return [note for name, found in contents.items() if (note := found.check_like(kinds[name], name in days))]


class _Predicted:
    """Predictions of the parts that were read so far."""

    def __init__(self, model: ModelFolder, level: float, asked: Questions) -> None:
        self.notes: dict[str, None] = {}
        self._model, self._level, self._asked = model, level, asked
        self._costs = Costs.of(asked.costs, _labels(model.estimator)) if asked.costs else None
        self._num_rows, self._num_unusual, self._scores = 0, 0, Scores()
        self._warnings: dict[str, None] = {}
        self._unseen: dict[str, tuple[int, str]] = {}
        self._drift = Drift(model.about, day_first(model))

    def add(self, frame: DataFrame, remarks: Sequence[str]) -> dict[str, Sequence[Any]]:
        """Predict one more part, and return the file's columns for this part."""
        about = self._model.about
        known = {column.name for column in about.columns} | {about.target, *about.identifiers}
        others = (f"Column {name!r} is not used." for name in frame.columns if name not in known)
        self.notes |= dict.fromkeys((*remarks, *others))
        inputs, found = _fitting(self._model, frame)
        self._warnings |= dict.fromkeys(found)
        for name, (count, text) in _unseen(self._model, frame).items():
            before, example = self._unseen.get(name, (0, text))
            self._unseen[name] = before + count, example
        with catch_warnings(record=True) as told:  # reported in the outcome
            simplefilter("always")
            columns, part = self._predict(inputs, frame)
        owner = f"{type(self._model.estimator).__name__}: "
        self._warnings |= dict.fromkeys(f"{str(entry.message).removeprefix(owner)}." for entry in told)
        self._num_rows += len(frame)
        self._num_unusual += sum(columns["unusual"])
        self._scores += part
        self._drift.add(inputs)
        return _keys(about, frame, columns) | columns

    def outcome(self) -> Outcome:
        """Summary of all parts."""
        unseen = (
            f"column {name!r}: {'1 cell holds a text' if count == 1 else f'{count:,} cells hold texts'} that did not occur in "
            f"training, such as {example[:40]!r}."
            for name, (count, example) in self._unseen.items()
        )
        counts, warnings = (self._num_rows, self._num_unusual), (*self._warnings, *unseen)
        return Outcome(*counts, self._scores, tuple(self.notes), self._drift.moved(), warnings)

    def _predict(self, inputs: DataFrame, frame: DataFrame) -> _Answers:
        estimator = self._model.estimator
        # In a small table, a single training row already exceeds `UNUSUAL_SHARE`.
        share = max(UNUSUAL_SHARE, 1.01 / (self._model.about.num_rows + 1))
        classes = isinstance(estimator, BayesianClassifier)
        unusual = estimator.unusual(inputs, share).tolist()
        columns, part = (self._classes if classes else self._numbers)(inputs, frame, unusual)
        if self._asked.explain:
            found = estimator.explain(inputs, self._level, share)
            columns |= {name: [_cell(text) for text in texts] for name, texts in reasons_of(found, classes).items()}
            self.notes[_typical(found, classes)] = None
        return columns, part

    def _classes(self, inputs: DataFrame, frame: DataFrame, unusual: list[bool]) -> _Answers:
        estimator, target = self._model.estimator, self._model.about.target
        assert isinstance(estimator, BayesianClassifier)
        probs, labels = estimator.predict_proba(inputs), _labels(estimator)
        columns: dict[str, Sequence[Any]] = {"prediction": [_cell(labels[best]) for best in probs.argmax(1)]}
        columns |= {f"probability_{label}": column.tolist() for label, column in zip(labels, probs.T, strict=True)}
        columns["unusual"] = unusual
        if self._costs is not None:
            decisions, costs = self._costs.decide(probs)
            columns |= {"decision": [_cell(decision) for decision in decisions], "expected_cost": costs.tolist()}
        known = frame[target].notna().to_numpy() if target in frame else np.zeros(len(frame), dtype=bool)
        if not known.any():
            return columns, Scores()
        values = np.array([label_of(cell) for cell in cells_of(frame[target][known])])
        return columns, Scores.of_classes(probs[known], labels, values)

    def _numbers(self, inputs: DataFrame, frame: DataFrame, unusual: list[bool]) -> _Answers:
        estimator, target = self._model.estimator, self._model.about.target
        assert isinstance(estimator, BayesianRegressor)
        found = estimator.predictive(inputs)
        lower, upper = found.interval(self._level)
        own = {"prediction": found.mean, "lower": lower, "upper": upper, "std": found.std}
        columns: dict[str, Sequence[Any]] = {name: values.detach()[:, 0].tolist() for name, values in own.items()}
        extra = {name: values.tolist() for name, values in self._asked.about_numbers(found).items()}
        self._note_tails(extra)
        columns |= {"unusual": unusual, **extra}
        if target not in frame:
            return columns, Scores()
        try:
            values = as_numbers(frame[target])
        except ValueError as error:
            raise InputError(
                f"the target {target!r} cannot be scored because it holds texts: {error}; fix the column, or remove it"
            ) from error
        known = np.isfinite(values)
        if not known.any():
            return columns, Scores()
        some = found if known.all() else estimator.predictive(inputs[known])
        return columns, Scores.of_numbers(some, values[known], (self._level,))

    def _note_tails(self, extra: Mapping[str, Sequence[float]]) -> None:
        """Add a note if a probability is so close to 0 or 1 that the training rows cannot support it."""
        rows = self._model.about.num_rows
        least = float(f"{1 / (rows + 1):.2g}")
        found = [value for name in extra if not name.startswith("quantile_") for value in extra[name]]
        if found and (min(found) < least or max(found) > 1 - least):
            self.notes[
                f"Read probabilities below {least:.2g} as less than {least:.2g}, and probabilities above {1 - least:.6g} "
                f"as more than {1 - least:.6g}: {rows:,} training rows cannot support more extreme probabilities."
            ] = None


def _labels(estimator: Any) -> list[str]:
    return list(map(str, estimator.classes_))


def _typical(found: Explanation, classes: bool) -> str:
    cells = ", ".join(f"{name}={cell}" for name, cell in list(found.typical.items())[:MAX_TYPICAL_CELLS])
    more = ", ..." if len(found.typical) > MAX_TYPICAL_CELLS else ""
    told = f"Reasons compare each row with a typical row ({cells}{more})"
    if classes:
        return f"{told}."
    value, width = (significant(float(part[0])) for part in (found.typical_value, found.typical_width))
    return f"{told}, whose prediction is {value} with an interval of width {width}."


def day_first(model: ModelFolder) -> tuple[str, ...]:
    """Date columns in which the day comes before the month in the training rows."""
    columns = model.estimator.fitted_.columns
    return () if columns is None else columns.schema.day_first


def _fitting(model: ModelFolder, frame: DataFrame) -> tuple[DataFrame, list[str]]:
    """The table's columns that the model needs, and warnings about missing columns.

    If a missing column had empty cells in training, it is filled with empty cells. Otherwise `InputError` is raised.
    """
    from pandas import DataFrame, Series

    names = [column.name for column in model.about.columns]
    if not any(name in frame.columns for name in names):
        found = ", ".join(map(str, frame.columns[:5])) + (", ..." if len(frame.columns) > 5 else "")
        remedy = f"the columns of the table are {found}"
        raise InputError(f"the table has none of the columns that the model needs ({', '.join(names[:5])}); {remedy}")
    others = [name for name in map(str, frame.columns) if name not in names]
    columns, warnings = {}, []
    for column in model.about.columns:
        if column.name in frame.columns:
            cells = frame[column.name]
            if not column.num_missing and cells.isna().any():
                warnings.append(f"column {column.name!r} has empty cells, but it had none in training.")
        else:
            near = closest(column.name, others, RENAMED_SIMILARITY)
            hint = "" if near is None else f"; the table has a column {near!r}, which you may want to rename"
            if not column.num_missing:
                raise InputError(
                    f"column {column.name!r} is missing, and the model needs it, because the column had no empty cells "
                    f"in training; add the column, and leave cells empty if their values are unknown{hint}"
                )
            cells = Series(np.nan, index=frame.index)
            warnings.append(
                f"column {column.name!r} is missing; all its cells count as empty, and the predictions are less accurate than the "
                f"model's scores{hint}."
            )
        if column.kind == "date" and not cells.notna().any():
            cells = cells.astype("datetime64[ns]")  # a column without values has no date type
        columns[column.name] = cells
    return DataFrame(columns), warnings


def _unseen(model: ModelFolder, frame: DataFrame) -> dict[str, tuple[int, str]]:
    """For each column, the number of cells whose text did not occur in training, and one of these texts."""
    found, columns = {}, model.estimator.fitted_.columns
    for name, levels in () if columns is None else zip(columns.schema.code_names, columns.schema.levels, strict=True):
        if name in frame.columns:
            cells = frame[name].dropna().astype(str)
            strange = cells[~cells.isin(levels)]
            if len(strange):
                found[name] = len(strange), strange.iloc[0]
    return found


def _keys(about: About, frame: DataFrame, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Columns that identify the row of a prediction: the table's identifiers if there are any, otherwise the row number."""
    names = [name for name in about.identifiers if name in frame.columns and _cell(name) not in columns]
    found: dict[str, Sequence[Any]] = {
        _cell(name): [_cell("" if cell is None else label_of(cell)) for cell in cells_of(frame[name])] for name in names
    }
    return found or {"row": [row + 1 for row in frame.index]}


def _dialect(about: About, frame: DataFrame) -> tuple[str, str]:
    """Separator and decimal mark of the table; the mark is a comma if the table and the training target use decimal commas."""
    separator, decimal = frame.attrs.get(DIALECT, (",", "."))
    written_alike = DIALECT in frame.attrs and frame.attrs.get(DECIMAL_COMMAS) and about.target in about.commas
    return separator, "," if written_alike else decimal


def _written(cells: Sequence[Any], decimal: str) -> list[Any]:
    """Cells in the form in which they are written; fractional numbers have six significant digits."""
    return [f"{cell:.6g}".replace(".", decimal) if isinstance(cell, float) else cell for cell in cells]


def _cell(text: object) -> str:
    """A text as a cell of the file. An apostrophe before a formula keeps spreadsheets from running it."""
    found = str(text)
    return f"'{found}" if found.startswith(FORMULA_STARTS) and not is_number(found) else found
