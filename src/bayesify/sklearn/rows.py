"""Weighted rows of training data, which can be merged, thinned and cut into batches."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesify.training.batches import StackedBatch

MAX_MEAN_WEIGHT = 10.0
"""Weights whose mean is larger are probably not meant as numbers of copies."""


def warn_of_copies(weights: np.ndarray, owner: str) -> None:
    """Warn if the weights say that the average row stands for many examples."""
    if weights.sum() > MAX_MEAN_WEIGHT * len(weights):
        warnings.warn(
            f"{owner}: according to sample_weight=, {len(weights):,} rows stand for {weights.sum():,.0f} examples, "
            "and the model will be as certain as if it had seen that many examples; if the weights are degrees of "
            "importance and not numbers of examples, divide them by their mean",
            stacklevel=5,
        )


@dataclass(frozen=True)
class Rows:
    """Training data of an estimator.

    Args:
        x: Inputs, [N, D].
        y: Targets: numbers, [N, O], or indices of classes, [N].
        weights: Number of examples that each row stands for, [N].
    """

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_data(self) -> float:
        """Number of examples that all rows stand for."""
        return float(self.weights.sum())

    def __getitem__(self, index: np.ndarray) -> Rows:
        return Rows(self.x[index], self.y[index], self.weights[index])

    def merged(self) -> Rows:
        """The distinct rows. The weights of equal rows are added, and the result does not depend on the order of the rows.

        A repeated example and a weighted example thus give bitwise equal results.
        """
        first, place = self.distinct()
        weights = np.bincount(place, weights=self.weights, minlength=len(first))
        return Rows(self.x[first], self.y[first], weights)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the distinct rows, in the order of `merged`, and for each row the position of its distinct row in this
        order, [N]."""
        both = np.column_stack((self.x, self.y))
        _, first, place = np.unique(both, axis=0, return_index=True, return_inverse=True)
        return first, place.reshape(-1)

    def folds(self, count: int, seed: int) -> np.ndarray:
        """Fold of each row, [N], among `count` folds. The fold of a row depends only on the row's values, the number of earlier
        copies of the row, and the seed, so that it stays the same if other rows are added. Copies go to the folds in turn."""
        salt, values = seed.to_bytes(8, "big"), np.column_stack((self.x, self.y)) + 0.0  # makes 0.0 of -0.0
        copies, found = Counter[int](), []
        for row in values:
            digest = int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8, salt=salt).digest(), "big")
            found.append((digest + copies[digest]) % count)
            copies[digest] += 1
        return np.array(found, dtype=np.int64)

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> Rows:
        """Concatenate several `Rows`."""
        return cls(*(np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "y", "weights")))

    def thinned(self, size: int, seed: int) -> Rows:
        """At most `size` rows, which represent all rows. The rows are drawn at random; rows with larger weights are more likely
        to be drawn."""
        if len(self) <= size:
            return self
        # The rows with the largest log(u) / weight are a weighted sample without replacement (Efraimidis & Spirakis 2006). The
        # weight already determined a row's chance to be drawn, so all drawn rows get the same weight.
        keys = np.log(np.random.default_rng(seed).random(len(self))) / self.weights
        kept = self[np.sort(np.argpartition(-keys, size)[:size])]
        return Rows(kept.x, kept.y, np.full(size, self.num_data / size))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights."""
        return torch.from_numpy(self.x), torch.from_numpy(self.y), torch.from_numpy(self.weights)


class Batches:
    """Batches of inputs, targets and weights. Each epoch has a new order, drawn with torch's global generator.

    Args:
        rows: Rows to cut into batches.
        size: Number of rows per batch. If all rows fit into one batch, they keep their order in every epoch.
    """

    def __init__(self, rows: Rows, size: int) -> None:
        self._tensors, self._size, self._rows = rows.tensors(), size, len(rows)

    def __len__(self) -> int:
        return -(-self._rows // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if len(self) == 1:
            yield self._tensors
            return
        for index in torch.randperm(self._rows).split(self._size):
            yield tuple(tensor[index] for tensor in self._tensors)


def stacked(rows: Sequence[Rows]) -> StackedBatch:
    """One batch for each of R models, stacked to [R, B, ...]; shorter batches are padded with rows of weight 0."""
    most = max(len(part) for part in rows)

    def pad(values: np.ndarray) -> np.ndarray:
        behind = np.repeat(values[:1], most - len(values), axis=0)
        return np.concatenate((values, behind)) if len(behind) else values

    x, y = (torch.from_numpy(np.stack([pad(getattr(part, key)) for part in rows])) for key in ("x", "y"))
    weights = np.stack([np.pad(part.weights, (0, most - len(part))) for part in rows])
    return StackedBatch(x, y, torch.from_numpy(weights))
