"""What the paper on function space claims in figures; see `tools.paper_claims`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import Verdict, listed, read


def _toy_ratio(folder: Path, problem: str) -> dict[str, float]:
    scores = read(folder / "toy.json")["scores"][problem]
    return {name: min(one["ratio"] for one in seeds) for name, seeds in scores.items()}


def snelson(folder: Path) -> Verdict:
    """The function's uncertainty grows away from the data."""
    found = _toy_ratio(folder, "snelson")
    about = "std two data widths away over that at the data, least of five seeds"
    return found["fsvi"] > 10, f"{about}: {listed(found, 1)} (data in the manner of Snelson's)"


def moons(folder: Path) -> Verdict:
    """Predictions are sure at the two moons and unsure away from them."""
    found = _toy_ratio(folder, "two_moons")
    return found["fsvi"] > 10, f"entropy away from the moons over that at them, least of five seeds: {listed(found, 1)}"


def _context(folder: Path, key: str) -> dict[str, float]:
    """A score in percent by the number of context inputs."""
    rows = {"40": "fsvi"} | {name: f"fsvi.{name}" for name in ("2", "10", "20", "80")}
    found = read(folder / "fashion_mnist.json")["rows"]
    return {name: 100 * found[rows[name]]["mean"][key] for name in sorted(rows, key=int)}


def _surest(content: Mapping[str, Any]) -> Verdict:
    """By AUROC and by the mean entropy of strangers, from the middles of its histogram's bins, of networks above 20 % accuracy."""
    rows = {name: content["rows"][name] for name in ("fsvi", "mfvi", "ensemble", "map")}
    found = {name: 100 * row["mean"]["auroc_entropy"] for name, row in rows.items()}
    entropy = {}
    for name in rows:
        counts = content["histograms"][name]["entropy_outside"]
        middles = (math.log(10) * (place + 0.5) / len(counts) for place in range(len(counts)))
        entropy[name] = sum(count * middle for count, middle in zip(counts, middles, strict=True)) / sum(counts)
    trained = [name for name, row in rows.items() if row["mean"]["accuracy"] > 0.2]
    shown = all(own["fsvi"] == max(own[name] for name in trained) for own in (found, entropy))
    spent = {name: row["seconds"] for name, row in rows.items()}
    return shown, (
        f"{listed(found, 1)}; mean entropy of strangers {listed(entropy)} nats; {listed(spent, 0)} s of a GPU beside other work"
    )


def strange_entropy(folder: Path) -> Verdict:
    """FSVI is the least sure of strange images."""
    content = read(folder / "fashion_mnist.json")
    shown, words = _surest(content)
    noise, ensemble = (100 * content["rows"][name]["mean"]["auroc_entropy"] for name in ("fsvi.noise", "ensemble"))
    return shown, (
        f"AUROC by entropy, Fashion-MNIST against MNIST, context notMNIST, three seeds: {words}; with the paper's own context, "
        f"uniform noise, FSVI has {noise:.1f} (one seed), {'above' if noise > ensemble else 'below'} the ensemble"
    )


def cifar10_strange_entropy(folder: Path) -> Verdict:
    """FSVI is the least sure of strange images, trained on CIFAR-10."""
    content = read(folder / "cifar10.json")
    first = {key: 100 * content["rows"]["fsvi"]["mean"][key] for key in ("auroc_entropy", "accuracy")}
    contexts = {"notmnist": "notMNIST, gray as these strangers are", "noise": "uniform noise"}
    for path in sorted(folder.glob("cifar10_*.json")):  # later runs of single systems, which the table has too
        newer = read(path)
        for key in ("rows", "histograms"):
            content[key] |= newer[key]
        if "fsvi" in newer["rows"]:
            content["settings"] = newer["settings"]
    shown, words = _surest(content)
    accuracy = {name: 100 * content["rows"][name]["mean"]["accuracy"] for name in ("fsvi", "mfvi", "ensemble", "map")}
    return shown, (
        f"AUROC by entropy, CIFAR-10 against Fashion-MNIST in three channels, one seed: {words}; context of FSVI "
        f"{contexts[content['settings']['context']]}; accuracy {listed(accuracy, 1)}; in a first run, context "
        f"{contexts['notmnist']}, FSVI had {first['auroc_entropy']:.1f} at an accuracy of {first['accuracy']:.1f}"
    )


def context_auroc(folder: Path) -> Verdict:
    """More context inputs increase entropy and AUROC on strange images."""
    found = _context(folder, "auroc_entropy")
    words = f"AUROC by entropy by the number of context inputs: {listed(found, 1)} (one seed, three at 40)"
    return sorted(found.values()) == list(found.values()), words


def context_accuracy(folder: Path) -> Verdict:
    """More context inputs do not change the test accuracy."""
    found = _context(folder, "accuracy")
    return max(found.values()) - min(
        found.values()
    ) < 1, f"accuracy by the number of context inputs: {listed(found, 1)}"


def context_calibration(folder: Path) -> Verdict:
    """More context inputs increase the expected calibration error."""
    found = _context(folder, "ece")
    return found["80"] > 1.5 * found["2"], (
        f"ECE in percent by the number of context inputs: {listed(found)}; it stays level here, where "
        "60,000 images outweigh a KL that is not scaled to the data"
    )
