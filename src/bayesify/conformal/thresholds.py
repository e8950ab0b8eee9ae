"""The quantile of calibration scores that all conformal methods use, with a correction for the new row."""

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, checked, refuse

Groups = Sequence[Hashable] | Tensor | None
"""Group of each row, for coverage within each group; `None` if there are no groups."""


@checked
def threshold(scores: Tensor, level: float) -> Tensor:
    r"""Upper bound [...], with a probability of at least `level`, on the score of a new row, from calibration scores [n, ...].

    The threshold is the $\lceil (n + 1) \cdot \text{level} \rceil$-th smallest of n calibration scores, or infinite if this rank
    is above n. A finite threshold therefore needs at least level / (1 - level) rows: 9 rows for level 0.9, and 19 rows for level
    0.95. Assume that the n rows and the new row are exchangeable (their order carries no information), and that the model has
    seen none of them. Then the new score is at most the threshold with a probability of at least `level`. If there are no ties,
    this probability is at most level + 1 / (n + 1) (Vovk et al. 2005).

    Args:
        scores: Scores of the calibration rows; a larger score means a worse prediction.
        level: Coverage level, strictly between 0 and 1.

    Raises:
        ValueError: If there is no score, if a score is NaN, or if the level is not strictly between 0 and 1.
    """
    rank = rank_of(level, len(scores))
    if bool(torch.isnan(scores).any()):
        raise ValueError("conformal.threshold: scores= contains NaN; give scores of finite predictions and targets")
    if rank > len(scores):
        return torch.full_like(scores[0], math.inf)
    return scores.sort(0).values[rank - 1]


@checked
def enough_rows(rows: Count, level: float) -> bool:
    """Whether a number of calibration rows gives a finite threshold for a level."""
    return rank_of(level, rows) <= rows


def rank_of(level: float, rows: int) -> int:
    """Rank, starting at 1, of the threshold among the scores of the calibration rows."""
    if not 0 < level < 1:
        raise ValueError(f"conformal: level={level}; give a probability strictly between 0 and 1")
    if rows < 1:
        raise ValueError("conformal: there are no calibration rows; give at least one row")
    return math.ceil((rows + 1) * level - 1e-9)


class Rule:
    """Base of `Intervals` and `Sets`, which calibrate predictions by the scores of calibration rows.

    Attributes:
        scores: Scores of the calibration rows, [n, ...], or a function of `level` that returns them; `None` before `fit`.
        groups: Groups of the calibration rows, if any.
    """

    scores: Tensor | Callable[..., Tensor] | None = None
    groups: list[Hashable] | None = None

    def thresholds(self, level: float, new: list[Hashable] | None) -> Tensor:
        """Threshold of each new row, [m, ...], from the calibration rows of its group; without groups one threshold, [1, ...]."""
        if self.scores is None:
            owner = f"conformal.{type(self).__name__}"
            raise ValueError(f"{owner}: there are no calibration rows; call fit(prediction, y) first")
        scores = self.scores if isinstance(self.scores, Tensor) else self.scores(level=level)
        if self.groups is None and new is None:
            return threshold(scores, level).unsqueeze(0)
        if new is None:
            raise ValueError("conformal: fit was called with groups=; give groups= for the new rows too")
        if self.groups is None:
            remedy = "call fit with groups=, or leave groups= out here"
            raise ValueError(f"conformal: groups= is given, but fit was called without groups=; {remedy}")
        found: dict[Hashable, Tensor] = {}
        for group in dict.fromkeys(new):
            rows = [index for index, other in enumerate(self.groups) if other == group]
            if not rows:
                absent = f"group {group!r} has no calibration row"
                raise ValueError(f"conformal: {absent}; calibrate with rows of every group")
            found[group] = threshold(scores[rows], level)
        return torch.stack([found[group] for group in new])

    def config(self) -> dict[str, Any]:
        """Arguments of the rule as plain data."""
        arguments = inspect.signature(type(self).__init__).parameters
        return {key: getattr(self, key) for key in arguments if key != "self"}


def listed(groups: Any, rows: int) -> list[Hashable] | None:
    """Groups as a list with one entry per row."""
    if groups is None:
        return None
    plain = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(plain) != rows or getattr(groups, "ndim", 1) != 1:
        found = f"groups= has length {len(plain)}, but there are {rows} rows"
        raise ValueError(f"conformal: {found}; give one group per row")
    if any(value != value for value in plain):
        raise ValueError("conformal: groups= contains NaN; give every row a group, or leave out rows without a group")
    return plain


def as_targets(y: Any) -> Tensor:
    """Targets as a tensor. Raises `TypeError` if they are not numbers."""
    try:
        return torch.as_tensor(y)
    except (TypeError, RuntimeError, ValueError):
        raise refuse("conformal", "y", y, "targets as a tensor or an array") from None
