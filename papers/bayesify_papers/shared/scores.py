"""Scores of predictions that need only torch, and statistics of several runs."""

import math
import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from bayesify import ClassificationPredictive, metrics

CLASSIFICATION_SCORES = ("accuracy", "nll", "ece", "brier")


def classification_scores(prediction: ClassificationPredictive, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score.

    Args:
        labels: Labels of the images on the prediction's device, [B].
    """
    return {
        "accuracy": float((prediction.labels == labels).double().mean()),
        "nll": float(-prediction.log_prob(labels).double().mean()),
        "ece": metrics.reliability(prediction, labels).ece,
        "brier": float(metrics.brier(prediction.class_probs, labels).mean()),
    }


def reliability_curve(prediction: ClassificationPredictive, labels: Tensor) -> dict[str, list[float | None]]:
    """Confidence, accuracy and number of images in each bin. All bins span equal ranges of confidence. Values of empty bins are
    `None`.

    Args:
        labels: Labels of the images on the prediction's device, [B].
    """
    found = metrics.reliability(prediction, labels)
    return {
        "count": found.count.tolist(),
        **{
            key: [round(value, 5) if math.isfinite(value) else None for value in getattr(found, key).tolist()]
            for key in ("confidence", "accuracy")
        },
    }


def separation(made: Mapping[str, ClassificationPredictive]) -> dict[str, float]:
    """AUROC of the set `ood/...` against `test`, by entropy and by mutual information."""
    (outside,) = (prediction for name, prediction in made.items() if name.startswith("ood/"))
    found = metrics.ood(made["test"], outside)
    return {key: found[key] for key in ("auroc_entropy", "auroc_mutual_information")}


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; `None` for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
