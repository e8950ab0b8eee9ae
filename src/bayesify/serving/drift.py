"""Distances between the columns of new rows and the columns of the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from bayesify.serving.about import MAX_TEXT_CHARACTERS, About, Column
from bayesify.tables.columns import date_of, times_of
from bayesify.tables.written_numbers import shown

if TYPE_CHECKING:
    from pandas import DataFrame

MIN_DISTANCE = 0.1
"""Minimum distance that is reported. A reported distance must also be larger than chance can explain for the number of rows."""
MAX_REPORTED_COLUMNS = 10


class Drift:
    r"""Distances between the columns of the training rows and the columns of new rows. New rows are added part by part.

    For numbers and dates, the distance is $\max_t |F(t) - G(t)|$ (Kolmogorov 1933), where F(t) is the share of cells that are at
    most t in the training rows, and G(t) is this share in the new rows. The maximum is taken over quantiles t of the training
    rows. For texts, the distance is half the sum of the absolute differences between the shares of each text. For empty cells,
    the distance is the difference between the shares of empty cells. A column is reported if its distance exceeds two limits. The
    first limit is `MIN_DISTANCE`. The second limit is the distance that two samples of one distribution exceed by chance in about
    1 of 100 cases. `day_first` names the date columns in which the day comes before the month.
    """

    def __init__(self, about: About, day_first: Collection[str]) -> None:
        self._columns, self._trained, self._day_first = about.columns, about.num_rows, day_first
        self._num_rows = 0
        self._counts = {column.name: np.zeros(len(column.shares)) for column in about.columns}
        self._present: Counter[str] = Counter()

    def add(self, frame: DataFrame) -> None:
        """Count the cells of one more part."""
        self._num_rows += len(frame)
        for column in self._columns:
            cells = frame[column.name].dropna()
            self._present[column.name] += len(cells)
            if not len(cells) or not column.shares:
                continue
            if column.kind == "text":
                counts = Counter(cells.astype(str).str.slice(stop=MAX_TEXT_CHARACTERS))
                self._counts[column.name] += [counts[text] for text in column.texts]
            else:
                values = np.sort(times_of(cells, column.name in self._day_first))
                self._counts[column.name] += np.searchsorted(values, column.knots, side="right")

    def moved(self) -> tuple[str, ...]:
        """One sentence for each column that differs from the training rows; the largest distance comes first."""
        found = [
            (distance, f"Column {column.name!r} differs from training by {distance:.2f}: {words}.")
            for column in self._columns
            for distance, words in (*self._shares(column), *self._gaps(column))
        ]
        return tuple(words for _, words in sorted(found, reverse=True)[:MAX_REPORTED_COLUMNS])

    def _shares(self, column: Column) -> list[tuple[float, str]]:
        """The distance between a column's nonempty cells in new and in training rows, with words; empty if it is small."""
        before, count = self._trained - column.num_missing, self._present[column.name]
        if not column.shares or not count or not before:
            return []
        shares, own = np.array(column.shares), self._counts[column.name] / count
        chance = 1 / before + 1 / count
        if column.kind == "text":
            distance = 0.5 * (np.abs(own - shares).sum() + abs(own.sum() - shares.sum()))
            limit = np.sqrt((len(own) + 1) * chance / 2) + np.sqrt(chance)
        else:
            distance, limit = np.abs(own - shares).max(), 1.63 * np.sqrt(chance)
        if distance < max(MIN_DISTANCE, limit):
            return []
        at = int(np.abs(own - shares).argmax())
        if column.kind == "text":
            return [(distance, _compared(own[at], repr(column.texts[at]), shares[at]))]
        value = date_of(column.knots[at]) if column.kind == "date" else shown(column.knots[at])
        if own[at] > shares[at]:
            return [(distance, _compared(own[at], f"at most {value}", shares[at]))]
        return [(distance, _compared(1 - own[at], f"above {value}", 1 - shares[at]))]

    def _gaps(self, column: Column) -> list[tuple[float, str]]:
        """The difference between the shares of empty cells in new and in training rows, with words; empty if it is small."""
        if not self._num_rows:
            return []
        own, before = 1 - self._present[column.name] / self._num_rows, column.num_missing / self._trained
        if abs(own - before) < max(MIN_DISTANCE, 1.3 * np.sqrt(1 / self._trained + 1 / self._num_rows)):
            return []
        return [(abs(own - before), _compared(own, "empty", before))]


def _compared(share: float, what: str, trained: float) -> str:
    return f"{100 * share:.0f} % of its cells are {what}, compared with {100 * trained:.0f} % in training"
