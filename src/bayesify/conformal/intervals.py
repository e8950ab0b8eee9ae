"""Conformal prediction of numbers, from a single split or from cross-validation."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.conformal.thresholds import Groups, Rule, as_targets, listed, rank_of
from bayesify.predictive.base import MAX_ELEMENTS_PER_CHUNK
from bayesify.predictive.regression import RegressionPredictive, match_targets

IntervalScore = Literal["absolute", "scaled", "quantiles", "centrality"]
"""Score of a calibration row: how wrong its prediction was; see `Intervals`."""
Known = RegressionPredictive | tuple[Tensor, Tensor]
"""The result of `predict`, or two tensors [n, O]: means and standard deviations, or lower and upper ends."""


class Intervals(Rule):
    r"""Intervals with guaranteed coverage for any model (split conformal prediction).

    Each of n calibration rows that the model has not seen gets a score s. Let q be the `threshold` of these scores.

    | score | s | interval |
    |---|---|---|
    | `absolute` | $\lvert y - \mu \rvert$ | $\mu \pm q$: one width for all rows (Papadopoulos et al. 2002) |
    | `scaled` | $\lvert y - \mu \rvert / \sigma$ | $\mu \pm q \sigma$ (Lei et al. 2018) |
    | `quantiles` | $\max(l - y, y - u)$ for the predictive's interval $[l, u]$ | $[l - q, u + q]$ (Romano et al. 2019, CQR) |
    | `centrality` | level of the smallest central interval with y | central interval of level q (Chernozhukov et al. 2021) |

    **Guarantee.** If the n calibration rows and a new row are exchangeable, the new row's interval contains its target with a
    probability of at least the level. If scores have no ties, the probability is at most level + 1 / (n + 1). Both bounds hold on
    average over calibration sets and new rows, not for each row. With `groups`, both bounds hold within each group, and n is the
    group's number of calibration rows (Vovk et al. 2003, Mondrian). For a given calibration set, coverage varies around the level
    with a standard deviation of about $\sqrt{\text{level} (1 - \text{level}) / n}$.

    If there are too few rows for a level, the interval is the whole real line. With the score `centrality`, intervals stay in the
    support of the predictive distribution: intervals of positive numbers stay positive, and intervals of counts have whole-number
    ends. If the model is so wrong that the scores of the targets round to 1, `centrality` gives the whole real line. In this case
    use `scaled`. Each output is calibrated separately.

    Args:
        score: Score of a calibration row: `"absolute"`, `"scaled"`, `"quantiles"` or `"centrality"`; see the table above.
    """

    @checked
    def __init__(self, score: IntervalScore = "scaled") -> None:
        self.score = score

    @checked
    def fit(self, prediction: Any, y: Any, *, groups: Groups = None) -> Self:
        """Calibrate on rows that the model was not trained on.

        Args:
            prediction: The result of `predict` for the calibration rows, or two arrays. The arrays are means and standard
                deviations. For the score `quantiles`, they are instead the lower and upper ends of intervals at the level that is
                later passed to `interval`.
            y: Targets of the calibration rows.
            groups: Group of each row, for coverage within each group.

        Raises:
            ValueError: If the targets or groups do not fit the prediction.
            TypeError: If the prediction is not a prediction of numbers, or if it lacks a quantity that the score needs.
        """
        known, targets = as_calibration(prediction, y, self.score)
        by_level = self.score == "quantiles" and isinstance(known, RegressionPredictive)
        scores = partial(interval_scores, self.score, known, targets)
        self.scores, self.groups = scores if by_level else scores(level=0.5), listed(groups, len(targets))
        return self

    @checked
    def interval(self, prediction: Any, level: float = 0.9, *, groups: Groups = None) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the new rows' intervals, [B, O] each.

        Args:
            prediction: Prediction of the new rows, in the form that `fit` takes.
            level: Coverage level, strictly between 0 and 1.
            groups: Group of each row, if `fit` was given groups.

        Raises:
            ValueError: If `fit` was not called, if the level is not strictly between 0 and 1, or if groups do not fit.
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
    """Prediction of the calibration rows, and their targets [n, O]."""
    known = as_prediction(prediction, score)
    center = known.mean if isinstance(known, RegressionPredictive) else known[0]
    return known, match_targets(as_targets(y).to(center), center)


def as_prediction(prediction: Any, score: str) -> Known:
    """The prediction itself, or two arrays converted to tensors [n, O]."""
    if isinstance(prediction, RegressionPredictive):
        return prediction
    if not isinstance(prediction, tuple) or len(prediction) != 2 or score == "centrality":
        wanted = "the result of predict(x)" + ("" if score == "centrality" else ", or a tuple of two arrays")
        raise TypeError(f"conformal: {type(prediction).__name__} is not a prediction of numbers; give {wanted}")
    first, second = (torch.as_tensor(part) for part in prediction)
    if first.shape != second.shape or first.ndim not in (1, 2):
        remedy = "give two arrays of the same shape, [n] or [n, O]"
        raise ValueError(f"conformal: the arrays have shapes {tuple(first.shape)} and {tuple(second.shape)}; {remedy}")
    return (first, second) if first.ndim == 2 else (first.unsqueeze(1), second.unsqueeze(1))


def centers(score: str, prediction: Known, level: float) -> tuple[Tensor, Tensor]:
    """The predicted means and the units of the score (standard deviations, or 1 for the score `absolute`), [n, O] each. For the
    score `quantiles`, the results are instead the ends of the predictive distribution's own intervals."""
    if not isinstance(prediction, RegressionPredictive):
        first, second = prediction
    elif score == "quantiles":
        return prediction.interval(level)
    else:
        first, second = prediction.mean, prediction.std
    return first, torch.ones_like(second) if score == "absolute" else second


def interval_scores(score: str, prediction: Known, y: Tensor, level: float) -> Tensor:
    """Scores [n, O] of rows whose targets are known."""
    if score == "centrality" and isinstance(prediction, RegressionPredictive):
        return prediction.centrality(y)
    first, second = centers(score, prediction, level)
    return torch.maximum(first - y, y - second) if score == "quantiles" else (y - first).abs() / second


def _own_intervals(prediction: RegressionPredictive, q: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper ends, [n, O], of the distribution's own central intervals of level q; the whole line if q is 1 or more."""
    lower, upper = torch.full_like(prediction.mean, -torch.inf), torch.full_like(prediction.mean, torch.inf)
    # Raise the level slightly: an interval of exactly level q would end just below an atom whose centrality is q.
    margin = max(1e-12, 8 * torch.finfo(q.dtype).eps)
    for level in q.unique().tolist():
        if level > 1 - 2 * margin:  # too close to 1 for the precision of a distribution function
            continue
        here = q.expand_as(lower) == level
        ends = prediction.interval(max(level + margin, 1e-6))
        lower, upper = torch.where(here, ends[0], lower), torch.where(here, ends[1], upper)
    return lower, upper


class CrossIntervals:
    r"""CV+ intervals from models that were each trained without one fold of the data (Barber et al. 2021).

    Model k was trained without fold k. It gives each row i of that fold the score $s_i = |y_i - \mu_{-k}(x_i)| /
    \sigma_{-k}(x_i)$ (see `Intervals` for other scores). Let $\alpha = 1 - \text{level}$. For a new x, the lower end of the
    interval is the $\lfloor (n + 1) \alpha \rfloor$-th smallest of all $\mu_{-k(i)}(x) - s_i \sigma_{-k(i)}(x)$. The upper end is
    the $\lceil (n + 1) (1 - \alpha) \rceil$-th smallest of all $\mu_{-k(i)}(x) + s_i \sigma_{-k(i)}(x)$. With one row in each
    fold this is the jackknife+.

    **Guarantee.** Assume n exchangeable rows in K folds of equal size, and any models. Then the interval contains a new target
    with a probability of at least $1 - 2 \alpha - \min\bigl(\frac{2 (1 - 1/K)}{n/K + 1}, \frac{1 - K/n}{K + 1}\bigr)$ (theorem 4
    of the paper). For the jackknife+ the bound is $1 - 2\alpha$. In practice the coverage is close to the level.

    Args:
        score: Score of a row: `"absolute"`, `"scaled"` or `"quantiles"`; see `Intervals`.
    """

    @checked
    def __init__(self, score: Literal["absolute", "scaled", "quantiles"] = "scaled") -> None:
        self.score = score
        self._folds: list[tuple[Known, Tensor]] = []

    @checked
    def fit(self, predictions: Sequence[Any], targets: Sequence[Any]) -> Self:
        """Calibrate with each model's predictions of the rows that it was not trained on.

        Args:
            predictions: One prediction per model: the result of `predict`, or two arrays as for `Intervals`.
            targets: For each model, the targets of the predicted rows.

        Raises:
            ValueError: If there are fewer than two models, or if the targets do not fit the predictions.
        """
        if len(predictions) != len(targets) or len(predictions) < 2:
            raise ValueError(
                f"conformal.CrossIntervals: predictions= has length {len(predictions)}, and targets= has length "
                f"{len(targets)}; give one prediction and one set of targets per model, for at least two models"
            )
        pairs = zip(predictions, targets, strict=True)
        self._folds = [as_calibration(prediction, y, self.score) for prediction, y in pairs]
        return self

    @checked
    def interval(self, predictions: Sequence[Any], level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the new rows' intervals, [B, O] each.

        Args:
            predictions: Each model's prediction of the new rows, in the order of `fit`.
            level: Coverage level, strictly between 0 and 1.

        Raises:
            ValueError: If `fit` was not called, if the number of models differs from the number in `fit`, or if the
                level is not strictly between 0 and 1.
        """
        if len(predictions) != len(self._folds):
            raise ValueError(
                f"conformal.CrossIntervals: predictions= has length {len(predictions)}, but the intervals were "
                f"fitted with {len(self._folds)} models; call fit first, and give one prediction per model"
            )
        rank = rank_of(level, sum(len(y) for _, y in self._folds))
        scores = [interval_scores(self.score, known, y, level) for known, y in self._folds]
        new = [centers(self.score, as_prediction(prediction, self.score), level) for prediction in predictions]
        rows = max(1, MAX_ELEMENTS_PER_CHUNK // sum(part.numel() for part in scores))
        pieces = (zip(first.split(rows), second.split(rows), strict=True) for first, second in new)
        low, high = zip(*(self._ends(scores, piece, rank) for piece in zip(*pieces, strict=True)), strict=True)
        return torch.cat(low), torch.cat(high)

    def _ends(self, scores: list[Tensor], new: Sequence[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
        """Lower and upper ends [B, O] for a chunk of new rows; each end is selected from n values, one per calibration row."""
        low, high = [], []
        for score, (a, b) in zip(scores, new, strict=True):
            q = score.unsqueeze(1)  # [n_k, 1, O]
            low.append(a - q if self.score == "quantiles" else a - q * b)
            high.append(b + q if self.score == "quantiles" else a + q * b)
        below, above = torch.cat(low).neg(), torch.cat(high)
        if rank > len(above):
            return torch.full_like(above[0], -torch.inf), torch.full_like(above[0], torch.inf)
        return below.kthvalue(rank, dim=0).values.neg(), above.kthvalue(rank, dim=0).values
