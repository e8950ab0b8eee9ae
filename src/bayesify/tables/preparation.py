"""Conversion of columns to a network's inputs, with statistics of the training rows only."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from bayesify.arguments.plain import Plain
from bayesify.tables.columns import Features
from bayesify.tables.level_means import cross_fitted, level_means

MAX_FEW_LEVELS, MAX_LEVELS, MAX_LEVEL_CELLS = 20, 500, 2**24
"""Limits on how many levels of a category get their own input: at most `MAX_LEVELS`, and fewer if these inputs would have more
than `MAX_LEVEL_CELLS` numbers over all rows and categories, but always up to `MAX_FEW_LEVELS`. A category with more than
`MAX_FEW_LEVELS` levels is also encoded by the means of its levels."""
MIN_LEVEL_ROWS = 3
"""Minimum number of training rows, by their weights, of a level with its own input; rarer levels share an input."""
MAX_RANGES_OUTSIDE = 3.0
"""A number is clipped if it lies outside the training range by more than this multiple of the range. Otherwise a typing error in
one test cell could dominate the score."""


@dataclass(frozen=True)
class Preparation(Plain):
    """Rules that turn rows into inputs: medians and marks for missing numbers, one input per frequent level, and level means.

    For a level that is rare or did not occur in the training rows, the input "other" is 1; for an empty cell, "other" and the
    inputs of all levels are 0. A category with more than `MAX_FEW_LEVELS` levels also has inputs with the mean target of the
    row's level (see `level_means`). The inputs with level means are 0 for a level that did not occur in the training rows.
    A number is clipped if it lies outside the training range by more than `MAX_RANGES_OUTSIDE` times the width of this range.
    Inputs that are constant over the training rows are left out. The estimators scale the inputs; this class does not.

    Args:
        medians: Values that replace missing numbers, [D].
        low: Lower limit of each number, [D].
        high: Upper limit of each number, [D].
        marked: Indices of number columns that have a further input, which marks missing cells.
        full: Indices of the categorical columns that have no empty cells in the training rows.
        levels: For each categorical column, the codes of the levels that have their own network input.
        kept: Whether each input varies over the training rows.
        means: For each category, the mean scores of its levels and of empty cells, [levels + 1, K]; empty for few levels.
    """

    medians: np.ndarray
    low: np.ndarray
    high: np.ndarray
    marked: tuple[int, ...]
    full: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    kept: np.ndarray
    means: tuple[np.ndarray, ...] = ()

    @classmethod
    def of(
        cls, features: Features, rows: np.ndarray, weights: np.ndarray | None = None, scores: np.ndarray | None = None
    ) -> Self:
        """Learn the rules from the training rows.

        Args:
            features: Features of the whole table.
            rows: Indices of the training rows.
            weights: Number of examples that each training row stands for, [N]; positive, and 1 by default.
            scores: Scores of the training rows' targets, [N, K], with mean 0; if `None`, no category is encoded by mean scores.
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
                reach = MAX_RANGES_OUTSIDE * (known.max() - known.min())
                low[index], high[index] = known.min() - reach, known.max() + reach
        marked, full = np.flatnonzero(np.isnan(numbers).any(0)), np.flatnonzero((codes != -1).all(0))
        wide = [len(np.unique(column[column >= 0])) > MAX_FEW_LEVELS for column in codes.T]
        most = max(MAX_FEW_LEVELS, min(MAX_LEVELS, MAX_LEVEL_CELLS // (max(1, sum(wide)) * len(rows))))
        levels = tuple(_frequent(column, weights, most) for column in codes.T)
        means = tuple(
            level_means(column, scores, weights, len(features.levels[index]))
            if wide[index] and scores is not None
            else np.empty(0)
            for index, column in enumerate(codes.T)
        )
        draft = cls(medians, low, high, tuple(marked.tolist()), tuple(full.tolist()), levels, np.ones(0, bool), means)
        inputs = draft._all(features, rows)
        return replace(draft, kept=(inputs != inputs[:1]).any(0))

    def __call__(self, features: Features, rows: np.ndarray) -> np.ndarray:
        """Inputs of rows: [N, inputs]; a single zero if no input varies.

        Args:
            features: Features of the training table, or of another table with the same columns.
            rows: Indices of rows.
        """
        return self._varying(self._all(features, rows))

    def training_inputs(
        self, features: Features, rows: np.ndarray, weights: np.ndarray, scores: np.ndarray | None
    ) -> np.ndarray:
        """Inputs of the training rows; the level means of a row do not include its own target."""
        inputs = self._all(features, rows)
        place = len(self.kept) - sum(known.shape[1] for known in self.means if len(known))
        for index, known in enumerate(self.means):
            if len(known) and scores is not None:
                made = cross_fitted(features.codes[rows, index], scores, weights, len(known) - 1)
                inputs[:, place : place + made.shape[1]] = made
                place += made.shape[1]
        return self._varying(inputs)

    def _varying(self, inputs: np.ndarray) -> np.ndarray:
        return inputs[:, self.kept] if self.kept.any() else np.zeros((len(inputs), 1))

    @property
    def marks(self) -> tuple[int, ...]:
        """Indices of the inputs that mark missing numbers."""
        place = int(self.kept[: len(self.medians)].sum())
        return tuple(range(place, place + int(self.kept[len(self.medians) :][: len(self.marked)].sum())))

    @property
    def text_marks(self) -> tuple[tuple[int, ...], ...]:
        """For each text column with empty cells in the training rows, the indices of the inputs that are all 0 if empty."""
        places, start, found = np.cumsum(self.kept) - 1, len(self.medians) + len(self.marked), list[tuple[int, ...]]()
        for index, own in enumerate(self.levels):
            inputs = np.arange(start, start + len(own) + 1)
            start += len(own) + 1
            if index not in self.full and self.kept[inputs].any():
                found.append(tuple(places[inputs[self.kept[inputs]]].tolist()))
        return tuple(found)

    @property
    def alternatives(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two alternative sets of inputs for categories with many levels: the inputs for single levels, and the level means."""
        of_levels, of_means = np.zeros((2, len(self.kept)), dtype=bool)
        place = len(self.medians) + len(self.marked)
        for index, own in enumerate(self.levels):
            of_levels[place : place + len(own) + 1] = bool(self.means) and len(self.means[index]) > 0
            place += len(own) + 1
        of_means[place:] = True
        levels, means = (np.flatnonzero(part[self.kept]).tolist() for part in (of_levels, of_means))
        return tuple(levels), tuple(means)

    def pooled(self, features: Features, rows: np.ndarray, weights: np.ndarray) -> tuple[str, ...]:
        """Sentences that say how many rare texts of a column share one input."""
        notes = []
        for index, own in enumerate(self.levels):
            codes = features.codes[rows, index]
            known = codes[codes >= 0]
            others, count = np.setdiff1d(known, own), len(np.unique(known))
            if len(others) > 1:
                held = weights[np.isin(codes, others)].sum()
                notes.append(
                    f"Column {features.code_names[index]!r}: {len(others):,} of its {count:,} different texts are rare and "
                    f"share one input ({held:,.0f} of {weights.sum():,.0f} rows)."
                )
        return tuple(notes)

    def owners(self, features: Features) -> tuple[str, ...]:
        """The table's column from which each input is made, in the order of the inputs."""
        names = [*features.sources, *(features.sources[index] for index in self.marked)]
        for name, own in zip(features.code_names, self.levels, strict=True):
            names += [name] * (len(own) + 1)
        for name, known in zip(features.code_names, self.means, strict=False):
            names += [name] * (known.shape[1] if len(known) else 0)
        return tuple(name for name, kept in zip(names, self.kept, strict=True) if kept) or (names[0],)

    def new_gaps(self, features: Features) -> dict[str, np.ndarray]:
        """For each column that has empty cells but had none in training, a mask [N] of the rows in which its cell is empty."""
        empty = {features.code_names[index]: features.codes[:, index] == -1 for index in self.full}
        for index, name in enumerate(features.sources):
            if index not in self.marked:
                empty[name] = np.isnan(features.numbers[:, index]) | empty.get(name, False)
        return {name: rows for name, rows in empty.items() if rows.any()}

    def unseen(self, features: Features) -> np.ndarray:
        """Mask [N] of the rows with a text that did not occur in training, or an empty cell in a column without any in training."""
        return np.asarray(np.any([(features.codes == -2).any(1), *self.new_gaps(features).values()], axis=0))

    def _all(self, features: Features, rows: np.ndarray) -> np.ndarray:
        numbers, codes = features.numbers[rows], features.codes[rows]
        missing = np.isnan(numbers)
        filled = np.clip(np.where(missing, self.medians, numbers), self.low, self.high)
        columns = [filled, *(missing[:, [index]].astype(np.float64) for index in self.marked)]
        for index, own in enumerate(self.levels):
            column = codes[:, index]
            columns.append((column[:, None] == np.array(own, dtype=np.int64)).astype(np.float64))
            columns.append(((column != -1) & ~np.isin(column, own))[:, None].astype(np.float64))
        for index, known in enumerate(self.means):
            if len(known):
                columns.append(np.where(codes[:, [index]] == -2, 0.0, known[codes[:, index]]))
        return np.column_stack(columns)


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The weighted median of values [N]."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    half = 0.5 * total[-1]
    low, high = np.searchsorted(total, (half * (1 - 1e-12), half * (1 + 1e-12)))
    return float(0.5 * (values[order[low]] + values[order[high]]))


def _frequent(codes: np.ndarray, weights: np.ndarray, most: int) -> tuple[int, ...]:
    known = codes >= 0
    levels, place = np.unique(codes[known], return_inverse=True)
    counts = np.bincount(place.reshape(-1), weights=weights[known], minlength=len(levels))
    order = np.lexsort((levels, -counts))
    return tuple(sorted(int(levels[index]) for index in order[:most] if counts[index] >= MIN_LEVEL_ROWS))
