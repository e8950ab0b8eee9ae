"""Tables from files: CSV in its dialects, JSON, Parquet, spreadsheets, compressed or not."""

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

from bayesify.tables.csv_files import CsvFile, TextFile
from bayesify.tables.errors import InputError, check_names, first_line
from bayesify.tables.packed import ZIP, read_workbook, unpack
from bayesify.tables.written_numbers import Words, apply_styles, decide_styles, is_text

if TYPE_CHECKING:
    from pandas import DataFrame

MISSING_MARKS = (
    *("", "?", "-", "--", "NA", "N/A", "n/a", "na", "<NA>", "#N/A", "NaN", "nan", "-nan", "NaT"),
    *("NULL", "null", "None", "none", "#DIV/0!", "#VALUE!"),
)
"""Cells that stand for "not known"."""
MAX_BYTES = 2 << 30
"""Of a Parquet file when unpacked; a larger one is refused before it fills the memory."""
STDIN = "-"
"""The path that stands for standard input."""


@dataclass(frozen=True)
class Reading:
    """How a file is to be read, where it does not say so itself.

    Args:
        sheet: Of a spreadsheet (default: the first that holds anything).
        encoding: Of text (default: UTF-8, UTF-16 or UTF-32 by the first bytes, else Windows-1252).
        missing: More cells that stand for "not known".
        texts: Columns whose cells stay texts, such as codes with leading zeros.
        commas: Columns in which `1.234` is 1234, and `1,234` is not.
    """

    sheet: str = ""
    encoding: str = ""
    missing: Sequence[str] = ()
    texts: Sequence[str] = ()
    commas: Sequence[str] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Cells that stand for "not known"."""
        return (*MISSING_MARKS, *self.missing)

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise InputError(
                f"--encoding {self.encoding}: there is none of that name; try utf-8, latin-1 or shift_jis"
            ) from None


def read_table(path: Path, reading: Reading | None = None) -> tuple[DataFrame, list[str]]:
    """Read a table.

    Text is taken for CSV, whatever its extension: separated by comma, semicolon, tab or bar, in UTF-8 or else Windows-1252, numbers
    with a decimal point or, between semicolons, a decimal comma; or for JSON, a list of objects or one on each line. Parquet and
    spreadsheets are known by their first bytes; what is compressed by gzip, bzip2, xz or zip is unpacked.

    Args:
        path: The file; `-` for standard input.
        reading: What the file does not say.

    Returns:
        The table with one row per example, and notes about how it was read.

    Raises:
        InputError: If the file is not there, cannot be read, is empty or binary, has two columns of one name, lines of different
            lengths, or no rows; or if it unpacks to more than is allowed.
    """
    reading = reading or Reading()
    where, content = read_bytes(path)
    content = unpack(where, content)
    if not content.strip():
        raise InputError(f"{where}: is empty; give a table with a header and rows")
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
        raise InputError(f"{where}: has a header but no rows")
    return with_names(where, frame), notes


def with_names(where: str, frame: DataFrame) -> DataFrame:
    """A table whose columns have texts for names, each of them once.

    Raises:
        InputError: If two columns have one name.
    """
    frame.columns = [str(name).strip() for name in frame.columns]
    check_names(where, list(frame.columns))
    return frame


def is_json(text: TextFile) -> bool:
    """Whether a text is JSON."""
    return text.start(10_000).lstrip()[:1] in ("{", "[")


def csv_of(text: TextFile, reading: Reading) -> CsvFile:
    """A text as CSV."""
    return CsvFile.of(text, reading.marks, reading.texts, reading.commas)


def is_path(data: str) -> bool:
    """Whether a text means a file, or standard input, and not a data set by name."""
    path = Path(data)
    return data == STDIN or path.exists() or bool(path.suffix) or len(path.parts) > 1


def check_there(data: str) -> None:
    """Refuse a file that is not there, or an address, without reading anything.

    Raises:
        InputError: With what to do.
    """
    if re.match(r"^(https?|ftp|s3):/", data):
        raise InputError(f"{data}: is an address; download the table, and give its file (curl -O ... does it)")
    if is_path(data) and data != STDIN and not Path(data).exists():
        raise InputError(f"{data}: there is no such file")


def read_bytes(path: Path) -> tuple[str, bytes]:
    """What a file is called in messages, and its bytes.

    Raises:
        InputError: If it is not there or cannot be read.
    """
    if str(path) == STDIN:
        return "standard input", sys.stdin.buffer.read()
    check_there(str(path))
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file with a table")
    with open_bytes(path) as file:
        return str(path), file.read()


def open_bytes(path: Path) -> IO[bytes]:
    """A file, open to be read.

    Raises:
        InputError: If it cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error


@contextmanager
def _parquet_file(path: str, source: Any) -> Iterator[Any]:
    """A Parquet file with each name once, and its errors in words."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'bayesify[compare]', or save as CSV") from error
    try:
        with parquet.ParquetFile(source) as file:
            check_names(path, [str(name).strip() for name in file.schema_arrow.names])
            yield file
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged or no Parquet file: {first_line(error)}") from error


def parquet_parts(path: Path, rows: int) -> Iterator[DataFrame]:
    """A Parquet file in parts of at most so many rows.

    Raises:
        InputError: As `read_table`.
    """
    with _parquet_file(str(path), path) as file:
        if not file.metadata.num_rows:
            raise InputError(f"{path}: has a header but no rows")
        for batch in file.iter_batches(rows):
            yield batch.to_pandas()


def _read_parquet(path: str, content: bytes) -> DataFrame:
    with _parquet_file(path, io.BytesIO(content)) as file:
        about = file.metadata
        texts = {field.name: field.type for field in file.schema_arrow if _is_text(field.type)}
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
        _check_size(path, max(8 * values, sum(group.total_byte_size for group in groups)))
        # Texts come as numbers of entries of a list, so that one long text for all rows costs nothing before it is refused.
        from pyarrow import BufferReader, parquet

        table = parquet.read_table(BufferReader(content), read_dictionary=list(texts))
        _check_size(path, sum(_text_bytes(chunk) for name in texts for chunk in table.column(name).chunks))
        for name, kind in texts.items():
            table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
        frame: DataFrame = table.to_pandas()
        return frame.reset_index(drop=True)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _text_bytes(chunk: Any) -> int:
    """Bytes of a column of texts, stored as numbers of entries of a list, when written out."""
    from pyarrow import compute

    return compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0


def _check_size(path: str, size: int) -> None:
    if size > MAX_BYTES:
        raise InputError(
            f"{path}: holds {size / 2**30:.1f} GiB when unpacked, more than {MAX_BYTES >> 30}; save fewer rows or columns"
        )


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
            f"{source.where}: is no JSON of a table: {first_line(error)}; give a list of objects, or one object on each line"
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(
            f"{source.where}: is JSON without names of columns; give a list of objects, or one object on each line"
        )
    frame = pandas.DataFrame(rows).replace(list(reading.marks), None)
    words = {
        name: Words.of(frame[name])
        for name in frame.columns
        if str(name).strip() not in reading.texts and is_text(frame[name].dtype)
    }
    styles, notes = decide_styles(words, False, reading.commas)
    return apply_styles(frame, styles), notes
