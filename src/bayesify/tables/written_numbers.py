"""Numbers as people write them: `12,345.67`, `$12,345`, `1.234,56`, `12 %`, `(7.50)`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SIGNS = r"[$€£¥₹₽₩]|USD|EUR|GBP|CHF|JPY|CNY|INR|AUD|CAD|SEK|NOK|DKK|PLN|BRL|Fr\.|kr"
NUMBER_WITH_SIGNS_PATTERN = re.compile(
    rf"^\s*(\(?)\s*([+-]?)\s*(?:{SIGNS})?\s*([+-]?)\s*([\d.,\u00a0\u202f\u2009'’ ]*\d)\s*(?:{SIGNS}|%)?\s*(\)?)\s*$"
)
"""Digits and separators with an optional sign, currency or percent sign, or parentheses for a negative number."""
SPACED_NUMBER_PATTERN = re.compile(r"^\d{1,3}([\u00a0\u202f\u2009'’ ]\d{3})+([.,]\d+)?$")
SPACES = re.compile(r"[\u00a0\u202f\u2009'’ ]")
ENGLISH = re.compile(r"^(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?$")
EUROPEAN = re.compile(r"^(\d{1,3}(\.\d{3})+|\d+)?(,\d+)?$")
STYLES = (ENGLISH, EUROPEAN)
DECIMAL_COMMAS = "decimal_commas"
"""Key in a frame's `attrs` for the columns that the file writes with a decimal comma."""
DIALECT = "dialect"
"""Key in a frame's `attrs` for the separator and the decimal mark of a CSV file."""
MIN_FITTING_SHARE = 0.5
"""Minimum share of a column's cells that must be numbers."""


@dataclass
class Words:
    """Counts of the texts of a column. A table can be counted part by part."""

    count: int = 0  # number of texts
    num_plain: int = 0  # number of texts that Python reads as numbers
    num_read: tuple[int, ...] = (0, 0)  # for each of `STYLES`, the number of texts that are numbers in this style
    examples: tuple[str | None, ...] = (None, None)  # for each of `STYLES`, the first number that Python does not read
    grouped: str | None = None  # first text that is a different number in each of `STYLES`, such as `1.234`

    def add(self, column: Series) -> Words:
        """Add the texts of one more part."""
        words = [cell for cell in column.tolist() if isinstance(cell, str)]
        odd = [text for text in words if not is_number(text)]
        self.count += len(words)
        self.num_plain += len(words) - len(odd)
        self.num_read = tuple(
            before + sum(isinstance(parse(text, style), float) for text in words)
            for before, style in zip(self.num_read, STYLES, strict=True)
        )
        self.examples = tuple(
            example or next((text for text in odd if parse(text, style) is not text), None)
            for example, style in zip(self.examples, STYLES, strict=True)
        )
        self.grouped = self.grouped or next((text for text in words if _has_two_values(text)), None)
        return self

    def decide(self, *, european: bool, known: bool) -> tuple[re.Pattern[str] | None, str | None]:
        """The style in which most texts are numbers, with an example; `None` if most texts are not numbers.

        Texts that are numbers in both styles are read with a decimal comma if `european` is true or if the column is
        `known` to have decimal commas in another table.
        """
        plain = self.num_plain == self.count
        if plain and not known and not (european and self.num_read[1] == self.count):
            return None, None
        order = (1, 0) if european or known else (0, 1)
        best = max(order, key=lambda place: self.num_read[place])  # in a tie, the first in `order`
        example = self.grouped if plain and best == 1 and not known else self.examples[best]
        if self.num_read[best] < MIN_FITTING_SHARE * self.count or (example is None and not known):
            return None, None
        return STYLES[best], example


def decide_styles(
    words: Mapping[str, Words], decimal_comma: bool, commas: Collection[str]
) -> tuple[dict[str, re.Pattern[str]], list[str]]:
    """The style of each column of written numbers, and notes that say how columns were read.

    If a whole column can be read either way, as in `1,234`, the comma is a thousands separator. It is a decimal comma if the file
    has other numbers with a `decimal_comma`, or if the column has decimal commas in another table (`commas`). A column gets no
    note if the file's decimal comma already explains its style.
    """
    styles, notes = {}, []
    for name, found in words.items():
        style, example = found.decide(european=decimal_comma, known=str(name).strip() in commas)
        if style is None:
            continue
        styles[name] = style
        told = decimal_comma and style is EUROPEAN  # the note about the whole file covers plain decimal commas
        if example and not (told and "." not in example and is_number(example.replace(",", ".", 1))):
            value = parse(example, style)
            notes.append(f"Column {name!r} holds numbers such as {example.strip()!r}, which was read as {value:.12g}.")
    return styles, notes


def apply_styles(frame: DataFrame, styles: Mapping[str, re.Pattern[str]], *, decimal_comma: bool = False) -> DataFrame:
    """A table whose columns of written numbers are converted to numbers; cells that are not numbers stay as they are.

    The frame's `attrs` list the columns with decimal commas, under `DECIMAL_COMMAS`.
    """
    import pandas

    european = {name for name, style in styles.items() if style is EUROPEAN}
    if decimal_comma:
        european |= {name for name, kind in zip(frame.columns, frame.dtypes, strict=True) if str(kind) == "float64"}
    names = [str(name).strip() for name in frame.columns if name in european]
    if styles:
        columns = {name: frame[name] for name in frame.columns}
        for name, style in styles.items():
            cells = [parse(cell, style) if isinstance(cell, str) else cell for cell in columns[name].tolist()]
            columns[name] = pandas.Series(cells, index=frame.index)
        frame = pandas.DataFrame(columns, index=frame.index)
    frame.attrs[DECIMAL_COMMAS] = names
    return frame


def is_text(kind: object) -> bool:
    """Whether a column of this type may contain texts."""
    return str(kind) in ("object", "str", "string")


def parse(text: str, style: re.Pattern[str]) -> float | str:
    """The number that a text denotes in a style, or the text itself if it is not a number."""
    if is_number(text) and style is ENGLISH:
        return float(text)
    dress = NUMBER_WITH_SIGNS_PATTERN.match(text)
    if dress is None or bool(dress[1]) != bool(dress[5]):
        return text
    digits = SPACES.sub("", dress[4]) if SPACED_NUMBER_PATTERN.match(dress[4]) else dress[4]
    if not style.match(digits):
        return text
    plain = digits.replace(",", "") if style is ENGLISH else digits.replace(".", "").replace(",", ".")
    return -float(plain) if "-" in (dress[2], dress[3]) or dress[1] else float(plain)


def _has_two_values(text: str) -> bool:
    found = [parse(text, style) for style in STYLES]
    return found[0] != found[1] and all(isinstance(value, float) for value in found)


def significant(value: float) -> str:
    """A number as readable text, with three significant digits, separated thousands, and an exponent only if needed."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, 2 - magnitude)}f}" if -5 < magnitude < 9 else f"{value:.2e}"


def shown(value: object) -> str:
    """A readable cell: a number with at most six digits, with separated thousands from 10,000 on; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.6g}"


def is_number(text: str) -> bool:
    """Whether Python reads a text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
