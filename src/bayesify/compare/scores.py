"""Scores and curves of one run, as plain numbers."""

import math
from typing import Any

import numpy as np
import torch

from bayesify import conformal, metrics
from bayesify.metrics.ranking import dense_ranks, kept_means
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from bayesify.sklearn.scores import LEVELS

THIRDS = ("low", "middle", "high")
"""Thirds of the test rows, ordered by their predictions."""
NUM_BINS, NUM_POINTS = 10, 20
"""Number of bins of the error-against-uncertainty figure, and number of points of a rejection curve."""
SHARPNESS_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles over test rows that describe the sharpness of predictions."""

Scores = dict[str, float | None]


def score_regression(
    test: RegressionPredictive, y: np.ndarray, calibration: RegressionPredictive, y_calibration: np.ndarray
) -> tuple[Scores, dict[str, Any]]:
    """Scores of a regression, and the curves of its figures. The scores and the curves are two mappings from names to values.

    The scores include all scores of `metrics.evaluate`. `calibration` is the mean distance of the coverage curve from the
    diagonal. `width_*` are the widths of the central intervals. `coverage_90_*` are the coverages of the 90 % intervals in the
    lowest, middle and highest third of the predictions. `conformal_coverage_*` and `conformal_width_*` describe recalibrated
    intervals; they are `None` if there are too few calibration rows. `test` is [N, 1], and `y` is [N].
    """
    targets = torch.from_numpy(y)[:, None]
    found: Scores = dict(metrics.evaluate(test, targets))
    curve = metrics.calibration_curve(test, targets)
    found["calibration"] = curve.error
    mean, std = _flat(test.mean), _flat(test.std)
    calibrated = conformal.Intervals("scaled").fit(calibration, torch.from_numpy(y_calibration))
    for level in LEVELS:
        name = f"{100 * level:.0f}"
        start, end = test.interval(level)
        found[f"width_{name}"] = float((end - start).mean())
        low, high = (_flat(end) for end in calibrated.interval(test, level))
        known = conformal.enough_rows(len(y_calibration), level)
        found[f"conformal_coverage_{name}"] = float(((low <= y) & (y <= high)).mean()) if known else None
        found[f"conformal_width_{name}"] = float((high - low).mean()) if known else None
    lower, upper = (_flat(end) for end in test.interval(0.9))
    inside = (lower <= y) & (y <= upper)
    for name, part in zip(THIRDS, np.array_split(np.argsort(mean, kind="stable"), 3), strict=True):
        found[f"coverage_90_{name}"] = float(inside[part].mean()) if len(part) else None
    _check(found)
    errors = np.square(y - mean)
    kept = kept_means(dense_ranks(torch.from_numpy(std), "std"), torch.from_numpy(errors), NUM_POINTS)
    curves = {
        "levels": curve.expected.tolist(),
        "observed": curve.observed.tolist(),
        "sharpness": np.quantile(std, SHARPNESS_LEVELS).tolist(),
        "bins": [{**entry, "error": math.sqrt(entry["error"])} for entry in _bins(std, errors)],
        "rejection": kept.sqrt().tolist(),
        "losses": _losses(test, targets),
    }
    return found, curves


def score_classification(
    test: ClassificationPredictive, labels: np.ndarray, calibration: ClassificationPredictive, known: np.ndarray
) -> tuple[Scores, dict[str, Any]]:
    """Scores of a classification and the curves of its figures; see `score_regression`.

    For each level, a row's set consists of the fewest classes whose probabilities add up to the level. `coverage_*` is the share
    of rows whose label is in this set, and `width_*` is the mean size of the set. `test` and `calibration` are predictions
    [N, C]; `labels` are the true classes of the test rows, and `known` are the true classes of the calibration rows.
    """
    targets = torch.from_numpy(labels)
    found: Scores = dict(metrics.evaluate(test, targets))
    probs, rows = test.class_probs.numpy(), np.arange(len(labels))
    calibrated = conformal.Sets("probability").fit(calibration, torch.from_numpy(known))
    for level in LEVELS:
        name = f"{100 * level:.0f}"
        sets = conformal.credible_sets(test.class_probs, level).numpy()
        found[f"coverage_{name}"], found[f"width_{name}"] = float(sets[rows, labels].mean()), float(sets.sum(1).mean())
        sets, enough = calibrated.sets(test, level).numpy(), conformal.enough_rows(len(known), level)
        found[f"conformal_coverage_{name}"] = float(sets[rows, labels].mean()) if enough else None
        found[f"conformal_width_{name}"] = float(sets.sum(1).mean()) if enough else None
    _check(found)
    diagram = metrics.reliability(test, targets)
    wrong = (probs.argmax(1) != labels).astype(np.float64)
    entropy = _flat(test.entropy)
    curves = {
        "edges": diagram.edges.tolist(),
        "count": diagram.count.tolist(),
        "confidence": (diagram.confidence.nan_to_num(0.0) * diagram.count).tolist(),
        "correct": (diagram.accuracy.nan_to_num(0.0) * diagram.count).tolist(),
        "sharpness": np.quantile(_flat(test.confidence), SHARPNESS_LEVELS).tolist(),
        "bins": _bins(entropy, wrong),
        "rejection": metrics.rejection_curve(test, targets, num_points=NUM_POINTS).accuracy.tolist(),
        "losses": _losses(test, targets),
        "confusion": np.bincount(labels * len(probs[0]) + probs.argmax(1), minlength=len(probs[0]) ** 2).tolist(),
    }
    return found, curves


def _losses(test: Predictive, targets: torch.Tensor) -> list[float]:
    """The NLL of each row, [N], rounded for a file."""
    return [round(float(loss), 5) for loss in -test.log_prob(targets)]


def _check(found: Scores) -> None:
    for name, value in found.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the score {name} is {value} on the test rows, so this method cannot be ranked")


def _flat(values: torch.Tensor) -> np.ndarray:
    return values.detach().reshape(-1).numpy()


def _bins(uncertainty: np.ndarray, errors: np.ndarray) -> list[dict[str, Any]]:
    """Mean uncertainty, mean error and number of rows of each bin; bins of equally many rows, from certain to uncertain."""
    order = np.argsort(uncertainty, kind="stable")
    parts = [part for part in np.array_split(order, min(NUM_BINS, max(1, len(order) // 5))) if len(part)]
    return [
        {"uncertainty": float(uncertainty[part].mean()), "error": float(errors[part].mean()), "count": len(part)}
        for part in parts
    ]
