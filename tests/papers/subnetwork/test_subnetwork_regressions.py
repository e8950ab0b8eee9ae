"""The regressions of subnetwork inference: their settings are the paper's, they run, they resume, and their numbers are right."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.subnetwork import map_regression, toy, uci

from bayesify.datasets import Standardization

DATA = toy.load("cosine")


def test_toy_has_the_papers_sizes():
    net = map_regression.make(1, toy.HIDDEN_LAYERS, toy.WIDTH, 0)
    assert map_regression.freeze_biases(net) == 2600
    made = toy.systems(2600, 0, torch.ones(2600), torch.ones(2600))
    sizes = [int(title.rpartition("(")[2][:-1]) for title in made]
    assert sizes == [2600, 50, 2600, *[1300, 78, 26] * 4]


def test_live_weights_leave_out_what_the_data_do_not_reach():
    curvature = torch.rand(100) + 0.1
    curvature[:40] = 0
    moved = torch.rand(100)
    made = toy.systems(100, 0, curvature, moved)
    chosen = made["Live weights 50% (50)"]["subset"].find.keywords["indices"]
    assert int(chosen.min()) >= 40
    assert set(chosen.tolist()) == set((curvature[40:].argsort()[:50] + 40).tolist())
    swag = made["SWAG variance 3% (3)"]["subset"].find.keywords["indices"]
    assert set(swag.tolist()) == set(moved.topk(3).indices.tolist())


@pytest.fixture
def narrow(monkeypatch):
    """The toy's network with 440 weights: matrices of 2,600 take most of the time, and prove no more."""
    monkeypatch.setattr(toy, "WIDTH", 20)


def test_toy_predictions_share_their_mean_and_full_is_widest(narrow):
    panels = toy.predictors(DATA, replace(toy.SMOKE, epochs=60), 0)
    means = [predict(DATA.grid).mean for predict in panels.values()]
    for mean in means:
        assert torch.allclose(mean, means[0], atol=1e-5)
    spread = {title: predict(DATA.grid).epistemic for title, predict in panels.items()}
    assert float(spread["MAP (0)"].abs().max()) == 0
    for title, variance in spread.items():
        if title.startswith(
            ("Largest", "Live", "SWAG", "Random")
        ):  # a part's conditional covariance is below the whole's marginal
            assert bool((variance <= spread["Full (440)"] * (1 + 1e-3) + 1e-5).all()), title


@pytest.mark.slow
def test_toy_smoke_and_resume(smoke, narrow, capsys):
    done = smoke("subnetwork/toy")
    first = json.loads((done.folder / "toy.json").read_text())
    assert len(first["outcomes"]) == 16
    assert first["command"].startswith("python -m bayesify_papers.subnetwork.toy")
    assert "no numbers" in done.printed
    toy.main(["--smoke", "--out", str(done.folder)])
    assert "seed 0" not in capsys.readouterr().out


@pytest.mark.parametrize("seed", [0, 1])
def test_training_keeps_the_epoch_of_best_validation(seed):
    """The kept network and noise are those whose validation score is the best of all epochs, found by training again to each."""
    recipe = map_regression.Recipe(learning_rate=0.05, epochs=6, patience=None)
    validation = (DATA.x[:10], DATA.y[:10])
    train = (DATA.x[10:], DATA.y[10:])

    def score(epochs, given):
        net = map_regression.make(1, 1, 8, seed)
        likelihood = map_regression.train(net, *train, replace(recipe, epochs=epochs), validation=given, seed=seed)
        with torch.no_grad():
            return float(likelihood.log_density(net(validation[0]), validation[1]).mean())

    every = [score(epochs, None) for epochs in range(1, 7)]
    assert score(6, validation) == pytest.approx(max(every), abs=1e-6)


def test_patience_ends_training():
    recipe = map_regression.Recipe(learning_rate=1e-12, epochs=10**6, patience=3)
    map_regression.train(map_regression.make(1, 1, 4, 0), DATA.x, DATA.y, recipe, validation=(DATA.x, DATA.y))


def test_uci_sizes_are_the_papers():
    """wine has 11 inputs: 600, 1,200, 3,100 and 11,200 weights (section 5.2)."""
    assert [uci.count_weights(11, *network) for network in uci.NETWORKS] == [600, 1200, 3100, 11_200]
    net = map_regression.make(11, 2, 100, 0, residual=True)
    assert map_regression.freeze_biases(net) == 11_200
    assert uci.subnetwork_sizes(11, 2, 50, uci.NETWORKS) == [600, 1200, 3100]
    assert uci.subnetwork_sizes(11, 1, 50, uci.NETWORKS) == [600]


def test_a_residual_layer_adds_to_its_input():
    net, x = map_regression.make(3, 2, 5, 0, residual=True), torch.randn(4, 3)
    plain = map_regression.make(3, 2, 5, 0)
    hidden = plain[:2](x)
    torch.testing.assert_close(net(x), plain[4](hidden + plain[2:4](hidden)))


def test_uci_scores_are_in_the_targets_unit():
    """MAP's log-likelihood on a split, computed again from the network that the split trains, in the target's own unit."""
    table, recipe = synthetic(120), replace(uci.SMOKE, epochs=30)
    table = replace(table, y=7.0 + 5.0 * table.y)
    options = {"gap": False, "index": 0, "network": (1, 4), "networks": ((1, 4),), "recipe": recipe}
    plain, bayesian = uci.run_split(table, table.splits[0], **options)
    rows = table.splits[0].with_validation(0.15, seed=0)
    scale_x, scale_y = Standardization.of(table.X[rows.train]), Standardization.of(table.y[rows.train])
    part = {
        key: (torch.from_numpy(scale_x(table.X[index])).float(), torch.from_numpy(scale_y(table.y[index])).float())
        for key, index in (("train", rows.train), ("validation", rows.validation), ("test", rows.test))
    }
    net = map_regression.make(3, 1, 4, 0)
    likelihood = map_regression.train(net, *part["train"], recipe, validation=part["validation"], seed=0)
    mean = scale_y.undo(net(part["test"][0]).detach().numpy())
    variance = float(likelihood.noise.detach()) * float(scale_y.std[0, 0]) ** 2
    error = table.y[rows.test] - mean
    wanted = np.mean(-0.5 * error**2 / variance - 0.5 * math.log(2 * math.pi * variance))
    assert plain["log_likelihood"] == pytest.approx(wanted, rel=1e-4)
    assert plain["rmse"] == bayesian["rmse"] == pytest.approx(math.sqrt(np.mean(error**2)), rel=1e-4)
    assert (plain["num_weights"], bayesian["num_weights"]) == (0, 16)
    assert bayesian["prior_precision"] in uci.PRIOR_PRECISIONS


def test_uci_smoke_resumes_after_a_kill(smoke, capsys):
    done = smoke("subnetwork/uci")
    path = done.folder / "uci.jsonl"
    whole = path.read_text()
    table = done.printed.partition("\n\n")[2]
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 10
    path.write_text("".join(lines[:7]))  # the last split of the last network is missing: lines come whole
    assert uci.main(["--smoke", "--out", str(done.folder)]) == 0
    again = capsys.readouterr().out
    assert again.count("synthetic gap 0") == 1
    assert again.partition("\n\n")[2] == table
    assert len(path.read_text().splitlines()) == 10
