"""The figures of each method, averaged over splits: calibration, sharpness, error after the rejection of uncertain rows, and
error against uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayesify.compare.scores import NUM_POINTS, SHARPNESS_LEVELS
from bayesify.serving.plots import FAINT, LINE, SECOND, Plot
from bayesify.tables.targets import Task

Curves = Sequence[Mapping[str, Any]]
"""Curves of one method, one entry per split."""


class Panels:
    """Figures with the same axes for all methods, so that the methods can be compared.

    The axes cover the values of all methods (`every`), but end at about three times the median of these values; larger values are
    cut off.
    """

    def __init__(self, every: Sequence[Curves], task: Task) -> None:
        self._classes = task == "classification"
        rejections = np.array([_mean(curves, "rejection") for curves in every])
        bins = [entry for curves in every for curve in curves for entry in curve["bins"]]
        stated, errors = ([entry[key] for entry in bins] for key in ("uncertainty", "error"))
        if self._classes:
            self._rejection, self._sharpness = (max(0.0, float(rejections.min()) - 0.05), 1.0), (0.0, 1.0)
            self._uncertainty, self._error = (0.0, _top(stated)), (0.0, min(1.0, _top(errors)))
        else:
            self._rejection = 0.0, _top(rejections.flatten().tolist())
            self._sharpness = 0.0, _top([_mean(curves, "sharpness")[-1] for curves in every])
            self._uncertainty = self._error = 0.0, _top([*stated, *errors])

    def figures(self, curves: Curves, title: str, reference: Curves | None) -> list[tuple[str, str]]:
        """Captions and SVG elements of one method's figures. The curves of a reference method are dashed."""
        first = self._reliability(curves, title) if self._classes else self._coverage(curves, title, reference)
        return [
            ("Stated against observed" if self._classes else "Coverage of intervals", first),
            ("Sharpness", self._sharpnesses(curves, title)),
            ("Leaving out uncertain rows", self._rejections(curves, title, reference)),
            ("Error against uncertainty", self._errors(curves, title)),
        ]

    def _coverage(self, curves: Curves, title: str, reference: Curves | None) -> str:
        words = "stated coverage, %", "observed, %", f"{title}: observed against stated coverage"
        plot = Plot((0, 1), (0, 1), *words, "xy").line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5)
        levels = list(curves[0]["levels"])
        if reference is not None:
            plot.line(levels, _mean(reference, "observed"), SECOND, dash="5 3", width=1.5)
        return plot.line(levels, _mean(curves, "observed")).svg()

    def _reliability(self, curves: Curves, title: str) -> str:
        words = "stated confidence, %", "accuracy, %", f"{title}: accuracy against confidence"
        keys = ("count", "confidence", "correct")
        count, confidence, correct = (np.sum([curve[key] for curve in curves], axis=0) for key in keys)
        plot = Plot((0, 1), (0, 1), *words, "xy").bars(curves[0]["edges"], count / count.sum(), FAINT)
        plot.line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5)
        full = count > 0
        shown = (confidence[full] / count[full], correct[full] / count[full])
        return plot.line(*shown).points(*shown).svg()

    def _sharpnesses(self, curves: Curves, title: str) -> str:
        label = "confidence, %" if self._classes else "predictive standard deviation"
        words = label, "rows, %", f"{title}: {label} over test rows", "xy" if self._classes else "y"
        values = np.clip(_mean(curves, "sharpness"), *self._sharpness)
        plot = Plot(self._sharpness, (0, 1), *words)
        return plot.line(values, SHARPNESS_LEVELS).points(values, SHARPNESS_LEVELS).svg()

    def _rejections(self, curves: Curves, title: str, reference: Curves | None) -> str:
        label = "accuracy of the rest, %" if self._classes else "error of the rest"
        words = "rows left out, %", label, f"{title}: {label} by share of rows left out", "xy" if self._classes else "x"
        plot, shares = Plot((0, 1), self._rejection, *words), [step / NUM_POINTS for step in range(NUM_POINTS)]
        if reference is not None:
            plot.line(shares, np.clip(_mean(reference, "rejection"), *self._rejection), SECOND, dash="5 3", width=1.5)
        return plot.line(shares, np.clip(_mean(curves, "rejection"), *self._rejection)).svg()

    def _errors(self, curves: Curves, title: str) -> str:
        stated = "entropy, nats" if self._classes else "predictive standard deviation"
        found = "error rate, %" if self._classes else "root mean squared error"
        words = stated, found, f"{title}: {found} against {stated}", "y" if self._classes else ""
        plot = Plot(self._uncertainty, self._error, *words)
        if not self._classes:
            plot.line([0, self._error[1]], [0, self._error[1]], FAINT, dash="4 3", width=1.5)
        bins = list(zip(*(curve["bins"] for curve in curves), strict=False))  # some splits have fewer bins than others
        x, y = ([np.mean([entry[key] for entry in group]) for group in bins] for key in ("uncertainty", "error"))
        return plot.points(np.clip(x, *self._uncertainty), np.clip(y, *self._error), LINE).svg()


def _top(values: Sequence[float]) -> float:
    return float(min(max(values), 3 * np.median(values))) * 1.05 or 1.0


def _mean(curves: Curves, key: str) -> np.ndarray:
    return np.asarray(np.mean([curve[key] for curve in curves], axis=0))
