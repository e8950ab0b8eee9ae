"""Classification: the recipe, the batches, stored predictions, tables, the command, and training without luck."""

import json
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bayesify_papers.inducing_weights import classification, rows, scores
from bayesify_papers.inducing_weights.systems import (
    BASELINES,
    SYSTEMS,
    Recipe,
    make_adam,
    make_optimizer,
    make_sgd,
    schedule_options,
    train,
)
from bayesify_papers.shared import predictions, sources
from bayesify_papers.shared.batches import MemoryBatches, cut_out, mirror_and_shift
from bayesify_papers.shared.image_problems import ImageProblem

from bayesify import metrics
from bayesify.conversion import bayesianize
from bayesify.datasets import corruptions, images
from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive


def test_batches_hold_every_example_once_and_repeat_by_seed():
    x = torch.arange(10.0)[:, None]
    batches = MemoryBatches(x, torch.arange(10), 3)
    assert len(batches) == 3
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        parts = list(batches)
        assert all(torch.equal(a[:, 0].long(), b) for a, b in parts)
        orders.append(torch.cat([b for _, b in parts]).tolist())
    assert len(set(orders[0])) == 9
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="give 1 to 10"):
        MemoryBatches(x, torch.arange(10), 11)


def test_images_are_mirrored_and_shifted_each_on_its_own():
    x = torch.rand(200, 2, 8, 8) + 1
    torch.manual_seed(0)
    made = mirror_and_shift(x)
    torch.manual_seed(0)
    rows, columns = torch.randint(-1, 2, (2, 200, 1))
    mirrored = torch.rand(200, 1) < 0.5
    assert 60 < mirrored.sum() < 140
    assert len({(int(row), int(column)) for row, column in zip(rows, columns, strict=True)}) == 9
    for index in range(200):
        padded = torch.nn.functional.pad(x[index], (1, 1, 1, 1))
        top, left = 1 + int(rows[index]), 1 + int(columns[index])
        cut = padded[:, top : top + 8, left : left + 8]
        assert torch.equal(made[index], cut.flip(-1) if mirrored[index] else cut)


def test_a_square_is_cut_out_of_each_image():
    x = torch.ones(300, 2, 8, 8)
    torch.manual_seed(0)
    made = cut_out(x, 4)
    missing = (made == 0).all(1)  # [B, H, W]
    assert torch.equal(missing, (made == 0).any(1))
    heights, widths = missing.any(2).sum(1), missing.any(1).sum(1)
    assert torch.equal(missing.sum((1, 2)), heights * widths)  # a rectangle
    assert set(heights.tolist()) == set(widths.tolist()) == {2, 3, 4}  # cut by the border
    assert missing.any(0).all()
    assert cut_out(x, 0) is x


def test_calibration_makes_no_difference_to_the_calibrated_nll():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(2 * torch.randn(4000, 5, generator=generator), -1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    exact = torch.nn.functional.nll_loss(probs.log(), labels).item()
    assert scores.calibrated_nll(probs, labels) == pytest.approx(exact, abs=2e-3)
    for power in (0.4, 3.0):
        distorted = probs.pow(power) / probs.pow(power).sum(-1, keepdim=True)
        assert scores.calibrated_nll(distorted, labels) == pytest.approx(exact, abs=2e-3)


@pytest.mark.slow
def test_one_cycle_rises_and_falls_for_every_group():
    recipe = Recipe(epochs=5, schedule="one_cycle")
    bnn = bayesianize(torch.nn.Linear(2, 2), "mean_field", likelihood=Categorical())
    optimizer = make_sgd(bnn, recipe)
    assert {group["nesterov"] for group in optimizer.param_groups} == {True}
    options = schedule_options(recipe, 20)
    scheduler, rates = options["scheduler"](optimizer), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert options["steps"].scheduler == "step"
    assert max(rates) == pytest.approx(recipe.point_learning_rate, rel=1e-2)
    assert 15 < rates.index(max(rates)) < 25
    assert rates[-1] < 0.01 * max(rates)


@pytest.mark.parametrize("steps", range(1, 13))
def test_one_cycle_suits_a_run_of_few_steps(steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
    scheduler = schedule_options(Recipe(epochs=1, schedule="one_cycle"), steps)["scheduler"](optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    top = rates.index(max(rates))
    assert 0 < top <= max(1, 0.2 * steps)
    assert rates == sorted(rates[:top]) + sorted(rates[top:], reverse=True)
    assert max(rates) > 0.9


@pytest.mark.slow
def test_baselines_start_from_the_point_estimate(tmp_path):
    options = ["--smoke", "--out", str(tmp_path), "--systems", "deterministic", *BASELINES]
    assert classification.main(options) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["scores"]) == {"deterministic", *BASELINES}
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["point-0"]
    assert all(0 < found["test"]["calibrated_nll"] < 5 for found in written["scores"].values())


def test_swag_does_not_depend_on_systems_before_it():
    given = ImageProblem(replace(classification.SMOKE_SOURCE, num_train=60), "cpu")
    recipe = replace(classification.SMOKE, swag_epochs=2)
    bnn, _ = train(SYSTEMS["deterministic"], recipe, given, 0)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        swag = BASELINES["swag"].after(bnn, recipe, given, 0)
        found.append(swag.predict(given.x[:5]).probs)
    assert torch.equal(*found)


def test_spreads_have_their_own_learning_rate():
    recipe = replace(classification.SMOKE, learning_rate=0.1, inducing_learning_rate=0.3, spread_learning_rate=0.7)
    for name, expected in (
        ("ffg_u", {"raw_lambda", "raw_std"}),
        ("ffg_w", {"raw_std"}),
        ("ensemble_u", {"raw_lambda"}),
    ):
        bnn = bayesianize(recipe.network(1, 3), SYSTEMS[name].posterior(recipe), likelihood=Categorical())
        quick = {id(p) for group in make_adam(bnn, recipe).param_groups if group["lr"] == 0.7 for p in group["params"]}
        names = {key for key, parameter in bnn.named_parameters() if id(parameter) in quick}
        assert {part for key in names for part in key.split(".") if part.startswith("raw_")} == expected
        rates = {group["lr"] for group in make_adam(bnn, recipe).param_groups}
        assert rates == ({0.1, 0.7} if name == "ffg_w" else {0.1, 0.3, 0.7})
        total = sum(len(group["params"]) for group in make_adam(bnn, recipe).param_groups)
        assert total == len(list(bnn.parameters()))


def test_sgd_turns_z_as_fast_as_weights_of_the_deterministic_network():
    """The angle of a step before BatchNorm depends on the learning rate times the weight decay."""
    recipe = replace(classification.SMOKE, inducing_optimizer="sgd", u_learning_rate=8.0, z_learning_rate=0.3)
    for name in ("ffg_u", "ensemble_u"):
        bnn = bayesianize(recipe.network(1, 3), SYSTEMS[name].posterior(recipe), likelihood=Categorical())
        groups = make_optimizer(SYSTEMS[name], bnn, recipe).param_groups
        found = {id(value): (group["lr"], group["weight_decay"]) for group in groups for value in group["params"]}
        assert len(found) == sum(len(group["params"]) for group in groups) == len(list(bnn.parameters()))
        for key, value in bnn.named_parameters():
            rate, decay = found[id(value)]
            if "z_row" in key or "z_col" in key:
                assert rate * decay == pytest.approx(recipe.point_learning_rate * recipe.point_weight_decay)
            elif key.startswith("posteriors."):
                assert decay == 0
                assert rate == {"location": 8, "value": 8, "raw_std": 1e3, "raw_lambda": 0.01}.get(
                    key.split(".")[-1], 0.1
                )
            else:
                assert (rate, decay) == (recipe.point_learning_rate, recipe.point_weight_decay)
    given = ImageProblem(classification.SMOKE_SOURCE, "cpu")
    _, history = train(SYSTEMS["ffg_u"], replace(recipe, u_learning_rate=0.1, epochs=3), given, 0)
    assert history[-1]["nll"] < history[0]["nll"]


def test_members_start_a_tenth_apart_as_in_appendix_j():
    recipe = replace(classification.SMOKE, inducing=16, members=5)
    bnn = bayesianize(recipe.network(1, 3), SYSTEMS["ensemble_u"].posterior(recipe), likelihood=Categorical())
    (family,) = bnn.posteriors[0].inducing
    assert family.value.std(0, correction=0).square().mean().sqrt().item() == pytest.approx(0.1, rel=0.05)
    assert family.value.mean(0).std().item() == pytest.approx(1.0, rel=0.1)


def test_an_inducing_posterior_starts_at_the_deterministic_network(tmp_path):
    given = ImageProblem(replace(classification.SMOKE_SOURCE, num_train=100), "cpu")
    recipe = replace(classification.SMOKE, epochs=2, batch=10, start_epochs=1, schedule="one_cycle", inducing=36)
    still = replace(recipe, learning_rate=1e-9, inducing_learning_rate=1e-9, spread_learning_rate=1e-9)
    bnn, history = train(SYSTEMS["ffg_u"], still, given, 0, tmp_path / "ffg_u-0.safetensors")
    whole = replace(recipe, epochs=3, start_epochs=0, learning_rate=1e-9)
    point, first = train(SYSTEMS["deterministic"], whole, given, 0, until=1)
    assert [row["nll"] for row in history[:1]] == [row["nll"] for row in first]
    assert len(history) == 3
    expected, found = dict(point.mean_network().named_parameters()), dict(bnn.mean_network().named_parameters())
    weight = "layer1.0.conv1.weight"  # rank 36 holds it whole
    assert (found[weight] - expected[weight]).norm() < 1e-3 * expected[weight].norm()
    assert not bnn.frozen_statistics
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy(tmp_path / "ffg_u-0.safetensors", tmp_path / "copy"))
    with pytest.raises(FileNotFoundError, match=r"exists without start-ffg_u-0\.json"):
        train(SYSTEMS["ffg_u"], still, given, 0, copy)
    shutil.copy(tmp_path / "start-ffg_u-0.json", tmp_path / "copy")
    with pytest.raises(ValueError, match="other settings"):
        train(SYSTEMS["ffg_u"], replace(still, start_epochs=2), given, 0, copy)
    again, rows_again = train(SYSTEMS["ffg_u"], still, given, 0, copy)  # needs no checkpoint of the start
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"ffg_u-0.safetensors", "start-ffg_u-0.json"}
    assert [row["seconds"] for row in rows_again] == [row["seconds"] for row in history]
    restored = again.state_dict()
    assert all(torch.equal(value, restored[key]) for key, value in bnn.state_dict().items())


def test_runs_that_differ_in_start_or_cap_have_other_descriptions():
    plain = asdict(Recipe())
    inducing = {"ffg_u", "ensemble_u"}
    changed = [({"start_epochs": 30}, inducing), ({"max_lambda": 0.3}, {"ffg_u"})]
    changed += [({"inducing_by_stage": "64,64,96,45"}, inducing), ({"inducing_optimizer": "sgd"}, inducing)]
    for changes, systems in changed:
        for name in SYSTEMS | BASELINES:
            same = rows.recipe_in_words(plain, name) == rows.recipe_in_words({**plain, **changes}, name)
            assert same == (name not in systems), (changes, name)


def test_stored_predictions_score_as_the_draws_do(tmp_path):
    logits = 2 * torch.randn(4, 50, 3)
    y = torch.randint(0, 3, (50,))
    full = ClassificationPredictive(Outputs(kept=logits), lambda outputs: outputs.log_softmax(-1))
    made = predictions.StoredPrediction(full.class_probs, full.aleatoric_entropy)
    predictions.write(tmp_path / "a.npz", {"test": made, "ood/b": made})
    read = predictions.read(tmp_path / "a.npz")
    assert list(read) == ["test", "ood/b"]
    for key, value in metrics.evaluate(full, y).items():
        assert metrics.evaluate(read["test"], y)[key] == pytest.approx(value, abs=1e-6)
    assert torch.allclose(read["ood/b"].mutual_information, full.mutual_information, atol=1e-6)


def test_networks_predict_together():
    recipe, x = classification.SMOKE, torch.randn(6, 1, 12, 12)
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = bayesianize(recipe.network(1, 3), SYSTEMS["deterministic"].posterior(recipe), likelihood=Categorical())
        networks.append(net.eval())
    together = predictions.predict_sets(networks, {"test": lambda: x}, 1, 0)["test"]
    apart = [network.predict(x, 1) for network in networks]
    assert torch.allclose(together.probs, sum(part.probs for part in apart) / 2, atol=1e-6)
    assert torch.allclose(together.aleatoric_entropy, sum(part.entropy for part in apart) / 2, atol=1e-6)
    stored = [predictions.predict_sets([network], {"test": lambda: x}, 1, 0) for network in networks]
    combined = predictions.combine(stored)["test"]
    assert torch.allclose(combined.probs, together.probs, atol=1e-6)
    assert torch.allclose(combined.mutual_information, together.mutual_information, atol=1e-6)
    with pytest.raises(ValueError, match="different sets"):
        predictions.combine([stored[0], {}])


def test_other_sets_take_the_shape_of_the_training_set():
    small = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 1, 28, 28)
    like = sources.like(small, np.zeros((1, 3, 32, 32), dtype=np.uint8))
    assert like.shape == (2, 3, 32, 32)
    assert np.array_equal(like[:, 2, 2:30, 2:30], small[:, 0])
    assert like.sum(dtype=np.int64) == 3 * small.sum(dtype=np.int64)


def test_a_missing_set_is_an_error_before_training(tmp_path):
    source = sources.Source(sources.SYNTHETIC, str(tmp_path), outside=("mnist",))
    with pytest.raises(FileNotFoundError, match=r"mnist\.npz"):
        ImageProblem(source, "cpu")


def test_normalization():
    pictures = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 6), dtype=np.uint8)
    scaled = sources.Normalization(pictures)(pictures, torch.device("cpu"))
    assert scaled.mean((0, 2, 3)).abs().max() < 1e-5
    assert (scaled.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5


def test_smoke_trains_writes_and_scores(smoke, capsys):
    done = smoke("inducing-weights/cifar10")
    written = json.loads((done.folder / "results.json").read_text())
    assert set(written["scores"]) == set(SYSTEMS)
    assert {"date", "command", "hardware", "versions", "settings", "seconds", "parameters"} <= set(written)
    assert written["parameters"]["ensemble_w"] == classification.SMOKE.members * written["parameters"]["deterministic"]
    assert {"auroc_entropy", "aupr_mutual_information"} <= set(written["scores"]["ffg_u"]["ood"]["noise"])
    assert classification.main(["--evaluate", str(done.folder)]) == 0
    assert capsys.readouterr().out.strip() in done.printed


def test_a_run_goes_on_where_it_ended(tmp_path, capsys):
    """A finished system is not trained again, the deterministic network is Ensemble-W's first, rows have all tables."""
    options = ["--smoke", "--out", str(tmp_path), "--systems"]
    assert classification.main([*options, "deterministic"]) == 0
    before = json.loads((tmp_path / "run.json").read_text())["history"]["deterministic"]
    assert classification.main([*options, "deterministic", "ensemble_w"]) == 0
    assert "Deterministic: predictions already exist" in capsys.readouterr().out
    after = json.loads((tmp_path / "run.json").read_text())
    assert after["history"]["deterministic"] == before
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["point-0", "point-1"]
    found = rows.classification(tmp_path)
    assert {(row["setting"].get("images"), row["metric"]) for row in found} >= {
        ("test", "nll"),
        ("corrupted", "ece"),
        (None, "auroc"),
    }
    assert all(row["seconds"] == after["seconds"][row["setting"]["system"]] for row in found)
    with pytest.raises(ValueError, match="was written with other settings"):
        classification.main([*options, "deterministic", "--validation", "50"])


def test_what_an_interrupted_run_left_is_removed(tmp_path):
    options = ["--smoke", "--out", str(tmp_path), "--systems", "ffg_u"]
    assert classification.main(options) == 0
    for name in ("ffg_u-0.safetensors", "start-ffg_u-0.safetensors", "start-ffg_u-0.json", "point-0.safetensors"):
        (tmp_path / name).write_text("")
    assert classification.main(options) == 0
    assert {path.name for path in tmp_path.glob("*-0.*")} == {"point-0.safetensors"}


def test_sizes_of_u_by_stage():
    recipe = replace(classification.SMOKE, inducing=6, inducing_by_stage="6,8,b5,3", start_epochs=1)
    bnn = bayesianize(recipe.network(1, 3), SYSTEMS["ffg_u"].posterior(recipe), likelihood=Categorical())
    found = {layer.name: (part.rows, part.cols) for part in bnn.posteriors for layer in part.layers}
    sizes = {"layer2": 8, "layer3": 5, "layer4": 3}
    assert len(found) == 13
    assert found == {name: 2 * (sizes.get(name.split(".")[0], 6),) for name in found}
    assert all(part.init == "network" for part in bnn.posteriors)
    balanced = {weight.name for part in bnn.posteriors for weight in part.weights if weight.balanced}
    assert balanced == {f"layer3.0.conv{number}.weight" for number in (1, 2)}
    for wrong in ("6,8", "6,8,5,3,6", "6,8,5,0", "6,8,5,x", "6,8,b,5"):
        with pytest.raises(ValueError, match="four positive numbers"):
            replace(recipe, inducing_by_stage=wrong)


def test_processes_share_a_folder(tmp_path, monkeypatch):
    def train_beside_another(system, recipe, given, seed, path):
        monkeypatch.setattr(classification, "train", train)
        assert classification.main(["--smoke", "--systems", "ffg_w", "--out", str(tmp_path)]) == 0
        return train(system, recipe, given, seed, path)

    train = classification.train
    monkeypatch.setattr(classification, "train", train_beside_another)
    assert classification.main(["--smoke", "--systems", "deterministic", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    for part in ("scores", "epochs", "seconds", "parameters"):
        assert set(content[part]) == {"deterministic", "ffg_w"}
    assert len(content["epochs"]["ffg_w"]["nll"]) == classification.SMOKE.epochs


def test_resnet_50_has_its_parameters():
    net = replace(classification.SMOKE, width=64, bottleneck=True).network(3, 10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 23_520_842


def test_a_validation_run_never_sees_the_test_images(tmp_path, capsys, monkeypatch):
    data = images.synthetic()
    monkeypatch.setattr(
        images, "synthetic", lambda: replace(data, test_images=data.test_images[:0], test_labels=data.test_labels[:0])
    )
    sources._images.cache_clear()
    options = ["--smoke", "--validation", "100", "--out", str(tmp_path), "--systems", "deterministic"]
    assert classification.main(options) == 0
    sources._images.cache_clear()
    assert "100 training images that were held out" in capsys.readouterr().out
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["validation"] == 100
    with np.load(tmp_path / "labels.npz") as stored:
        assert np.array_equal(stored["test"], data.train_labels[-100:])


def test_held_out_images_take_no_part_in_training():
    data = sources.hold_out(images.synthetic(50, 20), 10)
    whole = images.synthetic(50, 20)
    assert np.array_equal(data.train_images, whole.train_images[:40])
    assert np.array_equal(data.test_images, whole.train_images[40:])
    assert np.array_equal(data.test_labels, whole.train_labels[40:])
    with pytest.raises(ValueError, match="hold out fewer"):
        sources.hold_out(whole, 50)
    with pytest.raises(ValueError, match="validation=-1"):
        sources.Source(validation=-1)


@pytest.mark.parametrize("found", [(), ("svhn",)])
def test_out_of_distribution_sets_of_the_paper_are_used_if_available(tmp_path, monkeypatch, found):
    made = []
    monkeypatch.setattr(classification, "available", lambda names, _: [name for name in names if name in found])
    monkeypatch.setattr(classification, "run", lambda _, source, *__, **___: made.append(source))
    monkeypatch.setattr(classification, "evaluate", lambda _: 0)
    assert classification.main(["--dataset", "cifar10", "--out", str(tmp_path)]) == 0
    assert made[0].outside == ("mnist", "fashion_mnist", *found)
    assert set(made[0].kinds) == set(corruptions.SEVERITIES)


def test_rows_know_their_network_and_size(tmp_path):
    """Published numbers are those of a ResNet-50 of width 64 without held-out images, and of M = 64 but in table 5."""
    test = {"accuracy": 0.9, "nll": 0.3, "ece": 0.02, "brier": 0.1}
    system = {"test": test, "ood": {}, "corrupted": {f"contrast-{severity}": test for severity in range(1, 6)}}
    content = {"dataset": "cifar10", "seconds": {"ffg_u": 3.0, "ffg_w": 2.0}}
    content["scores"] = {"ffg_u": system, "ffg_w": system}

    def published(settings, **more):
        (tmp_path / "results.json").write_text(json.dumps({**content, **more, "settings": settings}))
        found = rows.classification(tmp_path)
        assert all(row["seconds"] == content["seconds"][row["setting"]["system"][:5]] for row in found)
        keys = ("system", "severity")
        return {
            tuple(row["setting"][key] for key in keys if key in row["setting"]): row["published"]
            for row in found
            if row["metric"] == "accuracy" and row["setting"].get("severity", "1") == "1"
        }

    whole = {"bottleneck": True, "width": 64}
    expected = {("ffg_u",): 94.40, ("ffg_u", "1"): 86.90, ("ffg_w",): 94.13, ("ffg_w", "1"): 83.80}
    assert published(whole) == expected
    wide = {("ffg_u_128",): 94.66, ("ffg_u_128", "1"): None, ("ffg_w",): 94.13, ("ffg_w", "1"): 83.80}
    assert published({**whole, "inducing": 128}) == wide
    for other in ({"depth": 2, "width": 64}, {"bottleneck": True, "width": 32}, {}):
        assert set(published(other).values()) == {None}
    assert set(published(whole, validation=100).values()) == {None}


def test_means_over_the_kinds_of_every_run_stay_comparable(tmp_path):
    """A run with more kinds keeps the means over the six compared kinds, and has means over all of its kinds as well."""
    entry = {kind: {"accuracy": 0.5, "ece": 0.1, "nll": 1.0, "brier": 0.2} for kind in sources.COMPARED_KINDS}
    more = {**entry, "snow": {**entry["contrast"], "accuracy": 0.92}}
    for kinds, expected in ((entry, {"corrupted": 50.0}), (more, {"corrupted": 50.0, "corrupted, 7 kinds": 56.0})):
        system = {"test": entry["contrast"], "ood": {}, "corrupted": {f"{kind}-3": one for kind, one in kinds.items()}}
        content = {"dataset": "cifar10", "seconds": {}, "settings": {}, "scores": {"ffg_w": system}}
        (tmp_path / "results.json").write_text(json.dumps(content))
        found = [row for row in rows.classification(tmp_path) if row["setting"].get("severity") == "3"]
        assert {row["setting"]["images"]: row["ours"] for row in found if row["metric"] == "accuracy"} == pytest.approx(
            expected
        )


def test_a_source_corrupts_by_its_kinds():
    plain = sources.Source(sources.SYNTHETIC, corrupted_images=2, severities=(5,))
    assert set(plain.scored()) == {"test", *(f"corrupted/{kind}-5" for kind in sources.COMPARED_KINDS)}
    assert set(replace(plain, kinds=("fog",), severities=(1, 2)).scored()) == {
        "test",
        "corrupted/fog-1",
        "corrupted/fog-2",
    }


def test_the_requirement_is_judged():
    def system(accuracy: float, ece: float) -> dict:
        return {"test": {"accuracy": accuracy, "ece": ece}}

    plain = {"deterministic": system(0.92, 0.04)}
    assert scores.requirement({**plain, "ffg_u": system(0.912, 0.02)})[0].endswith(": met")
    assert scores.requirement({**plain, "ffg_u": system(0.909, 0.01)})[0].endswith("NOT met")
    assert scores.requirement({**plain, "ensemble_u": system(0.93, 0.021)})[0].endswith("NOT met")


def test_evaluating_an_empty_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"labels\.npz"):
        classification.evaluate(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["ffg_u", "ensemble_u"])
def test_trains_without_luck(name, monkeypatch):
    """Five seeds on synthetic images: every test NLL within 0.1 nats of the median, far below that of chance, 2.30."""
    data = images.synthetic(600, 400, noise_std=0.45)
    monkeypatch.setattr(sources, "_images", lambda source: data)
    problem, nlls = ImageProblem(sources.Source(sources.SYNTHETIC), "cpu"), []
    for seed in range(5):
        bnn, _ = train(SYSTEMS[name], LUCK, problem, seed)
        nlls.append(problem.score(problem.predict([bnn], 10, 0)["test"])["nll"])
    median = statistics.median(nlls)
    assert median < 0.3
    assert all(abs(nll - median) < 0.1 for nll in nlls)


LUCK = Recipe(epochs=30, batch=50, inducing_learning_rate=1e-2, width=4, inducing=8, members=2, ensemble_draws=2)
