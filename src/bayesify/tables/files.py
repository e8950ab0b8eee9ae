"""Tables from files: CSV in its dialects, JSON, Parquet and spreadsheets, compressed or not."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bayesify.arguments.installing import how_to_install
from bayesify.tables.csv_files import CsvFile, TextFile
from bayesify.tables.errors import InputError, check_names, first_line
from bayesify.tables.packed import ZIP, check_size, read_workbook, unpack
from bayesify.tables.written_numbers import Words, apply_styles, decide_styles, is_text

if TYPE_CHECKING:
    from pandas import DataFrame

MISSING_MARKS = (
    *("", "?", "-", "--", "NA", "N/A", "n/a", "na", "<NA>", "#N/A", "NaN", "nan", "-nan", "NaT"),
    *("NULL", "null", "None", "none", "#DIV/0!", "#VALUE!"),
)
"""Cells that stand for "not known"."""
MAX_BYTES = 2 << 30
"""Maximum size of an unpacked Parquet file; a larger file is refused before it fills the memory."""
STDIN = "-"
"""The path that stands for standard input."""


@dataclass(frozen=True)
class Reading:
    """Instructions for reading an ambiguous file."""

    sheet: str = ""  # sheet of a spreadsheet (default: the first that is not empty)
    encoding: str = ""  # encoding of a text (default: a Unicode encoding, otherwise Windows-1252)
    missing: Sequence[str] = ()  # further texts that stand for "not known"
    texts: Sequence[str] = ()  # columns whose cells stay texts, such as codes with leading zeros
    commas: Sequence[str] = ()  # columns with decimal commas, in which `1.234` is 1234

    @property
    def marks(self) -> tuple[str, ...]:
        """Cells that stand for "not known"."""
        return (*MISSING_MARKS, *self.missing)

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise InputError(
                f"--encoding {self.encoding}: there is no such encoding; try utf-8, latin-1 or shift_jis"
            ) from None


def read_table(path: Path, reading: Reading | None = None) -> tuple[DataFrame, list[str]]:
    """Read a table.

    A text file is read as JSON if it looks like JSON (a list of objects, or one object per line), otherwise as CSV, whatever its
    extension. Columns of a CSV file are separated by commas, semicolons, tabs or bars. Text is read as UTF-8 if possible,
    otherwise as Windows-1252. Numbers have a decimal point or, if columns are separated by semicolons, a decimal comma. Parquet
    and spreadsheets are recognized by their first bytes. Files that are compressed by gzip, bzip2, xz or zip are unpacked.

    Args:
        path: Path of the file; `-` for standard input.
        reading: Instructions for reading an ambiguous file.

    Returns:
        The table with one row per example, and notes about how it was read.

    Raises:
        InputError: If the file does not exist, cannot be read, is empty or binary, or is too large when unpacked; or if the table
            has two columns of the same name, lines of different lengths, or no rows.
    """
    reading = reading or Reading()
    where, content = read_bytes(path)
    content = unpack(where, content)
    if not content.strip():
        raise InputError(f"{where}: the file is empty; give a table with a header and rows")
    notes: list[str] = []
    if content[:4] == b"PAR1":
        frame = _read_parquet(where, content)
    elif content.startswith(ZIP):
        frame, notes = read_workbook(where, content, reading.sheet, reading.marks, reading.texts)
    else:
        text, notes = TextFile.of(where, lambda: io.BytesIO(content), reading.encoding)
        frame, more = _read_json(text, reading) if is_json(text) else csv_of(text, reading).read()
        notes += more
    if not len(frame):
        raise InputError(f"{where}: the table has a header but no rows")
    return with_names(where, frame), notes


def with_names(where: str, frame: DataFrame) -> DataFrame:
    """A table whose column names are texts; two columns of the same name are refused."""
    frame.columns = [str(name).strip() for name in frame.columns]
    check_names(where, list(frame.columns))
    return frame


def is_json(text: TextFile) -> bool:
    """Whether a text is JSON."""
    return text.start(10_000).lstrip()[:1] in ("{", "[")


def csv_of(text: TextFile, reading: Reading) -> CsvFile:
    """A text file as CSV."""
    return CsvFile.of(text, reading.marks, reading.texts, reading.commas)


def is_path(data: str) -> bool:
    """Whether a text is a path or standard input, and not the name of a data set."""
    path = Path(data)
    return data == STDIN or path.exists() or bool(path.suffix) or len(path.parts) > 1


def check_there(data: str) -> None:
    """Refuse a missing file or a web address, without reading anything."""
    if re.match(r"^(https?|ftp|s3):/", data):
        raise InputError(
            f"{data}: this is a web address; download the table (for example with curl -O), and give the file"
        )
    if is_path(data) and data != STDIN and not Path(data).exists():
        raise InputError(f"{data}: there is no such file; check the path")


def read_bytes(path: Path) -> tuple[str, bytes]:
    """The name of a file in messages, and its bytes."""
    if str(path) == STDIN:
        return "standard input", sys.stdin.buffer.read()
    check_there(str(path))
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; give a file with a table")
    with open_bytes(path) as file:
        return str(path), file.read()


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading; raise `InputError` if this fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: the file cannot be read ({error.strerror}); check its permissions") from error


@contextmanager
def _parquet_file(path: str, source: Any) -> Iterator[Any]:
    """Open a Parquet file, refuse repeated column names, and reword errors."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path}: reading Parquet needs pyarrow; {how_to_install('compare')}, or save the table as CSV"
        ) from error
    try:
        with parquet.ParquetFile(source) as file:
            check_names(path, [str(name).strip() for name in file.schema_arrow.names])
            yield file
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: the file is damaged or is not a Parquet file: {first_line(error)}") from error


def parquet_parts(path: Path, rows: int) -> Iterator[DataFrame]:
    """A Parquet file in parts of at most `rows` rows. The same errors are raised as by `read_table`."""
    with _parquet_file(str(path), path) as file:
        if not file.metadata.num_rows:
            raise InputError(f"{path}: the table has a header but no rows")
        for batch in file.iter_batches(rows):
            yield batch.to_pandas()


def _read_parquet(path: str, content: bytes) -> DataFrame:
    with _parquet_file(path, io.BytesIO(content)) as file:
        from pyarrow import BufferReader, compute, parquet, types

        about, kinds = file.metadata, (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        texts = {field.name: field.type for field in file.schema_arrow if any(test(field.type) for test in kinds)}
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
        size, remedy = max(8 * values, sum(group.total_byte_size for group in groups)), "save fewer rows or columns"
        check_size(path, size, MAX_BYTES, remedy)
        # Read texts as indices into a dictionary, so that one long text repeated in all rows uses no memory before it is refused.
        table = parquet.read_table(BufferReader(content), read_dictionary=list(texts))
        chunks = [chunk for name in texts for chunk in table.column(name).chunks]
        sizes = (compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)) for chunk in chunks)
        check_size(path, sum(size.as_py() or 0 for size in sizes), MAX_BYTES, remedy)
        for name, kind in texts.items():
            table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
        frame: DataFrame = table.to_pandas()
        return frame.reset_index(drop=True)


def _read_json(source: TextFile, reading: Reading) -> tuple[DataFrame, list[str]]:
    import pandas

    with source.open() as file:
        text = file.read()
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{source.where}: this is not a table in JSON: {first_line(error)}; give a list of objects, or one object on each line"
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(
            f"{source.where}: the JSON has no column names; give a list of objects, or one object on each line"
        )
    frame = pandas.DataFrame(rows).replace(list(reading.marks), None)
    words = {
        name: Words().add(frame[name])
        for name in frame.columns
        if str(name).strip() not in reading.texts and is_text(frame[name].dtype)
    }
    styles, notes = decide_styles(words, False, reading.commas)
    return apply_styles(frame, styles), notes
