"""Rows with empty cells: how much wider the distributions of these rows must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bayesify.arguments.plain import Plain
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.recalibration import PRIOR_ROWS, stretch_factor

MIN_EMPTY_ROWS = 20
"""Minimum number of training rows with an empty cell in a column, by their weights, for a factor of these rows."""


Mark = int | tuple[int, ...]
"""How inputs show an empty cell: the index of an input that is then positive, or indices of inputs that are then all 0."""


def is_empty(inputs: np.ndarray, mark: Mark) -> np.ndarray:
    """Whether the cell is empty in each row of inputs [N, D]: [N]."""
    return inputs[:, mark] > 0 if isinstance(mark, int) else np.asarray((inputs[:, list(mark)] == 0).all(1))


def marks_of(columns: Columns | None) -> list[Mark]:
    """The marks of all columns that have empty cells in the training rows."""
    return [] if columns is None else [*columns.preparation.marks, *columns.preparation.text_marks]


@dataclass(frozen=True)
class EmptyCells(Plain):
    r"""Wider distributions for rows with an empty cell.

    The distribution of a row with an empty cell must also cover the different effects that the unknown value could have. If few
    rows have an empty cell, a network does not learn this additional spread, because early stopping ends training first. So each
    column has a factor s, which divides the normal scores of rows with an empty cell in this column. To find s, first compute the
    factor that widens the out-of-fold 90 % intervals of rows with an empty cell until they contain 90 % of the targets. The
    factor s is this widening factor, shrunk toward 1. The fewer empty cells the column has, the more the factor is shrunk. A row
    with several empty cells uses the largest factor of these cells' columns. A text that did not occur in training counts as
    empty if no input is 1 for it.

    Args:
        places: Indices of the inputs that mark empty cells of number columns with a factor above 1.
        factors: Factor s of each input in `places`, then of each text column in `texts`.
        texts: For each text column with a factor above 1, the indices of its inputs, which are all 0 if the cell is empty.
    """

    places: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    texts: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, marks: Sequence[Mark], inputs: np.ndarray, u: np.ndarray, weights: np.ndarray) -> Self:
        r"""Compute the factors from the columns' marks of empty cells, and from three arrays for the training rows: inputs
        [N, D], recalibrated out-of-fold probabilities $P(Y \le y)$ [N] and weights [N]. Each column must have an empty cell in at
        least one row."""
        places, texts = dict[int, float](), dict[tuple[int, ...], float]()
        for mark in marks:
            empty = is_empty(inputs, mark)
            num_rows = float(weights[empty].sum())
            excess = stretch_factor(u[empty], weights[empty]) - 1
            factor = 1 + excess * num_rows / (num_rows + PRIOR_ROWS)
            if factor > 1 and isinstance(mark, tuple):
                texts[mark] = factor
            elif factor > 1 and isinstance(mark, int):
                places[mark] = factor
        return cls(tuple(places), (*places.values(), *texts.values()), tuple(texts))

    def __call__(self, inputs: np.ndarray) -> Tensor | None:
        """Factor of each row, [N, 1], given the rows' inputs [N, D]; `None` if all factors are 1."""
        if not self.factors:
            return None
        marks: list[Mark] = [*self.places, *self.texts]
        empty = np.column_stack([is_empty(inputs, mark) for mark in marks])
        return torch.from_numpy(np.where(empty, self.factors, 1.0).max(1, keepdims=True)) if empty.any() else None

    def note(self, columns: Columns | None) -> str:
        """A sentence about wider intervals; empty if no intervals are wider."""
        if columns is None or not self.factors:
            return ""
        names = columns.preparation.owners(columns.schema)
        widest = dict[str, float]()  # a column with dates has several inputs, and a row's factor is the largest
        for place, factor in zip((*self.places, *(own[0] for own in self.texts)), self.factors, strict=True):
            widest[names[place]] = max(factor, widest.get(names[place], 1.0))
        found = [f"{factor:.2f} times for {name!r}" for name, factor in widest.items()]
        return (
            "Intervals are wider for rows with an empty cell, because out-of-fold predictions of such rows had larger errors: "
            f"{', '.join(found)}."
        )
