"""Further questions about a prediction: quantiles, probabilities of exceeding limits, decisions, and reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.tables import InputError, read_table
from bayesify.tables.targets import label_of

if TYPE_CHECKING:
    from torch import Tensor

    from bayesify.predictive.regression import RegressionPredictive
    from bayesify.serving.about import About
    from bayesify.sklearn.reasons import Explanation


MIN_PROBABILITY = 1e-6
"""Smallest probability that is written; the largest is 1 minus this value. Numbers in the file have six digits."""


@dataclass(frozen=True)
class Costs:
    """Costs of decisions.

    Args:
        decisions: Names of the A decisions.
        table: Cost of each decision for each true class, [C, A].
    """

    decisions: tuple[str, ...]
    table: np.ndarray

    @classmethod
    def of(cls, text: str, classes: Sequence[str]) -> Costs:
        """Read costs from a file, or from a text such as `sick:healthy=100,healthy:sick=5` with entries TRUTH:DECISION=COST.

        If the costs are given as text, the possible decisions are the classes. Right decisions cost 0, and wrong
        decisions that are not listed cost 1. In a file, the first column contains the true classes. Each other column is a
        decision, which may have any name.

        Args:
            text: Costs as a text, or the path of a file with costs.
            classes: The model's classes.

        Raises:
            InputError: If a class is unknown or missing, or if a cost is not a number.
        """
        if "=" not in text or Path(text).is_file():
            return cls._of_file(Path(text), classes)
        table = 1.0 - np.eye(len(classes))
        for entry in text.split(","):
            pair, sign, cost = entry.rpartition("=")
            pair = pair if sign else entry
            parts = [(pair[:at].strip(), pair[at + 1 :].strip()) for at, mark in enumerate(pair) if mark == ":"]
            known = [part for part in parts if set(part) <= set(classes)]
            if not known:
                unknown = next((name for name in (parts or [(pair.strip(), "")])[0] if name not in classes), pair)
                raise InputError(
                    f"--costs {entry.strip()}: write TRUTH:DECISION=COST, or give a file; {_unknown(unknown, classes)}"
                )
            truth, decision = (list(classes).index(name) for name in known[0])
            table[truth, decision] = number_of("--costs", cost)
        return cls(tuple(classes), table)

    @classmethod
    def _of_file(cls, path: Path, classes: Sequence[str]) -> Costs:
        if not path.is_file():
            raise InputError(
                f"--costs {path}: this is neither a file nor a cost such as {classes[0]}:{classes[-1]}=10, written "
                "as TRUTH:DECISION=COST; check the path, or write such a cost"
            )
        frame, _ = read_table(path)
        names, decisions = [label_of(cell) for cell in frame.iloc[:, 0]], tuple(map(str, frame.columns[1:]))
        wrong = [name for name in names if name not in classes]
        missing = [name for name in classes if name not in names]
        if wrong:
            raise InputError(f"--costs {path}: {_unknown(wrong[0], classes)}")
        if missing or len(names) != len(classes) or not decisions:
            what = "the file needs one row per class and one column per decision"
            what = f"there is no row for the class {missing[0]!r}" if missing else what
            remedy = "put the classes into the first column and the decisions into the other columns"
            raise InputError(f"--costs {path}: {what}; {remedy}")
        cells = frame.iloc[[names.index(name) for name in classes], 1:].to_numpy(object)
        return cls(decisions, np.array([[number_of(f"--costs {path}:", str(cell)) for cell in row] for row in cells]))

    def decide(self, probs: np.ndarray) -> tuple[list[str], np.ndarray]:
        """For each row, the decision with the lowest expected cost, and this cost. Shapes: probabilities [N, C], costs [N]."""
        expected = probs @ self.table
        return [self.decisions[best] for best in expected.argmin(1)], expected.min(1)


@dataclass(frozen=True)
class Questions:
    """Questions about each row.

    Args:
        quantiles: Levels of the quantiles to write for each row; only for a regression.
        above: Limits. For each limit, write the probability that the target exceeds the limit.
        below: Limits. For each limit, write the probability that the target stays below the limit.
        costs: Costs of decisions about classes, as a text that `Costs.of` accepts; empty if there are no costs.
        explain: Whether to write explanations: which columns raise or lower a prediction, which columns widen its interval, and
            why a row is unusual.
    """

    quantiles: Sequence[float] = ()
    above: Sequence[float] = ()
    below: Sequence[float] = ()
    costs: str = ""
    explain: bool = False

    def __post_init__(self) -> None:
        for value in self.quantiles:
            check_level("--quantiles", value)

    def check(self, about: About) -> None:
        """Raise `InputError` for a question that the model cannot answer."""
        numbers = {"--quantiles": self.quantiles, "--above": self.above, "--below": self.below}
        wrong = {"--costs": self.costs} if about.task == "regression" else numbers
        for option, value in wrong.items():
            if value:
                words = "classes", "numbers", "--above or --quantiles"
                needed, held, hint = words if about.task == "regression" else ("numbers", "classes", "--costs")
                raise InputError(
                    f"{option}: this option is for models that predict {needed}, but {about.target!r} holds {held}; omit "
                    f"the option, or use {hint}"
                )

    def about_numbers(self, found: RegressionPredictive) -> dict[str, np.ndarray]:
        """Mapping from column names to quantiles and probabilities for the N rows of a regression, each [N]."""
        from torch import full_like  # the command line checks its options before it imports torch

        columns: dict[str, Tensor] = {}
        if self.quantiles:
            every = found.quantile([float(level) for level in self.quantiles])
            columns |= {f"quantile_{level:g}": values for level, values in zip(self.quantiles, every, strict=True)}
        for limit in self.above:
            columns[f"above_{limit:.15g}"] = _possible(1 - found.cdf(full_like(found.mean, limit)))
        for limit in self.below:
            columns[f"below_{limit:.15g}"] = _possible(found.below(full_like(found.mean, limit)))
        return {name: values.detach().double().numpy()[:, 0] for name, values in columns.items()}


def _possible(probability: Tensor) -> Tensor:
    """Clamp probabilities away from 0 and 1, because a model cannot be certain far from the data."""
    return probability.double().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def reasons_of(found: Explanation, classes: bool) -> dict[str, Sequence[str]]:
    """Mapping from column names to the reasons for the predictions of all rows."""
    widened = "unsure_by" if classes else "widened_by"
    return {"moved_by": found.told("moves"), widened: found.told("widens"), "why_unusual": found.unusual}


def number_of(option: str, text: str) -> float:
    """The finite number that an option's text states. Raises `InputError` for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{option} {text.strip()}: this is not a number; write a number such as 500000 or 0.5")
    return value


def check_level(option: str, value: float) -> None:
    """Raise `InputError` for a level that is not strictly between 0 and 1."""
    if not 0 < value < 1:
        raise InputError(f"{option} {value:g}: give a number between 0 and 1, such as 0.9")


def _unknown(name: str, classes: Sequence[str]) -> str:
    return f"{name!r} is not a class; {suggest(name, classes)}"
