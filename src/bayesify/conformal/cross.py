"""Cross-conformal prediction of numbers, in which every row is used for both training and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.conformal.intervals import Known, as_calibration, as_prediction, centers, interval_scores
from bayesify.conformal.thresholds import rank_of
from bayesify.predictive.base import MAX_ELEMENTS_PER_CHUNK


class CrossIntervals:
    r"""CV+ intervals from models that were each trained without one fold of the data (Barber et al. 2021).

    Model k, trained without fold k, scores the rows i of that fold, $s_i = |y_i - \mu_{-k}(x_i)| / \sigma_{-k}(x_i)$ (see
    `Intervals` for the scores). Let $\alpha = 1 - \text{level}$. For a new x, the lower end of the interval is the
    $\lfloor (n + 1) \alpha \rfloor$-th smallest of all $\mu_{-k(i)}(x) - s_i \sigma_{-k(i)}(x)$. The upper end is the
    $\lceil (n + 1) (1 - \alpha) \rceil$-th smallest of all $\mu_{-k(i)}(x) + s_i \sigma_{-k(i)}(x)$. With one row in each fold this
    is the jackknife+.

    **Guarantee.** For n exchangeable rows in K folds of equal size, and for any models, the interval contains a new target with a
    probability of at least $1 - 2 \alpha - \min\bigl(\frac{2 (1 - 1/K)}{n/K + 1}, \frac{1 - K/n}{K + 1}\bigr)$ (their theorem 4).
    For the jackknife+ the bound is $1 - 2\alpha$. In practice the coverage is close to the level.

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

        Returns:
            This object.

        Raises:
            ValueError: If there are fewer than two models, or the targets do not fit the predictions.
        """
        if len(predictions) != len(targets) or len(predictions) < 2:
            raise ValueError(
                f"conformal.CrossIntervals: predictions has length {len(predictions)}, and targets has length {len(targets)}; "
                "give one prediction and one set of targets per model, for at least two models"
            )
        pairs = zip(predictions, targets, strict=True)
        self._folds = [as_calibration(prediction, y, self.score) for prediction, y in pairs]
        return self

    @checked
    def interval(self, predictions: Sequence[Any], level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends for new rows, [B, O] each.

        Args:
            predictions: Each model's prediction of the new rows, in the order of `fit`.
            level: Coverage level, strictly between 0 and 1.

        Raises:
            ValueError: If `fit` was not called, the number of models differs from the number in `fit`, or the level is not strictly
                between 0 and 1.
        """
        if len(predictions) != len(self._folds):
            raise ValueError(
                f"conformal.CrossIntervals: predictions has length {len(predictions)}, but fit was given {len(self._folds)} "
                "models; call fit first, and give one prediction per model"
            )
        rank = rank_of(level, sum(len(y) for _, y in self._folds))
        scores = [interval_scores(self.score, known, y, level) for known, y in self._folds]
        new = [centers(self.score, as_prediction(prediction, self.score), level) for prediction in predictions]
        rows = max(1, MAX_ELEMENTS_PER_CHUNK // sum(part.numel() for part in scores))
        parts = [
            self._ends(
                scores, [(first[start : start + rows], second[start : start + rows]) for first, second in new], rank
            )
            for start in range(0, len(new[0][0]), rows)
        ]
        low, high = zip(*parts, strict=True)
        return torch.cat(low), torch.cat(high)

    def _ends(self, scores: list[Tensor], new: list[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
        """Lower and upper ends for a chunk of new rows, each selected from the values [n, B, O] of all calibration
        rows.
        """
        low, high = [], []
        for score, (a, b) in zip(scores, new, strict=True):
            q = score.unsqueeze(1)  # [n_k, 1, O]
            low.append(a - q if self.score == "quantiles" else a - q * b)
            high.append(b + q if self.score == "quantiles" else a + q * b)
        below, above = torch.cat(low).neg(), torch.cat(high)
        if rank > len(above):
            return torch.full_like(above[0], -torch.inf), torch.full_like(above[0], torch.inf)
        return below.kthvalue(rank, dim=0).values.neg(), above.kthvalue(rank, dim=0).values
