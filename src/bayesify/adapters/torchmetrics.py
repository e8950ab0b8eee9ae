"""Scores of predictions as torchmetrics: they add up over batches and processes, and go into a `MetricCollection`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.adapters.extras import load
from bayesify.arguments.checks import Count, Level, checked
from bayesify.metrics.calibration import reliability
from bayesify.metrics.scores import COVERAGE_LEVELS, ECE_BINS, brier
from bayesify.metrics.targets import match_labels, match_values
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive

Metric: Any = load("torchmetrics", extra="metrics", owner="bayesify.adapters.torchmetrics").Metric


class PredictiveScore(Metric):
    """A mean over predictions that is known from sums: base of the scores below.

    `update(prediction, y)` takes what `predict` returns; for a classification, class probabilities [B, ..., C] will do too. Sums
    are in float64, so that the order of batches does not matter to more digits than float32 has, and they are added over processes.

    A subclass writes `terms`.
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
            prediction: What `predict` returns, or class probabilities [B, ..., C].
            y: Targets, one row per example.

        Raises:
            TypeError: If the score is not about predictions of this kind.
            ValueError: If targets do not fit.
        """
        terms = self.terms(as_predictive(prediction), y).double()
        self.total += terms.sum().to(self.total.device)
        self.count += terms.numel()

    def compute(self) -> Tensor:
        """The mean over all batches so far, a scalar."""
        return self.total / self.count

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """What is averaged, one number for each prediction."""
        raise NotImplementedError

    def _classes(self, prediction: Predictive, y: Tensor) -> tuple[ClassificationPredictive, Tensor]:
        if not isinstance(prediction, ClassificationPredictive):
            raise TypeError(f"{type(self).__name__}: prediction={type(prediction).__name__}; give one of classes")
        return prediction, match_labels(prediction, y)

    def _values(self, prediction: Predictive, y: Tensor) -> tuple[RegressionPredictive, Tensor]:
        if not isinstance(prediction, RegressionPredictive):
            raise TypeError(f"{type(self).__name__}: prediction={type(prediction).__name__}; give one of a regression")
        return prediction, match_values(prediction, y)


def as_predictive(prediction: Predictive | Tensor) -> Predictive:
    """A prediction, or class probabilities [B, ..., C] as one.

    Raises:
        ValueError: If the numbers are no probabilities.
    """
    if not isinstance(prediction, Tensor):
        return prediction
    sums = prediction.sum(-1) if prediction.ndim > 1 else prediction.new_zeros(1)
    if bool((prediction < 0).any()) or not bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        raise ValueError(
            f"torchmetrics: prediction, a tensor of shape {tuple(prediction.shape)}, does not hold class probabilities; "
            "give what predict(x) returns, or probabilities [B, C] that sum to 1"
        )
    return ClassificationPredictive(Outputs(kept=prediction.log().unsqueeze(0)))


class NLL(PredictiveScore):
    r"""Mean over examples of $-\log p(y)$, in nats, summed over an example's outputs; regression or classification."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """One number per example."""
        matched = self._classes if isinstance(prediction, ClassificationPredictive) else self._values
        return -prediction.log_prob(matched(prediction, y)[1])


class Accuracy(PredictiveScore):
    """Share of labels that are the most probable class."""

    higher_is_better = True

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """1 where it is right."""
        found, labels = self._classes(prediction, y)
        return found.labels == labels


class BrierScore(PredictiveScore):
    r"""Mean over predictions of $\sum_c (p_c - [y = c])^2$, between 0 and 2 (Brier 1950)."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """One number per prediction."""
        found, labels = self._classes(prediction, y)
        return brier(found.class_probs, labels)


class CalibrationError(PredictiveScore):
    r"""Expected calibration error of the most probable class: $\sum_k \frac{n_k}{n} |\text{accuracy}_k - \text{confidence}_k|$.

    Kept are the sums of each bin, so that batches give what all predictions together give.

    Args:
        num_bins: K, bins of equal width.
        options: Of `torchmetrics.Metric`.

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
    """Root of the mean squared error of the predictive mean, over examples and outputs."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """Squared errors, [B, O]."""
        found, values = self._values(prediction, y)
        return (found.mean - values).square()

    def compute(self) -> Tensor:
        """The root of the mean over all batches so far, a scalar."""
        return super().compute().sqrt()


class CRPS(PredictiveScore):
    """Mean continuous ranked probability score, see `RegressionPredictive.crps`, in y's unit."""

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """One number per example and output, [B, O]."""
        found, values = self._values(prediction, y)
        return found.crps(values)


class Coverage(PredictiveScore):
    """Share of targets in the central interval of a level; a calibrated prediction has the level itself.

    Args:
        level: Probability that the interval holds.
        options: Of `torchmetrics.Metric`.

    Raises:
        ValueError: If `level` is not strictly between 0 and 1.
    """

    higher_is_better: bool | None = None

    @checked
    def __init__(self, level: Level = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self.level = level

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """1 where the interval holds the target, [B, O]."""
        found, values = self._values(prediction, y)
        return found.centrality(values) <= self.level


class IntervalWidth(Coverage):
    """Mean width of the central interval of a level, in y's unit: how sharp a prediction is; arguments as for `Coverage`."""

    higher_is_better = False

    def terms(self, prediction: Predictive, y: Tensor) -> Tensor:
        """One number per example and output, [B, O]."""
        lower, upper = self._values(prediction, y)[0].interval(self.level)
        return upper - lower


@checked
def collection(task: Literal["regression", "classification"], **options: Any) -> Any:
    """The scores of `metrics.evaluate` for a task, under the same names, as a `torchmetrics.MetricCollection`.

    Args:
        task: `"regression"` or `"classification"`; a likelihood's `task`.
        options: Of the collection, such as `prefix`.

    Raises:
        ValueError: If the task is another.
    """
    if task == "classification":
        scores = {"accuracy": Accuracy(), "nll": NLL(), "ece": CalibrationError(), "brier": BrierScore()}
    else:
        scores = {"nll": NLL(), "rmse": RMSE(), "crps": CRPS()}
        scores |= {f"coverage_{100 * level:.0f}": Coverage(level) for level in COVERAGE_LEVELS}
    # Scores keep sums of different things although the sums have the same names: none may stand in for another.
    made: Any = load("torchmetrics", extra="metrics", owner="collection").MetricCollection(
        scores, compute_groups=False, **options
    )
    return made
