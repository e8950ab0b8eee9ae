"""Columns as numbers: what kind each one is, and how it enters a network."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.tables.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MOSTLY = 0.5
"""Share of cells that are numbers (or dates) from which on the others are taken for mistakes."""
MANY_LEVELS = 50
"""Different texts in a column above which it may be free text or an identifier."""
FEW_TEXTS = 10
"""Texts up to which it may be by chance that no two of them are the same."""
IDENTIFIERS = re.compile(
    r"^(id|index|uuid|guid|pk|key|nr|no|number|account|row|row_?(id|nr|no|number)|unnamed: \d+|.*[_ ](id|nr|no|key|number))$",
    re.IGNORECASE,
)
DAYS = " (days)"
"""Ends the name of the first number that is made of a date."""
MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
DATE = re.compile(
    r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rf"|\d{{4}}-\d{{2}}|{MONTH} \d{{1,2}},? \d{{4}}|\d{{1,2}}[ -]{MONTH}[ -]\d{{2,4}})([ T].*)?\s*$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Features:
    """All inputs of a table, not yet filled or scaled.

    Args:
        numbers: [N, D], NaN where a cell is missing.
        number_names: D names.
        codes: Positions in `levels`, [N, C]; -1 where a cell is missing.
        code_names: C names.
        levels: The texts of each category, C lists.
        notes: What was left out and why, in sentences.
    """

    numbers: np.ndarray
    number_names: tuple[str, ...]
    codes: np.ndarray
    code_names: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def schema(self) -> Features:
        """The same columns and levels without rows: what `read_features` needs for a second table."""
        return Features(
            np.empty((0, len(self.number_names))),
            self.number_names,
            np.empty((0, len(self.code_names)), dtype=np.int64),
            self.code_names,
            self.levels,
        )

    def config(self) -> dict[str, Any]:
        """Columns and levels as plain data."""
        return {
            "numbers": list(self.number_names),
            "categories": list(self.code_names),
            "levels": [list(levels) for levels in self.levels],
        }

    @classmethod
    def restore(cls, config: Mapping[str, Any]) -> Features:
        """The schema of `config`."""
        numbers, categories = tuple(map(str, config["numbers"])), tuple(map(str, config["categories"]))
        levels = tuple(tuple(map(str, level)) for level in config["levels"])
        none = np.empty((0, len(categories)), dtype=np.int64)
        return cls(np.empty((0, len(numbers))), numbers, none, categories, levels)

    @property
    def num_columns(self) -> int:
        """Columns of the table that are used; a date is one, however many numbers are made of it."""
        dates = [name.removesuffix(DAYS) for name in self.number_names if name.endswith(DAYS)]
        made = [name for name in self.number_names if any(name.startswith(f"{date} (") for date in dates)]
        return len(self.number_names) - len(made) + len(dates) + len(self.code_names)


def read_features(frame: DataFrame, like: Features | None = None) -> Features:
    """The inputs of a table.

    Numbers and truth values stay as they are; dates become days and, where they vary, season, weekday and hour as points on a
    circle; other texts are categories. Those that are constant, empty, identifiers or free text are left out.

    Args:
        frame: The table without its target; its index holds the numbers of the rows in the file.
        like: Inputs whose columns and levels are to be had, for a second table of the same kind.

    Raises:
        InputError: If a column of numbers or dates holds text, a column has mixed or unknown contents, or nothing is left.
    """
    numbers: dict[str, np.ndarray] = {}
    texts: dict[str, list[str | None]] = {}
    notes: list[str] = []
    for name in frame.columns:
        column = frame[name]
        kind = kind_of(name, column)
        if like is not None:
            kind = _forced(name, kind, like)
        reason = "" if like is not None else _useless(name, column, kind)
        if reason:
            notes.append(f"Column {name!r} was left out: {reason}.")
        elif kind == "number":
            numbers[name] = as_numbers(column)
        elif kind == "date":
            numbers |= _date_parts(name, column)
        else:
            texts[name] = [None if cell is None else str(cell) for cell in cells_of(column)]
    if like is not None:
        return _alike(numbers, texts, like, len(frame))
    if not numbers and not texts:
        raise InputError(f"no column is left to predict from. {' '.join(notes)}")
    for name, values in numbers.items():
        infinite = int(np.isinf(values).sum())
        if infinite:
            notes.append(f"Column {name!r} holds {infinite} infinite numbers; they count as missing.")
            numbers[name] = np.where(np.isinf(values), np.nan, values)
    levels = {name: tuple(sorted({cell for cell in cells if cell is not None})) for name, cells in texts.items()}
    return Features(
        np.column_stack(list(numbers.values())) if numbers else np.empty((len(frame), 0)),
        tuple(numbers),
        _codes(texts, levels, len(frame)),
        tuple(texts),
        tuple(levels.values()),
        tuple(notes),
    )


def _forced(name: str, kind: str, like: Features) -> str:
    if name in like.code_names:
        return "text"
    dated = any(known.startswith(f"{name} (") for known in like.number_names)
    wanted = "number" if name in like.number_names else "date" if dated else ""
    if wanted and kind != wanted:
        raise InputError(f"column {name!r} holds {kind}s where the first table has {wanted}s; give a table like it")
    return kind


def _alike(numbers: dict[str, np.ndarray], texts: dict[str, list[str | None]], like: Features, rows: int) -> Features:
    missing = [name for name in like.code_names if name not in texts]
    missing += [name for name in like.number_names if name not in numbers and not _is_part(name, numbers)]
    if missing:
        raise InputError(f"column {missing[0]!r} is missing; give a table with the same columns")
    values = [
        np.where(np.isinf(found := numbers.get(name, np.zeros(rows))), np.nan, found) for name in like.number_names
    ]
    levels = dict(zip(like.code_names, like.levels, strict=True))
    chosen = {name: texts[name] for name in like.code_names}
    return Features(
        np.column_stack(values) if values else np.empty((rows, 0)),
        like.number_names,
        _codes(chosen, levels, rows),
        like.code_names,
        like.levels,
    )


def _is_part(name: str, numbers: dict[str, np.ndarray]) -> bool:
    """Whether a name is a part of a date that does not vary in this table."""
    return " (" in name and f"{name.rsplit(' (', 1)[0]}{DAYS}" in numbers


def _codes(texts: dict[str, list[str | None]], levels: dict[str, tuple[str, ...]], rows: int) -> np.ndarray:
    """Positions in the levels; -2 for a text that is none of them."""
    columns = []
    for name, cells in texts.items():
        position = {level: index for index, level in enumerate(levels[name])}
        columns.append([-1 if cell is None else position.get(cell, -2) for cell in cells])
    return np.array(columns, dtype=np.int64).reshape(len(columns), rows).T


# -- kinds -------------------------------------------------------------------------------------------------------------


def kind_of(name: str, column: Series) -> str:
    """`"number"`, `"date"` or `"text"`, by most of a column's cells.

    Raises:
        InputError: If the other cells do not fit, or cells hold lists, bytes or complex numbers.
    """
    from pandas.api import types

    if types.is_bool_dtype(column) or types.is_numeric_dtype(column):
        if types.is_complex_dtype(column):
            raise InputError(f"column {name!r} holds complex numbers; leave it out with --ignore {name}")
        return "number"
    if types.is_datetime64_any_dtype(column) or types.is_timedelta64_dtype(column):
        return "date"
    present = [cell for cell in cells_of(column) if cell is not None]
    if not present:
        return "number"
    odd = next((cell for cell in present if isinstance(cell, (list, dict, set, np.ndarray, bytes))), None)
    if odd is not None:
        raise InputError(f"column {name!r} holds {type(odd).__name__} values; leave it out with --ignore {name}")
    numeric = np.array([_is_numeric(cell) for cell in present])
    if numeric.mean() >= MOSTLY:
        _refuse_others(name, column, numeric, "numbers")
        return "number"
    dated = np.array([not isinstance(cell, str) or DATE.match(cell) is not None for cell in present])
    if dated.mean() >= MOSTLY:
        _refuse_others(name, column, dated, "dates")
        return "date"
    return "text"


def _refuse_others(name: str, column: Series, fits: np.ndarray, what: str) -> None:
    if fits.all():
        return
    rows = [index for index, cell in enumerate(cells_of(column)) if cell is not None]
    first = int(np.flatnonzero(~fits)[0])
    wrong = [cell for cell in cells_of(column) if cell is not None][first]
    raise InputError(
        f"column {name!r} holds {what}, but {str(wrong)[:40]!r} in row {column.index[rows[first]] + 1} below the header "
        f"({int((~fits).sum())} of {len(fits)} cells hold no {what}); correct or empty such cells, or leave the column out "
        f"with --ignore {name}"
    )


def _is_numeric(cell: Any) -> bool:
    if isinstance(cell, (bool, int, float, np.number)):
        return True
    try:
        float(str(cell))
    except ValueError:
        return False
    return True


def cells_of(column: Series) -> list[Any]:
    """Cells with `None` for every kind of missing one; truth values among texts stay what they are."""
    missing = column.isna().to_numpy()
    return [None if absent else cell for absent, cell in zip(missing, column.tolist(), strict=True)]


def _useless(name: str, column: Series, kind: str) -> str:
    cells = [cell for cell in cells_of(column) if cell is not None]
    if not cells:
        return "all its cells are empty"
    different = len({str(cell) for cell in cells})
    if different == 1 and len(cells) == len(column):
        return "it holds the same value in every row"
    if different == len(column) and IDENTIFIERS.match(name) and (kind == "text" or _whole(cells)):
        return "it numbers the rows"
    if kind == "text" and different == len(cells) > FEW_TEXTS:
        return "it holds another text in every row, as names or free text do"
    if kind == "text" and different > MANY_LEVELS and different > 0.5 * len(cells):
        return f"it holds {different:,} different texts in {len(cells):,} rows, as names or free text do"
    return ""


def _whole(cells: Sequence[Any]) -> bool:
    return all(float(cell) == int(float(cell)) for cell in cells if np.isfinite(float(cell)))


# -- values ------------------------------------------------------------------------------------------------------------


def as_numbers(column: Series) -> np.ndarray:
    """A column's cells as numbers, NaN where one is missing: [N]."""
    return np.array([np.nan if cell is None else float(cell) for cell in cells_of(column)], dtype=np.float64)


def times_of(column: Series) -> np.ndarray:
    """Dates as days and numbers as they are, NaN where a cell is missing: [N].

    Raises:
        InputError: If the column holds texts.
    """
    name = str(column.name)
    kind = kind_of(name, column)
    if kind == "text":
        raise InputError(f"column {name!r} holds texts; a time is a date or a number")
    return as_numbers(column) if kind == "number" else _date_parts(name, column)[f"{name}{DAYS}"]


def _date_parts(name: str, column: Series) -> dict[str, np.ndarray]:
    import pandas

    if pandas.api.types.is_timedelta64_dtype(column):
        return {f"{name}{DAYS}": column.dt.total_seconds().to_numpy(np.float64, na_value=np.nan) / 86_400}
    if not pandas.api.types.is_datetime64_any_dtype(column):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that differ from row to row
            first = next(str(cell) for cell in cells_of(column) if cell is not None)
            dayfirst = re.match(r"^\s*\d{4}", first) is None and _day_first(column)
            column = pandas.to_datetime(column, errors="coerce", format="mixed", dayfirst=dayfirst, utc=True)
    times = pandas.Series(pandas.DatetimeIndex(pandas.to_datetime(column, utc=True)))
    stamp = pandas.Timestamp("2000-01-01", tz="UTC")
    days = ((times - stamp).dt.total_seconds() / 86_400).to_numpy(np.float64)
    parts = {f"{name}{DAYS}": days}
    present = times.dropna()
    whole_months = bool((present.dt.day == 1).all() or present.dt.is_month_end.all())  # whose weekdays mean nothing
    for part, values, period in (
        ("season", times.dt.day_of_year.to_numpy(np.float64), 365.25),
        *([] if whole_months else [("weekday", times.dt.day_of_week.to_numpy(np.float64), 7.0)]),
        ("hour", (times.dt.hour + times.dt.minute / 60).to_numpy(np.float64), 24.0),
    ):
        known = values[~np.isnan(values)]
        if len(known) and known.max() > known.min():
            angle = 2 * np.pi * values / period
            parts[f"{name} ({part}, sine)"], parts[f"{name} ({part}, cosine)"] = np.sin(angle), np.cos(angle)
    return parts


def _day_first(column: Series) -> bool:
    """Whether a date such as 23.11.2020 is among the cells; 01/02/2020 alone is read as January 2."""
    for cell in cells_of(column):
        found = re.match(r"^\s*(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}", str(cell))
        if found and int(found[1]) > 12:
            return True
    return any("." in str(cell) for cell in cells_of(column)[:1])
