"""Compressed files, archives with one table, and spreadsheets, unpacked within limits."""

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
"""Maximum size of an unpacked file; a larger file is refused before it fills the memory."""
CHUNK_BYTES = 1 << 20
OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
"""First bytes of compressed files, and functions that open them."""
ZIP = b"PK\x03\x04"
WORKBOOK = "xl/workbook.xml"
"""A file that every spreadsheet contains."""
HIDDEN_STARTS = ("__MACOSX/", ".")
UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)


def is_packed(start: bytes) -> bool:
    """Whether a file that starts with these bytes is compressed, an archive or a spreadsheet."""
    return start.startswith((*OPENERS, ZIP))


def unpack(where: str, content: bytes) -> bytes:
    """The content of a compressed file or of an archive with one table. Other files, including spreadsheets, stay unchanged.

    A file is refused if it is damaged, locked by a password, or larger than `MAX_UNPACKED_BYTES` when unpacked, or if it contains
    no file or several files.
    """
    try:
        for start, opener in OPENERS.items():
            if content.startswith(start):
                with opener(io.BytesIO(content)) as stream:
                    return unpack(where, _limited(where, stream))  # for example .tar.gz, which is refused later
        if content.startswith(ZIP):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if WORKBOOK in (every := archive.namelist()):
                    return content
                names = [name for name in every if not name.endswith("/") and not name.startswith(HIDDEN_STARTS)]
                if len(names) != 1:
                    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                    held = f"{len(names)} files ({shown})" if names else "no file"
                    raise InputError(f"{where}: this is an archive with {held}; unpack it, and give one table")
                with archive.open(names[0]) as stream:
                    return unpack(where, _limited(where, stream))
    except UNPACKING_ERRORS as error:
        raise InputError(
            f"{where}: the file cannot be unpacked ({error}); create the file again, or save the table as CSV"
        ) from error
    return content


def _limited(where: str, stream: IO[bytes]) -> bytes:
    found = io.BytesIO()
    while chunk := stream.read(CHUNK_BYTES):
        if found.tell() + len(chunk) > MAX_UNPACKED_BYTES:
            raise InputError(
                f"{where}: the file has more than {MAX_UNPACKED_BYTES / 2**30:g} GiB when unpacked; unpack it, and save "
                "fewer rows or columns"
            )
        found.write(chunk)
    return found.getvalue()


def check_size(where: str, size: int, limit: int, remedy: str) -> None:
    """Refuse a file that has more bytes than the limit when unpacked."""
    if size > limit:
        found = f"{size / 2**30:.1f} GiB when unpacked, more than the limit of {limit / 2**30:g} GiB"
        raise InputError(f"{where}: the file has {found}; {remedy}")


def read_workbook(
    where: str, content: bytes, sheet: str, missing: Sequence[str], texts: Sequence[str] = ()
) -> tuple[DataFrame, list[str]]:
    """One sheet of a spreadsheet, and notes about the choice of the sheet. The first row of the sheet contains the column names.

    If no sheet is named, the first sheet that is not empty is read. See `Reading` for `missing` and `texts`.
    """
    import pandas

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    check_size(where, size, MAX_UNPACKED_BYTES, "save it as CSV")
    if find_spec("openpyxl") is None:
        raise InputError(
            f"{where}: reading a spreadsheet needs openpyxl; pip install openpyxl, or save the sheet as CSV"
        )
    options: dict[str, Any] = {"na_values": list(missing), "keep_default_na": False, "dtype": dict.fromkeys(texts, str)}
    try:
        with pandas.ExcelFile(io.BytesIO(content), engine="openpyxl") as book:
            names = [str(name) for name in book.sheet_names]
            if sheet and sheet not in names:
                raise InputError(f"{where}: the file has no sheet {sheet!r}; its sheets are {', '.join(names)}")
            for name in [sheet] if sheet else names:
                frame = pandas.read_excel(book, sheet_name=name, **options)
                frame = frame.dropna(axis=0, how="all").dropna(axis=1, how="all")
                if len(frame.columns):
                    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                    note = f"Sheet {name!r} was read, one of {len(names)} ({shown}); --sheet chooses another."
                    return frame.reset_index(drop=True), [note] if len(names) > 1 else []
    except (*UNPACKING_ERRORS, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: the spreadsheet is damaged: {error}; save the sheet as CSV") from error
    raise InputError(
        f"{where}: {f'sheet {sheet!r}' if sheet else 'every sheet'} is empty; give a table with a header and rows"
    )
