"""Reading a table in parts. A table with millions of rows therefore need not fit into memory."""

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
"""Number of rows per part."""
MAX_WHOLE_BYTES = 4 << 20
"""Files up to this size are read as a whole."""


@dataclass(frozen=True)
class Parts:
    """The parts of a table, in order. They can be read several times.

    For each part, iteration yields the number of rows before the part, the rows of the part with a running index, and the notes.
    """

    path: Path
    frames: Callable[[], Iterator[DataFrame]]  # function that reads the parts, beginning with the first
    notes: list[str]  # sentences that say how the file was read

    def __iter__(self) -> Iterator[tuple[int, DataFrame, list[str]]]:
        first = 0
        for frame in self.frames():
            frame = with_names(str(self.path), frame)
            frame.index = range(first, first + len(frame))
            yield first, frame, self.notes
            first += len(frame)


def read_parts(path: Path, rows: int = PART_ROWS, reading: Reading | None = None) -> Parts:
    """Read a table in parts. Together, the parts are equal to the result of `read_table`.

    Encoding, separator and style of numbers are detected from the whole file. A CSV file is read several times, and a Parquet
    file is read by row groups. Only one part is therefore in memory at a time. Other files are read as a whole. No file is
    written.

    Raises:
        InputError: In the same cases as `read_table`, with the same messages, and if the file changes while it is read.
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
    """The parts of a file. After each part, the file is checked for changes."""
    before = path.stat()
    for frame in frames:
        yield frame
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputError(f"{path}: the file changed while it was read; wait until it is complete, and try again")
