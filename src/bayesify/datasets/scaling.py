"""Standardization by the statistics of training data only."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from bayesify.arguments.checks import checked
from bayesify.arguments.plain import Plain


@dataclass(frozen=True)
class Standardization(Plain):
    """A shift and a scale that give the training data mean 0 and variance 1 in every column or channel.

    Args:
        mean: Mean of the training data, with size 1 in the averaged axes.
        std: Standard deviation of the training data, with the same shape as `mean`; 1 for data that do not vary.
    """

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def identity(cls, columns: int) -> Self:
        """A standardization that leaves the columns of tables unchanged."""
        return cls(np.zeros((1, columns)), np.ones((1, columns)))

    @classmethod
    @checked
    def of(cls, train: np.ndarray, axes: tuple[int, ...] = (0,)) -> Self:
        """The standardization of training data.

        Args:
            train: Training data of any numeric type. They are converted to float64 in chunks of at most a few thousand rows.
            axes: Axes to average over, including the first: `(0,)` for columns of a table, `(0, 2, 3)` for channels of images.

        Raises:
            ValueError: If there is no row, if `axes` lacks the first axis or has an unknown axis, or if a number is not finite.
        """
        if 0 not in axes or any(axis >= train.ndim for axis in axes):
            remedy = f"the axes must include 0, and every axis must be less than {train.ndim}"
            raise ValueError(f"Standardization: axes={axes} do not fit an array with {train.ndim} axes; {remedy}")
        if not train.size:
            raise ValueError(
                f"Standardization: training data of shape {list(train.shape)} are empty; give at least one row"
            )
        size = np.prod([train.shape[axis] for axis in axes])
        rows = max(1, 2**22 // max(1, train[0].size))
        pieces = [train[start : start + rows] for start in range(0, len(train), rows)]
        mean = sum(piece.sum(axes, dtype=np.float64, keepdims=True) for piece in pieces) / size
        if not np.isfinite(mean).all():
            raise ValueError("Standardization: training data hold numbers that are not finite; remove or replace them")
        squares = sum(np.square(piece - mean).sum(axes, keepdims=True) for piece in pieces) / size
        std = np.sqrt(squares)
        # Rounding leaves a constant column with a spread of about 1e-16 of its size.
        return cls(mean, np.where(std > 1e-12 * np.abs(mean), std, 1.0))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """`(values - mean) / std`."""
        return np.asarray((values - self.mean) / self.std)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """`values * std + mean`."""
        return np.asarray(values * self.std + self.mean)
