"""Scores of predictions, which can be summed over parts of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from bayesify.conformal import credible_sets

MIN_PROBABILITY = 1e-12
LEVELS = (0.5, 0.9, 0.95)
"""Levels of the intervals and sets by which models are judged."""


@dataclass(frozen=True)
class Scores:
    """Sums of scores over rows.

    Args:
        num_rows: Number of scored examples.
        sums: Sum of each score over the examples.
        unknown: Number of examples whose class the model does not know. These examples count as wrong, but the log-loss ignores
            them.
    """

    num_rows: float = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    unknown: float = 0

    @classmethod
    def of_numbers(
        cls, predictive: Any, values: np.ndarray, levels: Sequence[float] = LEVELS, weights: np.ndarray | None = None
    ) -> Self:
        """Scores of a predictive [N, 1] for targets [N]: squared errors, CRPS, and coverage and width of intervals at each level.

        `weights` [N] says how many examples each row stands for; 1 by default.
        """
        y = torch.from_numpy(np.asarray(values, dtype=np.float64))[:, None]
        share = torch.ones_like(y) if weights is None else torch.from_numpy(weights)[:, None]
        sums = {"square": (y - predictive.mean).square(), "crps": predictive.crps(y)}
        for level in levels:
            lower, upper = predictive.interval(level)
            name = f"{100 * level:g}"
            sums |= {f"coverage_{name}": (lower <= y) & (y <= upper), f"width_{name}": upper - lower}
        return cls(float(share.sum()), {name: float((share * value).sum()) for name, value in sums.items()})

    @classmethod
    def of_classes(
        cls,
        probs: np.ndarray,
        classes: Sequence[str],
        values: np.ndarray,
        levels: Sequence[float] = (),
        weights: np.ndarray | None = None,
    ) -> Self:
        """Scores of probabilities [N, C] for labels [N]: accuracy, log-loss, and the coverage and size of the credible sets at
        each level.

        `classes` are the labels of the C columns of the probabilities. `weights` [N] says how many examples each row stands for;
        1 by default.
        """
        position = {label: index for index, label in enumerate(classes)}
        codes = np.array([position.get(str(value), -1) for value in values], dtype=np.int64)
        known, share = codes >= 0, np.ones(len(codes)) if weights is None else weights
        given = np.clip(probs[np.arange(len(codes)), codes], MIN_PROBABILITY, 1)
        sums = {"accuracy": probs.argmax(1) == codes, "log_loss": np.where(known, -np.log(given), 0.0)}
        for level in levels:
            sets = credible_sets(torch.from_numpy(probs), level).numpy()
            name = f"{100 * level:g}"
            sums |= {f"sets_{name}": sets[np.arange(len(codes)), codes] & known, f"size_{name}": sets.sum(1)}
        totals = {name: float((share * value).sum()) for name, value in sums.items()}
        return cls(float(share.sum()), totals, float(share[~known].sum()))

    def __add__(self, other: Scores) -> Scores:
        names = {**self.sums, **other.sums}
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Scores(self.num_rows + other.num_rows, sums, self.unknown + other.unknown)

    def means(self) -> dict[str, float]:
        """Mean of each score over the examples. `rmse` is the root of the mean squared error."""
        found = {name: value / (self.num_rows or 1) for name, value in self.sums.items()}
        if "log_loss" in found:
            found["log_loss"] = self.sums["log_loss"] / ((self.num_rows - self.unknown) or 1)
        if "square" in found:
            found = {"rmse": float(np.sqrt(found.pop("square"))), **found}
        return found
