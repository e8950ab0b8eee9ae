"""Calibration: whether predicted probabilities agree with observed frequencies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, Level, checked
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets


@dataclass(frozen=True)
class ReliabilityDiagram:
    """Data of a reliability diagram: accuracy against confidence in bins of equal width.

    Args:
        edges: Edges of the bins, [K + 1]. A bin includes its lower edge; the last bin includes both edges.
        confidence: Mean confidence in each bin, [K]; NaN if the bin is empty.
        accuracy: Share of correct predictions in each bin, [K]; NaN if the bin is empty.
        count: Number of predictions in each bin, [K].
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> float:
        r"""Expected calibration error: $\sum_k \frac{n_k}{n} |\text{accuracy}_k - \text{confidence}_k|$."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return float((gap * self.count).sum() / self.count.sum())


@checked
def reliability(predictive: ClassificationPredictive, y: Tensor, num_bins: Count = 15) -> ReliabilityDiagram:
    """Confidence and accuracy of the most probable class, in bins of equal width (DeGroot & Fienberg 1983).

    Several labels per example count as several predictions.

    Args:
        predictive: A prediction of classes.
        y: Labels.
        num_bins: Number of bins K.

    Raises:
        ValueError: If `num_bins` is below 1, or if the labels do not fit the prediction.
    """
    labels = match_labels(predictive, y)
    confidence = predictive.confidence.flatten().double()
    correct = (predictive.labels == labels).flatten().double()
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
    bins = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, num_bins - 1)
    count = torch.bincount(bins, minlength=num_bins)
    return ReliabilityDiagram(
        edges=edges,
        confidence=torch.bincount(bins, confidence, minlength=num_bins) / count,
        accuracy=torch.bincount(bins, correct, minlength=num_bins) / count,
        count=count,
    )


@dataclass(frozen=True)
class CalibrationCurve:
    """Expected and observed coverage of central intervals.

    Args:
        expected: Levels of the intervals, [K].
        observed: Share of targets inside the intervals, [K]. If a share is above the level in `expected`, the intervals are too
            wide; if it is below this level, they are too narrow.
    """

    expected: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """Mean distance of the curve from the diagonal."""
        return float((self.observed - self.expected).abs().mean())


@checked
def calibration_curve(
    predictive: RegressionPredictive, y: Tensor, levels: Sequence[Level] | None = None
) -> CalibrationCurve:
    r"""Expected and observed coverage of a regression's central intervals (Kuleshov et al. 2018).

    A target lies in the central interval of level $\alpha$ if its `centrality` is at most $\alpha$. Each output of an example
    counts separately. If predictions have atoms (single values with positive probability, such as counts or floors), an interval
    can have more probability than its level. The curve of a calibrated prediction then lies on or above the diagonal.

    Args:
        predictive: A prediction of a numeric target.
        y: Targets.
        levels: Levels strictly between 0 and 1; 0.05, 0.10, ..., 0.95 by default.

    Raises:
        ValueError: If there is no level, if a level is not strictly between 0 and 1, or if the targets do not fit.
    """
    chosen = [step / 20 for step in range(1, 20)] if levels is None else [float(level) for level in levels]
    if not chosen:
        raise ValueError("calibration_curve: levels= is empty; give at least one level between 0 and 1")
    centrality = predictive.centrality(match_values(predictive, y)).flatten().double()
    expected = torch.tensor(chosen, dtype=torch.float64, device=centrality.device)
    return CalibrationCurve(expected, (centrality <= expected[:, None]).double().mean(1))


def match_values(predictive: RegressionPredictive, y: Tensor) -> Tensor:
    """Targets of a regression, checked and reshaped to the shape of the predictive mean, [B, O]."""
    return match_targets(_some(y).to(predictive.mean.device), predictive.mean).to(predictive.mean.dtype)


def match_labels(predictive: ClassificationPredictive, y: Tensor) -> Tensor:
    """Labels of a classification, checked and reshaped to the shape of the predicted labels, [B] or [B, ...]."""
    return predictive.match_labels(_some(y).to(predictive.labels.device))


def _some(y: Tensor) -> Tensor:
    y = torch.as_tensor(y)
    if y.numel() == 0:
        raise ValueError("metrics: there are no targets; give at least one example")
    return y
