"""Inputs of a network on tables: scaled numbers with a soft limit beside their piecewise-linear encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from bayesify.arguments.plain import Plain

BINS, BINS_OF_MANY, MANY = 8, 16, 1_500
"""Pieces of a number's encoding, and those for more rows than `MANY`."""
SOFT_LIMIT = 3.0
"""Standard deviations beyond which a scaled number hardly grows."""


@dataclass(frozen=True)
class Encoding(Plain):
    r"""How inputs enter a network.

    A number x becomes $z / \sqrt{1 + (z/3)^2}$ with $z = (x - \mu)/\sigma$, which stays within (-3, 3), and beside it its
    piecewise-linear encoding (Gorishniy et al. 2022, eq. 1): with quantiles $b_0 < \dots < b_T$ of the training rows, entry t is

    $$ \min(1, \max(0, (x - b_{t-1}) / (b_t - b_{t-1}))) . $$

    Inputs that are marks or levels, 0 or 1, are scaled alike and get no encoding.

    Args:
        mean: [D].
        std: [D], 1 where an input does not vary.
        bounds: For each input its bounds in order; empty where it gets no encoding.
    """

    mean: np.ndarray
    std: np.ndarray
    bounds: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, inputs: np.ndarray, weights: np.ndarray, encoded: bool = True) -> Self:
        """From training rows.

        Args:
            inputs: [N, D].
            weights: How many examples each row stands for, [N].
            encoded: False for scaled numbers alone.
        """
        share = (weights / weights.sum())[:, None]
        mean = (share * inputs).sum(0)
        std = np.sqrt((share * np.square(inputs - mean)).sum(0))
        std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)
        bounds = [_bounds(column, weights) if encoded else np.empty(0) for column in inputs.T]
        return cls(mean, std, tuple(bounds))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Inputs of a network, [N, E], in float32."""
        z = (inputs - self.mean) / self.std
        parts = [z / np.sqrt(1 + np.square(z / SOFT_LIMIT))]
        for index, bounds in enumerate(self.bounds):
            if len(bounds):
                low, high = bounds[:-1], bounds[1:]
                parts.append(np.clip((inputs[:, [index]] - low) / (high - low), 0.0, 1.0))
        return np.concatenate(parts, axis=1).astype(np.float32)

    @property
    def num_inputs(self) -> int:
        """E."""
        return len(self.mean) + sum(max(len(bounds) - 1, 0) for bounds in self.bounds)


def _bounds(column: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted quantiles of a column, without repeats; none where it has fewer than three different ones."""
    values, place = np.unique(column, return_inverse=True)
    if len(values) < 3:
        return np.empty(0)
    total = np.cumsum(np.bincount(place.reshape(-1), weights=weights))
    levels = np.linspace(0, 1, (BINS if len(column) <= MANY else BINS_OF_MANY) + 1)[1:-1] * total[-1]
    inner = values[np.searchsorted(total, levels * (1 - 1e-12))]
    bounds = np.unique(np.concatenate((values[:1], inner, values[-1:])))
    return bounds if len(bounds) > 2 else np.empty(0)
