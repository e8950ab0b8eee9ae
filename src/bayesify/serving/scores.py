"""Scores of predictions that are added up part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from bayesify.sklearn import BayesianClassifier

LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True)
class Scores:
    """Sums over rows.

    Args:
        num_rows: Rows that were scored.
        sums: Of each score over these.
        unknown: Rows with a class that the model has never had; they count as wrong, and not in the log-loss.
    """

    num_rows: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    unknown: int = 0

    @classmethod
    def of(cls, estimator: Any, frame: Any, values: np.ndarray) -> Self:
        """Of an estimator on rows with their targets."""
        if isinstance(estimator, BayesianClassifier):
            return cls.of_classes(estimator.predict_proba(frame), list(map(str, estimator.classes_)), values)
        return cls.of_numbers(estimator.predictive(frame), values, 0.9)

    @classmethod
    def of_numbers(cls, predictive: Any, values: np.ndarray, level: float) -> Self:
        """Of a predictive of N rows."""
        y = torch.from_numpy(np.asarray(values, dtype=np.float64))[:, None]
        lower, upper = predictive.interval(level)
        name = f"{100 * level:g}"
        return cls(
            len(y),
            {
                "square": float((y - predictive.mean).square().sum()),
                "crps": float(predictive.crps(y).sum()),
                f"coverage_{name}": float(((lower <= y) & (y <= upper)).sum()),
                f"width_{name}": float((upper - lower).sum()),
            },
        )

    @classmethod
    def of_classes(cls, probs: np.ndarray, classes: list[str], values: np.ndarray) -> Self:
        """Of probabilities [N, C]."""
        position = {label: index for index, label in enumerate(classes)}
        codes = np.array([position.get(str(value), -1) for value in values], dtype=np.int64)
        known = codes >= 0
        given = np.clip(probs[np.flatnonzero(known), codes[known]], LEAST_PROBABILITY, 1)
        return cls(
            len(codes),
            {"accuracy": float((probs.argmax(1) == codes).sum()), "log_loss": float(-np.log(given).sum())},
            int((~known).sum()),
        )

    def __add__(self, other: Scores) -> Scores:
        names = {**self.sums, **other.sums}
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Scores(self.num_rows + other.num_rows, sums, self.unknown + other.unknown)

    def means(self) -> dict[str, float]:
        """Means over the rows; the root of the mean square as `rmse`."""
        found = {name: value / max(1, self.num_rows) for name, value in self.sums.items()}
        if "log_loss" in found:
            found["log_loss"] = self.sums["log_loss"] / max(1, self.num_rows - self.unknown)
        if "square" in found:
            found = {"rmse": float(np.sqrt(found.pop("square"))), **found}
        return found
