"""Tables from files, from standard input, and from named data sets with a known target. Large tables are read in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.tables import files
from bayesify.tables.csv_files import TextFile
from bayesify.tables.errors import InputError
from bayesify.tables.files import STDIN, Reading, open_bytes, read_table
from bayesify.tables.packed import is_packed
from bayesify.tables.targets import Task

if TYPE_CHECKING:
    from pandas import DataFrame

SCIKIT_LEARN = {"diabetes": "load_diabetes", "iris": "load_iris", "breast_cancer": "load_breast_cancer"}
"""Data sets that are part of scikit-learn, and their loaders."""
EXTENSIONS = (
    *(".gz", ".bz2", ".xz", ".zip", ".csv", ".tsv", ".txt", ".data"),
    *(".xlsx", ".xls", ".parquet", ".json", ".jsonl", ".ndjson"),
)
"""Extensions of files with tables."""
PART_ROWS = 20_000
"""Number of rows per part."""
MAX_WHOLE_BYTES = 4 << 20
"""Files up to this size are read as a whole."""


Standard = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Training and test rows of the splits that a data set defines."""


@dataclass(frozen=True)
class Source:
    """A table that was read."""

    frame: DataFrame
    name: str  # short name of the table; see `short_name`
    where: str  # name of the table in messages
    notes: tuple[str, ...] = ()  # sentences that say how the table was read
    target: str | None = None  # target column of a named data set
    task: Task | None = None  # task of a named data set
    standard: Standard = ()  # training and test rows of the splits that a data set defines


def read_source(data: str, reading: Reading | None = None) -> Source:
    """Read a table from a file, from standard input (`-`), or from the UCI or scikit-learn data set with this name."""
    if not files.is_path(data):
        return _named(data)
    frame, notes = read_table(Path(data), reading)
    return Source(frame, short_name(data), "standard input" if data == STDIN else Path(data).name, tuple(notes))


def short_name(data: str) -> str:
    """The file name without its extensions, reduced to characters that are safe in names; used to name folders of results."""
    if data == STDIN:
        return "table"
    path = Path(data)
    while path.suffix.lower() in EXTENSIONS:
        path = path.with_suffix("")
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in path.name) or "table"


def _named(name: str) -> Source:
    from pandas import DataFrame

    from bayesify.datasets import uci

    if name in SCIKIT_LEARN:
        import sklearn.datasets

        bunch: Any = getattr(sklearn.datasets, SCIKIT_LEARN[name])()
        frame = DataFrame(bunch.data, columns=[str(column) for column in bunch.feature_names])
        labels = getattr(bunch, "target_names", None)
        frame["target"] = bunch.target if labels is None else [str(labels[code]) for code in bunch.target]
        task: Task = "regression" if labels is None else "classification"
        return Source(frame, name, name, (), "target", task)
    short = {file: key for key, file in uci.REGRESSION.items()}.get(name, name)
    known = (*uci.REGRESSION, *uci.CLASSIFICATION, *SCIKIT_LEARN)
    if short not in known:
        raise InputError(f"{name}: this is neither a file nor a known data set; {suggest(name, known)}")
    table = uci.load(short)
    frame = DataFrame(table.X, columns=[f"x{index + 1}" for index in range(table.X.shape[1])])
    frame["y"] = table.y.reshape(-1)
    pairs = tuple((split.train, split.test) for split in table.splits)
    return Source(frame, name, name, (), "y", table.task, pairs)


@dataclass(frozen=True)
class Parts:
    """The parts of a table, which can be read several times.

    For each part, iteration yields the number of rows before the part, the rows of the part with a running index, and the notes.
    """

    path: Path
    frames: Callable[[], Iterator[DataFrame]]  # function that reads the parts, beginning with the first
    notes: list[str]  # sentences that say how the file was read

    def __iter__(self) -> Iterator[tuple[int, DataFrame, list[str]]]:
        first = 0
        for frame in self.frames():
            frame = files.with_names(str(self.path), frame)
            frame.index = range(first, first + len(frame))
            yield first, frame, self.notes
            first += len(frame)


def read_parts(path: Path, rows: int = PART_ROWS, reading: Reading | None = None) -> Parts:
    """Read a table in parts. Together, the parts are equal to the result of `read_table`.

    A CSV file is read several times, part by part, to detect encoding, separator and style of numbers from the whole file. A
    Parquet file is read by row groups. So only one part of such a file is in memory at a time. Other files are read as a whole.
    Raises `InputError` if `read_table` would raise it, or if the file changes while it is read.
    """
    reading = reading or Reading()
    if path.is_file() and path.stat().st_size > MAX_WHOLE_BYTES:
        with open_bytes(path) as file:
            start = file.read(8)
        if start.startswith(b"PAR1"):
            return Parts(path, lambda: _unchanged(path, files.parquet_parts(path, rows)), [])
        if not is_packed(start):
            text, notes = TextFile.of(str(path), lambda: open_bytes(path), reading.encoding)
            if not files.is_json(text):
                frames, more = files.csv_of(text, reading).read_parts(rows)
                return Parts(path, lambda: _unchanged(path, frames()), notes + more)
    frame, notes = read_table(path, reading)
    return Parts(path, lambda: (frame.iloc[first : first + rows] for first in range(0, len(frame), rows)), notes)


def _unchanged(path: Path, frames: Iterator[DataFrame]) -> Iterator[DataFrame]:
    """The parts of a file. After each part, the file is checked for changes."""
    before = path.stat()
    for frame in frames:
        yield frame
        if (now := path.stat()).st_size != before.st_size or now.st_mtime_ns != before.st_mtime_ns:
            raise InputError(f"{path}: the file changed while it was read; wait until it is complete, and try again")
