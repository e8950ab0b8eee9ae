"""Scores of predictions as torchmetrics metrics, which accumulate over batches and processes and fit in a `MetricCollection`."""

from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, Level, checked
from bayesify.arguments.installing import load
from bayesify.metrics.calibration import match_labels, match_values, reliability
from bayesify.metrics.scores import COVERAGE_LEVELS, ECE_BINS, brier
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive

_torchmetrics: Any = load("torchmetrics", extra="metrics", owner="bayesify.adapters.torchmetrics")
Metric: Any = _torchmetrics.Metric


class PredictiveScore(Metric):
    """Base class of scores that are means over predictions.

    `update(prediction, y)` takes the result of `predict` or, for a classification, class probabilities [B, ..., C]. Sums are
    accumulated in float64, so that after rounding to float32 the result does not depend on the order of batches. Sums are added
    over processes.

    A subclass implements `terms`.
    """

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @checked
    def update(self, prediction: Predictive | Tensor, y: Tensor) -> None:
        """Add a batch.

        Args:
            prediction: The result of `predict`, or class probabilities [B, ..., C].
            y: Targets, one row per example.

        Raises:
            TypeError: If the score does not apply to predictions of this kind.
            ValueError: If the targets do not fit the prediction.
        """
        terms = self.terms(as_predictive(prediction), y).double()
        self.total += terms.sum().to(self.total.device)
        self.count += terms.numel()

    def compute(self) -> Tensor:
        """The mean over all batches so far, a scalar."""
        return self.total / self.count

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """The numbers to average, one per prediction."""
        raise NotImplementedError

    def _classes(self, prediction: Predictive, y: Tensor) -> tuple[ClassificationPredictive, Tensor]:
        if not isinstance(prediction, ClassificationPredictive):
            raise TypeError(
                f"{type(self).__name__}: prediction={type(prediction).__name__}; give a ClassificationPredictive"
            )
        return prediction, match_labels(prediction, y)

    def _values(self, prediction: Predictive, y: Tensor) -> tuple[RegressionPredictive, Tensor]:
        if not isinstance(prediction, RegressionPredictive):
            raise TypeError(
                f"{type(self).__name__}: prediction={type(prediction).__name__}; give a RegressionPredictive"
            )
        return prediction, match_values(prediction, y)


def as_predictive(prediction: Predictive | Tensor) -> Predictive:
    """Return a prediction unchanged, and convert class probabilities [B, ..., C] to a prediction. Other tensors are
    refused."""
    if not isinstance(prediction, Tensor):
        return prediction
    sums = prediction.sum(-1) if prediction.ndim > 1 else prediction.new_zeros(1)
    if bool((prediction < 0).any()) or not bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        raise ValueError(
            f"torchmetrics: prediction=, a tensor of shape {tuple(prediction.shape)}, does not contain class "
            "probabilities; give the result of predict(x), or probabilities [B, C] that sum to 1"
        )
    return ClassificationPredictive(Outputs(kept=prediction.log().unsqueeze(0)))


class NLL(PredictiveScore):
    r"""Negative log-likelihood $-\log p(y)$ in nats, summed over an example's outputs and averaged over examples."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """Negative log-likelihood of each example."""
        matched = self._classes if isinstance(prediction, ClassificationPredictive) else self._values
        return -prediction.log_prob(matched(prediction, y)[1])


class Accuracy(PredictiveScore):
    """Share of predictions whose most probable class is the label."""

    higher_is_better = True

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """1 where the prediction is correct, otherwise 0."""
        found, labels = self._classes(prediction, y)
        return found.labels == labels


class BrierScore(PredictiveScore):
    r"""Mean over predictions of $\sum_c (p_c - [y = c])^2$, between 0 and 2 (Brier 1950)."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """Brier score of each prediction."""
        found, labels = self._classes(prediction, y)
        return brier(found.class_probs, labels)


class CalibrationError(PredictiveScore):
    r"""Expected calibration error of the most probable class: $\sum_k \frac{n_k}{n} |\text{accuracy}_k - \text{confidence}_k|$.

    The metric keeps the sums of each bin, so the result over batches equals the result over all predictions together.

    Args:
        num_bins: Number of bins K, of equal width.
        options: Options of `torchmetrics.Metric`.

    Raises:
        ValueError: If `num_bins` is below 1.
    """

    gaps: Tensor

    @checked
    def __init__(self, num_bins: Count = ECE_BINS, **options: Any) -> None:
        super().__init__(**options)
        self.num_bins = num_bins
        self.add_state("gaps", torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    @checked
    def update(self, prediction: Predictive | Tensor, y: Tensor) -> None:
        """Add a batch; see `PredictiveScore`."""
        diagram = reliability(*self._classes(as_predictive(prediction), y), self.num_bins)
        gaps = (diagram.accuracy - diagram.confidence).nan_to_num(0.0) * diagram.count
        self.gaps += gaps.to(self.gaps.device)
        self.count += diagram.count.sum().to(self.count.device)

    def compute(self) -> Tensor:
        """The error over all batches so far, a scalar."""
        return self.gaps.abs().sum() / self.count


class RMSE(PredictiveScore):
    """Root mean squared error of the predictive mean; squared errors are averaged over examples and outputs."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """Squared errors, [B, O]."""
        found, values = self._values(prediction, y)
        return (found.mean - values).square()

    def compute(self) -> Tensor:
        """The root mean squared error over all batches so far, a scalar."""
        return super().compute().sqrt()


class CRPS(PredictiveScore):
    """Mean continuous ranked probability score in y's unit; see `RegressionPredictive.crps`."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """CRPS of each example and output, [B, O]."""
        found, values = self._values(prediction, y)
        return found.crps(values)


class Coverage(PredictiveScore):
    """Share of targets that are inside the central interval of probability `level`; for a calibrated prediction this share equals
    `level`.

    Args:
        level: Probability of the central interval.
        options: Options of `torchmetrics.Metric`.

    Raises:
        ValueError: If `level` is not strictly between 0 and 1.
    """

    higher_is_better: bool | None = None

    @checked
    def __init__(self, level: Level = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self.level = level

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """1 where the interval contains the target, otherwise 0: [B, O]."""
        found, values = self._values(prediction, y)
        return found.centrality(values) <= self.level


class IntervalWidth(Coverage):
    """Mean width of the central interval of probability `level`, in y's unit; the arguments are the same as for `Coverage`."""

    higher_is_better = False

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """Width of the interval of each example and output, [B, O]."""
        lower, upper = self._values(prediction, y)[0].interval(self.level)
        return upper - lower


@checked
def collection(task: Literal["regression", "classification"], **options: Any) -> Any:
    """A `torchmetrics.MetricCollection` with the scores of `metrics.evaluate` for a task, under the same names.

    Args:
        task: `"regression"` or `"classification"`, as in a likelihood's `task`.
        options: Options of the collection, such as `prefix`.

    Raises:
        ValueError: If the task is unknown.
    """
    if task == "classification":
        scores = {"accuracy": Accuracy(), "nll": NLL(), "ece": CalibrationError(), "brier": BrierScore()}
    else:
        scores = {"nll": NLL(), "rmse": RMSE(), "crps": CRPS()}
        scores |= {f"coverage_{100 * level:.0f}": Coverage(level) for level in COVERAGE_LEVELS}
    # Compute groups are off, because the sums of different scores have the same names but different values.
    return _torchmetrics.MetricCollection(scores, compute_groups=False, **options)
