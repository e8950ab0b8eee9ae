"""Rows of training data with weights: scaled, merged, cut into batches, and kept for later."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesify.training.batches import StackedBatch

MAX_MEAN_WEIGHT = 10.0
"""Examples for each row on average above which weights are probably not meant as copies."""


def warn_of_copies(weights: np.ndarray, owner: str) -> None:
    """Warn where weights make rows stand for many times as many examples."""
    if weights.sum() > MAX_MEAN_WEIGHT * len(weights):
        warnings.warn(
            f"{owner}: by sample_weight {len(weights):,} rows stand for {weights.sum():,.0f} examples, and the model is as sure as "
            "these would make it; divide by the mean where weights say how much rows matter, not how many examples they are",
            stacklevel=5,
        )


@dataclass(frozen=True)
class Rows:
    """Training data of an estimator.

    Args:
        x: Inputs, [N, D].
        y: Targets, [N, O] numbers, or [N] positions of classes.
        weights: How many examples each row stands for, [N].
    """

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_data(self) -> float:
        """The examples that all rows stand for."""
        return float(self.weights.sum())

    def __getitem__(self, index: np.ndarray) -> Rows:
        return Rows(self.x[index], self.y[index], self.weights[index])

    def merged(self) -> Rows:
        """Equal rows as one with their weights added, in an order that does not depend on the given one.

        Training on them is then the same to the last bit whether an example is repeated or weighted.
        """
        first, place = self.distinct()
        weights = np.bincount(place, weights=self.weights, minlength=len(first))
        return Rows(self.x[first], self.y[first], weights)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The first of all equal rows, in the order of `merged`, and which of these each row is, [N]."""
        both = np.column_stack((self.x, self.y))
        _, first, place = np.unique(both, axis=0, return_index=True, return_inverse=True)
        return first, place.reshape(-1)

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> Rows:
        """Several one after the other."""
        return cls(*(np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "y", "weights")))

    def thinned(self, size: int, seed: int) -> Rows:
        """At most N of the rows, chosen with probabilities that grow with their weights; they stand for all of them.

        Args:
            size: Rows that stay.
            seed: Seed of the choice.
        """
        if len(self) <= size:
            return self
        # The largest log(u) / weight are a sample without replacement by weight (Efraimidis & Spirakis 2006). A row's chance is
        # its weight's share already, so those that stay count equally.
        keys = np.log(np.random.default_rng(seed).random(len(self))) / self.weights
        kept = self[np.sort(np.argpartition(-keys, size)[:size])]
        return Rows(kept.x, kept.y, np.full(size, self.num_data / size))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights."""
        return torch.from_numpy(self.x), torch.from_numpy(self.y), torch.from_numpy(self.weights)


class Batches:
    """Batches (inputs, targets, weights) in a new order each epoch, by torch's global generator.

    Args:
        rows: The data.
        size: Rows of a batch; if all fit into one, their order stays.
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
    """Rows of several models as one batch of each, [R, B, ...]; those that have fewer get rows of weight 0 behind."""
    most = max(len(part) for part in rows)

    def pad(values: np.ndarray) -> np.ndarray:
        behind = np.repeat(values[:1], most - len(values), axis=0)
        return np.concatenate((values, behind)) if len(behind) else values

    x, y = (torch.from_numpy(np.stack([pad(getattr(part, key)) for part in rows])) for key in ("x", "y"))
    weights = np.stack([np.pad(part.weights, (0, most - len(part))) for part in rows])
    return StackedBatch(x, y, torch.from_numpy(weights))
