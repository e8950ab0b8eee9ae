"""The experiments with global inducing points run on tiny problems, go on where they stopped, and judge as they say."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bayesify_papers.global_inducing import cifar, composition, cubic, deep_linear, uci
from bayesify_papers.global_inducing.networks import Design, make, stack
from bayesify_papers.shared.published import published
from bayesify_papers.shared.regressions import synthetic

from bayesify.datasets import toy

ROOT = Path(__file__).parents[3]


def test_cubic_smoke_writes_results_and_goes_on(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyro")
    done = smoke("global-inducing/cubic")
    assert len(done.rows) > 3
    path = done.folder / "results.json"
    written = json.loads(path.read_text())
    scores = written["scores"]
    assert set(scores) == {"fac", "li", "gi", "HMC", "NUTS"}
    assert len(scores["gi"]["0"]["std"]) == 200
    assert (done.folder / "cubic.png").is_file()
    before = scores.pop("gi")
    path.write_text(json.dumps(written))
    assert cubic.main(["--smoke", "--out", str(done.folder)]) == 0
    assert capsys.readouterr().out.count(": done") == 1
    assert json.loads(path.read_text())["scores"]["gi"] == before


def test_composition_smoke_and_independence(smoke: Any) -> None:
    """Local inducing points of a process lose nothing where layers are mixed: their conditionals are the same for all draws."""
    scores = json.loads((smoke("global-inducing/composition").folder / "results.json").read_text())["scores"]
    assert scores["dgp-dsvi"]["0"]["mixing_costs"] == [0]
    assert scores["dgp-gi"]["0"]["mixing_costs"][0] != 0
    assert [len(scores[name]["0"]["mixing_costs"]) for name in ("gi-5", "fac")] == [2, 2]
    assert all(0 <= share <= 1 for own in scores.values() for share in own["0"]["shares"])


def test_layers_that_compensate_lose_where_they_are_mixed() -> None:
    """f = (1 / a) relu(a x) is x for every draw a > 0; with another draw's 1 / b the error is (a / b - 1) x."""
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0])
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
    zeros = torch.zeros(4, 1)
    weights = {"0.weight": scales.view(4, 1, 1), "0.bias": zeros, "2.weight": 1 / scales.view(4, 1, 1), "2.bias": zeros}
    model: Any = SimpleNamespace(draw=lambda *_, **__: SimpleNamespace(weights=weights), mean_network=lambda: net)
    x = torch.linspace(0.1, 1, 7).unsqueeze(1)
    found = composition.network_layers(model, x, x, 0.5, 4)
    errors = (scales / scales.roll(1) - 1)[:, None] * x[:, 0]
    assert found["mixing_costs"] == [pytest.approx(float(errors.square().mean()) / (2 * 0.5), rel=1e-5)]
    assert found["shares"][1] == pytest.approx(0, abs=1e-6)
    hidden = scales[:, None] * x[:, 0]
    assert found["shares"][0] == pytest.approx(float(hidden.var(0, correction=0).mean() / hidden.var(correction=0)))


def test_layer_values_are_those_of_draws() -> None:
    x, y = torch.randn(6, 1), torch.randn(6, 1)
    model = make(Design((1, 4, 4, 1), ("gi",) * 3, points=3), x, y, 0.1)
    draws = model.draw(5, generator=torch.Generator().manual_seed(0))
    values = composition.layer_values(model.mean_network(), draws.weights, x)
    assert [tuple(one.shape) for one in values] == [(5, 6, 4), (5, 6, 4), (5, 6, 1)]
    assert torch.allclose(values[-1], draws(x), atol=1e-5)


def test_cubic_is_judged_by_the_worst_seed() -> None:
    def made(*spreads: float) -> dict[str, dict[str, float]]:
        return {str(seed): {"gap_std": spread, "data_std": 0.1} for seed, spread in enumerate(spreads)}

    lines = cubic.requirement({"fac": made(0.2, 0.1), "gi": made(0.32, 0.2), "NUTS": made(0.5, 0.5)})
    assert lines == [
        "gi / NUTS in the gap, at least 0.5: NOT met by all 2 seeds (0.64, 0.40)",
        "gi / fac in the gap, at least 1.5: met by all 2 seeds (1.60, 2.00)",
    ]


@pytest.mark.slow
def test_deep_linear_smoke(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke("global-inducing/deep-linear")
    assert len(done.rows) > 3
    assert deep_linear.main(["--smoke", "--out", str(done.folder)]) == 0
    assert (done.printed + capsys.readouterr().out).count("rand-gi, width 4, depth 3") == 1
    results = json.loads((done.folder / "results.json").read_text())
    # One regression on a tenth of the inputs, with their weight: a few nats below the evidence at once.
    assert results["evidence"] - 20 < results["bounds"]["gi-4-1"]["elbo"] < results["evidence"] + 1
    assert (done.folder / "deep_linear.png").is_file()


def test_compressed_rows_have_the_likelihood_of_all() -> None:
    data = toy.linear(40, 3, noise=0.3)
    x, y, constant = deep_linear.compress(data.x.double(), data.y.double(), 0.3)
    weight = torch.randn(3, 1, dtype=torch.float64)

    def log_density(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(torch.distributions.Normal(inputs @ weight, 0.3**0.5).log_prob(targets).sum())

    assert log_density(x, y) + constant == pytest.approx(log_density(data.x.double(), data.y.double()), rel=1e-10)


def test_deep_linear_compares_losses() -> None:
    bounds = {"gi-50-1": -300.0, "gi-50-10": -304.0, "fac-50-1": -300.0, "fac-50-10": -400.0}
    found = {key: {"elbo": value} for key, value in bounds.items()}
    assert deep_linear.requirement(found).endswith(": met")
    assert deep_linear.requirement({**found, "gi-50-10": {"elbo": -306.0}}).endswith("NOT met")
    assert deep_linear.requirement({}) == ""
    assert deep_linear.kinds("rand-gi", 3) == ("rand", "rand", "gi")
    assert deep_linear.kinds("li", 2) == ("li", "li")


def test_deep_linear_keeps_bounds_with_as_many_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented commands keep all bounds that we published. More draws replace a bound, fewer draws do not."""
    made: list[int] = []

    def fit(*arguments: Any) -> dict[str, Any]:
        made.append(arguments[5])
        return {"elbo": -1.0, "draws": arguments[5]}

    monkeypatch.setattr(deep_linear, "fit", fit)
    monkeypatch.setattr(deep_linear.figures, "HAS_MATPLOTLIB", False)
    shutil.copy(ROOT / "papers/results/global_inducing/deep_linear/results.json", tmp_path)
    several = ["--widths", "5", "50", "--depths", "1", "4", "10", "--methods", "gi", "rand-gi", "fac", "li"]
    precise = [
        "--widths",
        "50",
        "--depths",
        "10",
        "4",
        "--methods",
        "rand-gi",
        "gi-continued",
        "gi",
        "--draws",
        "10000",
    ]
    for options in (several, precise, several):
        assert deep_linear.main([*options, "--out", str(tmp_path)]) == 0
    assert made == []
    for draws in ("2000", "3000", "2000"):
        one = ["--widths", "5", "--depths", "1", "--methods", "gi", "--draws", draws, "--out", str(tmp_path)]
        assert deep_linear.main(one) == 0
    assert made == [2000, 3000]


def test_uci_smoke_runs_every_model_once(smoke: Any) -> None:
    done = smoke("global-inducing/uci")
    assert len(done.rows) > 3
    times = {path: path.stat().st_mtime_ns for path in done.folder.glob("*.json")}
    assert len(times) == len(uci.MODELS) + 4
    assert uci.main(["--smoke", "--out", str(done.folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in done.folder.glob("*.json")} == times
    assert "dgp5-dsvi" in done.printed
    for other in (["--splits", "1"], ["--points", "7"], ["--start", "network"], ["--hidden-precision", "3"]):
        with pytest.raises(ValueError, match="was written with other settings"):
            uci.main(["--smoke", *other, "--out", str(done.folder)])


def test_uci_networks_have_the_inducing_inputs_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def seen(design: Any, *others: Any, **more: Any) -> Any:
        made.append(design)
        return stack(design, *others, **more)

    monkeypatch.setattr(uci, "stack", seen)
    schedule = uci.Schedule(steps=2, batch=16)
    uci.run_networks(
        synthetic(splits=2), "gi", "scale", schedule, num_draws=10, hidden_precision=3.0, start="network", points=7
    )
    assert (made[0].points, made[0].hidden_precision, made[0].start) == (7, 3.0, "network")


def test_a_start_at_a_network_has_its_outputs_as_pseudo_outputs() -> None:
    design = Design((3, 5, 4, 1), ("gi",) * 3, points=20, hidden_precision=1e6, start="network")
    bnn = make(design, torch.randn(30, 3), torch.randn(30, 1), 0.1)
    one, other = (bnn.draw(1, generator=torch.Generator().manual_seed(seed)).weights for seed in (0, 1))
    for name in ("0.weight", "2.weight"):  # at this precision hidden layers are those of one network
        torch.testing.assert_close(one[name], other[name], rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="start='other'"):
        Design((3, 1), ("gi",), start="other")


def test_uci_numbers_are_in_the_target_s_unit() -> None:
    data = synthetic(splits=2)
    (x, y), (x_test, _), units = uci.stack_splits(data)
    split = data.splits[1]
    assert x.shape == (2, 54, 3)
    assert x_test.shape == (2, 6, 3)
    assert float(units[1]) == pytest.approx(float(data.y[split.train].std()))
    assert float(y[1].std(unbiased=False)) == pytest.approx(1.0, rel=1e-5)


def test_uci_compares_bounds_and_likelihoods() -> None:
    def job(model: str, elbo: list[float], likelihood: list[float]) -> dict[str, Any]:
        scores = {"elbo": elbo, "log_likelihood": likelihood, "rmse": [1.0, 1.0]}
        return {"dataset": "yacht", "model": model, "prior": "scale", "scores": scores}

    found = [job("fac", [-1.0, -1.2], [-0.5, -0.7]), job("gi", [-0.9, -1.1], [-0.55, -0.75])]
    (line,) = uci.compare(found)
    assert "is higher than fac's by 0.100" in line
    assert "no worse within a standard error (-0.050, standard error 0.100)" in line
    (line,) = uci.compare([found[0], job("gi", [-1.9, -1.1], [-0.75, -0.95])])
    assert "NOT higher" in line
    assert "WORSE" in line
    assert uci.compare(found[:1]) == []


@pytest.mark.slow
def test_cifar_smoke_trains_every_system_and_keeps_results(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke("global-inducing/cifar10")
    assert len(done.rows) > 3
    assert cifar.main(["--smoke", "--out", str(done.folder)]) == 0
    printed = capsys.readouterr().out
    assert "epoch" not in printed.replace("epochs", "")
    scores = json.loads((done.folder / "results.json").read_text())["scores"]
    assert set(scores) == {f"{system}_spatial" for system in cifar.SYSTEMS}
    assert not list(done.folder.glob("*.safetensors"))


def test_cifar_trains_on_after_its_checkpoint_was_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[bool] = []

    def run(*arguments: Any) -> dict[str, Any]:
        trained.append(arguments[-1])
        scores = dict.fromkeys(("log_likelihood", "accuracy", "elbo", "ece", "seconds"), 0.5)
        return {**scores, "epochs": arguments[3].epochs if trained[-1] else 1}

    monkeypatch.setattr(cifar, "run", run)
    for options in (["--no-train"], [], []):
        assert cifar.main(["--smoke", *options, "--out", str(tmp_path)]) == 0
    assert trained == [False] * len(cifar.SYSTEMS) + [True] * len(cifar.SYSTEMS)


@pytest.mark.slow
def test_cifar_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cifar.images.synthetic(20, 10, side=8)
    setting = cifar.Setting(epochs=3, points=4, batch=10, width=4, passes=1, stored=1, draws=2)
    whole = cifar.run("gi", "scale", data, setting, tmp_path / "whole")
    seen: list[str] = []

    def stop(text: str, **_: Any) -> None:
        seen.append(text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop)
    with pytest.raises(KeyboardInterrupt):
        cifar.run("gi", "scale", data, setting, tmp_path / "cut")
    again = cifar.run("gi", "scale", data, setting, tmp_path / "cut")
    assert len(seen) in (3, 4)  # told of the second epoch again if the checkpoint is of the first
    assert again["elbo"] == whole["elbo"]
    assert [row["nll"] for row in again["history"]] == [row["nll"] for row in whole["history"]]


def test_published_numbers_are_of_table_1() -> None:
    assert published("global_inducing")["cifar10"]["gi"]["spatial"] == (-0.40, 86.70, -0.68)
    assert set(published("global_inducing")["cifar10"]) == set(cifar.SYSTEMS)
    assert cifar.Setting().epochs == 1000
    rates = [cifar.rate(share) for share in (0.0, 0.699, 0.7, 0.85, 1.0)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.02**0.5, 0.02])
    weights = [cifar.kl_weight(epoch / 100) for epoch in (0, 9, 10, 55, 99, 100, 999)]
    assert weights == pytest.approx([0, 0, 0.1, 0.5, 0.9, 1, 1])
    x, y = torch.rand(20, 3, 8, 8), torch.arange(20) % 10
    bnn = cifar.make("gi", "spatial", x, y, cifar.Setting(points=5, width=4))
    assert not any("bias" in name for name in bnn.draw(1).weights if not name.startswith(cifar.LAST_LAYER))
    starts = {float(value.detach().mean()) for name, value in bnn.named_parameters() if "log_precision" in name}
    assert sorted(starts) == pytest.approx([-4.0, 0.0])
