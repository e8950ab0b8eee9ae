"""Columns as numbers: the kind of each column, and its conversion to inputs of a network."""

from __future__ import annotations

import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.arguments.plain import Plain
from bayesify.tables.errors import InputError, check_magnitude
from bayesify.tables.written_numbers import is_number

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MIN_FITTING_SHARE = 0.5
"""If at least this share of cells are numbers (or dates), the other cells count as mistakes."""
MAX_SURE_LEVELS = 50
"""A column with more different texts than this may be free text or an identifier."""
MAX_CHANCE_TEXTS = 10
"""In a column of at most this many texts, all texts may differ by chance."""
IDENTIFIERS = re.compile(
    r"^(id|index|uuid|guid|pk|key|nr|no|number|account|row|row_?(id|nr|no|number)|unnamed: \d+|.*[_ ](id|nr|no|key|number))$",
    re.IGNORECASE,
)
DAYS = " (days)"
"""Suffix of the name of the first number that is made from a date."""
MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
DATE = re.compile(
    r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rf"|\d{{4}}-\d{{2}}|{MONTH} \d{{1,2}},? \d{{4}}|\d{{1,2}}[ -]{MONTH}[ -]\d{{2,4}})([ T].*)?\s*$",
    re.IGNORECASE,
)

DAY_MONTH = re.compile(r"^\s*(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}")
"""A date whose year comes last."""


@dataclass(frozen=True)
class Features(Plain):
    """All inputs of a table, before empty cells are filled and numbers are scaled.

    Args:
        numbers: Numbers, [N, D]; NaN for an empty cell.
        number_names: Names of the D columns of `numbers`.
        codes: Index in `levels` of each cell, [N, C]; -1 for an empty cell.
        code_names: Names of the C columns of `codes`.
        levels: For each of the C columns of `codes`, its distinct texts.
        notes: Sentences that say which columns and cells were left out, and how dates were read.
        day_first: Date columns that write the day before the month, as in 23/11/2020.
        sources: For each of the D columns of `numbers`, the table's column from which it was made; a date gives several columns.
    """

    numbers: np.ndarray
    number_names: tuple[str, ...]
    codes: np.ndarray
    code_names: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    day_first: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def schema(self) -> Features:
        """This object without rows: only its columns and levels, which `read_features` needs to read a second table."""
        return Features.restore(self.config())

    def config(self) -> dict[str, Any]:
        """Columns and levels as a plain dict."""
        return {
            "numbers": list(self.number_names),
            "categories": list(self.code_names),
            "levels": [list(levels) for levels in self.levels],
            "day_first": list(self.day_first),
            "sources": list(self.sources),
        }

    @classmethod
    def restore(cls, config: Mapping[str, Any]) -> Features:
        """The schema that `config` describes."""
        numbers, categories, day_first = (
            tuple(map(str, config[key])) for key in ("numbers", "categories", "day_first")
        )
        levels = tuple(tuple(map(str, level)) for level in config["levels"])
        sources = tuple(map(str, config["sources"])) if "sources" in config else _sources_by_name(numbers)
        none = np.empty((0, len(categories)), dtype=np.int64)
        return cls(np.empty((0, len(numbers))), numbers, none, categories, levels, (), day_first, sources)

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of the used columns of the table: `"number"`, `"date"` or `"text"`."""
        made = zip(self.number_names, self.sources, strict=True)
        kinds = {source: "number" if name == source else "date" for name, source in made}
        return kinds | dict.fromkeys(self.code_names, "text")

    @property
    def num_columns(self) -> int:
        """Number of used columns of the table; a date counts as one column."""
        return len(self.kinds)


def _sources_by_name(names: Sequence[str]) -> tuple[str, ...]:
    """The sources, derived from the names, for a file of an earlier version, which does not store the sources."""
    dates = [name.removesuffix(DAYS) for name in names if name.endswith(DAYS)]
    return tuple(next((date for date in dates if name.startswith(f"{date} (")), name) for name in names)


def read_features(frame: DataFrame, like: Features | None = None) -> Features:
    """Read the inputs of a table.

    Numbers and booleans stay as they are. Dates become days. Season, weekday and hour of a date are added as points on a circle,
    each only if it varies. Other texts become categories. Constant or empty columns, identifiers and free text are left out.

    Args:
        frame: The table without its target. Its index contains the row numbers in the file.
        like: Inputs of an earlier table of the same kind. The new table is read with the earlier table's columns, levels, and
            order of day and month.

    Raises:
        InputError: If a column of numbers or dates contains text, has mixed or unknown contents, or if no column is left.
    """
    day_first: list[str] = []
    sources: dict[str, str] = {}
    numbers: dict[str, np.ndarray] = {}
    texts: dict[str, list[str | None]] = {}
    notes: list[str] = []
    kinds = {} if like is None else like.kinds
    for name in frame.columns if like is None else [name for name in frame.columns if name in kinds]:
        column, found, kind, reason = frame[name], Contents(name), kinds.get(name, ""), ""
        if kind != "text":
            found.add(column)
        if like is None:
            kind = found.kind()
            reason = _useless(name, column, kind)
        else:
            found.check_like(kind, name in like.day_first)
        if reason:
            notes.append(f"Column {name!r} was left out: {reason}.")
        elif kind == "number":
            _add_numbers(name, {name: as_numbers(column)}, numbers, sources)
        elif kind == "date":
            first, note = found.order(None if like is None else name in like.day_first)
            day_first += [name] * first
            notes += [note] * bool(note)
            _add_numbers(name, _date_parts(name, column, first, every=like is not None), numbers, sources)
        else:
            texts[name] = [None if cell is None else str(cell) for cell in cells_of(column)]
    if like is not None:
        return _with_rows(like, numbers, texts, len(frame))
    if not numbers and not texts:
        raise InputError(f"no usable column is left. {' '.join(notes)}")
    for name, values in numbers.items():
        check_magnitude(f"column {name!r}", values)
        infinite = int(np.isinf(values).sum())
        if infinite:
            notes.append(f"Column {name!r} holds {infinite} infinite numbers; they count as missing.")
    levels = tuple(tuple(sorted({cell for cell in cells if cell is not None})) for cells in texts.values())
    none, origin = np.empty(0), tuple(sources.values())
    schema = Features(none, tuple(numbers), none, tuple(texts), levels, tuple(notes), tuple(day_first), origin)
    return _with_rows(schema, numbers, texts, len(frame))


def _add_numbers(
    source: str, made: Mapping[str, np.ndarray], numbers: dict[str, np.ndarray], sources: dict[str, str]
) -> None:
    """Add the numbers that are made from a column, and refuse a name that is already used for another column's number."""
    for name, values in made.items():
        if name in numbers:
            column, date = (source, sources[name]) if name == source else (sources[name], source)
            raise InputError(
                f"column {column!r} has the same name as a column of numbers computed from the dates in {date!r}; rename the "
                f"column, or leave it out with --ignore {column}"
            )
        numbers[name], sources[name] = values, source


def _with_rows(
    schema: Features, numbers: Mapping[str, np.ndarray], texts: Mapping[str, Sequence[str | None]], rows: int
) -> Features:
    """The features of rows, with a schema's columns. Infinite numbers become NaN, and an unknown text gets the code -2."""
    missing = [name for name in schema.code_names if name not in texts]
    missing += [name for name in schema.number_names if name not in numbers]
    if missing:
        raise InputError(f"column {missing[0]!r} is missing; give a table with the same columns")
    values = [np.where(np.isinf(numbers[name]), np.nan, numbers[name]) for name in schema.number_names]
    codes = []
    for name, levels in zip(schema.code_names, schema.levels, strict=True):
        position = {level: index for index, level in enumerate(levels)}
        codes.append([-1 if cell is None else position.get(cell, -2) for cell in texts[name]])
    return replace(
        schema,
        numbers=np.column_stack(values) if values else np.empty((rows, 0)),
        codes=np.array(codes, dtype=np.int64).reshape(len(codes), rows).T,
    )


# -- kinds -------------------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """Counts of a column's cells by kind. A table can be counted part by part. The kinds are numbers and dates."""

    name: str  # name of the column
    dated: bool = False  # whether pandas knows that the column contains dates
    num_present: int = 0  # number of nonempty cells
    num_fitting: tuple[int, ...] = (0, 0)  # number of cells of each kind
    misfits: tuple[tuple[int, Any] | None, ...] = (None, None)  # for each kind, row and content of the first other cell
    day_first: str | None = None  # first date that writes the day before the month
    month_first: str | None = None  # first date that writes the month before the day
    ordered: str | None = None  # first date that writes the year last

    def add(self, column: Series) -> Contents:
        """Add the cells of one more part, whose index contains row numbers. Lists, bytes and complex numbers are refused."""
        from pandas.api import types

        if types.is_bool_dtype(column) or types.is_numeric_dtype(column):
            if types.is_complex_dtype(column):
                raise self._unsupported("complex numbers")
            count = int(column.notna().sum())
            self.num_present += count
            self.num_fitting = tuple(before + count for before in self.num_fitting)
        elif types.is_datetime64_any_dtype(column) or types.is_timedelta64_dtype(column):
            self.dated = True
        else:
            cells = zip(column.index, cells_of(column), strict=True)
            self._add_cells([(row, cell) for row, cell in cells if cell is not None])
        return self

    def _unsupported(self, what: str) -> InputError:
        words = f"column {self.name!r} holds {what}, which are not supported"
        return InputError(f"{words}; leave it out with --ignore {self.name}")

    def _add_cells(self, present: list[tuple[int, Any]]) -> None:
        for _, cell in present:
            if isinstance(cell, (list, dict, set, np.ndarray, bytes)):
                raise self._unsupported(f"{type(cell).__name__} values")
        numeric = [isinstance(cell, (bool, int, float, np.number)) or is_number(str(cell)) for _, cell in present]
        dated = [not isinstance(cell, str) or DATE.match(cell) is not None for _, cell in present]
        self.num_present += len(present)
        self.num_fitting = (self.num_fitting[0] + sum(numeric), self.num_fitting[1] + sum(dated))
        self.misfits = tuple(
            known or next((entry for entry, fits in zip(present, every, strict=True) if not fits), None)
            for known, every in zip(self.misfits, (numeric, dated), strict=True)
        )
        for _, cell in present:
            if isinstance(cell, str) and (part := DAY_MONTH.match(cell)):
                first, second = int(part[1]), int(part[2])
                self.ordered = self.ordered or cell
                if first > 12 >= second:
                    self.day_first = self.day_first or cell
                if second > 12 >= first:
                    self.month_first = self.month_first or cell

    def kind(self) -> str:
        """`"number"`, `"date"` or `"text"`, by the majority of the cells. Other cells among numbers or dates are refused."""
        if self.dated:
            return "date"
        for kind, fitting, misfit in zip(("number", "date"), self.num_fitting, self.misfits, strict=True):
            if fitting >= MIN_FITTING_SHARE * self.num_present:
                if misfit is not None:
                    row, wrong = misfit
                    raise InputError(
                        f"column {self.name!r} holds {kind}s, but row {row + 1} below the header has {str(wrong)[:40]!r} "
                        f"({self.num_present - fitting} of {self.num_present} cells hold no {kind}); fix these cells or "
                        f"leave them blank{_as_missing(wrong)}, or leave the column out with --ignore {self.name}"
                    )
                return kind
        return "text"

    def check_like(self, wanted: str, day_first: bool) -> str:
        """A note about dates. A column whose kind, or order of day and month, differs from the earlier table is refused."""
        if wanted == "text":
            return ""
        kind = self.kind()
        if kind != wanted:
            raise InputError(
                f"column {self.name!r} holds {kind}s, but the training rows have {wanted}s; give {wanted}s in this column"
            )
        return self.order(day_first)[1] if wanted == "date" else ""

    def order(self, known: bool | None) -> tuple[bool, str]:
        """Whether dates such as 23/11/2020 write the day before the month, and a note, which is empty without such dates.

        If the order is `known` from an earlier table, it is used. Cells that contradict this order, or each other, are
        refused. If nothing shows the order, 01/02/2020 is January 2, and 01.02.2020 is February 1.
        """
        if self.ordered is None:
            return bool(known), ""
        day, month = self.day_first, self.month_first
        if day is not None and month is not None:
            raise InputError(
                f"column {self.name!r} holds {day!r}, with the day first, and {month!r}, with the month first; write dates "
                f"as 2020-11-23, or leave the column out with --ignore {self.name}"
            )
        if known is not None:
            wrong = month if known else day
            if wrong is not None:
                raise InputError(
                    f"column {self.name!r} holds {wrong!r}, but in the training rows the {'day' if known else 'month'} of a date "
                    "comes first; write dates in the same order, or as 2020-11-23"
                )
            first, why = known, ", as in training"
        elif day is not None or month is not None:
            first, why = day is not None, ""
        else:
            first, why = "." in self.ordered, "; no cell shows the order"
        example, order = (day or month or self.ordered).strip(), "day" if first else "month"
        return first, f"Column {self.name!r}: dates such as {example} were read with the {order} first{why}."


def _as_missing(cell: object) -> str:
    """Advice about a cell that may stand for "not known", such as `k.A.`; empty for a cell with digits."""
    text = str(cell).strip()
    named = 0 < len(text) <= 40 and "," not in text and not any(sign.isdigit() for sign in text)
    return f", read them as empty with --missing {shlex.quote(text)}" if named else ""


def without_options(message: str) -> str:
    """A message of `Contents` without command-line options, for users of the estimators."""
    return re.sub(r" with --missing .*?(?=, or leave)", "", message).partition(" with --ignore ")[0]


def kind_of(name: str, column: Series) -> str:
    """`"number"`, `"date"` or `"text"`, by the majority of a column's cells; see `Contents`."""
    return Contents(name).add(column).kind()


def cells_of(column: Series) -> list[Any]:
    """Cells, with `None` for every kind of missing cell; booleans among texts stay booleans."""
    missing = column.isna().to_numpy()
    return [None if absent else cell for absent, cell in zip(missing, column.tolist(), strict=True)]


def _useless(name: str, column: Series, kind: str) -> str:
    cells = [cell for cell in cells_of(column) if cell is not None]
    if not cells:
        return "all its cells are empty"
    different = len({str(cell) for cell in cells})
    if different == 1 and len(cells) == len(column):
        return "it holds the same value in every row"
    if (
        different == len(column)
        and IDENTIFIERS.match(name)
        and (kind == "text" or all(float(cell).is_integer() for cell in cells if np.isfinite(float(cell))))
    ):
        return "it numbers the rows"
    if kind == "text" and different == len(cells) > MAX_CHANCE_TEXTS:
        return "it holds a different text in every row, like names or free text"
    if kind == "text" and different > MAX_SURE_LEVELS and different > 0.5 * len(cells):
        return f"it holds {different:,} different texts in {len(cells):,} rows, like names or free text"
    return ""


# -- values ------------------------------------------------------------------------------------------------------------


def as_numbers(column: Series) -> np.ndarray:
    """Cells of a column as numbers, with NaN for an empty cell: [N]."""
    return np.array([np.nan if cell is None else float(cell) for cell in cells_of(column)], dtype=np.float64)


def times_of(column: Series, day_first: bool | None = None) -> np.ndarray:
    """Dates converted to days, or numbers unchanged, with NaN for an empty cell: [N]. Texts are refused."""
    name = str(column.name)
    found = Contents(name).add(column)
    kind = found.kind()
    if kind == "text":
        raise InputError(f"column {name!r} holds texts; a time must be a date or a number")
    if kind == "number":
        return as_numbers(column)
    return _date_parts(name, column, found.order(day_first)[0])[f"{name}{DAYS}"]


def date_of(days: float) -> str:
    """The date that lies `days` days after January 1, 2000, as text."""
    return str(np.datetime64("2000-01-01") + np.timedelta64(math.floor(days), "D"))


def _date_parts(name: str, column: Series, day_first: bool, *, every: bool = False) -> dict[str, np.ndarray]:
    """Days since 2000, and season, weekday and hour as points on a circle. Without `every`, only parts that vary."""
    import pandas

    if pandas.api.types.is_timedelta64_dtype(column):
        return {f"{name}{DAYS}": column.dt.total_seconds().to_numpy(np.float64, na_value=np.nan) / 86_400}
    if not pandas.api.types.is_datetime64_any_dtype(column):
        column = _as_dates(column, day_first)
    times = pandas.Series(pandas.DatetimeIndex(pandas.to_datetime(column, utc=True)))
    stamp = pandas.Timestamp("2000-01-01", tz="UTC")
    days = ((times - stamp).dt.total_seconds() / 86_400).to_numpy(np.float64)
    parts = {f"{name}{DAYS}": days}
    present = times.dropna()
    whole_months = bool((present.dt.day == 1).all() or present.dt.is_month_end.all())  # weekdays mean nothing here
    for part, values, period in (
        ("season", times.dt.day_of_year.to_numpy(np.float64), 365.25),
        *([] if whole_months and not every else [("weekday", times.dt.day_of_week.to_numpy(np.float64), 7.0)]),
        ("hour", (times.dt.hour + times.dt.minute / 60).to_numpy(np.float64), 24.0),
    ):
        known = values[~np.isnan(values)]
        if every or (len(known) and known.max() > known.min()):
            angle = 2 * np.pi * values / period
            parts[f"{name} ({part}, sine)"], parts[f"{name} ({part}, cosine)"] = np.sin(angle), np.cos(angle)
    return parts


def _as_dates(column: Series, day_first: bool) -> Series:
    """Texts as dates; `day_first` applies to dates that write the year last."""
    import pandas

    cells = column.astype(object)
    ordered = cells.map(lambda cell: isinstance(cell, str) and DAY_MONTH.match(cell) is not None).to_numpy(bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas warns about formats that differ between rows
        return pandas.concat(
            [
                pandas.to_datetime(cells[rows], errors="coerce", format="mixed", dayfirst=first, utc=True)
                for rows, first in ((ordered, day_first), (~ordered, False))
            ]
        ).sort_index()
