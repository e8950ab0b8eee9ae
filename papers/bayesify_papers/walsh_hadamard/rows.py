"""Results of the experiments as rows, next to the published numbers. Each reader takes the folder that an experiment wrote."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bayesify_papers.shared.published import Score, published
from bayesify_papers.shared.records import read, read_lines
from bayesify_papers.shared.rows import Published, Row, grouped
from bayesify_papers.walsh_hadamard.regression import corrected

PAPER = published("walsh_hadamard")
NETWORK_COLUMNS = ("dataset", "model", "hidden_layers", "width")
REGRESSION_SCORES = ("rmse", "mnll", "rmse_draws", "mnll_draws")
"""Scores of regressions. The last two are over single draws, as the authors compute them."""


def _splits(folder: Path) -> list[dict[str, Any]]:
    return read_lines(*(path for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith("-validation")))


def table2(folder: Path) -> list[Row]:
    """Table 2: one hidden layer, with the published MNLLs corrected."""
    return _regressions(folder, lambda score, own: PAPER.find("shallow", score, own["dataset"], own["model"]))


def deep(folder: Path) -> list[Row]:
    """Tables 7 and 8: two hidden layers, with the published MNLLs corrected."""
    return _regressions(
        folder, lambda score, own: PAPER.find("deep", score, own["model"], own["width"], own["dataset"])
    )


def _regressions(folder: Path, find: Callable[[str, Mapping[str, Any]], Score | None]) -> list[Row]:
    """Rows of splits."""

    def published_score(metric: str, own: Mapping[str, Any]) -> Published:
        return corrected(metric, own["dataset"], own["model"], find(metric.removesuffix("_draws"), own))

    return grouped(_splits(folder), NETWORK_COLUMNS, REGRESSION_SCORES, published_score)


def table9(folder: Path) -> list[Row]:
    """Table 9: classification."""

    def find(metric: str, own: Mapping[str, Any]) -> Published:
        shape, name = f"{own['hidden_layers']}x{own['width']}", metric.removesuffix("_draws")
        found: Published = PAPER.find("classification", name, own["model"], shape, own["dataset"])
        return found

    return grouped(_splits(folder), NETWORK_COLUMNS, ("error", "mnll", "mnll_draws"), find)


def approximability(folder: Path) -> list[Row]:
    """Distances of random matrices to the family, which the paper shows in a figure."""
    return grouped(read(folder / "approximability.json")["rows"], ["size"], ["median", "zero_matrix"])


def random_features(folder: Path) -> list[Row]:
    """Gaussian processes by random features, which the paper shows in a figure."""
    keys = ("function", "system", "covariance", "block", "parameters")
    return grouped(read(folder / "random_features.json")["rows"], keys, ["rmse", "nll"])


def transform_time(folder: Path) -> list[Row]:
    """Time of the transform divided by the time of a dense product, which the paper shows in a figure."""
    found = grouped(read(folder / "transform_time.json")["rows"], ("by", "size", "batch"), ["ratio"])
    return [{**one, "timing": True} for one in found]
