"""Encoding of tables as network inputs: scaled numbers and, for the default method, also their piecewise-linear encodings."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from bayesify.arguments.plain import Plain
from bayesify.tables.errors import check_magnitude

NUM_BINS, NUM_BINS_OF_MANY, MAX_ROWS_FOR_FEW_BINS = 8, 16, 1_500
"""Number of pieces of a number's encoding, for up to `MAX_ROWS_FOR_FEW_BINS` rows and for more rows."""
SOFT_LIMIT_STD = 3.0
"""Soft limit of scaled numbers, in standard deviations."""


@dataclass(frozen=True)
class Encoding(Plain):
    r"""Conversion of table inputs to inputs of a network.

    A number x becomes $z = (x - \mu)/\sigma$ or, with a soft limit, $z / \sqrt{1 + (z/3)^2}$, which stays within (-3, 3). Its
    piecewise-linear encoding (Gorishniy et al. 2022, eq. 1) may be added. If $b_0 < \dots < b_T$ are quantiles of the training
    rows, entry t is

    $$ \min(1, \max(0, (x - b_{t-1}) / (b_t - b_{t-1}))) . $$

    Inputs that mark levels or missing cells by 0 and 1 are scaled in the same way and get no piecewise encoding. If no input is
    left, the network gets a single 0.
    """

    mean: np.ndarray  # mean of each input, [D]
    std: np.ndarray  # standard deviation of each input, [D]; 1 for a constant input
    bounds: tuple[np.ndarray, ...] = ()  # sorted bounds of each input; empty for an input without a piecewise encoding
    soft_limit: bool = False  # whether scaled numbers have a soft limit
    left_out: tuple[int, ...] = ()  # indices of unused inputs, which other inputs replace

    @classmethod
    def scaled(cls, inputs: np.ndarray, weights: np.ndarray) -> Self:
        """An encoding that scales each input to mean 0 and variance 1 over the training rows, without a soft limit.

        Shapes: inputs [N, D], weights (number of examples that each row stands for) [N]. See `check_magnitude` for errors.
        """
        for index, column in enumerate(inputs.T):
            check_magnitude(f"input {index}, counted from 0,", column)
        share = (weights / weights.sum())[:, None]
        mean = (share * inputs).sum(0)
        std = np.sqrt((share * np.square(inputs - mean)).sum(0))
        # Rounding leaves a constant column with a spread of about 1e-16 of its size.
        return cls(mean, np.where(std > 1e-12 * np.abs(mean), std, 1.0))

    @classmethod
    def piecewise(cls, inputs: np.ndarray, weights: np.ndarray) -> Self:
        """An encoding as in `scaled`, but with a soft limit and with piecewise-linear encodings."""
        bounds = tuple(_bounds(column, weights) for column in inputs.T)
        return replace(cls.scaled(inputs, weights), bounds=bounds, soft_limit=True)

    @property
    def num_scaled(self) -> int:
        """Number of scaled inputs. The piecewise-linear encodings follow them."""
        return len(self.mean) - len(self.left_out)

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Inputs of a network, [N, E]."""
        z = (inputs - self.mean) / self.std
        z = np.delete(z, self.left_out, axis=1)
        parts = [z / np.hypot(1, z / SOFT_LIMIT_STD) if self.soft_limit else z]
        for index, bounds in enumerate(self.bounds):
            if len(bounds) and index not in self.left_out:
                low, high = bounds[:-1], bounds[1:]
                parts.append(np.clip((inputs[:, [index]] - low) / (high - low), 0.0, 1.0))
        found = np.concatenate(parts, axis=1)
        return found if found.shape[1] else np.zeros((len(inputs), 1))


def _bounds(column: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted quantiles of a column, without repeats; empty if it has fewer than three different values."""
    values, place = np.unique(column, return_inverse=True)
    if len(values) < 3:
        return np.empty(0)
    total = np.cumsum(np.bincount(place.reshape(-1), weights=weights))
    count = NUM_BINS if len(column) <= MAX_ROWS_FOR_FEW_BINS else NUM_BINS_OF_MANY
    levels = np.linspace(0, 1, count + 1)[1:-1] * total[-1]
    inner = values[np.searchsorted(total, levels * (1 - 1e-12))]
    bounds = np.unique(np.concatenate((values[:1], inner, values[-1:])))
    return bounds if len(bounds) > 2 else np.empty(0)
