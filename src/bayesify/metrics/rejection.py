"""Classification with rejection: accuracy as the most uncertain examples are rejected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, checked
from bayesify.metrics.calibration import match_labels
from bayesify.metrics.ranking import dense_ranks, uncertainties
from bayesify.predictive.classification import ClassificationPredictive


@dataclass(frozen=True)
class RejectionCurve:
    """Accuracy of the kept examples as a function of the share of rejected examples.

    Args:
        rejected: Share of rejected examples, [K], ascending from 0.
        accuracy: Accuracy of the kept examples, [K].
        best: Accuracy if all errors were rejected first, [K].
    """

    rejected: Tensor
    accuracy: Tensor
    best: Tensor

    @property
    def area(self) -> float:
        """Mean accuracy over all shares of rejected examples."""
        return float(self.accuracy.mean())


@checked
def rejection_curve(
    predictive: ClassificationPredictive,
    y: Tensor,
    *,
    by: str = "entropy",
    outside: ClassificationPredictive | None = None,
    num_points: Count = 100,
) -> RejectionCurve:
    r"""Accuracy after rejecting the least certain examples.

    Of n examples, the $\lfloor n k / K \rfloor$ least certain are rejected, for k = 0..K-1. For equally certain examples, the
    result is the expectation over random orders. An example with several labels is correct if all its labels are
    correct.

    Args:
        predictive: A prediction of classes for examples from the training distribution.
        y: Labels of these examples.
        by: Measure of uncertainty: `"max_probability"`, `"entropy"` or `"mutual_information"`.
        outside: Prediction of out-of-distribution examples. Each counts as an error, because no label is correct for it
            (Daxberger et al. 2021, figure 6).
        num_points: Number of points K on the curve.

    Raises:
        ValueError: If the labels do not fit the prediction, `by` is unknown, or `num_points` is below 1.
        TypeError: If a prediction is not a prediction of classes.
    """
    scores = uncertainties(predictive)
    if by not in scores:
        raise ValueError(f"rejection_curve: by={by!r}; give one of {', '.join(scores)}")
    right = predictive.labels == match_labels(predictive, y)
    correct = right.flatten(1).all(1).double() if right.ndim > 1 else right.double()
    score = scores[by]
    if outside is not None:
        score = torch.cat((score, uncertainties(outside)[by].to(score)))
        correct = torch.cat((correct, correct.new_zeros(len(score) - len(correct))))
    ranks = dense_ranks(score, by)
    expected = (torch.bincount(ranks, correct) / torch.bincount(ranks))[ranks]
    orders = torch.stack((expected[torch.argsort(ranks)], correct.sort(descending=True).values))
    steps = torch.arange(num_points, device=score.device)
    kept = len(score) - steps * len(score) // num_points
    return RejectionCurve(steps / num_points, *(orders.cumsum(1)[:, kept - 1] / kept))
