"""Tables from files: CSV in its dialects, JSON, Parquet, spreadsheets, compressed or not."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.tables.errors import InputError
from bayesify.tables.packed import ZIP, read_workbook, unpack
from bayesify.tables.written_numbers import is_number, read_written

if TYPE_CHECKING:
    from pandas import DataFrame

MISSING_MARKS = (
    *("", "?", "-", "--", "NA", "N/A", "n/a", "na", "<NA>", "#N/A", "NaN", "nan", "-nan", "NaT"),
    *("NULL", "null", "None", "none", "#DIV/0!", "#VALUE!"),
)
"""Cells that stand for "not known"."""
RAGGED = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
"""How pandas says that a line is too long."""
SEPARATORS = (",", ";", "\t", "|")
MAX_BYTES = 2 << 30
"""Of a Parquet file when unpacked; a larger one is refused before it fills the memory."""
KNOWN_BINARIES = {
    b"\xd0\xcf\x11\xe0": "an old spreadsheet; save the sheet as CSV",
    b"%PDF": "a PDF; give the table as CSV or Parquet",
    b"\x89PNG": "a picture; give a table as CSV or Parquet",
    b"\xff\xd8\xff": "a picture; give a table as CSV or Parquet",
    b"7z\xbc\xaf": "a 7z archive; unpack it, and give one table",
    b"Rar!": "a rar archive; unpack it, and give one table",
}
"""First bytes of files that are no tables, and what to do."""


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
    missing = (*MISSING_MARKS, *reading.missing)
    notes: list[str] = []
    if content[:4] == b"PAR1":
        frame = _read_parquet(where, content)
    elif content.startswith(ZIP):
        frame, notes = read_workbook(where, content, reading.sheet, missing, reading.texts)
    else:
        text, notes = _decode(where, content, reading.encoding)
        read = _read_json if text.lstrip()[:1] in ("{", "[") else _read_csv
        frame, more = read(where, text, missing, reading)
        notes += more
    if not len(frame):
        raise InputError(f"{where}: has a header but no rows")
    frame.columns = [str(name).strip() for name in frame.columns]
    _check_names(where, list(frame.columns))
    return frame, notes


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
    try:
        return str(path), path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error


def _check_names(path: str, names: list[str]) -> None:
    for name in names:
        places = [str(index + 1) for index, other in enumerate(names) if other == name]
        if len(places) > 1:
            raise InputError(f"{path}: columns {' and '.join(places)} are both called {name!r}; rename one of them")


def _read_parquet(path: str, content: bytes) -> DataFrame:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'bayesify[compare]', or save as CSV") from error
    try:
        with parquet.ParquetFile(BufferReader(content)) as file:
            about = file.metadata
            texts = {field.name: field.type for field in file.schema_arrow if _is_text(field.type)}
            _check_names(path, [str(name).strip() for name in file.schema_arrow.names])
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
        _check_size(path, max(8 * values, sum(group.total_byte_size for group in groups)))
        # Texts come as numbers of entries of a list, so that one long text for all rows costs nothing before it is refused.
        table = parquet.read_table(BufferReader(content), read_dictionary=list(texts))
        _check_size(path, sum(_text_bytes(chunk) for name in texts for chunk in table.column(name).chunks))
        for name, kind in texts.items():
            table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
        frame: DataFrame = table.to_pandas()
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged or no Parquet file: {_first_line(error)}") from error
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


def _read_json(path: str, text: str, missing: Sequence[str], reading: Reading) -> tuple[DataFrame, list[str]]:
    import pandas

    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: is no JSON of a table: {_first_line(error)}; give a list of objects, or one object on each line"
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(
            f"{path}: is JSON without names of columns; give a list of objects, or one object on each line"
        )
    return read_written(pandas.DataFrame(rows).replace(list(missing), None), texts=reading.texts, commas=reading.commas)


def _read_csv(path: str, text: str, missing: Sequence[str], reading: Reading) -> tuple[DataFrame, list[str]]:
    import pandas

    header = text.lstrip("\r\n").split("\n", 1)[0]
    separator = max(SEPARATORS, key=header.count)
    names = next(csv.reader([header.rstrip("\r")], delimiter=separator), [])
    _check_names(path, [name.strip() for name in names if name.strip()])
    options: dict[str, Any] = {
        "sep": separator,
        "na_values": list(missing),
        "keep_default_na": False,
        "skipinitialspace": True,
        "low_memory": False,
        "decimal": "," if separator == ";" and _decimal_commas(text) else ".",
        "index_col": False,
        "dtype": {name: str for name in names if name.strip() in (*reading.texts, *reading.commas)},
    }
    try:
        frame: DataFrame = pandas.read_csv(io.StringIO(text), **options)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, pandas.errors.ParserWarning) as error:
        if ragged := RAGGED.search(str(error)):
            raise InputError(
                f"{path}: line {ragged[2]} has {ragged[3]} cells where the lines before it have {ragged[1]}; correct it, and "
                "put texts with a separator in them in quotes"
            ) from error
        raise InputError(f"{path}: is no table: {_first_line(error)}") from error
    if all(is_number(name) for name in names) and len(names) > 1:
        raise InputError(
            f"{path}: the first line holds numbers only ({', '.join(names[:3])}, ...); "
            "put the columns' names in the first line"
        )
    return read_written(frame, decimal_comma=options["decimal"] == ",", texts=reading.texts, commas=reading.commas)


def _decode(path: str, content: bytes, given: str) -> tuple[str, list[str]]:
    for start, what in KNOWN_BINARIES.items():
        if content.startswith(start):
            raise InputError(f"{path}: is {what}")
    if given:
        try:
            return content.decode(given), []
        except UnicodeDecodeError as error:
            raise InputError(
                f"--encoding {given}: {path} is not in it: {error.reason} at byte {error.start}"
            ) from error
    for encoding in _encodings(content):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        odd = sum(ord(sign) < 32 and sign not in "\r\n\t" for sign in text[:10_000])
        if odd <= 0.01 * min(len(text), 10_000):
            return text, [] if encoding != "cp1252" else ["The file is not in UTF-8; it was read as Windows-1252."]
    raise InputError(f"{path}: is a binary file; give a table as CSV, Excel, Parquet or JSON")


def _encodings(content: bytes) -> list[str]:
    """Those to try, by the first bytes."""
    if content.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return ["utf-32"]
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ["utf-16"]
    start = content[:2000]
    for zeros, encoding in ((start[1::2], "utf-16-le"), (start[::2], "utf-16-be")):  # without a mark
        if zeros.count(0) > 0.4 * len(start) > 4:
            return [encoding]
    return [] if 0 in content[:100_000] else ["utf-8-sig", "cp1252"]


def _decimal_commas(text: str) -> bool:
    cells = [cell.strip() for line in text[:50_000].split("\n")[1:-1] for cell in line.split(";")]
    with_comma = sum(is_number(cell.replace(",", ".", 1)) and "," in cell for cell in cells)
    return with_comma > sum(is_number(cell) and "." in cell for cell in cells)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
