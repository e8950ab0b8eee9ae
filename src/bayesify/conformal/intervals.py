"""Split conformal prediction of numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.conformal.thresholds import Rule, as_targets, listed
from bayesify.predictive.regression import RegressionPredictive, match_targets

IntervalScore = Literal["absolute", "scaled", "quantiles", "centrality"]
"""How wrong a prediction of a number was; see `Intervals`."""
Known = RegressionPredictive | tuple[Tensor, Tensor]
"""What `predict` returns, or two tensors [n, O]: means and deviations, or lower and upper ends."""


class Intervals(Rule):
    r"""Intervals that hold the truth with the probability they say, whatever the model (split conformal prediction).

    From n calibration rows that the model has not seen, each gets a score s; q is their `threshold` for the level.

    | score | s | interval |
    |---|---|---|
    | `absolute` | $\lvert y - \mu \rvert$ | $\mu \pm q$: one width for all rows (Papadopoulos et al. 2002) |
    | `scaled` | $\lvert y - \mu \rvert / \sigma$ | $\mu \pm q \sigma$ (Lei et al. 2018) |
    | `quantiles` | $\max(l - y, y - u)$, l and u the predictive's own ends | $[l - q, u + q]$ (Romano et al. 2019, CQR) |
    | `centrality` | level of the smallest central interval with y | the predictive's own of level q (Chernozhukov et al. 2021) |

    **Guarantee.** If the n rows and a new one are exchangeable, the new row's interval holds its target with a probability of at
    least the level, and of at most level + 1 / (n + 1) where scores have no ties: on average over calibration sets and new
    rows, not for each row; with `groups` within each group (Vovk et al. 2003, Mondrian), n then the group's rows. Given one
    calibration set, coverage varies around the level with a deviation of about $\sqrt{\text{level} (1 - \text{level}) / n}$.
    Where there are too few rows for a level, the interval is the whole line. `centrality` keeps what the predictive
    knows: intervals of positive or whole numbers stay positive or whole; a model so wrong that targets lie beyond its last digit
    of probability has the whole line, and is better served by `scaled`. Several outputs are calibrated one by one.

    Args:
        score: See above.
    """

    @checked
    def __init__(self, score: IntervalScore = "scaled") -> None:
        self.score = score

    @checked
    def fit(self, prediction: Any, y: Any, *, groups: Sequence[Hashable] | Tensor | None = None) -> Self:
        """Take in calibration rows.

        Args:
            prediction: What `predict` says of them; or arrays: means and deviations, or lower and upper ends for `quantiles` (of
                the level that will be asked for).
            y: Their targets.
            groups: One value per row.

        Returns:
            Itself.

        Raises:
            ValueError: If targets or groups do not fit.
            TypeError: If the prediction is none of numbers, or has not what the score needs.
        """
        known, targets = as_calibration(prediction, y, self.score)
        by_level = self.score == "quantiles" and isinstance(known, RegressionPredictive)
        scores = partial(interval_scores, self.score, known, targets)
        self.scores, self.groups = scores if by_level else scores(level=0.5), listed(groups, len(targets))
        return self

    @checked
    def interval(
        self, prediction: Any, level: float = 0.9, *, groups: Sequence[Hashable] | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Lower and upper ends for new rows, [B, O] each.

        Args:
            prediction: As for `fit`.
            level: Strictly between 0 and 1.
            groups: One value per row, where `fit` had them.

        Raises:
            ValueError: If nothing was fitted, the level is not strictly between 0 and 1, or groups do not fit.
        """
        new = as_prediction(prediction, self.score)
        rows = len(new) if isinstance(new, RegressionPredictive) else len(new[0])
        q = self.thresholds(level, listed(groups, rows))
        if self.score == "centrality" and isinstance(new, RegressionPredictive):
            return _own_intervals(new, q.expand(rows, *q.shape[1:]))
        center, width = centers(self.score, new, level)
        if self.score == "quantiles":
            return center - q, width + q
        return center - q * width, center + q * width


def as_calibration(prediction: Any, y: Any, score: str) -> tuple[Known, Tensor]:
    """What was said of calibration rows, and their targets, [n, O]."""
    known = as_prediction(prediction, score)
    center = known.mean if isinstance(known, RegressionPredictive) else known[0]
    return known, match_targets(as_targets(y).to(center), center)


def as_prediction(prediction: Any, score: str) -> Known:
    """A prediction, or two arrays as tensors [n, O]."""
    if isinstance(prediction, RegressionPredictive):
        return prediction
    if not isinstance(prediction, tuple) or len(prediction) != 2 or score == "centrality":
        wanted = "what predict(x) returns" + ("" if score == "centrality" else ", or a tuple of two arrays")
        raise TypeError(f"conformal: {type(prediction).__name__} is no prediction of numbers; give {wanted}")
    first, second = (torch.as_tensor(part) for part in prediction)
    if first.shape != second.shape or first.ndim not in (1, 2):
        raise ValueError(
            f"conformal: arrays of shapes {tuple(first.shape)} and {tuple(second.shape)}; give two of the same, [n] or [n, O]"
        )
    return (first, second) if first.ndim == 2 else (first.unsqueeze(1), second.unsqueeze(1))


def centers(score: str, prediction: Known, level: float) -> tuple[Tensor, Tensor]:
    """Means and widths that scores count in, or the ends of the predictive's own intervals, [n, O] each."""
    if not isinstance(prediction, RegressionPredictive):
        first, second = prediction
        return first, torch.ones_like(second) if score == "absolute" else second
    if score == "quantiles":
        return prediction.interval(level)
    return prediction.mean, torch.ones_like(prediction.mean) if score == "absolute" else prediction.std


def interval_scores(score: str, prediction: Known, y: Tensor, level: float) -> Tensor:
    """Scores of rows with targets, [n, O]."""
    if score == "centrality" and isinstance(prediction, RegressionPredictive):
        return prediction.centrality(y)
    first, second = centers(score, prediction, level)
    return torch.maximum(first - y, y - second) if score == "quantiles" else (y - first).abs() / second


def _own_intervals(prediction: RegressionPredictive, q: Tensor) -> tuple[Tensor, Tensor]:
    """The predictive's own central intervals, of the level q of each row and output; the whole line where q is 1 or more."""
    lower, upper = torch.full_like(prediction.mean, -torch.inf), torch.full_like(prediction.mean, torch.inf)
    # At the level itself the interval ends below an atom whose centrality is the level; one of a slightly higher level holds it.
    margin = max(1e-12, 8 * torch.finfo(q.dtype).eps)
    for level in q.unique().tolist():
        if level > 1 - 2 * margin:  # beyond what a distribution function resolves
            continue
        here = q.expand_as(lower) == level
        ends = prediction.interval(max(level + margin, 1e-6))
        lower, upper = torch.where(here, ends[0], lower), torch.where(here, ends[1], upper)
    return lower, upper
