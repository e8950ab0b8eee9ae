"""The commands of tables 2, 7, 8 and 9 run, go on from what they stored, and compare as they say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import write_lines
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.walsh_hadamard import classification, regression, rows, shallow_regression, validation
from bayesify_papers.walsh_hadamard.stacked_training import Recipe

from bayesify.likelihoods import Categorical, Gaussian
from bayesify.predictive import Outputs


def test_published_tables_have_all_rows() -> None:
    paper = published("walsh_hadamard")
    assert paper.find("shallow", "rmse", "boston", "WHVI") == (2.56, 0.15)
    assert paper.find("shallow", "mnll", "yacht", "WHVI") == (1.28, 0.22)
    assert paper.find("deep", "rmse", "WHVI", 512, "boston") == (2.99, 0.69)
    assert paper.find("deep", "rmse", "MCD", 64, "power") is None
    assert paper.find("deep", "mnll", "MFG", 512, "power") == (3.04, 0.03)
    assert paper.find("deep", "mnll", "WHVI", 64, "yacht") == (2.56, 1.33)
    assert paper.find("classification", "error", "WHVI", "2x64", "eeg") == (0.25, 0.01)
    assert paper.find("classification", "mnll", "WHVI", "3x512", "letter") == (0.90, 0.01)
    for table in paper["deep"].values():
        assert {width for own in table.values() for width in own} == {str(width) for width in paper["widths"]}
        assert all(set(row) <= set(paper["datasets"]) for own in table.values() for row in own.values())
    assert sum(len(row) for table in paper["deep"].values() for own in table.values() for row in own.values()) == 253


def test_rows_are_scaled_by_training_rows_alone() -> None:
    data = synthetic()
    made = regression.Rows.of(data, data.splits)
    assert made.x.shape == (3, 54, 3)
    assert made.y.shape == (3, 54, 1)
    torch.testing.assert_close(made.x.mean(1), torch.zeros(3, 3), rtol=0, atol=1e-6)
    torch.testing.assert_close(made.y.std(1, correction=0), torch.ones(3, 1), rtol=0, atol=1e-6)
    split = data.splits[1]
    unit = data.y[split.train].std()
    assert made.units[1] == pytest.approx(unit)
    expected = (data.y[split.test] - data.y[split.train].mean()) / unit
    np.testing.assert_allclose(made.tests[1][1].numpy(), expected, rtol=1e-5)
    aside = regression.Rows.of(data, data.splits, validation=True)
    assert aside.x.shape[1] + aside.tests[0][0].shape[0] == 54


def test_scores_are_in_the_targets_own_unit() -> None:
    """A network whose weights do not vary: a Gaussian around its outputs, by hand in the unit of the data."""
    setting = regression.Setting("MCD", 1, 4, noise=0.5)
    network = regression.make(setting, 3, seed=0)
    torch.manual_seed(1)
    x, y, unit = torch.randn(20, 3), torch.randn(20, 1), 7.0
    object.__setattr__(network.posterior, "rate", 0.0)
    scores = regression.judge(network, x, y, unit, num_draws=2, seed=0)
    outputs = network.mean_network()(x).detach() * unit
    assert isinstance(network.likelihood, Gaussian)
    noise = torch.distributions.Normal(outputs, float(network.likelihood.noise.detach()) ** 0.5 * unit)
    for ending in ("", "_draws"):
        assert scores[f"rmse{ending}"] == pytest.approx(float((outputs - y * unit).square().mean().sqrt()), rel=1e-5)
        assert scores[f"mnll{ending}"] == pytest.approx(-float(noise.log_prob(y * unit).mean()), rel=1e-5)


def test_scores_of_single_draws_are_no_better() -> None:
    """By Jensen's inequality, against the library's mixture; of a network that drops outputs too."""
    setting = regression.Setting("WHVI", 1, 9, noise=2.0, own_unit=True, output_row=True, activation="tanh")
    network = regression.make(setting, 3, seed=0, unit=2.0)
    assert float(network.likelihood.noise.detach()) == pytest.approx(0.5)  # type: ignore[union-attr, operator]
    weight = dict(network.draw(1).weights)["2.weight"]
    assert weight.shape[-2:] == (16, 9)
    torch.manual_seed(1)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    scores = regression.judge(network, x, y, 2.0, num_draws=8, seed=0)
    assert scores["rmse"] <= scores["rmse_draws"]
    assert scores["mnll"] <= scores["mnll_draws"]
    plain = regression.make(regression.Setting("MFG", 1, 4), 3, seed=0, outputs=2)
    both = torch.randn(20, 2)
    found = regression.judge(plain, x, both, 1.0, num_draws=8, seed=0)
    prediction: Any = plain.predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert found["mnll"] == pytest.approx(-float(prediction.log_prob(both).mean()), rel=1e-5)
    assert found["rmse"] == pytest.approx(float((prediction.mean - both).square().mean().sqrt()), rel=1e-5)


def test_both_targets_of_naval_follow_from_the_order_of_rows() -> None:
    compressor = np.repeat(0.95 + 0.001 * np.arange(51), 26 * 9)[:, None]
    naval = replace(synthetic(), name="naval", X=np.zeros((11934, 1)), y=compressor)
    y = regression.both_targets(naval).y
    assert y.shape == (11934, 2)
    assert len(np.unique(y.round(3), axis=0)) == 51 * 26
    assert y[:, 1].std() == pytest.approx(0.0075)
    with pytest.raises(ValueError, match="not in the order"):
        regression.both_targets(replace(naval, y=compressor[::-1]))
    assert regression.both_targets(synthetic()).y.shape[1] == 1


def test_both_targets_of_energy_are_in_the_order_of_its_rows() -> None:
    """Mean, deviation and quartiles are those that are known of the cooling load."""
    X = np.zeros((768, 8))
    X[:, 5], X[:, 7] = np.tile([2, 3, 4, 5], 192), np.repeat([0, *[1, 2, 3, 4, 5] * 3], 48)
    energy = replace(synthetic(), name="energy", X=X, y=np.zeros((768, 1)))
    second = regression.both_targets(energy).y[:, 1]
    assert second.mean() == pytest.approx(24.58776, abs=1e-5)
    assert second.std(ddof=1) == pytest.approx(9.513306, abs=1e-6)
    assert np.quantile(second, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([10.9, 15.62, 22.08, 33.1325, 48.03])
    with pytest.raises(ValueError, match="not in the order"):
        regression.both_targets(replace(energy, X=X[::-1]))


def test_what_is_stored_of_other_settings_is_not_taken_for_these(tmp_path) -> None:
    setting = regression.Setting("MFG", 1, 4)
    first = regression.run_setting(tmp_path, synthetic(), setting, shallow_regression.SMOKE)
    assert regression.run_setting(tmp_path, synthetic(), setting, shallow_regression.SMOKE) == first
    with pytest.raises(ValueError, match="other settings"):
        regression.run_setting(tmp_path, synthetic(), setting, replace(shallow_regression.SMOKE, steps=16))
    with pytest.raises(ValueError, match="other settings"):
        regression.run_setting(tmp_path, synthetic(), setting, shallow_regression.SMOKE, splits=1)


def test_a_published_mnll_lacks_a_constant_for_each_target() -> None:
    assert regression.corrected("mnll", "power", "WHVI", (2.74, 0.03)) == (pytest.approx(2.8332), 0.03)
    assert regression.corrected("mnll", "naval", "MCD", (-9.93, 0.01)) == (pytest.approx(-9.7436), 0.01)
    assert regression.corrected("mnll", "power", "NNG", (2.78, 0.01)) == (2.78, 0.01)
    assert regression.corrected("rmse", "power", "WHVI", (4.11, 0.12)) == (4.11, 0.12)
    assert np.log(2 * np.pi) / 2 - np.log2(np.pi) / 2 == pytest.approx(0.0932, abs=5e-5)


def test_a_smaller_g_is_the_same_network() -> None:
    made = [
        regression.make(regression.Setting("WHVI", 1, 9, point_biases=True, shrink=shrink), 3, seed=0).double()
        for shrink in (1.0, 25.0)
    ]
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = (network.draw(3, generator=torch.Generator().manual_seed(1)) for network in made)
    torch.testing.assert_close(first(x), second(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.kl, second.kl, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="shrink=2"):
        regression.Setting("MFG", 1, 9, shrink=2)


def test_stored_runs_of_noisy_natural_gradient_name_the_settings_that_they_used() -> None:
    folder = Path(__file__).parents[3] / "papers" / "results" / "walsh_hadamard"
    found = [json.loads(path.read_text())["recipe"] for path in sorted(folder.glob("**/*-nng-*.json"))]
    assert len(found) >= 9
    for stored in found:
        recipe = Recipe(steps=stored["steps"] - Recipe.fixed_noise_steps, batch=stored["batch"])
        assert stored == regression.used_settings("NNG", recipe)


@pytest.mark.slow
def test_noisy_natural_gradient_resumes_after_the_last_finished_split(tmp_path: Path, monkeypatch: Any) -> None:
    setting, judge = regression.Setting("NNG", 1, 4), regression.judge
    whole = regression.run_setting(tmp_path / "whole", synthetic(), setting, shallow_regression.SMOKE)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(regression, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regression.run_setting(tmp_path, synthetic(), setting, shallow_regression.SMOKE)
    kept = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert kept == [f"synthetic-nng-1x4-split{index}.safetensors" for index in range(3)]
    monkeypatch.setattr(regression, "judge", judge)
    monkeypatch.setattr(regression.NoisyKFAC, "_step", interrupted)
    assert regression.run_setting(tmp_path, synthetic(), setting, shallow_regression.SMOKE) == whole
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_authors_settings_are_for_whvi_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shallow_regression.main(["--smoke", "--faithful", "--models", "MFG"])
    assert "use --models WHVI" in capsys.readouterr().err


@pytest.mark.slow
def test_table_2_goes_on_from_what_is_stored(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke("walsh-hadamard/table2")
    tmp_path, first = done.folder, done.printed
    assert "step 20 of 20" in first
    assert "synthetic" in first
    stored = [json.loads(line) for line in (tmp_path / "synthetic-whvi-1x50.jsonl").read_text().splitlines()]
    assert [line["split"] for line in stored] == [0, 1, 2]
    facts = json.loads((tmp_path / "synthetic-whvi-1x50.json").read_text())
    assert facts["command"].endswith(f"--smoke --out {tmp_path}")
    assert facts["recipe"]["steps"] == 15
    assert not list(tmp_path.glob("*.safetensors"))
    assert shallow_regression.main(["--smoke", "--out", str(tmp_path)]) == 0
    second = capsys.readouterr().out
    assert "step" not in second
    assert second in first
    assert shallow_regression.main(["--table", "--out", str(tmp_path)]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(second.split())


def test_settings_follow_the_paper() -> None:
    assert shallow_regression.setting("protein", "WHVI").width == 100
    assert shallow_regression.setting("boston", "WHVI").width == 50
    recipe = Recipe()
    assert (recipe.fixed_noise_steps, recipe.steps, recipe.batch) == (500, 50_000, 64)


def test_tables_7_and_8(smoke: Any, tmp_path: Path) -> None:
    assert {row["setting"]["width"] for row in smoke("walsh-hadamard/deep").rows} == {64, 256}
    outcome = {
        "dataset": "yacht",
        "model": "WHVI",
        "hidden_layers": 2,
        "width": 64,
        "split": 0,
        "rmse": 0.9,
        "mnll": 2.0,
    }
    write_lines(tmp_path / "one" / "yacht.jsonl", [outcome])
    rmse, mnll = rows.deep(tmp_path / "one")
    assert (rmse["published"], rmse["published_std"]) == (0.82, 0.18)
    assert rmse["deviations"] == pytest.approx(0.08 / 0.18)
    assert mnll["published"] == pytest.approx(2.56 + 0.0932)


def test_table_9(smoke: Any, tmp_path: Path) -> None:
    done = smoke("walsh-hadamard/table9")
    assert {row["setting"]["hidden_layers"] for row in done.rows} == {2, 3}
    assert classification.main(["--table", "--out", str(done.folder)]) == 0
    outcome = {
        "dataset": "magic",
        "model": "WHVI",
        "hidden_layers": 2,
        "width": 64,
        "split": 0,
        "error": 0.15,
        "mnll": 0.36,
    }
    write_lines(tmp_path / "one" / "magic.jsonl", [outcome])
    assert rows.table9(tmp_path / "one")[1]["deviations"] == pytest.approx(2.0)


def test_classes_are_scored_by_the_mixture_and_by_single_draws() -> None:
    """The error and `mnll` are the scores of the mixture."""
    outputs = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    scores = classification.judge(Categorical().predictive(Outputs(kept=outputs)), labels)
    chosen = outputs.softmax(-1)[:, torch.arange(6), labels]
    assert scores["mnll"] == pytest.approx(-float(chosen.mean(0).log().mean()), rel=1e-5)
    assert scores["mnll_draws"] == pytest.approx(-float(chosen.log().mean()), rel=1e-5)
    assert scores["mnll"] < scores["mnll_draws"]
    assert scores["error"] == float((outputs.softmax(-1).mean(0).argmax(-1) != labels).double().mean())


def test_spikes_are_cut() -> None:
    generator = np.random.default_rng(0)
    train, test = generator.normal(size=(500, 2)), generator.normal(size=(50, 2))
    train[3, 0] = 1e6
    scaled, _ = classification.scaled(train, test, cut=True)
    assert scaled[:, 0].abs().max() < 6
    untouched, _ = classification.scaled(train, test, cut=False)
    assert untouched[3, 0] > 20


def test_candidates_are_compared_on_rows_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--smoke", "--point-biases", "--scales", "1", "2", "--out", str(tmp_path)]
    assert validation.main(arguments) == 0
    assert "point estimates" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    outcomes = json.loads(path.read_text())["outcomes"]
    assert [one["init_scale"] for one in outcomes] == [1.0, 2.0]
    assert all(one["point_biases"] and np.isfinite(one["mnll"]) for one in outcomes)
