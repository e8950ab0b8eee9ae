"""Storage of training rows in a folder. Every cell is read back exactly, even a text that looks empty or looks like a number."""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def pack_rows(frame: DataFrame) -> bytes:
    """Rows as compressed JSON with one list per line: first the column names, then the cells of each row.

    Numbers are stored exactly, and empty cells as `null`. Dates and other objects are stored as texts.
    """
    columns = [_cells(frame[name]) for name in frame.columns]
    lines = [list(map(str, frame.columns)), *zip(*columns, strict=True)]
    return gzip.compress("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(), mtime=0)


def unpack_rows(content: bytes) -> DataFrame:
    """Rows from the result of `pack_rows`."""
    import pandas

    names, *rows = (json.loads(line) for line in gzip.decompress(content).decode().split("\n")[:-1])
    cells = zip(*rows, strict=True) if rows else ([] for _ in names)
    filled = [
        [math.nan if cell is None else cell for cell in column] for column in cells
    ]  # as in tables that are read from files
    return pandas.DataFrame({name: pandas.Series(column) for name, column in zip(names, filled, strict=True)})


def _cells(column: Series) -> list[Any]:
    from pandas.api import types

    empty = column.isna().tolist()
    cells = column.astype(str).tolist() if types.is_datetime64_any_dtype(column.dtype) else column.tolist()
    return [None if gap else _plain(cell) for gap, cell in zip(empty, cells, strict=True)]


def _plain(cell: Any) -> Any:
    """A cell as a number, a truth value or a text."""
    found = cell.item() if hasattr(cell, "item") else cell
    return found if isinstance(found, (bool, int, float, str)) else str(found)
