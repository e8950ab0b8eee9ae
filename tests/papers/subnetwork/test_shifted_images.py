"""Subnetworks on shifted images: the published numbers, the pieces, and everything once on tiny images."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from bayesify_papers.shared import predictions
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.published import published
from bayesify_papers.subnetwork import (
    corrupted_cifar,
    image_scores,
    image_systems,
    image_training,
    rotated_mnist,
    shifted_images,
)
from bayesify_papers.subnetwork.image_systems import DEFAULT_SYSTEMS
from bayesify_papers.subnetwork.image_training import Recipe

from bayesify.datasets import images
from bayesify.weights.catalog import count_parameters


def test_published_tables_are_whole():
    paper = published("subnetwork")
    for dataset, columns in (("mnist", 13), ("cifar10", 6)):
        assert set(paper[dataset]) == set(paper["titles"])
        for name, system in paper[dataset].items():
            assert {key for key in system if not key.endswith("_std")} == {"ll", "error", "ece", "brier"}
            assert all(len(values) == columns for values in system.values()), name
            assert max(system["ll"]) < 0
    at_60 = paper["angles"].index(60)
    assert paper["mnist"]["subnetwork"]["ll"][at_60] == -2.10
    assert paper["mnist"]["map"]["ll"][at_60] == -4.29
    assert paper["mnist"]["map"]["error"][at_60] == 0.63
    assert paper["cifar10"]["subnetwork"]["ll"] == (-0.27, -0.51, -0.73, -1.06, -1.25, -1.47)


def test_the_network_is_the_papers():
    """ResNet-18 with a 3x3 stem and no max-pool; the last BatchNorm of each block starts at 0."""
    net = image_training.make(Recipe(), 3, 10, 0)
    assert count_parameters(net) == 11_173_962
    assert all(float(module.bn2.weight.detach().abs().max()) == 0 for module in net.layer3)


def test_learning_rate_falls_at_the_papers_epochs():
    assert [round(image_training.rate(Recipe(), epoch), 6) for epoch in (0, 39.9, 40, 69.9, 70, 89)] == [
        1,
        1,
        0.1,
        0.1,
        0.01,
        0.01,
    ]
    recipe = corrupted_cifar.RECIPE
    assert [round(image_training.rate(recipe, epoch), 6) for epoch in (149, 150, 225)] == [1, 0.1, 0.01]


def test_search_tries_each_value_once():
    tried = []

    def score(precision):
        tried.append(precision)
        return {"tuned": -abs(np.log10(precision) - 1), "shifted": -abs(np.log10(precision) + 2)}

    found = image_systems.search(score, (1e-2, 1.0, 1e2), ("tuned", "shifted"), 0.0)
    assert found["tuned"][0] == 10.0
    assert found["shifted"][0] == 1e-2
    assert len(tried) == len(set(tried)) == len(found["shifted"][1])


@pytest.mark.parametrize(("least", "wanted"), [(0.2, 10**-0.5), (1e-9, 1e-4), (1e9, 100.0), (0.05, 10**-1)])
def test_the_widest_posterior_stays_above_the_floor(least, wanted):
    """The score falls below the floor under a precision of `least`; steps of the grid are bisected twice."""
    found = image_systems.search(
        lambda precision: {"tuned": 0.0 if precision >= least else -1.0}, (1e-4, 1e-2, 1.0, 1e2), ("widest",), -0.5
    )
    assert found["widest"][0] == pytest.approx(wanted)


def test_random_turns_use_every_angle():
    pictures = np.random.default_rng(0).integers(0, 256, (26, 1, 8, 8), dtype=np.uint8)
    turned = rotated_mnist.turn_at_random(pictures)
    assert sum(np.array_equal(one, other) for one, other in zip(pictures, turned, strict=True)) == 2
    flipped = sum(np.array_equal(np.rot90(one, 2, (1, 2)), other) for one, other in zip(pictures, turned, strict=True))
    assert flipped == 2


def test_random_corruptions_leave_a_sixth():
    pictures = np.random.default_rng(0).integers(60, 200, (60, 3, 8, 8), dtype=np.uint8)
    corrupted = corrupted_cifar.corrupt_at_random(pictures)
    assert sum(np.array_equal(one, other) for one, other in zip(pictures, corrupted, strict=True)) == 10


def test_scores_of_known_predictions(tmp_path):
    """Half of the labels right with probability 0.8, half wrong; other images less certain than all."""
    labels = np.zeros(10, np.uint8)
    inside = np.full((10, 3), 0.1, np.float32)
    inside[:5, 0], inside[5:, 1] = 0.8, 0.8
    outside = np.full((10, 3), 1 / 3, np.float32)
    (tmp_path / "run.json").write_text(json.dumps({"systems": {"map": {}}}))
    np.savez(tmp_path / "labels.npz", labels=labels)
    made = {"shifted/0": inside, "ood/far": outside}
    stored = {name: predictions.StoredPrediction.of(torch.from_numpy(probs)) for name, probs in made.items()}
    predictions.write(tmp_path / "map.npz", stored)
    scores = image_scores.score(tmp_path)["map"]
    assert scores["shifted"]["0"]["accuracy"] == 0.5
    assert scores["shifted"]["0"]["nll"] == pytest.approx(-(np.log(0.8) + np.log(0.1)) / 2, abs=1e-5)
    assert scores["shifted"]["0"]["ece"] == pytest.approx(0.3, abs=1e-5)
    curve = scores["reliability"]["0"]
    assert [(at, count) for at, count in enumerate(curve["count"]) if count] == [(12, 10)]
    assert (curve["confidence"][12], curve["accuracy"][12], curve["accuracy"][0]) == (pytest.approx(0.8), 0.5, None)
    assert scores["ood"]["far"]["auroc_entropy"] == 1.0
    assert scores["rejection"]["far"][0] == pytest.approx(0.25)
    assert scores["rejection"]["far"][5] == pytest.approx(0.5)


def test_requirement_in_words():
    def system(nll, accuracy):
        return {"shifted": {"60": {"nll": nll, "accuracy": accuracy}}}

    lines = rotated_mnist.requirement(
        {"map": system(4.3, 0.37), "subnetwork": system(2.1, 0.365), "random": system(3.0, 0.37)}
    )
    assert len(lines) == 1
    assert "+2.20" in lines[0]
    assert lines[0].endswith(": met")
    assert rotated_mnist.requirement({"map": system(4.3, 0.37), "subnetwork": system(2.9, 0.37)})[0].endswith("NOT met")
    assert rotated_mnist.requirement({"map": system(4.3, 0.37), "subnetwork": system(2.1, 0.35)})[0].endswith("NOT met")


@pytest.mark.slow
def test_rotated_mnist_smoke_and_resume(smoke, capsys):
    done = smoke("subnetwork/rotated-mnist")
    results = json.loads((done.folder / "results.json").read_text())
    assert set(results["scores"]) >= {
        "map",
        "subnetwork",
        "subnetwork_tuned",
        "subnetwork_widest",
        "subnetwork_shifted",
        "last_layer_tuned",
        "last_layer_widest",
        "last_layer_shifted",
    }
    assert results["systems"]["subnetwork"]["prior_precision"] == 500.0
    assert "at 60 degrees" in done.printed
    (done.folder / "network-0.safetensors").unlink()  # nothing is trained again
    assert rotated_mnist.main(["--smoke", "--out", str(done.folder)]) == 0
    assert capsys.readouterr().out.count("predictions already exist") == len(DEFAULT_SYSTEMS)
    assert not (done.folder / "network-0.safetensors").exists()


def test_a_trained_network_is_read_back(tmp_path, capsys):
    recipe = Recipe(epochs=2, batch=10, depth=1, width=2)
    x, y = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
    path = tmp_path / "network.safetensors"
    first, _ = image_training.trained(path, recipe, x, y, num_classes=2, seed=0)
    assert capsys.readouterr().out.count("epoch") == 2
    second, seconds = image_training.trained(path, recipe, x, y, num_classes=2, seed=0)
    assert "epoch" not in capsys.readouterr().out
    assert seconds > 0
    assert torch.equal(first(x), second(x))
    with pytest.raises(ValueError, match=r"momentum=0\.9, but this run has 0\.5"):
        image_training.trained(path, replace(recipe, momentum=0.5), x, y, num_classes=2, seed=0)


def test_training_is_sgd_on_the_mean_cross_entropy(tmp_path):
    recipe = Recipe(epochs=3, batch=20, depth=1, width=2, drops=(0.5, 0.9), crops=0)
    x, y = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
    found, _ = image_training.trained(tmp_path / "network.safetensors", recipe, x, y, num_classes=2, seed=0)
    net = image_training.make(recipe, 1, 2, 0).train()
    sgd = recipe.sgd(net.parameters())
    for epoch in range(3):
        sgd.param_groups[0]["lr"] = recipe.learning_rate * image_training.rate(recipe, epoch)
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        sgd.step()
    assert torch.allclose(found(x), net.eval()(x), atol=1e-4)


def test_images_are_shifted_under_black_and_not_mirrored():
    x = torch.rand(50, 2, 8, 8) + torch.tensor([1.0, -3.0])[:, None, None]
    (moved, _), *_ = image_training.batches(x, torch.arange(50), 50, Recipe(crops=2))
    padded = torch.stack(
        [torch.nn.functional.pad(x[:, k], (2,) * 4, value=float(x[:, k].min())) for k in range(2)], 1
    )  # every channel has its own black
    cuts = torch.cat([padded[..., top : top + 8, left : left + 8] for top in range(5) for left in range(5)])
    for picture in moved:
        assert bool((picture == cuts).flatten(1).all(1).any())


def test_the_subnetwork_has_the_weights_that_move(tmp_path):
    """No bias and no normalization among them; every one varies at least as much as any that was left out."""
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    recipe, settings = rotated_mnist.SMOKE
    shop = image_systems.Workshop(tmp_path, x, y, (x, y), (x, y), 2, replace(recipe, batch=20), settings)
    chosen, seconds = image_systems.moving_weights(shop)
    assert len(set(chosen.tolist())) == settings.size
    assert seconds > 0
    names = [name for name, value in shop.map_estimate.named_parameters() for _ in range(value.numel())]
    shapes = {name: value.ndim for name, value in shop.map_estimate.named_parameters()}
    assert all(shapes[names[index]] > 1 for index in chosen.tolist())
    assert torch.equal(chosen, image_systems.moving_weights(shop)[0])


def test_members_of_the_ensemble_have_the_batch_size_of_other_systems(tmp_path, monkeypatch):
    """The first member is the MAP estimate with its own batch size; a member is not read as the MAP estimate of its seed."""
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    settings = replace(rotated_mnist.SMOKE[1], members=3, apart_batch=8)
    recipe = replace(rotated_mnist.SMOKE[0], batch=20)
    shops = [
        image_systems.Workshop(tmp_path, x, y, (x, y), (x, y), 2, recipe, settings, seed=seed) for seed in range(2)
    ]
    sizes, each = [], MemoryBatches.__iter__

    def iterate(self):
        sizes.append(self.batch)
        yield from each(self)

    monkeypatch.setattr(MemoryBatches, "__iter__", iterate)
    (variant,) = image_systems.SYSTEMS["ensemble"](shops[0])
    assert sizes == [20, 8, 8]
    assert shops[1].map_estimate is not None
    assert sizes == [20, 8, 8, 20]
    mean = torch.stack([shops[0].network(member)[0](x).double().softmax(-1) for member in range(3)]).mean(0)
    assert torch.allclose(variant.predict(x), mean)
    assert len(sizes) == 4  # networks in the folder are not trained again


def test_dropout_warms_up_step_by_step(tmp_path, monkeypatch):
    x, y, rates = torch.randn(40, 1, 8, 8), torch.arange(40) % 2, []
    recipe = replace(rotated_mnist.SMOKE[0], batch=20, epochs=2, warmup=2)
    settings = replace(rotated_mnist.SMOKE[1], apart_batch=20)
    shop = image_systems.Workshop(tmp_path, x, y, (x, y), (x, y), 2, recipe, settings)
    step = torch.optim.SGD.step

    def watched(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"] / recipe.learning_rate)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    next(iter(image_systems.SYSTEMS["dropout"](shop)))
    assert rates[:4] == pytest.approx([image_training.rate(recipe, count / 2) for count in range(4)])


@pytest.mark.parametrize("name", ["subnetwork", "dropout", "vogn"])
def test_what_was_interrupted_goes_on(tmp_path, monkeypatch, name):
    """A run that is killed in its third of four epochs ends as one that is not, and stored epochs are not run again."""
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    recipe = replace(rotated_mnist.SMOKE[0], batch=20, epochs=4 if name == "dropout" else 1)
    counts = {"select_epochs": 4, "swag_epochs": 4, "vogn_epochs": 4, "apart_batch": 20, "select_batch": 20}
    settings = replace(rotated_mnist.SMOKE[1], **counts, tune=("none",))
    predicted, counted, passes, before = {}, {}, [], 0
    for place in ("whole", "cut"):
        folder = tmp_path / place
        folder.mkdir()
        shop = image_systems.Workshop(folder, x, y, (x, y), (x, y), 2, recipe, settings)
        assert shop.map_estimate is not None  # trained before anything is counted
        each = MemoryBatches.__iter__
        stop = counted["whole"] - 1 if place == "cut" else None

        def iterate(self, each=each, stop=stop, own=passes):
            own.append(1)
            if stop and len(own) == stop:
                raise KeyboardInterrupt
            yield from each(self)

        with monkeypatch.context() as patch:
            patch.setattr(MemoryBatches, "__iter__", iterate)
            passes.clear()
            if stop:
                with pytest.raises(KeyboardInterrupt):
                    next(iter(image_systems.SYSTEMS[name](shop)))
                before = len(passes)
            variant = next(iter(image_systems.SYSTEMS[name](shop)))
        counted[place] = len(passes) - before
        predicted[place] = variant.predict(x)
    assert torch.equal(predicted["whole"], predicted["cut"])
    assert counted["cut"] < counted["whole"]  # passes over the data of the second call


def test_processes_keep_what_others_leave_in_the_folder(tmp_path, monkeypatch):
    pictures = np.zeros((4, 1, 8, 8), np.uint8)
    labels = np.arange(4, dtype=np.uint8) % 2
    data = images.Images("tiny", pictures, labels, pictures, labels)
    task = shifted_images.Task(data, lambda part: part, {"shifted/0": pictures}, labels)

    def slow(shop):
        content = json.loads((tmp_path / "run.json").read_text())
        content["systems"]["other"] = {"system": "other"}  # by another process, while this one trains
        (tmp_path / "run.json").write_text(json.dumps(content))
        yield image_systems.Variant("slow", lambda x: torch.full((len(x), 2), 0.5), {})

    fast = image_systems.Variant("fast", lambda x: torch.full((len(x), 2), 0.5), {})
    monkeypatch.setitem(shifted_images.SYSTEMS, "fast", lambda shop: iter([fast]))
    monkeypatch.setitem(shifted_images.SYSTEMS, "slow", slow)
    shifted_images.run(
        tmp_path, task, Recipe(), replace(rotated_mnist.SMOKE[1], num_validation=2), systems=["fast", "slow"]
    )
    assert set(json.loads((tmp_path / "run.json").read_text())["systems"]) == {"fast", "slow", "other"}


def test_test_images_are_spread_out():
    (rows,) = shifted_images.spread_out(5, np.arange(100))
    assert rows.tolist() == [0, 25, 50, 74, 99]
    assert len(shifted_images.spread_out(500, np.arange(100))[0]) == 100


@pytest.mark.slow
def test_every_system_runs(smoke, monkeypatch):
    """With two kinds of corruptions, which all take the same way."""
    kinds = corrupted_cifar.COMPARED_KINDS[:2]
    monkeypatch.setattr(corrupted_cifar, "COMPARED_KINDS", kinds)
    folder = smoke("subnetwork/corrupted-cifar").folder
    shifted = [f"shifted/{kind}-5" for kind in kinds]
    assert json.loads((folder / "run.json").read_text())["sets"] == ["shifted/none-0", *shifted, "ood/noise"]
    found = {path.stem.partition("_")[0] for path in folder.glob("*.npz")}
    assert {"map", "subnetwork", "random", "last", "diagonal", "dropout", "swag", "vogn", "ensemble"} <= found


def test_predictions_keep_small_probabilities():
    made = predictions.StoredPrediction.of(torch.tensor([[0.0, -80.0]]).double().exp())
    assert float(made.log_prob(torch.tensor([1]))) == pytest.approx(-80.0)
