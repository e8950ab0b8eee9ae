"""Tables from files: CSV in its dialects, and Parquet."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.tables.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

MISSING_MARKS = (
    "",
    "?",
    "NA",
    "N/A",
    "n/a",
    "na",
    "NaN",
    "nan",
    "-nan",
    "NULL",
    "null",
    "None",
    "none",
    "<NA>",
    "#N/A",
)
"""Cells that stand for "not known"."""
RAGGED = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
"""How pandas says that a line is too long."""
SEPARATORS = (",", ";", "\t", "|")
MOST_BYTES = 2 << 30
"""Of a Parquet file when unpacked; a larger one is refused before it fills the memory."""
KNOWN_BINARIES = {
    b"PK\x03\x04": "a spreadsheet or zip archive; save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet; save the sheet as CSV",
    b"%PDF": "a PDF; give the table as CSV or Parquet",
    b"\x89PNG": "a picture; give a table as CSV or Parquet",
    b"\xff\xd8\xff": "a picture; give a table as CSV or Parquet",
    b"\x1f\x8b": "compressed; unpack it first",
}
"""First bytes of files that are no tables, and what to do."""


def read_table(path: Path) -> tuple[DataFrame, list[str]]:
    """Read a table.

    Text is taken for CSV, whatever its extension: separated by comma, semicolon, tab or bar, in UTF-8 or else Windows-1252, numbers
    with a decimal point or, between semicolons, a decimal comma. Parquet is known by its first bytes.

    Args:
        path: The file.

    Returns:
        The table with one row per example, and notes about how it was read.

    Raises:
        InputError: If the file is not there, cannot be read, is empty or binary, has two columns of one name, lines of different
            lengths, or no rows; or if it is Parquet of more than `MOST_BYTES` when unpacked.
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a CSV or Parquet file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    if not content.strip():
        raise InputError(f"{path}: is empty; give a table with a header and rows")
    notes: list[str] = []
    if content[:4] == b"PAR1":
        frame = _read_parquet(path)
    else:
        frame, notes = _read_csv(path, content)
    if not len(frame):
        raise InputError(f"{path}: has a header but no rows")
    frame.columns = [str(name).strip() for name in frame.columns]
    _check_names(path, list(frame.columns))
    return frame, notes


def _check_names(path: Path, names: list[str]) -> None:
    for name in names:
        places = [str(index + 1) for index, other in enumerate(names) if other == name]
        if len(places) > 1:
            raise InputError(f"{path}: columns {' and '.join(places)} are both called {name!r}; rename one of them")


def _read_parquet(path: Path) -> DataFrame:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'bayesify[compare]', or save as CSV") from error
    try:
        with parquet.ParquetFile(path) as file:
            about, texts = (
                file.metadata,
                {field.name: field.type for field in file.schema_arrow if _is_text(field.type)},
            )
            _check_names(path, [str(name).strip() for name in file.schema_arrow.names])
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
        _check_size(path, max(8 * values, sum(group.total_byte_size for group in groups)))
        # Texts come as numbers of entries of a list, so that one long text for all rows costs nothing before it is refused.
        table = parquet.read_table(path, read_dictionary=list(texts))
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


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise InputError(
            f"{path}: holds {size / 2**30:.1f} GiB when unpacked, more than {MOST_BYTES >> 30}; save fewer rows or columns"
        )


def _read_csv(path: Path, content: bytes) -> tuple[DataFrame, list[str]]:
    import pandas

    for start, what in KNOWN_BINARIES.items():
        if content.startswith(start):
            raise InputError(f"{path}: is {what}")
    if b"\x00" in content[:100_000] and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}: is a binary file; give a CSV or Parquet file")
    text, notes = _decode(path, content)
    header = text.lstrip("\r\n").split("\n", 1)[0]
    separator = _separator(header)
    names = next(csv.reader([header.rstrip("\r")], delimiter=separator), [])
    _check_names(path, [name.strip() for name in names if name.strip()])
    options: dict[str, Any] = {
        "sep": separator,
        "na_values": list(MISSING_MARKS),
        "keep_default_na": False,
        "skipinitialspace": True,
        "low_memory": False,
        "decimal": "," if separator == ";" and _decimal_commas(text) else ".",
        "index_col": False,
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
    if all(_is_number(name) for name in names) and len(names) > 1:
        raise InputError(
            f"{path}: the first line holds numbers only ({', '.join(names[:3])}, ...); "
            "put the columns' names in the first line"
        )
    return frame, notes


def _decode(path: Path, content: bytes) -> tuple[str, list[str]]:
    marked = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    encodings = ["utf-16"] if marked else ["utf-8-sig", "cp1252"]
    for encoding in encodings:
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        odd = sum(ord(sign) < 32 and sign not in "\r\n\t" for sign in text[:10_000])
        if odd <= 0.01 * min(len(text), 10_000):
            return text, [] if encoding != "cp1252" else ["The file is not in UTF-8; it was read as Windows-1252."]
    raise InputError(f"{path}: is a binary file; give a CSV or Parquet file")


def _separator(header: str) -> str:
    counts = {separator: header.count(separator) for separator in SEPARATORS}
    return max(SEPARATORS, key=lambda separator: counts[separator])


def _decimal_commas(text: str) -> bool:
    cells = [cell.strip() for line in text[:50_000].split("\n")[1:-1] for cell in line.split(";")]
    with_comma = sum(_is_number(cell.replace(",", ".", 1)) and "," in cell for cell in cells)
    return with_comma > sum(_is_number(cell) and "." in cell for cell in cells)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
