"""Scores of predictions that are added up part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from bayesify.conformal import credible_sets

MIN_PROBABILITY = 1e-12
LEVELS = (0.5, 0.9, 0.95)
"""Of the intervals and sets that models are judged by."""


@dataclass(frozen=True)
class Scores:
    """Sums over rows.

    Args:
        num_rows: Examples that were scored.
        sums: Sums of each score over these.
        unknown: Examples with a class that the model has never had; they count as wrong, and not in the log-loss.
    """

    num_rows: float = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    unknown: float = 0

    @classmethod
    def of_numbers(
        cls, predictive: Any, values: np.ndarray, levels: Sequence[float] = LEVELS, weights: np.ndarray | None = None
    ) -> Self:
        """Of a predictive of N rows: squared errors, CRPS, and of each level how many targets intervals hold and how wide they are.

        Args:
            predictive: [N, 1].
            values: Targets, [N].
            levels: Of the intervals.
            weights: How many examples each row stands for, [N]; 1 by default.
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
        """Of probabilities: right classes, log-loss, and of each level how many labels are in the fewest classes that reach it.

        Args:
            probs: [N, C].
            classes: C labels.
            values: Labels, [N].
            levels: Of these sets.
            weights: How many examples each row stands for, [N]; 1 by default.
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
        return cls(
            float(share.sum()),
            {name: float((share * value).sum()) for name, value in sums.items()},
            float(share[~known].sum()),
        )

    def __add__(self, other: Scores) -> Scores:
        names = {**self.sums, **other.sums}
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Scores(self.num_rows + other.num_rows, sums, self.unknown + other.unknown)

    def means(self) -> dict[str, float]:
        """Means over the rows; the root of the mean square as `rmse`."""
        found = {name: value / (self.num_rows or 1) for name, value in self.sums.items()}
        if "log_loss" in found:
            found["log_loss"] = self.sums["log_loss"] / ((self.num_rows - self.unknown) or 1)
        if "square" in found:
            found = {"rmse": float(np.sqrt(found.pop("square"))), **found}
        return found
