"""Ranking of examples by uncertainty, to detect out-of-distribution examples and to reject the most uncertain ones."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, checked
from bayesify.metrics.calibration import match_labels
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive


def uncertainties(predictive: Predictive) -> dict[str, Tensor]:
    r"""Measures of uncertainty by name, one number per example, [B] each; a larger number means less certainty.

    A classification has `max_probability` ($-\log$ of the most probable label's probability), `entropy` and `mutual_information`.
    Each measure is summed over the labels or positions of an example. A regression has `epistemic` and `variance`, summed over
    outputs. Values of `mutual_information` and `epistemic` below their rounding error count as 0, so that a model with a single
    draw is equally certain everywhere.

    Raises:
        TypeError: If `predictive` is neither a classification nor a regression.
    """
    if isinstance(predictive, ClassificationPredictive):
        eps = torch.finfo(predictive.class_probs.dtype).eps
        resolution = 8 * eps * math.log(max(2, predictive.class_probs.shape[-1]))
        information = predictive.mutual_information
        measures = {
            "max_probability": -predictive.confidence.log(),
            "entropy": predictive.entropy,
            "mutual_information": information.where(information > resolution, 0.0),
        }
    elif isinstance(predictive, RegressionPredictive):
        eps = torch.finfo(predictive.mean.dtype).eps
        resolved = predictive.epistemic > (8 * eps * predictive.mean).square()
        measures = {"epistemic": predictive.epistemic.where(resolved, 0.0), "variance": predictive.variance}
    else:
        raise TypeError(f"metrics: {type(predictive).__name__} is not a prediction; pass the result of predict(x)")
    return {name: value.flatten(1).sum(1) if value.ndim > 1 else value for name, value in measures.items()}


@checked
def ood(inside: Predictive, outside: Predictive) -> dict[str, float]:
    """How well uncertainty separates out-of-distribution examples from examples of the training distribution.

    The out-of-distribution examples are the positive class, and the uncertainty is the score. AUROC is the probability that a
    random out-of-distribution example is less certain than a random example of the training distribution (ties count half): 0.5
    is chance, 1 is perfect. AUPR is the average precision; its chance level is the share of out-of-distribution examples. AUROC
    and AUPR are exact up to the final rounding.

    Args:
        inside: Prediction of examples from the training distribution.
        outside: Prediction of out-of-distribution examples.

    Returns:
        Scores named `auroc_*` and `aupr_*`. A classification has scores for `max_probability`, `entropy` and
        `mutual_information`. A regression has scores for `epistemic` and `variance` (the total variance).

    Raises:
        ValueError: If only one prediction is a regression, if a prediction is empty, or if an uncertainty is not finite.
    """
    scores_inside, scores_outside = uncertainties(inside), uncertainties(outside)
    if scores_inside.keys() != scores_outside.keys():
        raise ValueError(
            "ood: one prediction is a regression and the other a classification; give two predictions of the same kind"
        )
    result: dict[str, float] = {}
    for name, low in scores_inside.items():
        high = scores_outside[name].to(low)
        if not len(low) or not len(high):
            raise ValueError("ood: a prediction has no examples; give two predictions with at least one example each")
        ranks = dense_ranks(torch.cat((low, high)), name)
        result[f"auroc_{name}"], result[f"aupr_{name}"] = areas(ranks[: len(low)], ranks[len(low) :])
    return result


def areas(low: Tensor, high: Tensor) -> tuple[float, float]:
    """AUROC and average precision of separating positive examples (ranks `high`, [M]) from negative ones (ranks `low`, [N])."""
    size = int(torch.cat((low, high)).max()) + 1
    negative, positive = (torch.bincount(ranks.cpu(), minlength=size).flip(0) for ranks in (low, high))  # highest first
    passed, found = negative.cumsum(0), positive.cumsum(0)
    # Pairs in the right order count 2, and ties count 1.
    right = int((positive * (2 * (len(low) - passed) + negative)).sum())
    precision = found.double() / (found + passed)
    return right / (2 * len(low) * len(high)), float((positive * precision).sum()) / len(high)


def dense_ranks(scores: Tensor, name: str) -> Tensor:
    """Ranks of scores, starting at 0; equal scores share a rank."""
    if not bool(torch.isfinite(scores).all()):
        remedy = "check the network's outputs for NaN and infinity"
        raise ValueError(f"metrics: {name} is not finite for some example; {remedy}")
    ranks: Tensor = torch.unique(scores, return_inverse=True)[1]
    return ranks


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
    result is the expectation over random orders. An example with several labels is correct if all of them are correct.

    Args:
        predictive: A prediction of classes for examples from the training distribution.
        y: Labels of these examples.
        by: Measure of uncertainty: `"max_probability"`, `"entropy"` or `"mutual_information"`.
        outside: Prediction of out-of-distribution examples. Each counts as an error, because no label is correct for it
            (Daxberger et al. 2021, figure 6).
        num_points: Number of points K on the curve.

    Raises:
        ValueError: If the labels do not fit the prediction, if `by` is unknown, or if `num_points` is below 1.
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
    orders = dense_ranks(score, by), 1 - correct.long()
    shares = torch.arange(num_points, device=score.device) / num_points
    return RejectionCurve(shares, *(kept_means(ranks, correct, num_points) for ranks in orders))


def kept_means(ranks: Tensor, values: Tensor, num_points: int) -> Tensor:
    """Mean values [K] of the rows that are kept after the share k / K of the rows, those of the highest ranks, is rejected, for
    k = 0..K-1. Among rows of equal rank, it is the expectation over random orders."""
    expected = (torch.bincount(ranks, values) / torch.bincount(ranks))[ranks.sort().values]
    kept = len(ranks) - torch.arange(num_points, device=ranks.device) * len(ranks) // num_points
    return expected.cumsum(0)[kept - 1] / kept
