"""The target column: its task and its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.tables.columns import as_numbers, cells_of, kind_of
from bayesify.tables.errors import InputError, check_magnitude
from bayesify.tables.written_numbers import is_number

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Task = Literal["regression", "classification"]
MAX_CLASS_NUMBERS = 10
"""A target with at most this many different whole numbers may be classes."""
MIN_DIFFERENT_COUNTS, MAX_LARGEST_SHARE = 4, 0.25
"""Whole numbers are taken as counts if they have at least this many different values, and the largest value has at most this share
of the rows that the most frequent value has."""
MAX_CLASSES = 100
MAX_SHOWN_LETTERS = 40
"""Maximum number of letters of a text that an error message quotes."""
MIN_CLASS_ROWS = 5
"""Minimum number of rows of a class, so that each part of a split can contain the class."""


@dataclass(frozen=True)
class Target:
    """Values of the target.

    Args:
        name: Name of the column.
        task: `"regression"` or `"classification"`.
        values: Numbers, or indices of `classes`, [N].
        rows: Indices of the table's rows that have a target, [N].
        classes: Labels; empty for a regression.
        notes: Sentences about assumptions, and about what was left out.
    """

    name: str
    task: Task
    values: np.ndarray
    rows: np.ndarray
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_column(frame: DataFrame, name: str | None, where: str) -> str:
    """Find the target's column.

    Raises:
        InputError: If no name is given, or if no column has the given name; the message suggests the nearest name.
    """
    names = [str(column) for column in frame.columns]
    if name is None:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise InputError(f"{where}: say with --target which column to predict; the columns are {shown}")
    if name not in names:
        raise InputError(f"{where}: there is no column {name!r}; {suggest(name, names)}")
    if len(names) < 2:
        raise InputError(f"{where}: {name!r} is the only column; give at least one more column to predict it from")
    return name


def read_target(column: Series, task: Task | None = None) -> Target:
    """Read the values of the target's column, and detect the task.

    The task is a classification if the column contains texts or booleans, or at most ten different whole numbers that occur often
    and do not look like counts. For other numbers, the task is a regression.

    Args:
        column: The column with its name, one cell per row of the table.
        task: Task; `None` to detect it.

    Raises:
        InputError: If all cells are empty or equal, if numbers are mixed with text, if numbers are too large to be squared, if
            there are too many classes, or if the target contains dates.
    """
    name = str(column.name)
    try:
        kind = "text" if task == "classification" else kind_of(name, column)
    except InputError as error:
        raise InputError(
            f"the target: {str(error).replace(f', or leave the column out with --ignore {name}', '')}"
        ) from error
    if kind == "date":
        raise InputError(f"the target {name!r} holds dates; predict a number of days or a class instead")
    present = ~column.isna().to_numpy()
    values = as_numbers(column) if kind == "number" else None
    if values is not None:
        infinite = np.isinf(values)
        present &= ~infinite
    notes = []
    absent = int((~present).sum())
    if absent == len(column):
        raise InputError(f"the target {name!r} is empty in every row; give rows that have a target")
    if absent:
        notes.append(f"{absent:,} rows without a finite {name} were left out.")
    rows = np.flatnonzero(present)
    found = task or _detect(column, values, rows)
    if task is None:
        what = "numbers" if found == "regression" else "classes"
        if found == "regression" and values is not None and len(np.unique(values[rows])) <= MAX_CLASS_NUMBERS:
            what = "counts"
        other = "classification" if found == "regression" else "regression"
        hint = "" if values is None else f"; if this is wrong, use --task {other}"
        notes.append(f"{name} is treated as {what} ({found}){hint}.")
    if found == "regression":
        if values is None:
            raise InputError(f"the target {name!r} holds texts, so the task cannot be regression; leave out --task")
        numbers = values[rows]
        if numbers.max() == numbers.min():
            raise InputError(
                f"the target {name!r} is {numbers[0]:g} in every row, so there is nothing to predict; choose another "
                "target"
            )
        check_magnitude(f"the target {name!r}", numbers)
        return Target(name, "regression", numbers, rows, (), tuple(notes))
    return _classes(name, column, rows, notes)


def _detect(column: Series, values: np.ndarray | None, rows: np.ndarray) -> Task:
    from pandas.api import types

    if values is None or types.is_bool_dtype(column):
        return "classification"
    numbers = values[rows]
    different = len(np.unique(numbers))
    whole = bool((numbers == np.round(numbers)).all())
    often = len(numbers) >= MIN_CLASS_ROWS * different
    classes = whole and different <= MAX_CLASS_NUMBERS and often and not _are_counts(numbers)
    return "classification" if classes else "regression"


def _are_counts(numbers: np.ndarray) -> bool:
    """Whether whole numbers 0, 1, 2, ... are counts, of which large ones are rare, and not codes of classes."""
    values, counts = np.unique(numbers, return_counts=True)
    if len(values) < MIN_DIFFERENT_COUNTS or values[0] != 0 or values[-1] > 2 * len(values):
        return False
    top = int(counts.argmax())
    falling = (np.diff(counts[top:]) <= 2 * np.sqrt(counts[top:-1])).all()
    return bool(top <= 1 and counts[-1] <= MAX_LARGEST_SHARE * counts[top] and falling)


def _classes(name: str, column: Series, rows: np.ndarray, notes: list[str]) -> Target:
    cells = cells_of(column)
    labels = np.array([label_of(cells[row]) for row in rows])
    known, counts = np.unique(labels, return_counts=True)
    if len(known) == 1:
        raise InputError(
            f"the target {name!r} is {str(known[0])!r} in every row; a classification needs rows of at least two classes"
        )
    if len(known) > MAX_CLASSES:
        raise InputError(f"the target {name!r} {_many_classes(known, counts)}")
    rare, classes = (known[chosen].tolist() for chosen in (counts < MIN_CLASS_ROWS, counts >= MIN_CLASS_ROWS))
    kept = np.isin(labels, classes)
    if rare:
        named = ", ".join(repr(label) for label in rare[:5])
        notes.append(
            f"{int((~kept).sum())} rows were left out, because their class has fewer than {MIN_CLASS_ROWS} rows: {named}."
        )
    if len(classes) < 2:
        raise InputError(
            f"the target {name!r} has fewer than two classes with at least {MIN_CLASS_ROWS} rows; give more rows of each class"
        )
    if all(is_number(label) for label in classes):
        classes.sort(key=float)
    position = {label: index for index, label in enumerate(classes)}
    codes = np.array([position[label] for label in labels[kept].tolist()], dtype=np.int64)
    return Target(name, "classification", codes, rows[kept], tuple(classes), tuple(notes))


def _many_classes(known: np.ndarray, counts: np.ndarray) -> str:
    """The probable kind of a column with too many classes, and the remedy."""
    rows, example = int(counts.sum()), str(known[counts.argmax()])
    once = int((counts == 1).sum())
    if all(is_number(label) for label in known.tolist()):
        looks, remedy = "It holds numbers", "use --task regression"
    elif 2 * once > rows:
        several_words = 2 * sum(" " in label for label in known.tolist()) > len(known)
        looks = (
            f"It looks like {'free text' if several_words else 'names or identifiers'}: {once:,} values occur only once"
        )
        remedy = "give another column as --target, or first sort the texts into a few classes in a new column"
    else:
        looks = f"It looks like a category with many values, of {rows / len(known):.0f} rows each on average"
        remedy = "merge rare values into one class such as 'other', or give a coarser column as --target"
    shown = example if len(example) <= MAX_SHOWN_LETTERS else f"{example[:MAX_SHOWN_LETTERS].rstrip()}..."
    return (
        f"has {len(known):,} different values in {rows:,} rows, such as {shown!r}, but a classification may have at most "
        f"{MAX_CLASSES} classes. {looks}; {remedy}"
    )


def label_of(cell: object) -> str:
    """The label of a class: whole numbers without a point, texts without surrounding space."""
    if isinstance(cell, (float, np.floating)) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()
