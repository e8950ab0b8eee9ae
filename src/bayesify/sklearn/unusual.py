"""Rows unlike those of training: distances to the nearest training rows, compared with those among the training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

NEIGHBORS = 5
MOST_ROWS = 2_000
"""Training rows that are kept to compare with."""


@dataclass(frozen=True)
class Neighbors:
    r"""How far rows lie from the training rows: the mean distance to the K nearest of these, K = 5 at most.

    Inputs that are numbers count in standard deviations, marks and levels (0 or 1) as they are. Each training row's own distance
    leaves the row itself out, so that a new row like these exceeds the share s of them with probability s.

    Args:
        rows: Scaled training rows, [M, D].
        center: [D].
        scale: [D].
        distances: Those of the training rows, in order, [M].
    """

    rows: Tensor
    center: Tensor
    scale: Tensor
    distances: Tensor

    @classmethod
    def of(cls, inputs: np.ndarray) -> Self:
        """From training rows.

        Args:
            inputs: [M, D], with M at least 2.
        """
        x = torch.from_numpy(inputs).double()
        std = x.std(0, unbiased=False)
        marks = ((x == 0) | (x == 1)).all(0)
        center = torch.where(marks, torch.zeros_like(std), x.mean(0))
        scale = torch.where(marks | (std <= 1e-12 * center.abs()), torch.ones_like(std), std)
        rows = (x - center) / scale
        found = _nearest(rows, rows, min(NEIGHBORS, len(rows) - 1), skip_first=True)
        return cls(rows.float(), center, scale, found.sort().values)

    def share_beyond(self, inputs: np.ndarray) -> np.ndarray:
        """The share of training rows that lie at least as far from the others as each row does, [N]: near 0 for an unusual row."""
        x = (torch.from_numpy(inputs).double() - self.center) / self.scale
        found = _nearest(x, self.rows.double(), min(NEIGHBORS, len(self.rows)))
        beyond = len(self.distances) - torch.searchsorted(self.distances, found)
        share: np.ndarray = ((beyond + 1) / (len(self.distances) + 1)).numpy()
        return share

    def tensors(self) -> dict[str, Tensor]:
        """What is stored."""
        return {"rows": self.rows, "center": self.center, "scale": self.scale, "distances": self.distances}

    @classmethod
    def restore(cls, tensors: Mapping[str, Any]) -> Self:
        """From `tensors`."""
        return cls(**tensors)


def _nearest(x: Tensor, rows: Tensor, count: int, skip_first: bool = False) -> Tensor:
    """Mean distance of each x to the nearest rows, [N]; without the row at distance 0 that x is itself."""
    found = []
    for part in x.split(max(1, 2**22 // max(1, len(rows)))):
        near = torch.cdist(part, rows).topk(count + skip_first, largest=False).values
        found.append((near[:, 1:] if skip_first else near).mean(1))
    return torch.cat(found)
