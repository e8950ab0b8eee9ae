import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bayesify_papers.catalog import CATALOG
from bayesify_papers.command import reproduce
from bayesify_papers.shared.figures import HAS_MATPLOTLIB

from bayesify import BayesianNetwork

MAX_DRAWS = 4
"""Draws of a prediction in a quick run; figures ask for up to 200."""
KEYS = {"experiment", "part", "setting", "metric", "runs", "ours", "error", "published", "published_std"}


@dataclass
class Smoke:
    """What a quick run left: its folder, what it printed, its rows."""

    folder: Path
    printed: str
    rows: list[dict[str, Any]]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let `fit` keep only four draws of networks with BatchNorm, because keeping 32 takes longer than the few steps of a test.

    Slow tests train for real and predict with more draws, so they keep the library's own number.
    """
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("bayesify.training.batch_statistics.DEFAULT_NUM_DRAWS", MAX_DRAWS)
        monkeypatch.setattr("bayesify.training.batch_statistics.MIN_DRAWS", MAX_DRAWS)


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Smoke]:
    """The quick run of an experiment, by the way of `bayesify reproduce`; each is run by one test only.

    Its figures are not laid out, which takes more than half of a second for each, and drawn as PNG only; tests of figures do
    the rest. Predictions take few draws.
    """
    predict = BayesianNetwork.predict

    def predict_by_few(bnn: BayesianNetwork, x: Any, num_draws: int | None = None, **options: Any) -> Any:
        return predict(bnn, x, min(num_draws or MAX_DRAWS, MAX_DRAWS), **options)

    monkeypatch.setattr(BayesianNetwork, "predict", predict_by_few)
    if HAS_MATPLOTLIB:
        from matplotlib.figure import Figure

        draw = Figure.savefig

        def draw_once(figure: Figure, path: Any, **options: Any) -> None:
            if Path(path).suffix == ".svg":
                Path(path).write_text("<svg/>")
            else:
                draw(figure, path, **options)

        monkeypatch.setattr(Figure, "savefig", draw_once)
        monkeypatch.setattr("matplotlib.figure.Figure.set_layout_engine", lambda *_, **__: None)

    def run(name: str) -> Smoke:
        rows = reproduce([CATALOG[name]], tmp_path, smoke=True)
        assert rows == [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        assert rows
        for row in rows:
            assert set(row) >= KEYS
            assert row["experiment"] == name
            assert math.isfinite(row["ours"]), row
        return Smoke(tmp_path / name, (tmp_path / name / "log.txt").read_text(), rows)

    return run
