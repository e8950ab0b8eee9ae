"""A small version of the benchmark of distances from exact posteriors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesify.baselines.microcanonical import sampler_of
from bayesify.conversion import bayesianize
from bayesify.posteriors import Ensemble
from bayesify.predictor import Batch
from benchmarks import truth
from benchmarks.truth_densities import slope_of
from benchmarks.truth_distances import distances, floors
from benchmarks.truth_problems import PROBLEMS

HERE = {"gap", "heteroscedastic", "extrapolation", "small_noise", "moons", "process", "linear"}
"""Problems that need no file."""


@pytest.mark.slow
def test_chains_of_a_problem_meet_its_closed_form_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the floor: the chains have a quarter of the draws, and their error is twice as large."""
    problem = PROBLEMS["linear"]()
    monkeypatch.setattr(truth, "POINT_EPOCHS", 60)
    chains = truth.Part(problem, 0, tmp_path, members=6, warmup=9)
    for _ in range(30):
        chains.advance()
    chains.write()
    exact = problem.exact(truth.STORED_DRAWS)
    found = torch.stack(chains.functions).flatten(0, 1)
    limits = floors(problem, exact)
    for name, value in distances(problem, found, exact, exact[:100]).items():
        assert value < 3 * limits[name] + 0.02, name
    again = truth.Part(problem, 0, tmp_path, members=6)
    assert len(again.functions) == 30
    chains.advance()
    again.advance()
    assert torch.equal(chains.functions[-1], again.functions[-1])
    told = truth.diagnose(problem, *truth.joined("linear", tmp_path))
    assert told["chains"] == 6
    assert told["r_hat"] < 1.3


@pytest.mark.slow
def test_rows_of_exact_and_other_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "STORED_DRAWS", 200)
    truth.collect(tmp_path, ["linear"], tmp_path)
    assert set(np.load(tmp_path / "linear.npz")) == {"functions", "diagnostics"}
    for place in ("laplace", "point"):
        row = truth.stored_row("linear", place, 0, 250, tmp_path, tmp_path, float("inf"))
        assert row == json.loads((tmp_path / "rows" / f"linear-{place}-0.json").read_text())
        assert {"problem", "method", "seed", "seconds", "distances", "floors"} <= row.keys()
        assert row["distances"].keys() == row["floors"].keys()
        ratios = [row["distances"][name] / floor for name, floor in row["floors"].items()]
        assert max(ratios) < 2 if place == "laplace" else min(ratios) > 1


@pytest.mark.parametrize("name", sorted(HERE))
def test_problems_are_whole(name: str) -> None:
    problem = PROBLEMS[name]()
    assert problem.name == name
    outputs = problem.network(0)(problem.inputs)
    assert len(outputs) == len(problem.inside) == len(problem.inputs)
    assert 0 < int(problem.inside.sum()) < len(problem.inputs)
    assert torch.isfinite(problem.likelihood.log_prob(problem.network(0)(problem.x), problem.y)).all()


def test_a_distribution_has_no_distance_from_itself() -> None:
    for name in ("gap", "moons", "heteroscedastic"):
        problem = PROBLEMS[name]()
        draws = torch.randn(40, *problem.network(0)(problem.inputs).shape, generator=torch.Generator().manual_seed(0))
        same = distances(problem, draws, draws, draws)
        assert all(abs(value) < 1e-9 for value in same.values())
        moved = distances(problem, draws + torch.tensor([1.0, 0.0])[: draws.shape[-1]], draws, draws)
        assert moved["wasserstein"] == pytest.approx(1.0, abs=0.02) if name == "gap" else moved["wasserstein"] > 0.05


def test_all_methods_but_references_compete() -> None:
    assert len(truth.competitors()) >= 16
    assert not {"hmc", "microcanonical"} & set(truth.competitors())


def test_the_page_is_that_of_the_results() -> None:
    from tools.truth_page import PAGE, page

    text = PAGE.read_text()
    assert page(text) == text, "run python -m tools.truth_page"


def test_figures_and_table_of_some_rows() -> None:
    from tools.truth_page import contents, heat_map, times

    near, far = {"wasserstein": 0.5, "correlation": 1.0}, {"wasserstein": 5.0, "correlation": 10.0}
    facts = {
        "problem": "linear",
        "seed": 0,
        "seconds": 2.0,
        "floors": {"wasserstein": 0.5, "correlation": 1.0},
        "spread": {"inside": 1.0, "outside": 0.5},
    }
    rows = [
        {**facts, "method": "laplace", "apart": False, "distances": near},
        {**facts, "method": "point", "apart": False, "distances": far},
    ]
    rows.append({**facts, "method": "deep_gp", "apart": True, "distances": near})
    rows.append({**facts, "method": "nng", "apart": False, "distances": {}, "note": "ValueError: no"})
    truths = {"linear": {"closed_form": True, "proven": True, "seconds": 0.0}}
    text = contents({"rows": rows, "truths": truths, "command": "run"})
    assert "| `laplace` | 1.0 | 1.0 | 1.0 | 1.00 | 0.50 |" in text
    assert "| `point` | 10.0 | 10.0 | 10.0 |" in text
    assert text.index("`point`") < text.index("| `deep_gp` | apart |")
    assert "The ranking uses" not in text
    partly = contents({"rows": [*rows, {**rows[0], "problem": "gap"}], "truths": truths})
    assert "The ranking uses the 1 problems on which all ranked methods were run: linear." in partly
    assert "These runs ended with an error: `nng` on linear (`ValueError: no`)." in text
    for figure in (heat_map(rows[:3]), times(rows[:3])):
        assert figure.startswith("<svg")
        assert "laplace" in figure


@pytest.mark.parametrize("name", sorted(HERE))
def test_densities_written_out_are_those_of_the_sampler(name: str) -> None:
    problem = PROBLEMS[name]()
    bnn = bayesianize(problem.make(), Ensemble(3), likelihood=problem.likelihood, prior=problem.prior)
    sampler, _ = sampler_of(bnn, Batch(problem.x, problem.y), seed=0)
    positions = 0.5 * torch.randn(sampler.position.shape, generator=torch.Generator().manual_seed(0))
    (density, slope), (other, wanted) = slope_of(problem, sampler.scale)(positions), sampler.slope(positions)
    torch.testing.assert_close(density - density[0], other - other[0], rtol=1e-4, atol=0.02)
    torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
