"""The figures of one method: calibration, sharpness, rejection, error against uncertainty; averaged over splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesify.compare.plots import FAINT, LINE, SECOND, Plot
from bayesify.compare.scores import NUM_POINTS, SHARPNESS_LEVELS
from bayesify.tables.targets import Task

Curves = Sequence[Mapping[str, Any]]
"""Curves of one method, one entry per split."""


@dataclass(frozen=True)
class Axes:
    """Ends of axes that all methods share, so that figures can be compared."""

    rejection: tuple[float, float]
    uncertainty: tuple[float, float]
    error: tuple[float, float]
    sharpness: tuple[float, float]


def axes_of(every: Sequence[Curves], task: Task) -> Axes:
    """Axes that hold nearly all of every method; outliers are cut at three times the middle."""
    rejections = [_mean(curves, "rejection") for curves in every]
    stated = [entry["uncertainty"] for curves in every for curve in curves for entry in curve["bins"]]
    errors = [entry["error"] for curves in every for curve in curves for entry in curve["bins"]]
    wide = [_mean(curves, "sharpness")[-1] for curves in every]
    if task == "classification":
        low = float(min(values.min() for values in rejections))
        return Axes((max(0.0, low - 0.05), 1.0), (0.0, _top(stated)), (0.0, min(1.0, _top(errors))), (0.0, 1.0))
    highest = _top([float(value) for values in rejections for value in values])
    return Axes((0.0, highest), (0.0, _top([*stated, *errors])), (0.0, _top([*stated, *errors])), (0.0, _top(wide)))


def _top(values: Sequence[float]) -> float:
    return float(min(max(values), 3 * np.median(values))) * 1.05 or 1.0


def figures(curves: Curves, axes: Axes, task: Task, title: str, reference: Curves | None) -> list[tuple[str, str]]:
    """Captions and SVG elements of one method.

    Args:
        curves: Of the method.
        axes: Shared by all methods.
        task: Of the comparison.
        title: Of the method.
        reference: Curves of the plain network, dashed in the figures; `None` for none.
    """
    first = _reliability(curves, title) if task == "classification" else _coverage(curves, title, reference)
    return [
        ("Stated against observed" if task == "classification" else "Coverage of intervals", first),
        ("Sharpness", _sharpness(curves, axes, task, title)),
        ("Turning away uncertain rows", _rejection(curves, axes, task, title, reference)),
        ("Error against uncertainty", _errors(curves, axes, task, title)),
    ]


def _coverage(curves: Curves, title: str, reference: Curves | None) -> str:
    plot = Plot((0, 1), (0, 1), "stated coverage, %", "observed, %", f"{title}: observed against stated coverage", "xy")
    plot.line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5)
    levels = list(curves[0]["levels"])
    if reference is not None:
        plot.line(levels, _mean(reference, "observed"), SECOND, dash="5 3", width=1.5)
    return plot.line(levels, _mean(curves, "observed")).svg()


def _reliability(curves: Curves, title: str) -> str:
    plot = Plot((0, 1), (0, 1), "stated confidence, %", "accuracy, %", f"{title}: accuracy against confidence", "xy")
    count, confidence, correct = (
        np.sum([curve[key] for curve in curves], axis=0) for key in ("count", "confidence", "correct")
    )
    plot.bars(curves[0]["edges"], count / count.sum(), FAINT)
    plot.line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5)
    full = count > 0
    shown = (confidence[full] / count[full], correct[full] / count[full])
    return plot.line(*shown).points(*shown).svg()


def _sharpness(curves: Curves, axes: Axes, task: Task, title: str) -> str:
    label = "confidence, %" if task == "classification" else "predictive standard deviation"
    plot = Plot(axes.sharpness, (0, 1), label, "rows, %", f"{title}: {label} over test rows",
                "xy" if task == "classification" else "y")  # fmt: skip
    values = np.clip(_mean(curves, "sharpness"), *axes.sharpness)
    return plot.line(values, SHARPNESS_LEVELS).points(values, SHARPNESS_LEVELS).svg()


def _rejection(curves: Curves, axes: Axes, task: Task, title: str, reference: Curves | None) -> str:
    label = "accuracy of the rest, %" if task == "classification" else "error of the rest"
    plot = Plot((0, 1), axes.rejection, "rows turned away, %", label, f"{title}: {label} by share turned away",
                "xy" if task == "classification" else "x")  # fmt: skip
    shares = [step / NUM_POINTS for step in range(NUM_POINTS)]
    if reference is not None:
        plot.line(shares, np.clip(_mean(reference, "rejection"), *axes.rejection), SECOND, dash="5 3", width=1.5)
    return plot.line(shares, np.clip(_mean(curves, "rejection"), *axes.rejection)).svg()


def _errors(curves: Curves, axes: Axes, task: Task, title: str) -> str:
    stated = "entropy, nats" if task == "classification" else "predictive standard deviation"
    found = "error rate, %" if task == "classification" else "root mean squared error"
    plot = Plot(axes.uncertainty, axes.error, stated, found, f"{title}: {found} against {stated}",
                "y" if task == "classification" else "")  # fmt: skip
    if task == "regression":
        plot.line([0, axes.error[1]], [0, axes.error[1]], FAINT, dash="4 3", width=1.5)
    number = min(len(curve["bins"]) for curve in curves)
    bins = [[curve["bins"][position] for curve in curves] for position in range(number)]
    x = np.clip([np.mean([entry["uncertainty"] for entry in group]) for group in bins], *axes.uncertainty)
    y = np.clip([np.mean([entry["error"] for entry in group]) for group in bins], *axes.error)
    return plot.points(x, y, LINE).svg()


def _mean(curves: Curves, key: str) -> np.ndarray:
    found: np.ndarray = np.mean([curve[key] for curve in curves], axis=0)
    return found
