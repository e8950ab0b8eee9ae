"""A comparison as plain data, for files and other programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from bayesify.compare.comparison import Comparison
from bayesify.compare.runs import TIMES
from bayesify.version import __version__


def as_record(comparison: Comparison) -> dict[str, Any]:
    """The table, the verdict and what they were made from.

    Numbers that are not known are `None`. `times` differ from run to run; all else is the same for the same seed.
    """
    summary, table, question = comparison.summary, comparison.table, comparison.question
    verdict = comparison.verdict
    return {
        "bayesify": __version__,
        "data": table.name,
        "target": table.target,
        "task": summary.task,
        "classes": list(table.classes),
        "rows": len(table),
        "seed": question.seed,
        "quick": question.quick,
        "splits": len(summary.splits),
        "unfinished": list(comparison.unfinished),
        "verdict": None if verdict is None else asdict(verdict),
        "winner": None if comparison.winner is None else asdict(comparison.winner),
        "methods": [
            {
                "name": row.name,
                "title": row.title,
                "splits": len(row.splits),
                "mean": _finite({key: value for key, value in row.means.items() if key not in TIMES}),
                "standard_error": _finite({key: value for key, value in row.errors.items() if key not in TIMES}),
                "times": _finite({key: row.means.get(key) for key in TIMES}),
                "behind_best": None if row.behind is None else row.behind.mean,
                "p": None if math.isnan(row.p) else row.p,
                "leads": row.leads,
                "failure": row.failure or None,
            }
            for row in summary.rows
        ],
        "cautions": list(table.cautions),
        "notes": list(table.notes),
    }


def as_json(comparison: Comparison) -> str:
    """The record as text."""
    return json.dumps(as_record(comparison), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
