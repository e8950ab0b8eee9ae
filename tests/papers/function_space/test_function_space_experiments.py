"""The function-space experiments run end to end on tiny problems, resume, and score by known formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bayesify_papers.function_space import fashion, scores, toy, trainings
from bayesify_papers.function_space.networks import convolutional_network

from bayesify import fit, likelihoods
from bayesify.priors import Neal, Standard


@pytest.mark.slow
def test_fashion_smoke_writes_tables_and_resumes(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke("function-space/fashion")
    assert {row["setting"]["system"] for row in done.rows} >= {"fsvi.train", "ensemble"}
    results = json.loads((done.folder / "results.json").read_text())
    assert {"fsvi", "mfvi", "map", "ensemble", "fsvi.train", "fsvi.2"} <= set(results["rows"])
    assert sum(results["histograms"]["fsvi"]["entropy_test"]) == 200
    spent = {row: results["rows"][row]["seconds"] for row in ("fsvi", "mfvi", "map", "ensemble")}
    assert min(spent.values()) > 0
    assert results["own_settings"]["mfvi"]["epochs"] == 3 * results["settings"]["epochs"]
    assert results["own_settings"]["fsvi"] == {}
    assert spent["ensemble"] == pytest.approx(
        sum(one for name, one in results["seconds"].items() if name.startswith("map-")), abs=0.06
    )
    assert fashion.main(["--smoke", "--out", str(done.folder)]) == 0
    assert ": fsvi-1" not in capsys.readouterr().out  # nothing was trained again
    with pytest.raises(FileNotFoundError, match="has no file study"):
        scores.evaluate(done.folder / "elsewhere")


def test_a_study_keeps_what_it_knew_of_earlier_systems(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    options = ["--smoke", "--no-ablation", "--out", str(tmp_path), "--systems"]
    assert fashion.main([*options, "map"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(fashion, "run_trainings", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fashion.main([*options, "mfvi"])
    assert fashion.main([*options, "mfvi"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["own_settings"]) == {"map", "mfvi"}
    assert {name.partition("-")[0] for name in results["seconds"]} == {"map", "mfvi"}
    assert results["seconds"].keys() == results["last_epoch"].keys()


def test_one_system_from_other_deviations(tmp_path: Path) -> None:
    chosen = ["--smoke", "--no-ablation", "--systems", "fsvi", "--init-std", "0.003", "--out", str(tmp_path)]
    assert fashion.main(chosen) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row.partition(".")[0] for row in results["rows"]} == {"fsvi"}
    stored = [json.loads(path.read_text())["job"] for path in (tmp_path / "jobs").glob("*.json")]
    assert {job["init_std"] for job in stored} == {results["settings"]["init_std"]} == {0.003}
    plain = fashion.plan(trainings.Training("fsvi"), 1, init_std=0.003)["mfvi-1"]
    assert plain.init_std == trainings.Training("fsvi").init_std  # of mean-field nothing changes


@pytest.mark.parametrize(("name", "scale"), [("standard", None), ("neal", 1.0), ("default", 8.0), ("decay", 10**0.5)])
def test_prior_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, scale: float | None) -> None:
    made = []

    def fitted(model: Any, *given: Any, **options: Any) -> Any:
        made.append(model)
        return fit(model, *given, **options)

    monkeypatch.setattr(trainings, "fit", fitted)
    chosen = [
        "--smoke",
        "--no-ablation",
        "--systems",
        "mfvi",
        "--prior",
        name,
        "--workers",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert fashion.main(chosen) == 0
    prior = made[0].prior
    assert getattr(prior, "scale", getattr(prior, "std", None)) == (None if scale is None else pytest.approx(scale))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["prior"] == name
    assert results["last_epoch"]["mfvi-1"]["kl"] > 0


@pytest.mark.slow
def test_mean_field_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """On images that it does not train on, from where the KL has its weight, to the best of these epochs."""
    seen: list[dict[str, Any]] = []

    def fitted(model: Any, batches: Any, **options: Any) -> Any:
        seen.append({**options, "trained": len(batches.x)})
        return fit(model, batches, **options)

    monkeypatch.setattr(trainings, "fit", fitted)
    job = trainings.Training("mfvi", dataset="synthetic", epochs=6, batch=50, widths=(4, 4, 4), kl_free=0.5, patience=1)
    given = trainings.problem(job.source, "cpu", unit=True)
    _, history = trainings.train(job, given)
    held = sum(len(x) for x, _ in seen[0]["validation"])
    assert held == len(given.x) // 10
    assert held + seen[0]["trained"] == seen[0]["num_data"] + held == len(given.x)
    assert [row["kl_weight"] for row in history][:4] == [0.0, 0.0, 0.0, 1.0]
    for other in (replace(job, system="map"), replace(job, patience=0)):
        trainings.train(other, given)
        assert seen[-1]["trained"] == len(given.x)
        assert "patience" not in seen[-1]


def test_points_of_a_mixture_are_shared() -> None:
    job = trainings.Training("fsvi", context="noise+train", points=5)
    context = trainings.make_context(job, torch.rand(10, 1, 4, 4))
    assert context.n == 5
    for wrong in ("mnist", "noise+mnist"):
        with pytest.raises(ValueError, match="; choose notmnist, noise"):
            trainings.make_context(trainings.Training("fsvi", context=wrong, points=5), torch.rand(10, 1, 4, 4))


def test_requirement_is_about_the_worst_seed() -> None:
    entry = {
        "accuracy": 0.92,
        "ece": 0.01,
        "nll": 0.2,
        "brier": 0.1,
        "auroc_entropy": 0.9,
        "auroc_mutual_information": 0.95,
    }
    met = scores.requirement({"fsvi": scores.summarize([entry])})
    assert "met by every seed" in met[0]
    bad = scores.requirement({"fsvi": scores.summarize([entry, {**entry, "ece": 0.03}])})
    assert "NOT met" in bad[0]
    assert "ece 0.030" in bad[0]


def test_networks_have_the_layers_of_the_paper() -> None:
    for widths, side in (((32, 64, 128), 28), ((64, 64, 128, 128, 256, 256, 256), 32)):
        net = convolutional_network(1, side, 10, widths)
        assert sum(isinstance(module, torch.nn.Conv2d) for module in net) == len(widths)
        assert net(torch.zeros(1, 1, side, side)).shape == (1, 10)


def test_toy_writes_results(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    done = smoke("function-space/toy")
    assert "two_moons" in done.printed
    written = json.loads((done.folder / "results.json").read_text())
    assert set(written["scores"]) == {"snelson", "two_moons"}
    assert written["regression"].startswith("synthetic")
    assert written["regression"] in done.printed


def test_ring_stays_outside() -> None:
    x = torch.rand(50, 2)
    low, high = x.amin(0), x.amax(0)
    away = ((toy.ring(x) - (low + high) / 2) / (high - low)).norm(dim=1)
    torch.testing.assert_close(away, torch.full((64,), 2.5))


@pytest.mark.parametrize(("method", "std"), [("mfvi", 1.0), ("ensemble", 10**0.5)])
def test_toy_weight_priors_are_the_paper_s(method: str, std: float) -> None:
    """Mean-field has N(0, I), and the ensemble has a weight decay of 0.1, in layers of any width."""
    bnn = toy.network(1, 1, likelihoods.Gaussian(noise=0.1), method, seed=0)
    stds = [float(torch.as_tensor(one).mean()) for one in bnn.prior.typical().std.values()]
    assert stds == pytest.approx([std] * 6)  # weights and biases of three layers


def test_toy_function_space_ignores_the_weight_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    how = toy.Schedule(epochs=5)
    found = []
    for prior in (Standard, Neal):
        monkeypatch.setattr(toy, "Standard", prior)
        found.append({method: toy.classification(method, 0, how)[0] for method in ("fsvi", "mfvi")})
    assert found[0]["fsvi"] == found[1]["fsvi"]
    assert found[0]["mfvi"] != found[1]["mfvi"]
