"""Numbers as people write them: `12,345.67`, `$12,345`, `1.234,56`, `12 %`, `(7.50)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame

SIGNS = r"[$€£¥₹₽₩]|USD|EUR|GBP|CHF|JPY|CNY|INR|AUD|CAD|SEK|NOK|DKK|PLN|BRL|Fr\.|kr"
DRESS = re.compile(
    rf"^\s*(\(?)\s*([+-]?)\s*(?:{SIGNS})?\s*([+-]?)\s*([\d.,\u00a0\u202f\u2009'’ ]*\d)\s*(?:{SIGNS}|%)?\s*(\)?)\s*$"
)
"""A sign, a currency before or after, or a percent sign, or parentheses for a negative number, around digits and separators."""
SPACED = re.compile(r"^\d{1,3}([\u00a0\u202f\u2009'’ ]\d{3})+([.,]\d+)?$")
SPACES = re.compile(r"[\u00a0\u202f\u2009'’ ]")
ENGLISH = re.compile(r"^(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?$")
EUROPEAN = re.compile(r"^(\d{1,3}(\.\d{3})+|\d+)?(,\d+)?$")
DECIMAL_COMMAS = "decimal_commas"
"""Under which a frame's `attrs` name columns that the file writes with a decimal comma."""
MIN_FITTING_SHARE = 0.5
"""Share of the cells of a column that must be numbers."""


def read_written(
    frame: DataFrame, *, decimal_comma: bool = False, texts: Sequence[str] = (), commas: Sequence[str] = ()
) -> tuple[DataFrame, list[str]]:
    """A table with columns of written numbers as numbers, and a note for each; cells that are none stay as they are.

    Where all of a column can be read either way, such as `1,234`, the comma is a thousands separator. Names of columns with decimal
    commas are left in the frame's `attrs`, as `DECIMAL_COMMAS`.

    Args:
        frame: As it was read; columns of texts may hold numbers.
        decimal_comma: Whether the file writes other numbers with a decimal comma, which then decides such columns too.
        texts: Columns whose cells stay texts.
        commas: Columns that another table writes with a decimal comma, which decides them here; they are to be read as texts.
    """
    notes, changed, european = [], {}, []
    for name in frame.columns:
        column, known = frame[name], str(name).strip() in commas
        if str(name).strip() in texts:
            continue
        if column.dtype != object and str(column.dtype) not in ("str", "string"):
            if decimal_comma and column.dtype == float:
                european.append(str(name).strip())
            continue
        cells = column.tolist()
        words = [cell for cell in cells if isinstance(cell, str)]
        if all(is_number(text) for text in words) and not known:
            continue
        styles = (EUROPEAN, ENGLISH) if decimal_comma or known else (ENGLISH, EUROPEAN)
        found = [[parse(cell, style) if isinstance(cell, str) else cell for cell in cells] for style in styles]
        counts = [sum(isinstance(cell, float) for cell in read) for read in found]
        best = int(np.argmax(counts))
        numbers = [cell for before, cell in zip(cells, found[best], strict=True) if isinstance(before, str)]
        if sum(isinstance(cell, float) for cell in numbers) < MIN_FITTING_SHARE * len(words):
            continue
        example = next((text for text in words if not is_number(text) and parse(text, styles[best]) is not text), None)
        if example is None and not known:
            continue
        if example is not None:
            value = parse(example, styles[best])
            notes.append(f"Column {name!r} holds numbers such as {example.strip()!r}, which was read as {value:.12g}.")
        changed[name] = found[best]
        european += [str(name).strip()] * (styles[best] is EUROPEAN)
    frame = frame.assign(**changed) if changed else frame
    frame.attrs[DECIMAL_COMMAS] = european
    return frame, notes


def parse(text: str, style: re.Pattern[str]) -> float | str:
    """The number that a text is in a style, or the text itself."""
    if is_number(text) and style is ENGLISH:
        return float(text)
    dress = DRESS.match(text)
    if dress is None or bool(dress[1]) != bool(dress[5]):
        return text
    digits = SPACES.sub("", dress[4]) if SPACED.match(dress[4]) else dress[4]
    if not style.match(digits):
        return text
    plain = digits.replace(",", "") if style is ENGLISH else digits.replace(".", "").replace(",", ".")
    return -float(plain) if "-" in (dress[2], dress[3]) or dress[1] else float(plain)


def is_number(text: str) -> bool:
    """Whether Python reads a text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
