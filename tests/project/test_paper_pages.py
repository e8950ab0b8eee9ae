"""The tables of the papers' pages are what the stored results say."""

import itertools
import json
import re
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
from bayesify_papers.inducing_weights.rows import network_name, recipe_in_words
from bayesify_papers.inducing_weights.systems import Recipe

from tools import cifar10_page
from tools import paper_pages as pages
from tools.paper_claims import subnetwork as claims

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["inducing-weights", "function-space", "subnetwork"])
def test_the_page_shows_the_committed_results(name):
    page = (ROOT / "docs" / "experiments" / f"{name}.md").read_text()
    assert pages.filled(page, ROOT / "papers" / "results" / name.replace("-", "_"), name) == page
    assert all(pages.START.format(table) in page for table in pages.PAGES[name])


def test_the_plot_of_cifar10_and_its_page_are_current():
    page = cifar10_page.PAGE.read_text()
    assert cifar10_page.filled(page) == page, "run python -m tools.cifar10_page"
    assert cifar10_page.drawing() == cifar10_page.PLOT.read_text(), "run python -m tools.cifar10_page"


def test_the_plot_of_cifar10_takes_new_networks_and_no_held_out_images(tmp_path, monkeypatch):
    stored = json.loads((cifar10_page.RESULTS / "cifar10_resnet18_one_cycle_0.json").read_text())
    for name, more in (
        ("cifar10_resnet50_one_cycle_0", {"settings": {**stored["settings"], "bottleneck": True}}),
        ("cifar10_resnet18_one_cycle_held", {"validation": 5000}),
        ("cifar10_resnet18_one_cycle_1", {}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**stored, **more}))
    monkeypatch.setattr(cifar10_page, "RESULTS", tmp_path)
    assert [point.name for point in cifar10_page.ours()] == [
        "FFG-U",
        "FFG-U, ResNet-50",
    ]
    test = stored["scores"]["ffg_u"]["test"]
    assert {(point.accuracy, point.nll) for point in cifar10_page.ours()} == {(100 * test["accuracy"], test["nll"])}
    drawn = cifar10_page.drawing()
    assert drawn.count("<circle") == 2 + sum(point.inside for *_, own in cifar10_page.others() for point in own)
    assert "ResNet-50</text>" in drawn


def test_stored_runs_of_one_description_have_the_same_settings():
    groups = {}
    for path in sorted(cifar10_page.RESULTS.glob("cifar10_*.json")):
        content = json.loads(path.read_text())
        settings = asdict(Recipe()) | content["settings"]
        for system in content["scores"]:
            key = network_name(settings), settings["inducing"], system, recipe_in_words(settings, system)
            groups.setdefault(key, []).append(settings)
    assert any(len(alike) > 1 for alike in groups.values())
    for key, alike in groups.items():
        assert all(settings == alike[0] for settings in alike), key


def test_labels_of_our_points_do_not_cover_each_other():
    pattern = rf'<text x="([0-9.]+)" y="([0-9.]+)" text-anchor="middle" fill="{cifar10_page.OURS}">([^<]+)<'
    labels = [(float(x), float(y), words) for x, y, words in re.findall(pattern, cifar10_page.PLOT.read_text())]
    assert len(labels) > 20
    for (x, y, words), (other_x, other_y, other) in itertools.combinations(labels, 2):
        apart = cifar10_page.LETTER_WIDTH * (len(words) + len(other)) / 2
        assert abs(x - other_x) >= apart - 0.2 or abs(y - other_y) >= cifar10_page.LETTER_HEIGHT - 0.2, (words, other)


def test_a_table_is_made_again_between_its_marks(tmp_path):
    facts = {"hardware": {"cpu": "A"}, "versions": {"torch": "2"}, "date": "2026-01-01", "command": "run"}
    row = {
        "system": "ffg_u",
        "keep": 0.5,
        "fine_tuned": True,
        "parameters": 1234,
        "accuracy": 0.9,
        "nll": 1.0,
        "ece": 0.01,
    }
    (tmp_path / "pruning.json").write_text(
        json.dumps({**facts, "dataset": "cifar10", "fine_tuning": 50, "rows": [row]})
    )
    small = {"system": "ensemble_u", "inducing": 4, "max_lambda": 0.1, "max_std": None, "parameters": 5}
    rows = [{**small, "accuracy": 0.8, "ece": 0.02}]
    (tmp_path / "ablation.json").write_text(json.dumps({**facts, "num_train": 100, "rows": rows}))
    names = ("pruning*", "ablation", "fashion_mnist")
    text = "a\n" + "".join(f"{pages.START.format(name)}\nold\n{pages.END}\n" for name in names) + "b"
    made = pages.filled(text, tmp_path, "inducing-weights")
    assert "| FFG-U | 50 | 50 epochs | 1,234 | 90.00 | 1.000 | 1.00 | 94.31 | 0.18 | 2.31 |" in made
    assert "| Ensemble-U | 4 | 0.10 | - | 5 | 80.00 | 2.00 |" in made
    assert made.count("Not measured yet.") == 1
    assert "old" not in made
    assert (made[0], made[-1]) == ("a", "b")
    assert pages.filled(made, tmp_path, "inducing-weights") == made


def test_numbers_in_sentences_are_those_of_the_files():
    """What the pages say in words, made again from tables.json and the results."""
    content = json.loads((ROOT / "papers" / "tables.json").read_text())
    cells = content["cells"]
    pages = (ROOT / "docs" / "experiments").glob("*.md")
    text = {path.stem: " ".join(path.read_text().split()) for path in pages}  # wherever lines are wrapped
    turned = [
        one for one in cells if one["column"] == "MAP" and "MNIST rotated" in one["table"] and one["ours"] is not None
    ]
    met, agree = (sum(one[rule] for one in turned) for rule in ("met", "agrees"))
    assert (
        f"Our MAP meets or exceeds {met} of the paper's {len(turned)} numbers and agrees with {agree} of them."
        in text["subnetwork"]
    )
    assert f"{met} of the {len(turned)} cells of MAP are met" in text["every-table"]
    runs = {
        name: [
            json.loads(path.read_text())
            for path in sorted((ROOT / "papers/results/inducing_weights").glob(f"cifar10_resnet18_{name}_?.json"))
        ]
        for name in ("240_epochs_start_120_sgd_kl_0.25_one_cycle", "480_epochs_one_cycle_point")
    }
    ours, plain = (
        statistics.fmean(100 * run["scores"][system]["test"]["accuracy"] for run in found)
        for found, system in zip(runs.values(), ("ffg_u", "deterministic"), strict=True)
    )
    assert f"is {plain - ours:.2f} points less accurate than a deterministic network" in text["inducing-weights"]
    seconds = [run["epochs"]["ffg_u"]["seconds"] for run in runs["240_epochs_start_120_sgd_kl_0.25_one_cycle"]]
    start, late = (
        statistics.fmean(statistics.median(one[part]) for one in seconds) for part in (slice(120), slice(120, None))
    )
    assert f"{start:.2f} s per epoch | {late:.2f} s per epoch | {late / start:.2f} |" in text["inducing-weights"]
    last = json.loads((ROOT / "papers/results/function_space/cifar10.json").read_text())["last_epoch"]
    assert f"{last['mfvi-1']['kl'] / 1e6:.2f} million nats" in text["function-space"]
    assert (
        f"is {last['fsvi-1']['nll']:.2f} (maximum a posteriori: {last['map-1-0']['nll']:.2f})" in text["function-space"]
    )
    early = json.loads((ROOT / "papers/results/function_space/cifar10_mfvi.json").read_text())["last_epoch"]["mfvi-1"]
    assert f"Training stopped after {early['epoch']} epochs." in text["function-space"]
    assert f"the KL of mean-field ({early['kl'] / 1e6:.1f} million nats)" in text["function-space"]
    for title, words in (
        ("Diag-Laplace", "| diagonal posterior | {} | {} |"),
        ("SWAG", "| SWAG | {} | {} |"),
        ("Dropout", "| dropout | {} | {} |"),
        ("Ensemble", "| ensemble | {} | {} |"),
        ("Subnetwork", "our subnetwork meets or exceeds {} of the paper's 52 numbers and agrees with {} of them."),
    ):
        own = [one for one in cells if one["column"] == title and "MNIST rotated" in one["table"]]
        assert words.format(*(sum(one[rule] for one in own) for rule in ("met", "agrees"))) in text["subnetwork"]
    cut = json.loads((ROOT / "papers/results/global_inducing/cifar10/fac-gi_cut.json").read_text())["history"]
    assert f"{cut[0]['bound']:.2f} after 10 epochs, {cut[1]['bound']:.2f} after 20" in text["every-table"]
    ran = {(one["paper"], one["experiment"]) for one in content["cells"] if one["ours"] is not None}
    ran |= {(one["paper"], one["experiment"]) for one in content["figures"] if one["ran"]}
    assert f"{len(ran)} of the 31 experiments" in (ROOT / "papers" / "README.md").read_text()
    kept = claims._kept(ROOT / "papers" / "results" / "subnetwork")
    for words, title in (
        ("largest variance", "Largest variance"),
        ("largest variance of live weights", "Live weights"),
        ("largest variance over iterates of SGD", "SWAG variance"),
        ("random", "Random"),
    ):
        shares = [[kept[name][f"{title} {share}"] for name in ("matern", "cosine")] for share in ("50%", "3%", "1%")]
        line = " | ".join(f"{matern:.0f} / {cosine:.0f} %" for matern, cosine in shares)
        assert f"| {words} | {line} |" in text["subnetwork"]
    counts = [one for one in cells if one["column"] == "parameters" and one["ours"] is not None]
    apart = [abs(one["ours"] - one["published"]) for one in counts if one["ours"] != one["published"]]
    assert (len(apart), min(apart), max(apart)) == (4, 10, 20)  # as docs/reproduce.md and the page say
    deep_folder = ROOT / "papers" / "results" / "walsh_hadamard" / "deep"
    spent = [json.loads(path.read_text()) for path in deep_folder.glob("*.json")]
    gpu = [one["processor_seconds"] for one in spent if one["hardware"]["gpu"]]
    x86 = [
        one["processor_seconds"] for one in spent if not one["hardware"]["gpu"] and one["hardware"]["cpu"] != "aarch64"
    ]
    for seconds in (x86, gpu):
        assert f"{min(seconds):.0f} to {max(seconds):.0f} s each" in text["walsh-hadamard"]
    wide = [json.loads(line) for line in (deep_folder / "yacht-whvi-2x512.jsonl").read_text().splitlines()]
    single, mixture, noise = (statistics.fmean(one[key] for one in wide) for key in ("rmse_draws", "rmse", "noise_std"))
    assert f"{single:.2f} ({mixture:.2f})" in text["walsh-hadamard"]
    assert f"rises from 0.32 to {noise:.2f}" in text["walsh-hadamard"]
    for name in ("li", "fac"):
        (scores,) = json.loads((ROOT / f"papers/results/global_inducing/cifar10/{name}.json").read_text())[
            "scores"
        ].values()
        assert f"{scores['seconds']:,.0f}" in text["global-inducing"]
        longest = max(row["seconds"] for row in scores["history"])
        assert f"{scores['seconds'] - longest:,.0f}" in text["global-inducing"]
    bounds = json.loads((ROOT / "papers/results/global_inducing/deep_linear/results.json").read_text())["bounds"]
    for depth in (4, 10):
        found = [bounds[f"{name}-50-{depth}"]["elbo"] for name in ("gi", "rand-gi", "gi-continued")]
        assert " | ".join(f"{value:.2f}" for value in found) in text["global-inducing"]
        assert found[2] > found[1] - 2 * bounds[f"rand-gi-50-{depth}"]["error"]  # gi contains rand-gi
