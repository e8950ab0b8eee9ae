"""Files inside files: what is compressed, an archive with one table, or a spreadsheet, unpacked within limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from bayesify.tables.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_UNPACKED_BYTES = 1 << 30
"""Bytes of a file when unpacked; a larger one is refused before it fills the memory."""
CHUNK_BYTES = 1 << 20
OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
"""First bytes of compressed files, and how to open them."""
ZIP = b"PK\x03\x04"
WORKBOOK = "xl/workbook.xml"
"""A file in every archive that is a spreadsheet."""
HIDDEN_STARTS = ("__MACOSX/", ".")
UNPACKING_ERRORS = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
)


def is_packed(start: bytes) -> bool:
    """Whether first bytes are those of a compressed file, an archive or a spreadsheet."""
    return start.startswith((*OPENERS, ZIP))


def unpack(where: str, content: bytes) -> bytes:
    """What a compressed file or an archive of one table holds; anything else, and spreadsheets, as they are.

    Args:
        where: The file, for messages.
        content: Its bytes.

    Raises:
        InputError: If it is damaged, locked by a password, unpacks to more than `MAX_UNPACKED_BYTES`, or holds no or several files.
    """
    try:
        for start, opener in OPENERS.items():
            if content.startswith(start):
                with opener(io.BytesIO(content)) as stream:
                    return unpack(where, _limited(where, stream))  # such as .tar.gz, which is refused later
        if content.startswith(ZIP) and not is_workbook(content):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = [
                    name for name in archive.namelist() if not name.endswith("/") and not name.startswith(HIDDEN_STARTS)
                ]
                if len(names) != 1:
                    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                    held = f"{len(names)} files ({shown})" if names else "no file"
                    raise InputError(f"{where}: is an archive with {held}; unpack it, and give one table")
                with archive.open(names[0]) as stream:
                    return unpack(where, _limited(where, stream))
    except UNPACKING_ERRORS as error:
        raise InputError(f"{where}: cannot be unpacked: {error}; make it again, or save the table as CSV") from error
    return content


def _limited(where: str, stream: IO[bytes]) -> bytes:
    found = io.BytesIO()
    while chunk := stream.read(CHUNK_BYTES):
        if found.tell() + len(chunk) > MAX_UNPACKED_BYTES:
            raise InputError(
                f"{where}: unpacks to more than {MAX_UNPACKED_BYTES / 2**30:g} GiB; unpack it, and save fewer rows or columns"
            )
        found.write(chunk)
    return found.getvalue()


def is_workbook(content: bytes) -> bool:
    """Whether bytes are a spreadsheet (.xlsx)."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return WORKBOOK in archive.namelist()
    except UNPACKING_ERRORS:
        return False


def read_workbook(
    where: str, content: bytes, sheet: str, missing: Sequence[str], texts: Sequence[str] = ()
) -> tuple[DataFrame, list[str]]:
    """One sheet of a spreadsheet, its first row the names of the columns, and notes about which it was.

    Args:
        where: The file, for messages.
        content: Its bytes.
        sheet: A name; empty for the first that holds anything.
        missing: Cells that stand for "not known".
        texts: Columns whose cells stay texts.

    Raises:
        InputError: If openpyxl is not installed, the sheet is not there or empty, or it unpacks to too much.
    """
    import pandas

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MAX_UNPACKED_BYTES:
        raise InputError(
            f"{where}: unpacks to {size / 2**30:.1f} GiB, more than {MAX_UNPACKED_BYTES / 2**30:g}; save it as CSV"
        )
    if find_spec("openpyxl") is None:
        raise InputError(f"{where}: is a spreadsheet; pip install openpyxl, or save the sheet as CSV")
    options: dict[str, Any] = {"na_values": list(missing), "keep_default_na": False, "dtype": dict.fromkeys(texts, str)}
    try:
        with pandas.ExcelFile(io.BytesIO(content), engine="openpyxl") as book:
            names = [str(name) for name in book.sheet_names]
            if sheet and sheet not in names:
                raise InputError(f"{where}: has no sheet {sheet!r}; there are {', '.join(names)}")
            for name in [sheet] if sheet else names:
                frame = pandas.read_excel(book, sheet_name=name, **options)
                frame = frame.dropna(axis=0, how="all").dropna(axis=1, how="all")
                if len(frame.columns):
                    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                    note = f"Sheet {name!r} was read, of {len(names)} ({shown}); --sheet takes another."
                    return frame.reset_index(drop=True), [note] if len(names) > 1 else []
    except (*UNPACKING_ERRORS, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: is a damaged spreadsheet: {error}; save the sheet as CSV") from error
    raise InputError(
        f"{where}: {f'sheet {sheet!r}' if sheet else 'every sheet'} is empty; give a table with a header and rows"
    )
