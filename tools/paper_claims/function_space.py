"""Claims in figures of the paper on function space; see `tools.paper_claims`."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import Verdict, at, listed, read

TOY_RUNS = {
    "prior variance 10, learning rate 1e-2, 400 steps (five seeds)": "toy.json",
    "the paper's prior variance of 1e6, learning rate 1e-3, 4,000 steps (three seeds)": "toy_paper_settings.json",
}
"""Result files of the toy problems by setting. Claims are judged by all of them."""


def _toy(folder: Path, problem: str, key: str, over: Callable[[Iterable[float]], float]) -> dict[str, dict[str, float]]:
    """A number over the seeds of each method, by setting."""
    return {
        setting: {
            name: over(one[key] for one in seeds) for name, seeds in read(folder / file)["scores"][problem].items()
        }
        for setting, file in TOY_RUNS.items()
    }


def _each_toy(found: Mapping[str, Mapping[str, float]], digits: int = 1) -> str:
    return ". ".join(f"With {setting}: {listed(own, digits)}" for setting, own in found.items())


SNELSON_RATIO = (
    "On Snelson's points, we divide the std two data widths away from the data by the std at the data, and take the smallest ratio "
    "over seeds."
)


def snelson(folder: Path) -> Verdict:
    """The function's uncertainty grows away from the data."""
    found = _toy(folder, "snelson", "ratio", min)
    words = f"{SNELSON_RATIO} {_each_toy(found)}. The claim counts as shown if every ratio of FSVI is above 10"
    return all(own["fsvi"] > 10 for own in found.values()), words


def snelson_above_mean_field(folder: Path) -> Verdict:
    """FSVI's uncertainty grows more away from the data than MFVI's."""
    found, errors = (_toy(folder, "snelson", key, over) for key, over in (("ratio", min), ("rmse", statistics.fmean)))
    words = f"{SNELSON_RATIO} {_each_toy(found)}. We also computed the mean RMSE over seeds. {_each_toy(errors, 2)}"
    return all(own["fsvi"] > own["mfvi"] for own in found.values()), words


def _moons(folder: Path, setting: str) -> Verdict:
    found = {
        name: (statistics.fmean(one["inside"] for one in seeds), statistics.fmean(one["outside"] for one in seeds))
        for name, seeds in read(folder / TOY_RUNS[setting])["scores"]["two_moons"].items()
    }
    inside, outside = ({name: pair[place] for name, pair in found.items()} for place in (0, 1))
    return inside["fsvi"] < 0.1 * math.log(2) and outside["fsvi"] > 0.5 * math.log(2), (
        f"Setting: {setting}. Mean entropy in nats at the moons: {listed(inside)}. Mean entropy in nats on a ring two data widths "
        f"away: {listed(outside)}. The largest possible entropy is {math.log(2):.2f}. The claim counts as shown if FSVI has less "
        "than a "
        "tenth of the largest entropy at the moons and more than half of the largest entropy on the ring"
    )


def moons(folder: Path) -> Verdict:
    """Predictions are certain at the two moons and uncertain away from them."""
    return _moons(folder, next(iter(TOY_RUNS)))


def moons_paper_settings(folder: Path) -> Verdict:
    """The same with the paper's prior variance and learning rate."""
    return _moons(folder, list(TOY_RUNS)[-1])


def moons_ensemble(folder: Path) -> Verdict:
    """Away from the moons, ensembles are uncertain only around the decision boundary."""
    found = {
        setting: {name: 100 * share for name, share in own.items()}
        for setting, own in _toy(folder, "two_moons", "uncertain", statistics.fmean).items()
    }
    return all(own["ensemble"] < 25 for own in found.values()), (
        "We take points on a ring around the moons, two data widths away. We report the percentage of points whose entropy is "
        f"above half of the largest possible entropy (mean over seeds). {_each_toy(found, 0)}. The claim counts as shown if the "
        "ensemble always has less than 25 %"
    )


CONTEXT_SYSTEMS = {"2": "fsvi.2", "10": "fsvi.10", "20": "fsvi.20", "40": "fsvi", "80": "fsvi.80"}
"""Names of FSVI in the results by its number of context inputs."""


def _context(folder: Path, key: str) -> dict[str, float]:
    """A score in percent by the number of context inputs."""
    found = read(folder / "fashion_mnist.json")["rows"]
    return {count: 100 * found[name]["mean"][key] for count, name in CONTEXT_SYSTEMS.items()}


def _outside_entropy(content: Mapping[str, Any], system: str) -> float:
    """Mean entropy on out-of-distribution images in nats, from the centers of the histogram's bins."""
    counts = content["histograms"][system]["entropy_outside"]
    middles = (math.log(10) * (place + 0.5) / len(counts) for place in range(len(counts)))
    return float(sum(count * middle for count, middle in zip(counts, middles, strict=True)) / sum(counts))


def _surest(content: Mapping[str, Any], ours: str) -> Verdict:
    """Whether `ours` has the highest mean entropy on out-of-distribution images, among networks above 20 % accuracy."""
    rows = {name: content["rows"][name] for name in (ours, "mfvi", "ensemble", "map")}
    entropy = {name: _outside_entropy(content, name) for name in rows}
    trained = [name for name, row in rows.items() if row["mean"]["accuracy"] > 0.2]
    accuracy = {name: 100 * row["mean"]["accuracy"] for name, row in rows.items()}
    counts = sorted({row["seeds"] for row in rows.values()})
    seeds = f"{' to '.join(map(str, counts))} seed{'s' * (counts[-1] > 1)}"
    shown = entropy[ours] == max(entropy[name] for name in trained)
    return shown, f"{listed(entropy)} ({seeds}). Accuracy in percent: {listed(accuracy, 1)}"


def _with_later(content: dict[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """A run with later runs of single systems in place of its own, as in the table."""
    for newer in map(read, paths):
        for key in ("rows", "histograms"):
            content[key] |= newer[key]
        if "fsvi" in newer["rows"]:
            content["settings"] = newer["settings"]
    return content


def outside_entropy(folder: Path) -> Verdict:
    """With uniform noise as context, FSVI is the least certain of out-of-distribution images."""
    content = _with_later(read(folder / "fashion_mnist.json"), [folder / "fashion_mnist_map.json"])
    later = read(folder / "fashion_mnist_noise.json")
    for key in ("rows", "histograms"):
        content[key]["fsvi.noise"] = later[key]["fsvi"]
    shown, words = _surest(content, "fsvi.noise")
    return shown, f"Mean entropy in nats on MNIST after training on Fashion-MNIST: {words}"


def outside_entropy_notmnist(folder: Path) -> Verdict:
    """With notMNIST as context, FSVI is the least certain of out-of-distribution images."""
    shown, words = _surest(read(folder / "fashion_mnist.json"), "fsvi")
    return shown, f"Mean entropy in nats on MNIST after training on Fashion-MNIST: {words}"


def cifar10_outside_entropy(folder: Path) -> Verdict:
    """Trained on CIFAR-10, FSVI is the least certain of out-of-distribution images."""
    content = _with_later(read(folder / "cifar10.json"), sorted(folder.glob("cifar10_*.json")))
    contexts = {"notmnist": "notMNIST", "noise": "uniform noise"}
    shown, words = _surest(content, "fsvi")
    context = contexts[content["settings"]["context"]]
    return shown, (
        f"Mean entropy in nats on Fashion-MNIST (in three channels) after training on CIFAR-10: {words}. The context is {context}"
    )


def context_auroc(folder: Path) -> Verdict:
    """More context inputs increase entropy and AUROC on out-of-distribution images."""
    found, content = _context(folder, "auroc_entropy"), read(folder / "fashion_mnist.json")
    entropy = {count: _outside_entropy(content, name) for count, name in CONTEXT_SYSTEMS.items()}
    words = (
        f"AUROC in percent, by entropy: {at(found, '({} context inputs)', 1)}. "
        f"Mean entropy on MNIST in nats: {at(entropy, '({} context inputs)')}"
    )
    return all(sorted(own.values()) == list(own.values()) for own in (found, entropy)), words


def context_accuracy(folder: Path) -> Verdict:
    """More context inputs do not change the test accuracy."""
    found = _context(folder, "accuracy")
    shown = max(found.values()) - min(found.values()) < 1
    return shown, f"Accuracy in percent: {at(found, '({} context inputs)', 1)}"


def context_calibration(folder: Path) -> Verdict:
    """More context inputs increase the expected calibration error."""
    found = _context(folder, "ece")
    return found["80"] > 1.5 * found["2"], (
        f"ECE in percent: {at(found, '({} context inputs)')}. The claim counts as shown if the ECE with 80 context inputs is more "
        "than 1.5 times the ECE with 2"
    )
