"""From columns to a network's inputs, with statistics of the training rows alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bayesify.arguments.plain import Plain
from bayesify.tables.columns import Features

MAX_LEVELS = 20
"""Levels of one category that get an input of their own."""
MIN_LEVEL_ROWS = 3
"""Training rows, by their weights, that a level needs for that; rarer ones share an input."""
MAX_RANGES_OUTSIDE = 3.0
"""Ranges of the training rows by which a number may lie outside them before it is cut: a typing error in one cell of a test row
else decides a whole score."""


@dataclass(frozen=True)
class Preparation(Plain):
    """How rows become inputs: medians for missing numbers beside a mark, one input per frequent level.

    A level that is rare, or was not in the training rows, is the input "other"; a missing category has none of its inputs set.
    Numbers are cut at `MAX_RANGES_OUTSIDE` times the training rows' range beyond it. Inputs that are constant over the training
    rows are left out. Scaling is the estimators' own.

    Args:
        medians: What a missing number becomes, [D].
        low: Lower limit of each number, [D].
        high: Upper limit of each number, [D].
        marked: Positions of numbers that get a mark where they are missing.
        full: Positions of categories that no training row lacks.
        levels: For each category the codes with an input of their own.
        kept: Which inputs vary over the training rows.
    """

    medians: np.ndarray
    low: np.ndarray
    high: np.ndarray
    marked: tuple[int, ...]
    full: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    kept: np.ndarray

    @classmethod
    def of(cls, features: Features, rows: np.ndarray, weights: np.ndarray | None = None) -> Preparation:
        """From the training rows.

        Args:
            features: Features of the whole table.
            rows: Numbers of the training rows.
            weights: How many examples each of these stands for, positive, [N]; 1 by default.
        """
        weights = np.ones(len(rows)) if weights is None else weights
        numbers, codes = features.numbers[rows], features.codes[rows]
        medians = np.zeros(numbers.shape[1])
        largest = np.finfo(np.float64).max
        low, high = np.full(numbers.shape[1], -largest), np.full(numbers.shape[1], largest)
        for index in range(numbers.shape[1]):
            present = ~np.isnan(numbers[:, index])
            known = numbers[present, index]
            if len(known):
                medians[index] = weighted_median(known, weights[present])
                width = known.max() - known.min()
                low[index], high[index] = (
                    known.min() - MAX_RANGES_OUTSIDE * width,
                    known.max() + MAX_RANGES_OUTSIDE * width,
                )
        marked, full = np.flatnonzero(np.isnan(numbers).any(0)), np.flatnonzero((codes != -1).all(0))
        levels = tuple(_frequent(codes[:, index], weights) for index in range(codes.shape[1]))
        draft = cls(medians, low, high, tuple(marked.tolist()), tuple(full.tolist()), levels, np.ones(0, bool))
        inputs = draft._all(features, rows)
        return replace(draft, kept=(inputs != inputs[:1]).any(0))

    def __call__(self, features: Features, rows: np.ndarray) -> np.ndarray:
        """Inputs of rows: [N, inputs]; a single zero where none varies.

        Args:
            features: Features of the table that was learned from, or of another with the same columns.
            rows: Row numbers.
        """
        inputs = self._all(features, rows)[:, self.kept]
        return inputs if inputs.shape[1] else np.zeros((len(rows), 1))

    def owners(self, features: Features) -> tuple[str, ...]:
        """The table's column that each input is made of, in the order of the inputs."""
        names = [*features.sources, *(features.sources[index] for index in self.marked)]
        for name, own in zip(features.code_names, self.levels, strict=True):
            names += [name] * (len(own) + 1)
        return tuple(name for name, kept in zip(names, self.kept, strict=True) if kept) or (names[0],)

    def new_gaps(self, features: Features) -> dict[str, np.ndarray]:
        """Rows whose cell is empty, [N], by the names of columns that have such cells and had none in training."""
        empty = {features.code_names[index]: features.codes[:, index] == -1 for index in self.full}
        for index, name in enumerate(features.sources):
            if index not in self.marked:
                empty[name] = np.isnan(features.numbers[:, index]) | empty.get(name, False)
        return {name: rows for name, rows in empty.items() if rows.any()}

    def unseen(self, features: Features) -> np.ndarray:
        """Rows with a text that a column never had in training, nor a rare one that stands for it, or a gap where none was: [N]."""
        found: np.ndarray = np.any([np.zeros(len(features), bool), *self.new_gaps(features).values()], axis=0)
        place = len(self.medians) + len(self.marked)
        for index, own in enumerate(self.levels):
            place += len(own) + 1
            if not self.kept[place - 1]:
                found |= features.codes[:, index] == -2
        return found

    def _all(self, features: Features, rows: np.ndarray) -> np.ndarray:
        numbers, codes = features.numbers[rows], features.codes[rows]
        missing = np.isnan(numbers)
        filled = np.clip(np.where(missing, self.medians, numbers), self.low, self.high)
        columns = [filled, *(missing[:, [index]].astype(np.float64) for index in self.marked)]
        for index, own in enumerate(self.levels):
            column = codes[:, index]
            columns += [(column == level)[:, None].astype(np.float64) for level in own]
            columns.append(((column != -1) & ~np.isin(column, own))[:, None].astype(np.float64))
        return np.column_stack(columns)


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The median of values [N] that stand for several examples each, as if each were there so many times."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    half = 0.5 * total[-1]
    low, high = np.searchsorted(total, (half * (1 - 1e-12), half * (1 + 1e-12)))
    return float(0.5 * (values[order[low]] + values[order[high]]))


def _frequent(codes: np.ndarray, weights: np.ndarray) -> tuple[int, ...]:
    known = codes >= 0
    levels, place = np.unique(codes[known], return_inverse=True)
    counts = np.bincount(place.reshape(-1), weights=weights[known], minlength=len(levels))
    order = np.lexsort((levels, -counts))
    return tuple(sorted(int(levels[index]) for index in order[:MAX_LEVELS] if counts[index] >= MIN_LEVEL_ROWS))
