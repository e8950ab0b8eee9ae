"""Inputs of an estimator: arrays of numbers, or data frames with columns of all kinds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bayesify.arguments.plain import Plain
from bayesify.sklearn.settings import FULL_BATCH_ROWS
from bayesify.tables.columns import Features, date_of, read_features, without_options
from bayesify.tables.errors import InputError
from bayesify.tables.preparation import Preparation
from bayesify.tables.written_numbers import shown

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Columns(Plain):
    """Rules that turn the rows of a data frame into numbers. The rules depend on the kinds, levels and medians of the training
    columns.

    Args:
        names: Columns of the training frame, in order.
        schema: Columns that are used, with their kinds and levels.
        preparation: Conversion of the used columns to numbers.
        notes: Sentences that say which columns and cells were left out, how dates were read, and which texts share an input.
    """

    names: tuple[str, ...]
    schema: Features
    preparation: Preparation
    notes: tuple[str, ...] = ()

    @classmethod
    def learn(
        cls,
        frame: DataFrame,
        owner: str,
        y: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        score: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> tuple[Self, np.ndarray]:
        """Learn the rules from training rows; return the rules and the rows' inputs, [N, D].

        Nothing is learned from rows of weight 0, and the returned inputs of these rows are 0. If the table is small enough
        for `merge_rows`, rows with the same cells and the same targets y [N, ...] count as one row. The function `score` maps
        targets and row weights to scores [N, K]. If `score` and y are given, a text column with many levels is also encoded
        by the mean score of each level.

        Raises:
            InputError: If two columns have the same name, if a column has mixed contents, or if no column is usable.
        """
        frame = _named(frame, owner).reset_index(drop=True)
        weights = np.ones(len(frame)) if weights is None else weights
        used = np.flatnonzero(weights > 0)
        first, place, rows = _distinct(frame.iloc[used], None if y is None or len(used) > FULL_BATCH_ROWS else y[used])
        try:
            features = read_features(frame.iloc[used[first]])
        except InputError as error:
            raise _told(error, owner) from None
        each = np.bincount(place, weights=weights[used])[rows]
        scores = None if score is None or y is None else score(y[used[first[rows]]], each)
        preparation = Preparation.of(features, rows, each, scores)
        notes = (*features.notes, *preparation.pooled(features, rows, each))
        made = cls(tuple(frame.columns), features.schema(), preparation, notes)
        found = preparation.training_inputs(features, rows, each, scores)
        inputs = np.zeros((len(frame), found.shape[1]))
        inputs[used] = found[np.argsort(rows)[place]]
        return made, inputs

    def __call__(self, frame: DataFrame, owner: str) -> np.ndarray:
        """Inputs of new rows, [N, D]. The training columns are found by their names, in any order; additional columns are ignored.

        Warns if cells are empty in columns that had no empty cells in training.

        Raises:
            InputError: If a column is missing or contains other kinds of cells than in training.
        """
        features = self.read(frame, owner)
        gaps = self.preparation.new_gaps(features)
        if gaps:
            names, count = ", ".join(map(repr, gaps)), sum(int(rows.sum()) for rows in gaps.values())
            warnings.warn(
                f"{owner}: {count} cells of {names} are empty, but none was empty in training; empty numbers and dates "
                "are replaced by medians, empty texts count as none of the known texts, and rows with empty cells count as "
                "`unusual`",
                stacklevel=4,
            )
        return self.preparation(features, np.arange(len(frame)))

    @property
    def used(self) -> tuple[str, ...]:
        """Columns of the frame that are used, in order."""
        known = self.schema.kinds
        return tuple(name for name in self.names if name in known)

    def read(self, frame: DataFrame, owner: str) -> Features:
        """Features of new rows, from which `__call__` makes inputs."""
        frame = _named(frame, owner)
        used = list(self.used)
        missing = [name for name in used if name not in frame.columns]
        if missing:
            raise InputError(f"{owner}: column {missing[0]!r} is missing; give all columns of the training rows")
        try:
            return read_features(frame[used].reset_index(drop=True), like=self.schema)
        except InputError as error:
            raise _told(error, owner) from None

    def unseen(self, features: Features) -> dict[str, np.ndarray]:
        """For each column, a mask [N] of the rows that are unusual because of their cell in this column; see
        `Preparation.unseen`."""
        odd = self.preparation.unseen(features)
        new = {name: features.codes[:, place] == -2 for place, name in enumerate(features.code_names)}
        found = {name: odd & rows for name, rows in (self.preparation.new_gaps(features) | new).items()}
        return {name: rows for name, rows in found.items() if rows.any()}

    def cut(self, features: Features) -> dict[str, np.ndarray]:
        """For each column, a mask [N] of the rows whose number is so far outside the training range that it is clipped; see
        `Preparation`."""
        found: dict[str, np.ndarray] = {}
        for name, values, low, high in zip(
            features.sources, features.numbers.T, self.preparation.low, self.preparation.high, strict=True
        ):
            found[name] = found.get(name, False) | (values < low) | (values > high)
        return found

    def cells_of(self, inputs: np.ndarray) -> dict[str, str]:
        """The cells of a row as texts, reconstructed from its inputs [E]. A text that the inputs do not determine is called "a
        rare text"."""
        owners, schema = np.array(self.preparation.owners(self.schema)), self.schema
        owners[list(self.preparation.alternatives[1])] = ""  # level means follow from the levels
        found = {}
        for place, name in enumerate(schema.code_names):
            codes = np.full((len(schema.levels[place]) + 1, len(schema.code_names)), -1)
            codes[:, place] = np.arange(-1, len(codes) - 1)
            numbers = np.broadcast_to(self.preparation.medians, (len(codes), len(self.preparation.medians)))
            made = self.preparation(replace(schema, numbers=numbers, codes=codes), np.arange(len(codes)))
            same = np.flatnonzero((made == inputs)[:, owners == name].all(1)) - 1
            found[name] = "empty" if -1 in same else schema.levels[place][same[0]] if len(same) == 1 else "a rare text"
        for place, (part, name) in enumerate(zip(schema.number_names, schema.sources, strict=True)):
            value = inputs[self.preparation.kept[:place].sum()] if self.preparation.kept[place] else np.nan
            if name not in found:
                found[name] = date_of(float(value)) if part != name and value == value else shown(value)
        return {name: found[name] for name in self.used}


def _distinct(frame: DataFrame, y: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three arrays: the indices of the distinct rows; for each row, the position of its distinct row among these indices; and a
    canonical order of the distinct rows.

    Of several rows with equal cells and equal targets, the first is the distinct row. If y is `None`, every row is distinct.

    The canonical order does not depend on the given order of the rows. Sums and folds therefore do not depend on the given order
    either.
    """
    if y is None:
        every = np.arange(len(frame))
        return every, every, every
    import pandas

    target = pandas.DataFrame(np.asarray(y).reshape(len(frame), -1), index=frame.index)
    marks = [pandas.util.hash_pandas_object(part, index=False) for part in (frame, target)]
    _, first, place = np.unique(np.column_stack(marks), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[place.reshape(-1)], rank


def is_pandas(X: Any) -> bool:
    """Whether X is a pandas frame."""
    import sys

    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


def is_frame(X: Any) -> bool:
    """Whether X is a pandas frame with cells other than finite numbers."""
    return is_pandas(X) and (X.columns.has_duplicates or _odd_column(X) is not None)


def refuse_cells(frame: DataFrame, owner: str) -> None:
    """Raise a `ValueError` that names a column with cells that are not finite numbers; in training, all cells were finite
    numbers.
    """
    name = _odd_column(_named(frame, owner))
    raise ValueError(
        f"{owner}: column {name!r} has cells that are not finite numbers (text, missing or infinite), but all cells were "
        "finite numbers in training; fix these cells, or train on a frame that has such cells"
    )


def _odd_column(frame: DataFrame) -> Any:
    from pandas.api import types

    for place, kind in enumerate(frame.dtypes):
        plain = types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) and not types.is_complex_dtype(kind)
        if not plain or not np.isfinite(frame.iloc[:, place].to_numpy(np.float64, na_value=np.nan)).all():
            return frame.columns[place]
    return None


def _told(error: InputError, owner: str) -> InputError:
    """The error, worded for an estimator instead of the command line."""
    told = InputError(f"{owner}: {without_options(str(error))}")
    told.for_command = str(error)
    return told


def _named(frame: DataFrame, owner: str) -> DataFrame:
    """The frame, with column names as texts; raises `InputError` if a name occurs twice."""
    names = [str(name) for name in frame.columns]
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise InputError(f"{owner}: {count} columns have the name {name!r}; rename all but one")
    named = frame.copy(deep=False)
    named.columns = names
    return named
