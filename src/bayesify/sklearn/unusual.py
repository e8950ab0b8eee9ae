"""Detection of rows that are unlike the training rows, because they are far away or because the network's draws disagree about
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

NUM_NEIGHBORS = 5
MIN_TAIL_VALUES = 5
"""Minimum number of largest values from which a tail is estimated."""
MAX_KEPT_ROWS = 2_000
"""Maximum number of training rows that are kept for comparison."""


@dataclass(frozen=True)
class Neighbors:
    r"""Measures how much a row differs from the training rows. The measure is the row's mean distance to the K nearest training
    rows, where K is at most 5.

    Numeric inputs are measured in standard deviations. Inputs that mark levels or missing cells by 0 and 1 are not scaled. The
    distance of a training row is computed without the row itself. The probability that a new row from the same distribution is
    farther away than a share s of the training rows is therefore 1 - s. A second measure is the epistemic uncertainty of the
    prediction, in any unit.

    Args:
        rows: Scaled training rows, [M, D].
        center: Center of each input, [D].
        scale: Scale of each input, [D].
        distances: Mean distance of each training row to its nearest other training rows, sorted, [M].
        spreads: Epistemic uncertainty of the training rows, sorted, [M].
    """

    rows: Tensor
    center: Tensor
    scale: Tensor
    distances: Tensor
    spreads: Tensor

    @classmethod
    def of(cls, inputs: np.ndarray, spreads: Tensor) -> Self:
        """Make the object from the inputs [M, D] and epistemic uncertainties [M] of at least two training rows."""
        x = torch.from_numpy(inputs).double()
        std = x.std(0, unbiased=False)
        marks = ((x == 0) | (x == 1)).all(0)
        center = torch.where(marks, torch.zeros_like(std), x.mean(0))
        scale = torch.where(marks | (std <= 1e-12 * center.abs()), torch.ones_like(std), std)
        rows = (x - center) / scale
        found = _nearest(rows, rows, min(NUM_NEIGHBORS, len(rows) - 1), skip_first=True)
        return cls(rows.float(), center, scale, found.sort().values, spreads.double().sort().values)

    def share_beyond(self, inputs: np.ndarray, spreads: Tensor) -> np.ndarray:
        """For each row, the share [N] of training rows that are at least as unusual as this row, in distance or in uncertainty.

        The share is the smaller of the two `tails`; it is near 0 for an unusual row.
        """
        return np.asarray(np.minimum(*self.tails(inputs, spreads)))

    def tails(self, inputs: np.ndarray, spreads: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """For each row, twice the share of training rows whose distance to their nearest rows is at least this row's distance,
        and twice the share whose uncertainty is at least this row's uncertainty.

        Both results are [N] and at most 1.
        """
        found = _nearest(self.scaled(inputs), self.rows.double(), self._count)
        far, unsure = tail_share(found, self.distances), tail_share(spreads.double(), self.spreads)
        return (2 * far).clip(max=1.0), (2 * unsure).clip(max=1.0)

    def gaps(self, inputs: np.ndarray) -> np.ndarray:
        """For each row and input, the mean squared difference from the nearest training rows, in squared standard deviations:
        [N, D]."""
        x, rows = self.scaled(inputs), self.rows.double()
        near = rows[torch.cdist(x, rows).topk(self._count, largest=False).indices]  # [N, K, D]
        return np.asarray((near - x.unsqueeze(1)).square().mean(1))

    def scaled(self, inputs: np.ndarray) -> Tensor:
        """Inputs in the units of `rows`."""
        copied = torch.tensor(inputs, dtype=torch.float64)  # A frame may own the array and forbid writing to it.
        return (copied - self.center) / self.scale

    @property
    def _count(self) -> int:
        return min(NUM_NEIGHBORS, len(self.rows))


def tail_share(values: Tensor, known: Tensor) -> np.ndarray:
    r"""For each value, the share [N] of the sorted `known` values [M] that are at least as large as this value. The numerator and
    the denominator of the share are each increased by 1.

    For a value v beyond the largest known value $v_M$, the share is the Pareto tail $\frac{1}{M + 1} (v_M / v)^\alpha$. Hill's
    method estimates $\alpha$ from the largest tenth of the known values, but from at least five values. So even a few rows
    suffice to show that a value is far larger than all known values.
    """
    count = len(known)
    values = values.double() * (1 - 1e-9)  # values that are equal up to rounding do not count as larger
    share = (count - torch.searchsorted(known.double(), values) + 1).double() / (count + 1)
    top = known[-min(count, max(MIN_TAIL_VALUES, count // 10)) :].double().clamp_min(1e-12)
    alpha = 1 / (top / top[0]).log().mean().clamp_min(1e-3)
    beyond = (top[-1] / values.double().clamp_min(1e-12)).clamp_max(1.0) ** alpha
    return np.asarray(torch.where(values > known[-1], share * beyond, share))


def _nearest(x: Tensor, rows: Tensor, count: int, skip_first: bool = False) -> Tensor:
    """Mean distance of each row of `x` to its nearest neighbors in `rows`, [N]. With `skip_first`, the nearest row is left out,
    because it is the row itself, at distance 0."""
    found = []
    for part in x.split(max(1, 2**22 // max(1, len(rows)))):
        near = torch.cdist(part, rows).topk(count + skip_first, largest=False).values
        found.append((near[:, 1:] if skip_first else near).mean(1))
    return torch.cat(found)
