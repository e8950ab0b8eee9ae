"""Rows after the training period: which input is the time, and how much wider the intervals of these rows must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bayesify.arguments.plain import Plain
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.recalibration import stretch_factor
from bayesify.tables.columns import DAYS, date_of
from bayesify.tables.written_numbers import shown

LATEST_SHARE, MIN_LATEST_ROWS, MIN_EARLIER_SHARE = 0.2, 30, 0.5
"""Share of the training rows (the latest ones) that are predicted from earlier rows, minimum number of these latest rows, and
minimum share of earlier rows. The latest rows can be more than this share if many rows have the same time."""
MIN_TIMES = 10
"""A column of numbers can count as the time only if it has at least this many different values."""


@dataclass(frozen=True)
class LaterRows(Plain):
    r"""Wider distributions for rows that are later than all training rows.

    Out-of-fold predictions of random rows do not show how the target changes after the training period. So the latest training rows
    are predicted from earlier rows. If the 90 % intervals of the latest training rows contain too few targets, the normal scores
    of rows after the training period are divided by a factor s. The factor s widens the intervals of the latest training rows
    just enough to contain 90 % of the targets; see `stretch_factor`.

    Args:
        place: Index of the input that is the time.
        limit: Latest time of the training rows.
        stretch: The factor s.
    """

    place: int
    limit: float
    stretch: float

    @classmethod
    def of(cls, place: int, times: np.ndarray, u: np.ndarray, weights: np.ndarray) -> Self:
        """Make the object from the times [N] of all training rows, and from the stated probabilities u = P(Y <= y) [M] and
        weights [M] of the latest rows."""
        return cls(place, float(times.max()), stretch_factor(u, weights))

    def __call__(self, inputs: np.ndarray) -> Tensor | None:
        """Factor of each row, [N, 1], given the rows' inputs [N, D]; `None` if all factors are 1."""
        later = inputs[:, self.place] > self.limit
        return (
            torch.from_numpy(np.where(later, self.stretch, 1.0))[:, None] if self.stretch > 1 and later.any() else None
        )

    def note(self, columns: Columns | None) -> str:
        """A sentence about wider intervals; empty if the intervals are not wider."""
        if self.stretch == 1.0:
            return ""
        name, limit = f"input {self.place}, counted from 0", shown(self.limit)
        if columns is not None:
            name = columns.preparation.owners(columns.schema)[self.place]
            limit = date_of(self.limit) if columns.schema.kinds[name] == "date" else limit
            name = f"column {name!r}"
        return (
            f"Intervals are {self.stretch:.2f} times as wide for rows after {limit} ({name}), because predictions of the "
            "latest training rows from earlier rows had larger errors than predictions of random rows."
        )


def find_time(inputs: np.ndarray, columns: Columns | None, ordered: bool = True) -> int | None:
    """Index of the input that is the time: the first date, or the first column of numbers that never decreases from one
    row to the next.

    A column of numbers that is the only input does not count as the time, because the inputs of a function of one variable are
    often sorted.

    Args:
        inputs: Inputs of the training rows, [N, D], in the order in which they were given.
        columns: Rules that turned a data frame into these inputs; `None` if there was no data frame.
        ordered: Whether the rows have their original order; if not, only a date counts as the time.
    """
    numbers = range(inputs.shape[1])
    if columns is not None:
        kept, names = columns.preparation.kept, columns.schema.number_names
        numbers = range(int(kept[: len(names)].sum()))
        for place, name in enumerate(names):
            if name.endswith(DAYS) and kept[place]:
                return int(kept[:place].sum())
    if ordered and inputs.shape[1] > 1:
        for place in numbers:
            rises = np.diff(inputs[:, place])
            if (rises >= 0).all() and (rises > 0).sum() >= MIN_TIMES - 1:
                return place
    return None


def latest_rows(times: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
    """Given the times [N] and weights [N] of all training rows, a mask [N] of the latest rows; `None` if there are too few rows
    or times."""
    order = np.argsort(times, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    latest: np.ndarray = times >= times[order][np.searchsorted(share, (1 - LATEST_SHARE) * (1 + 1e-12))]
    enough = latest.sum() >= MIN_LATEST_ROWS and weights[~latest].sum() >= MIN_EARLIER_SHARE * weights.sum()
    return latest if enough else None
