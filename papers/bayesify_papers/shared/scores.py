"""Scores of predictions that need only torch, and statistics of several runs."""

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesify import ClassificationPredictive, metrics
from bayesify.metrics.ranking import uncertainties

CLASSIFICATION_SCORES = ("accuracy", "nll", "ece", "brier")


def classification_scores(prediction: ClassificationPredictive, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score.

    Args:
        prediction: Prediction for B images.
        labels: Labels of the images on the prediction's device, [B].
    """
    return {
        "accuracy": float((prediction.labels == labels).double().mean()),
        "nll": float(-prediction.log_prob(labels).double().mean()),
        "ece": metrics.reliability(prediction, labels).ece,
        "brier": float(metrics.brier(prediction.class_probs, labels).mean()),
    }


def reliability_curve(prediction: ClassificationPredictive, labels: Tensor) -> dict[str, list[float | None]]:
    """Confidence, accuracy and number of images in bins of confidence of equal width. Values of empty bins are `None`.

    Args:
        prediction: Prediction for B images.
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
    """AUROC of the set `ood/...` against `test`, by entropy and by mutual information, from ranks."""
    (outside,) = (prediction for name, prediction in made.items() if name.startswith("ood/"))
    inner, outer = uncertainties(made["test"]), uncertainties(outside)
    return {f"auroc_{key}": rank_auroc(inner[key], outer[key]) for key in ("entropy", "mutual_information")}


def rank_auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that a number of `outside` is larger than a number of `inside`; ties count half."""
    values, place = torch.cat((inside, outside)).double().unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(values)).double()
    ranks = counts.cumsum(0) - (counts - 1) / 2  # mean rank of each value, from 1
    total = float(ranks[place[len(inside) :]].sum())
    low = len(outside) * (len(outside) + 1) / 2
    return (total - low) / (len(inside) * len(outside))


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; `None` for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
