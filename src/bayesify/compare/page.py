"""The report of a comparison: one self-contained HTML page with figures of each method."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.compare.comparison import Comparison
from bayesify.compare.contestants import title_of
from bayesify.compare.explanation import columns_of
from bayesify.compare.scores import NUM_POINTS, SHARPNESS_LEVELS, THIRDS
from bayesify.compare.summary import COLUMNS, MIN_NAMED_NATS, MISSING_MARK, Column, MethodRow, cell, show
from bayesify.compare.verdict import recalls
from bayesify.serving.plots import FAINT, LINE, SECOND, Plot, ranking
from bayesify.sklearn.recipe import HIDDEN_BY_NAME
from bayesify.sklearn.scores import LEVELS
from bayesify.tables.columns import DAYS, Features, date_of
from bayesify.tables.targets import Task
from bayesify.tables.written_numbers import significant
from bayesify.version import __version__

OOD = {
    "max_probability": "by confidence",
    "entropy": "by entropy",
    "mutual_information": "by mutual information",
    "epistemic": "by epistemic variance",
    "variance": "by whole variance",
}
"""Names of measures of uncertainty in the table of out-of-distribution rows."""
REFERENCE = "boosted_trees"
"""The method whose curves are dashed in the figures of all other methods."""
NUM_EXAMPLE_COLUMNS = 3
"""Number of columns, the most important ones, that are shown with each example row."""
MAX_LISTED = 15
"""Maximum number of columns that are listed, and maximum number of classes."""
NUM_OPEN_PANELS = 4
"""Number of methods whose figures are unfolded when the page is opened."""


def render(comparison: Comparison, running: str = "") -> str:
    """The page of a comparison with a finished run. While runs are in progress, `running` describes the progress in words."""
    summary, verdict = comparison.summary, comparison.verdict
    shown = None if verdict is None else summary.row(verdict.pick if verdict.network is None else verdict.network)
    if verdict is not None and verdict.certainty in ("clear", "likely", "tie"):
        shown = summary.row(verdict.pick if comparison.winner is None else comparison.winner.method)
    regression = summary.task == "regression"
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    return environment.from_string(page).render(
        comparison=comparison,
        summary=summary,
        table=comparison.table,
        verdict=verdict,
        shown=shown,
        running=running,
        version=__version__,
        parts=next((result["rows"] for result in summary.results.values() if "rows" in result), {}),
        hidden=HIDDEN_BY_NAME[0],
        examples=None if shown is None else _examples(shown, comparison),
        importance=[] if shown is None else _importance(shown, comparison),
        recalls=[] if shown is None else _recalls(shown, comparison),
        worth=MIN_NAMED_NATS,
        reference=REFERENCE,
        unfinished=[title_of(name) for name in comparison.unfinished],
        ranking=_ranking(comparison),
        columns=COLUMNS[summary.task],
        ood=_ood(summary.ranked),
        cell=cell,
        is_best=functools.partial(_is_best, summary.ranked),
        percent=_percent,
        width=lambda value: MISSING_MARK if value is None else significant(value) if regression else f"{value:.2f}",
        levels=[f"{100 * level:.0f}" for level in LEVELS],
        thirds=THIRDS if regression else (),
        panels=_panels(comparison),
        shown_panels=NUM_OPEN_PANELS,
    )


def _percent(value: float | None) -> str:
    return MISSING_MARK if value is None else f"{100 * value:.0f}"


def _first_run(row: MethodRow, comparison: Comparison, key: str) -> Any:
    """The entry `key` of a method's run on the first split; runs on other splits lack this entry."""
    return comparison.summary.results.get((row.name, 0), {}).get(key)


def _examples(row: MethodRow, comparison: Comparison) -> dict[str, Any] | None:
    table, found = comparison.table, _first_run(row, comparison, "examples")
    if not found:
        return None
    leading = list(_first_run(row, comparison, "importance") or {})[:NUM_EXAMPLE_COLUMNS]
    columns = {name: place for name, place in columns_of(table.features).items() if name in leading}
    regression = table.task == "regression"
    headings = [*leading, "predicted", "90 % range" if regression else "confidence", "truth"]
    rows = []
    for one in found:
        cells = [_cell(table.features, *columns[name], one["row"]) for name in leading]
        if regression:
            ends = f"{significant(one['lower'])} to {significant(one['upper'])}"
            inside = one["lower"] <= one["truth"] <= one["upper"]
            cells += [significant(one["mean"]), ends, significant(one["truth"]) + ("" if inside else ", outside")]
        else:
            labels = [table.classes[int(one[key])] for key in ("guess", "truth")]
            cells += [labels[0], f"{100 * one['probability']:.0f} %", labels[1]]
        number = one["row"] if table.origin is None else int(table.origin[one["row"]])
        rows.append({"name": f"row {number + 1}", "cells": cells})
    return {"headings": headings, "rows": rows}


def _cell(features: Features, numbers: Sequence[int], codes: Sequence[int], row: int) -> str:
    if codes:
        code = int(features.codes[row, codes[0]])
        return MISSING_MARK if code < 0 else features.levels[codes[0]][code]
    value = float(features.numbers[row, numbers[0]])
    if math.isnan(value):
        return MISSING_MARK
    if features.number_names[numbers[0]].endswith(DAYS):
        return date_of(value)
    return f"{value:.6g}"


def _importance(row: MethodRow, comparison: Comparison) -> list[dict[str, str]]:
    """For the most important columns, as text: name, width of the bar, and changes of loss, error and coverage."""
    found: dict[str, Any] = _first_run(row, comparison, "importance") or {}
    regression = comparison.table.task == "regression"
    most = max((entry["loss"] for entry in found.values()), default=0.0)
    if most <= 0:
        return []
    return [
        {
            "name": name,
            "width": f"{5 * max(0.0, entry['loss']) / most:.2f}",
            "loss": _changed(100 * entry["loss"], 0, "%") if regression else _changed(entry["loss"], 3, "nats"),
            "error": _changed(100 * entry["error"], 0 if regression else 1, "%" if regression else "points"),
            "coverage": _changed(100 * entry["coverage"], 1, "points"),
        }
        for name, entry in list(found.items())[:MAX_LISTED]
    ]


def _changed(value: float, digits: int, unit: str) -> str:
    text = f"{value:+,.{digits}f}"
    return f"{text if text.strip('+-0.,') else text.replace('-', '+')} {unit}"


def _recalls(row: MethodRow, comparison: Comparison) -> list[list[str]]:
    """Label, share, recall and precision of the most frequent classes; empty for a regression."""
    found = recalls(row, comparison.summary, comparison.table.classes)
    order = sorted(found, key=lambda entry: -entry[1])[:MAX_LISTED]
    return [[label, f"{100 * share:.1f}", *map(_percent, values)] for label, share, *values in order]


def _ranking(comparison: Comparison) -> str:
    ranked = comparison.summary.ranked
    if not ranked:
        return ""
    reference = comparison.summary.row("constant") or comparison.summary.row("point")
    entries = [(row.title, row.means["nll"] or 0.0, row.errors["nll"] or 0.0, row.leads) for row in ranked]
    return ranking(entries, reference.means["nll"] if reference else None, "NLL, nats per row (lower is better)")


def _is_best(ranked: Sequence[MethodRow], row: MethodRow, column: Column) -> bool:
    values = [value for other in ranked if (value := other.means.get(column.key)) is not None]
    mine = row.means.get(column.key)
    if row.failure or mine is None or len(values) < 2:
        return False
    if isinstance(column.better, str):
        return show(mine, column) == show(max(values) if column.better == "high" else min(values), column)
    goal = column.better
    return abs(mine - goal) <= min(abs(value - goal) for value in values) + 1e-9


def _ood(ranked: Sequence[MethodRow]) -> list[Column]:
    """Columns of the report's table that show how well out-of-distribution rows are detected; empty if there are no such rows."""
    names = [key.removeprefix("auroc_") for key in (ranked[0].means if ranked else ()) if key.startswith("auroc_")]
    return [Column(f"auroc_{name}", OOD[name], "", 1, 3, "high") for name in names]


def _panels(comparison: Comparison) -> list[dict[str, Any]]:
    summary = comparison.summary
    results, rows = summary.results, summary.ranked
    curves = {row.name: [results[row.name, split]["curves"] for split in summary.splits] for row in rows}
    if not curves:
        return []
    panels = Panels(list(curves.values()), summary.task)
    reference = REFERENCE if REFERENCE in curves else "point"
    found = []
    for row in rows:
        line = f"NLL {row.means['nll']:.3f}, 90 % cover {100 * (row.means['coverage_90'] or 0):.0f} %"
        dashed = None if row.name == reference else curves.get(reference)
        found.append({"title": row.title, "line": line, "figures": panels.figures(curves[row.name], row.title, dashed)})
    return found


Curves = Sequence[Mapping[str, Any]]
"""Curves of one method, one entry per split."""


class Panels:
    """Figures with the same axes for all methods. The axes end at about three times the median of all methods' (`every`) values."""

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
