"""The two-cluster regression: its settings are the paper's, it runs, and it trains without luck."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from bayesify_papers.inducing_weights import regression

from bayesify.datasets import toy
from bayesify.weights.catalog import count_parameters


def test_inducing_sizes_are_the_papers():
    """25 x 2 for the input layer, its bias counted, and 1 x 25 for the output layer (appendix J.1)."""
    first = 25 * 50 + 2 * 2 + 25 + 2 + 1 + 2 * 25 * 2
    second = 1 * 1 + 25 * 51 + 1 + 25 + 1 + 2 * 1 * 25
    assert count_parameters(regression.make("FFG-U", 0)) == first + second
    assert count_parameters(regression.make("Ensemble-U", 0)) == first + second + (8 - 2) * (25 * 2 + 1 * 25)


def test_members_start_a_tenth_apart_as_in_appendix_j():
    (first, second) = regression.make("Ensemble-U", 0).posteriors[0].inducing
    spread = torch.cat([family.value.var(0, correction=0).flatten() for family in (first, second)])
    assert spread.mean().sqrt().item() == pytest.approx(0.1, rel=0.15)


def test_prior_is_four_over_the_root_of_the_inputs():
    std = regression.make("FFG-W", 0).prior.draw(1).std
    assert std["0.weight"] == std["0.bias"] == 4.0
    assert std["2.weight"] == std["2.bias"] == pytest.approx(4 / 50**0.5)
    std = regression.make("FCG-W", 0, count_bias=True).prior.draw(1).std
    assert std["0.weight"] == std["0.bias"] == pytest.approx(4 / 2**0.5)
    assert std["2.weight"] == std["2.bias"] == pytest.approx(4 / 51**0.5)


@pytest.mark.slow
def test_smoke(smoke):
    pytest.importorskip("pyro")
    systems = [*regression.SYSTEMS, regression.REFERENCE_SYSTEM]
    done = smoke("inducing-weights/regression")
    written = json.loads((done.folder / "regression.json").read_text())
    assert [outcome["system"] for outcome in written["outcomes"]] == systems
    assert written["command"].startswith("python -m bayesify_papers")
    assert "no numbers" in done.printed
    assert all(system in done.printed for system in systems)


def test_figure_has_a_panel_per_system(tmp_path):
    pytest.importorskip("matplotlib")
    data, training = toy.cosine(), regression.SMOKE
    panels = {name: regression.predictors("FFG-W", data, training, [0])[0] for name in ("one", "two", "three", "four")}
    regression.figure(panels, data, tmp_path / "figure")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    text = (tmp_path / "figure.svg").read_text()
    assert text.count("fill-opacity") + text.count("opacity: 0.25") >= 12  # three bands in each of four panels


def test_a_run_goes_on_where_it_ended(tmp_path):
    """What is stored is not trained again; another schedule in the same folder is refused."""
    training = replace(regression.SMOKE, steps=2, cosine=False)
    first = regression.run(["FFG-W"], 1, training, tmp_path)
    both = regression.run(["FFG-W"], 2, training, tmp_path)
    assert [outcome["seed"] for outcome in both] == [0, 1]
    assert both[0] == first[0]
    with pytest.raises(ValueError, match="other settings"):
        regression.run(["FFG-W"], 2, regression.SMOKE, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("system", ["FFG-U", "Ensemble-U"])
def test_trains_without_luck(system, tmp_path):
    """Five seeds, the settings of the experiment: every test NLL within 0.05 nats of the median, far from a bad fit."""
    outcomes = regression.run([system], 5, regression.Training(), tmp_path)
    nlls = [outcome["nll"] for outcome in outcomes]
    median = statistics.median(nlls)
    assert median < -0.6  # a constant has +10, a deterministic fit about -0.75, the noise alone -0.88
    assert all(abs(nll - median) < 0.05 for nll in nlls)
