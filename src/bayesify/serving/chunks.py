"""A table in parts, so that one of millions of rows is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

PART_ROWS = 20_000
"""Rows of a part."""
MAX_WHOLE_BYTES = 4 << 20
"""Bytes up to which a file is read as a whole."""
BINARY_STARTS = (
    b"PK\x03\x04",
    b"\xd0\xcf\x11\xe0",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\xff\xfe",
    b"\xfe\xff",
    b"[",
    b"{",
)
"""First bytes of files that are not text line by line."""


def read_parts(
    path: Path, rows: int = PART_ROWS, reading: Reading | None = None
) -> Iterator[tuple[int, DataFrame, list[str]]]:
    """Parts of a table in order: the number of rows before each, its rows, and notes about how they were read.

    CSV is cut between rows, also where cells hold line ends, and each part read with the header as a table of its own; Parquet is
    read by its groups of rows. Other files are read as a whole.

    Raises:
        InputError: As `read_table`; of a part with the rows that it holds.
    """
    start = b""
    if path.is_file() and path.stat().st_size > MAX_WHOLE_BYTES:
        with path.open("rb") as file:
            start = file.read(8)
    if start.startswith(b"PAR1"):
        yield from _parquet(path, rows)
    elif start and not start.removeprefix(b"\xef\xbb\xbf").startswith(BINARY_STARTS):
        yield from _lines(path, rows, reading)
    else:
        frame, notes = read_table(path, reading)
        for first in range(0, len(frame), rows):
            yield first, frame.iloc[first : first + rows].reset_index(drop=True), notes


def _parquet(path: Path, rows: int) -> Iterator[tuple[int, DataFrame, list[str]]]:
    from pyarrow import parquet

    first = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(rows):
                frame = batch.to_pandas()
                frame.columns = [str(name).strip() for name in frame.columns]
                yield first, frame, []
                first += len(frame)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged or no Parquet file: {error}") from error


def _lines(path: Path, rows: int, reading: Reading | None) -> Iterator[tuple[int, DataFrame, list[str]]]:
    first, part, name = 0, 0, path.name
    with path.open("rb") as file, TemporaryDirectory(prefix="bayesify-") as folder:
        header = _record(file)
        while block := _block(file, rows):
            part += 1
            draft = Path(folder) / name
            draft.write_bytes(header + block)
            try:
                frame, notes = read_table(draft, reading)
            except InputError as error:
                reason = str(error).replace(f"{draft}: ", "")
                raise InputError(f"{path}: in the rows from {first + 1:,} on: {reason}") from error
            yield first, frame, notes
            first += len(frame)


def _block(file: IO[bytes], rows: int) -> bytes:
    found: list[bytes] = []
    while len(found) < rows and (record := _record(file)):
        if record.strip():
            found.append(record)
    return b"".join(found)


def _record(file: IO[bytes]) -> bytes:
    """One row of a CSV file, with the line ends inside quotes; empty at the end of the file."""
    record = file.readline()
    quotes = record.count(b'"')
    while quotes % 2 and (line := file.readline()):
        record += line
        quotes += line.count(b'"')
    return record
