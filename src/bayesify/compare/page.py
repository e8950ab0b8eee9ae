"""The report of a comparison: one HTML page with everything inside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesify.compare.comparison import Comparison
from bayesify.compare.models import HIDDEN
from bayesify.compare.panels import axes_of, figures
from bayesify.compare.plots import ranking
from bayesify.compare.scores import LEVELS
from bayesify.compare.summary import COLUMNS, MISSING, Column, Row, cell, show, significant
from bayesify.compare.tuning import TEMPERATURE, title_of
from bayesify.compare.verdict import judge
from bayesify.version import __version__

OOD = {
    "max_probability": "by confidence",
    "entropy": "by entropy",
    "mutual_information": "by mutual information",
    "epistemic": "by epistemic variance",
    "variance": "by whole variance",
}
"""How measures of uncertainty are called in the table of other inputs."""


def render(comparison: Comparison) -> str:
    """The page.

    Args:
        comparison: What was found; it may be unfinished, with at least one finished run.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("compare.html").read_text(encoding="utf-8"))
    summary, problem, question = comparison.summary, comparison.problem, comparison.question
    best, columns = summary.best, COLUMNS[summary.task]
    return template.render(
        version=__version__,
        name=problem.name,
        target=problem.target,
        task=summary.task,
        rows_total=len(problem),
        num_columns=problem.features.num_columns,
        classes=list(problem.classes),
        splits=len(summary.splits),
        parts=_parts(comparison),
        hidden=HIDDEN[0],
        seed=question.seed,
        quick=question.quick,
        standard=bool(problem.standard),
        notes=list(problem.notes),
        verdict=judge(summary, comparison.results, problem.target),
        unfinished=[title_of(name) for name in comparison.unfinished],
        best=best,
        ranking=_ranking(comparison),
        columns=columns,
        labels=[f"{column.heading}{', ' + column.unit if column.unit else ''}" for column in columns],
        rows=[_table_row(row, columns, summary.rows) for row in summary.rows],
        intervals=[_interval_row(row, summary.task) for row in summary.ranked],
        levels=[f"{100 * level:.0f}" for level in LEVELS],
        ood=_ood(summary.ranked),
        panels=_panels(comparison),
        choices=_choices(comparison),
        estimator="BayesianRegressor" if summary.task == "regression" else "BayesianClassifier",
        snippet_method="point" if best is None or best.name == TEMPERATURE else best.name,
        temperature_best=best is not None and best.name == TEMPERATURE,
    )


def _parts(comparison: Comparison) -> dict[str, int]:
    for result in comparison.results.values():
        if "rows" in result:
            rows: dict[str, int] = result["rows"]
            return rows
    return {}


def _ranking(comparison: Comparison) -> str:
    ranked = comparison.summary.ranked
    if not ranked:
        return ""
    plain = comparison.summary.row("point")
    entries = [
        (row.title, float(row.means["nll"] or 0.0), float(row.errors["nll"] or 0.0), not row.clearly_behind)
        for row in ranked
    ]
    return ranking(entries, plain.means["nll"] if plain else None, "NLL, nats per row: further left is better")


def _table_row(row: Row, columns: Sequence[Column], rows: Sequence[Row]) -> dict[str, Any]:
    ranked = [other for other in rows if not other.failure]
    cells = [
        {"text": cell(row, column).replace(" ± ", " ± "), "best": not row.failure and _is_best(row, column, ranked)}
        for column in columns
    ]  # fmt: skip
    if row.failure or row.behind is None:
        standing = ""
    elif math.isnan(row.p):
        standing = "not tested"
    else:
        standing = "behind" if row.clearly_behind else "no clear difference"
    return {
        "title": row.title,
        "name": row.name,
        "cells": cells if row.means else [],
        "failure": row.failure,
        "standing": standing,
        "first": row.behind is None and not row.failure,
    }


def _is_best(row: Row, column: Column, ranked: Sequence[Row]) -> bool:
    values = [value for other in ranked if (value := other.means.get(column.key)) is not None]
    mine = row.means.get(column.key)
    if mine is None or len(values) < 2:
        return False
    if column.better == "high":
        return show(mine, column) == show(max(values), column)
    if column.better == "low":
        return show(mine, column) == show(min(values), column)
    goal = float(column.better)
    return abs(mine - goal) <= min(abs(value - goal) for value in values) + 1e-9


def _interval_row(row: Row, task: str) -> dict[str, Any]:
    groups = []
    for level in LEVELS:
        name = f"{100 * level:.0f}"
        group = []
        for prefix in ("", "conformal_"):
            cover, width = row.means[f"{prefix}coverage_{name}"], row.means[f"{prefix}width_{name}"]
            group.append(MISSING if cover is None else f"{100 * cover:.0f}")
            group.append(MISSING if width is None else significant(width) if task == "regression" else f"{width:.2f}")
        groups.append(group)
    return {"title": row.title, "groups": groups}


def _ood(ranked: Sequence[Row]) -> dict[str, Any] | None:
    keys = [key for key in (ranked[0].means if ranked else ()) if key.startswith("auroc_")]
    if not keys:
        return None
    columns = [Column(key, "AUROC", "", 1, 3, "high") for key in keys]
    return {
        "headings": [OOD[key.removeprefix("auroc_")] for key in keys],
        "rows": [
            {
                "title": row.title,
                "cells": [{"text": cell(row, column), "best": _is_best(row, column, ranked)} for column in columns],
            }
            for row in ranked
        ],
    }


def _panels(comparison: Comparison) -> list[dict[str, Any]]:
    summary, results = comparison.summary, comparison.results
    curves = {row.name: [results[row.name, split]["curves"] for split in summary.splits] for row in summary.ranked}
    if not curves:
        return []
    axes = axes_of(list(curves.values()), summary.task)
    plain = curves.get("point")
    return [
        {
            "title": row.title,
            "name": row.name,
            "line": f"NLL {row.means['nll']:.3f}, 90 % cover {100 * (row.means['coverage_90'] or 0):.0f} %",
            "figures": figures(curves[row.name], axes, summary.task, row.title, None if row.name == "point" else plain),
        }
        for row in summary.ranked
    ]


def _choices(comparison: Comparison) -> list[tuple[str, str]]:
    """What validation rows chose, for each ranked method."""
    found = []
    for row in comparison.summary.ranked:
        words = Counter(_choice(comparison.results[row.name, split]["choice"]) for split in row.splits)
        found.append((row.title, "; ".join(f"{text} ({count} of {len(row.splits)})" for text, count in words.items())))
    return found


def _choice(choice: dict[str, Any]) -> str:
    options = [f"{key.replace('_', ' ')} {value:g}" for key, value in choice["options"].items()]
    if choice["noise_factor"] != 1:
        options.append(f"noise × {choice['noise_factor']:g}")
    return ", ".join([f"prior scale {choice['prior_scale']:g}", *options])
