"""A table in parts, so that one of millions of rows is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bayesify.tables.csv_files import TextFile
from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading, csv_of, is_json, open_bytes, parquet_parts, read_table, with_names
from bayesify.tables.packed import is_packed

if TYPE_CHECKING:
    from pandas import DataFrame

PART_ROWS = 20_000
"""Rows of a part."""
MAX_WHOLE_BYTES = 4 << 20
"""Bytes up to which a file is read as a whole."""


@dataclass(frozen=True)
class Parts:
    """Parts of a table in order, which can be gone through several times.

    Iterating gives the number of rows before each part, its rows, whose index counts on, and notes about how the file was read.

    Args:
        path: The file.
        frames: Reads the parts from the first on.
        notes: How the file was read, in sentences.
    """

    path: Path
    frames: Callable[[], Iterator[DataFrame]]
    notes: list[str]

    def __iter__(self) -> Iterator[tuple[int, DataFrame, list[str]]]:
        first = 0
        for frame in self.frames():
            frame = with_names(str(self.path), frame)
            frame.index = range(first, first + len(frame))
            yield first, frame, self.notes
            first += len(frame)


def read_parts(path: Path, rows: int = PART_ROWS, reading: Reading | None = None) -> Parts:
    """A table in parts, which are rows of the table that `read_table` gives.

    Encoding, separator and style of numbers are decided by the whole file. CSV is read several times, and Parquet by its
    groups of rows, so that memory holds one part; other files are read as a whole. Nothing is written.

    Raises:
        InputError: As `read_table`, with the same words; or if the file changes while it is read.
    """
    reading = reading or Reading()
    if path.is_file() and path.stat().st_size > MAX_WHOLE_BYTES:
        with open_bytes(path) as file:
            start = file.read(8)
        if start.startswith(b"PAR1"):
            return Parts(path, lambda: _unchanged(path, parquet_parts(path, rows)), [])
        if not is_packed(start):
            text, notes = TextFile.of(str(path), lambda: open_bytes(path), reading.encoding)
            if not is_json(text):
                frames, more = csv_of(text, reading).read_parts(rows)
                return Parts(path, lambda: _unchanged(path, frames()), notes + more)
    frame, notes = read_table(path, reading)
    return Parts(path, lambda: (frame.iloc[first : first + rows] for first in range(0, len(frame), rows)), notes)


def _unchanged(path: Path, frames: Iterator[DataFrame]) -> Iterator[DataFrame]:
    """Parts of a file as long as it is what it was."""
    before = path.stat()
    for frame in frames:
        yield frame
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputError(f"{path}: changed while it was read; wait until it is complete, and try again")
