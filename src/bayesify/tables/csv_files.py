"""Reading CSV files with various encodings, separators, quotes and decimal marks, which are detected once per file."""

from __future__ import annotations

import codecs
import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Literal

from bayesify.tables.errors import InputError, check_names, first_line
from bayesify.tables.written_numbers import DIALECT, Words, apply_styles, decide_styles, is_number, is_text

if TYPE_CHECKING:
    from pandas import DataFrame

RAGGED_ROW_PATTERN = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
"""Message of pandas for a line that is too long."""
SEPARATORS = (",", ";", "\t", "|")
LINE_ENDS = re.compile(r"\r\n|\r|\n")
START_BYTES, BLOCK_BYTES, MAX_HEADER_CHARS = 100_000, 1 << 20, 1 << 24
"""Number of bytes that decide the encoding, number of bytes decoded at a time, and maximum number of characters of the header."""
KNOWN_BINARIES = {
    b"\xd0\xcf\x11\xe0": "this is an old spreadsheet; save the sheet as CSV",
    b"%PDF": "this is a PDF; give the table as CSV or Parquet",
    b"\x89PNG": "this is a picture; give a table as CSV or Parquet",
    b"\xff\xd8\xff": "this is a picture; give a table as CSV or Parquet",
    b"7z\xbc\xaf": "this is a 7z archive; unpack it, and give one table",
    b"Rar!": "this is a rar archive; unpack it, and give one table",
}
"""First bytes of files that are not tables, with the problem and the remedy."""


@dataclass(frozen=True)
class TextFile:
    """A text file that can be read several times, in one encoding."""

    where: str  # name of the file in messages
    open_bytes: Callable[[], IO[bytes]]  # function that opens the file at its beginning
    encoding: str

    @classmethod
    def of(cls, where: str, open_bytes: Callable[[], IO[bytes]], given: str = "") -> tuple[TextFile, list[str]]:
        """A text file, valid in the detected or `given` encoding, and notes about the encoding. Binary files are refused."""
        with open_bytes() as file:
            start = file.read(START_BYTES)
        for known, what in KNOWN_BINARIES.items():
            if start.startswith(known):
                raise InputError(f"{where}: {what}")
        for encoding in [given] if given else _encodings(start):
            text = cls(where, open_bytes, encoding)
            wrong = text._find_wrong()
            if given and wrong:
                raise InputError(
                    f"--encoding {given}: {where} is not in this encoding ({wrong}); give another encoding, or leave --encoding out"
                )
            if given or (not wrong and _is_readable(text.start(10_000))):
                return text, [] if encoding != "cp1252" else ["The file is not in UTF-8; it was read as Windows-1252."]
        remedy = "give a table as CSV, Excel, Parquet or JSON, or give the encoding with --encoding"
        raise InputError(f"{where}: this is a binary file, or a text in an unknown encoding; {remedy}")

    def open(self) -> io.TextIOWrapper:
        """The text from its beginning, with unchanged line ends."""
        return io.TextIOWrapper(self.open_bytes(), encoding=self.encoding, newline="")

    def start(self, size: int) -> str:
        """The first characters of the file's text."""
        with self.open() as file:
            return file.read(size)

    def _find_wrong(self) -> str:
        """Reason and place of the first bytes that the encoding cannot decode; empty if there are none."""
        decoder, done = codecs.getincrementaldecoder(self.encoding)(), 0
        with self.open_bytes() as file:
            while True:
                block = file.read(BLOCK_BYTES)
                before = done - len(decoder.getstate()[0])
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    return f"{error.reason} at byte {before + error.start}"
                if not block:
                    return ""
                done += len(block)


def _encodings(start: bytes) -> list[str]:
    if start.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return ["utf-32"]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ["utf-16"]
    some = start[:2000]
    for zeros, others, encoding in ((some[1::2], some[::2], "utf-16-le"), (some[::2], some[1::2], "utf-16-be")):
        if 0 not in others and zeros.count(0) > 0.3 * len(zeros) > 1:  # zero bytes of separators, digits and line ends
            return [encoding]
    return [] if 0 in start else ["utf-8-sig", "cp1252"]


def _is_readable(text: str) -> bool:
    odd = sum(ord(sign) < 32 and sign not in "\r\n\t" for sign in text)
    return odd <= 0.01 * len(text)


@dataclass(frozen=True)
class CsvFile:
    """A CSV file. Reading it as a whole or in parts gives the same result."""

    text: TextFile
    names: Sequence[str]  # names of the columns, as pandas reads them
    options: dict[str, Any]  # options of `pandas.read_csv`
    texts: frozenset[str]  # columns whose cells stay texts
    commas: frozenset[str]  # columns that have decimal commas in an earlier table
    comma_example: str = ""  # a number that the file writes with a decimal comma; empty if all numbers have a point

    @classmethod
    def of(cls, text: TextFile, missing: Sequence[str], texts: Sequence[str], commas: Sequence[str]) -> CsvFile:
        """A file with the dialect detected from its beginning; two columns with the same name are refused."""
        names, separator = _header(text)
        check_names(text.where, [name.strip() for name in names if name.strip()])
        names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        example = _decimal_comma(text.start(50_000)) if separator == ";" else ""
        options = {
            "sep": separator,
            "na_values": list(missing),
            "keep_default_na": False,
            "skipinitialspace": True,
            "low_memory": False,
            "decimal": "," if example else ".",
            "index_col": False,
        }
        return cls(text, names, options, frozenset(texts), frozenset(commas), example)

    def read(self) -> tuple[DataFrame, list[str]]:
        """The whole table, and notes about its numbers.

        Lines of different lengths, a table without rows, and a first line of numbers are refused.
        """
        frames = list(self._frames(None))
        styles, notes = decide_styles(self._words(frames)[0], bool(self.comma_example), self.commas)
        return self._styled(frames[0], styles), self._notes + notes

    def read_parts(self, rows: int) -> tuple[Callable[[], Iterator[DataFrame]], list[str]]:
        """A function that reads the table in parts of `rows` rows, and notes about its numbers. See `read` for errors."""
        words, mixed = self._words(self._frames(rows))
        if mixed:  # if some parts hold texts, the whole column holds texts
            words |= self._words(self._frames(rows, mixed))[0]
        styles, notes = decide_styles(words, bool(self.comma_example), self.commas)
        chosen = [name for name in words if words[name].count]

        def parts() -> Iterator[DataFrame]:
            for frame in self._frames(rows, chosen):
                yield self._styled(frame, styles)

        return parts, self._notes + notes

    def _styled(self, frame: DataFrame, styles: Mapping[str, re.Pattern[str]]) -> DataFrame:
        """A part with texts such as `1.234,5` as numbers, and with separator and decimal mark in its `attrs[DIALECT]`."""
        frame = apply_styles(frame, styles, decimal_comma=bool(self.comma_example))
        frame.attrs[DIALECT] = (self.options["sep"], self.options["decimal"])
        return frame

    def _words(self, frames: Iterable[DataFrame]) -> tuple[dict[str, Words], list[str]]:
        """Counts of the texts in each text column, and the names of text columns that contain only numbers in some parts."""
        words: dict[str, Words] = {}
        numeric: set[str] = set()
        count, columns = 0, ()
        for frame in frames:
            count, columns = count + len(frame), frame.columns
            for name, kind in zip(frame.columns, frame.dtypes, strict=True):
                if name.strip() in self.texts:
                    continue
                if is_text(kind):
                    words.setdefault(name, Words()).add(frame[name])
                elif name not in numeric and frame[name].notna().any():
                    numeric.add(name)
        self._check(columns, count)
        return words, [name for name in words if name in numeric and words[name].count]

    @property
    def _notes(self) -> list[str]:
        found = self.comma_example
        note = f"Numbers were read with a decimal comma, such as {found!r}, which is {found.replace(',', '.')}."
        return [note] if found else []

    def _check(self, columns: Sequence[str], rows: int) -> None:
        if all(is_number(name) for name in self.names) and len(self.names) > 1:
            raise InputError(
                f"{self.text.where}: the first line holds numbers only ({', '.join(self.names[:3])}, ...); "
                "put the columns' names in the first line"
            )
        if not rows:
            raise InputError(f"{self.text.where}: the table has a header but no rows; add rows below the header")
        check_names(self.text.where, [name.strip() for name in columns])

    def _frames(self, rows: int | None, chosen: Sequence[str] = ()) -> Iterator[DataFrame]:
        """The table as pandas reads it, in parts of `rows` rows. Columns in `texts`, `commas` or `chosen` are read as texts."""
        from pandas.errors import EmptyDataError, ParserError, ParserWarning

        try:
            try:
                yield from self._pandas_frames(rows, chosen, "error")
            except ParserWarning:  # lines of different lengths are reported first, even in later parts
                for _ in self._pandas_frames(rows, chosen, "ignore"):
                    pass
                raise
        except (ParserError, EmptyDataError, ParserWarning) as error:
            raise InputError(f"{self.text.where}: {_words_of(error)}") from error

    def _pandas_frames(
        self, rows: int | None, chosen: Sequence[str], dropped_cells: Literal["error", "ignore"]
    ) -> Iterator[DataFrame]:
        import pandas

        kept = {*self.texts, *self.commas, *(name.strip() for name in chosen)}
        dtype = {name: str for name in self.names if name.strip() in kept}
        options = {**self.options, "dtype": dtype, "iterator": True, "chunksize": rows}
        if pandas.__version__ < "3":  # later versions read every number exactly as it was written
            options["float_precision"] = "round_trip"
        with self.text.open() as file, pandas.read_csv(file, **options) as reader:
            while True:
                with warnings.catch_warnings():
                    warnings.simplefilter(dropped_cells, pandas.errors.ParserWarning)
                    frame = next(reader, None)
                if frame is None:
                    return
                yield frame


def _words_of(error: Exception) -> str:
    """The problem with a table and its remedy, as text for a message."""
    quotes = "correct it, and put texts that contain a separator into quotes"
    if ragged := RAGGED_ROW_PATTERN.search(str(error)):
        return f"line {ragged[2]} has {ragged[3]} cells, but the lines before it have {ragged[1]}; {quotes}"
    if isinstance(error, Warning):
        return f"the first row has more cells than the header has names; {quotes}"
    return f"this is not a table: {first_line(error)}"


def _header(text: TextFile) -> tuple[list[str], str]:
    """The names in the first nonempty line, and the separator."""
    with text.open() as file:
        line = next((line for line in iter(lambda: file.readline(MAX_HEADER_CHARS), "") if line.strip(" \r\n")), "")
        if not line:
            raise InputError(f"{text.where}: the file is empty; give a table with a header and rows")
        separator = max(SEPARATORS, key=line.count)
        try:
            return next(csv.reader(chain([line], file), delimiter=separator, skipinitialspace=True), []), separator
        except csv.Error as error:
            raise InputError(f"{text.where}: this is not a table ({error} in its first line)") from error


def _decimal_comma(start: str) -> str:
    """The first number with a decimal comma, if there are more such numbers than numbers with a point."""
    cells = [cell.strip() for line in LINE_ENDS.split(start)[1:-1] for cell in line.split(";")]
    with_comma = [cell for cell in cells if "," in cell and is_number(cell.replace(",", ".", 1))]
    return with_comma[0] if len(with_comma) > sum(is_number(cell) and "." in cell for cell in cells) else ""
