"""What an estimator takes for inputs: arrays of numbers, or data frames with columns of all kinds."""

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
    """How the rows of a data frame become numbers: kinds of columns, levels, medians, all from the training rows.

    Args:
        names: The frame's columns in training, in order.
        schema: Those that are used, with kinds and levels.
        preparation: From these to numbers.
        notes: What was left out and why, in sentences.
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
        """From training rows; and their inputs, [N, D], 0 for rows of weight 0, which nothing is learned from.

        Args:
            frame: The rows.
            owner: Name of the estimator, for messages.
            y: Their targets, [N, ...]: rows that have these in common too count as one where `merge_rows` merges them.
            weights: How many examples each row stands for, [N]; 1 by default.
            score: From targets and weights to scores [N, K] whose means texts of many levels enter by; without it they do not.

        Raises:
            InputError: If two columns have one name, a column has mixed contents, or none is of use.
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
        """Inputs of other rows, [N, D]; columns are found by name, in any order, and others do not matter.

        Warns of cells that are empty in columns that never were in training.

        Raises:
            InputError: If a column is missing, or holds another kind of cells than in training.
        """
        features = self.read(frame, owner)
        gaps = self.preparation.new_gaps(features)
        if gaps:
            names, count = ", ".join(map(repr, gaps)), sum(int(rows.sum()) for rows in gaps.values())
            warnings.warn(
                f"{owner}: {count} cells of {names} are empty, and none was in training: medians stand in for numbers and dates, "
                "no level for texts, and their rows are `unusual`",
                stacklevel=4,
            )
        return self.preparation(features, np.arange(len(frame)))

    @property
    def used(self) -> tuple[str, ...]:
        """The frame's columns that are used, in order."""
        known = self.schema.kinds
        return tuple(name for name in self.names if name in known)

    def read(self, frame: DataFrame, owner: str) -> Features:
        """Columns of other rows, before they become inputs; see `__call__`."""
        frame = _named(frame, owner)
        used = list(self.used)
        missing = [name for name in used if name not in frame.columns]
        if missing:
            raise InputError(f"{owner}: column {missing[0]!r} is missing; give the columns of the training rows")
        try:
            return read_features(frame[used].reset_index(drop=True), like=self.schema)
        except InputError as error:
            raise _told(error, owner) from None

    def unseen(self, features: Features) -> dict[str, np.ndarray]:
        """Rows of which a cell alone makes them unusual, [N], by column: see `Preparation.unseen`."""
        odd = self.preparation.unseen(features)
        new = {name: features.codes[:, place] == -2 for place, name in enumerate(features.code_names)}
        found = {name: odd & rows for name, rows in (self.preparation.new_gaps(features) | new).items()}
        return {name: rows for name, rows in found.items() if rows.any()}

    def cut(self, features: Features) -> dict[str, np.ndarray]:
        """Rows whose number lies so far outside the training rows that it is cut, [N], by column; see `Preparation`."""
        found: dict[str, np.ndarray] = {}
        for name, values, low, high in zip(
            features.sources, features.numbers.T, self.preparation.low, self.preparation.high, strict=True
        ):
            found[name] = found.get(name, False) | (values < low) | (values > high)
        return found

    def cells_of(self, inputs: np.ndarray) -> dict[str, str]:
        """What the columns of one row of inputs hold, as texts, as far as inputs tell: [E]."""
        owners, schema = np.array(self.preparation.owners(self.schema)), self.schema
        owners[list(self.preparation.alternatives[1])] = ""  # means of levels, which levels tell
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
    """The first of all rows that have cells and targets in common, in order, and which of these each row is; all without y.

    Then an order of these that does not depend on the given one, so that sums and folds are the same for rows in any order.
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
    """Whether X is a pandas frame that is more than an array of finite numbers with names."""
    return is_pandas(X) and (X.columns.has_duplicates or _odd_column(X) is not None)


def refuse_cells(frame: DataFrame, owner: str) -> None:
    """Raise `ValueError` with the name of a column that does not hold finite numbers, where training was on these alone."""
    name = _odd_column(_named(frame, owner))
    raise ValueError(
        f"{owner}: column {name!r} holds cells that are no finite numbers (text, missing or infinite), and training saw "
        "numbers alone; correct them, or train on a frame with such cells"
    )


def _odd_column(frame: DataFrame) -> Any:
    from pandas.api import types

    for place, kind in enumerate(frame.dtypes):
        plain = types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) and not types.is_complex_dtype(kind)
        if not plain or not np.isfinite(frame.iloc[:, place].to_numpy(np.float64, na_value=np.nan)).all():
            return frame.columns[place]
    return None


def _told(error: InputError, owner: str) -> InputError:
    """The error of an estimator, which has no command line."""
    told = InputError(f"{owner}: {without_options(str(error))}")
    told.for_command = str(error)
    return told


def _named(frame: DataFrame, owner: str) -> DataFrame:
    """The frame with text for names, each of them once."""
    names = [str(name) for name in frame.columns]
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise InputError(f"{owner}: {count} columns are called {name!r}; rename all but one")
    named = frame.copy(deep=False)
    named.columns = names
    return named
