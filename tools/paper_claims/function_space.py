"""Claims in figures of the paper on function space; see `tools.paper_claims`."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.markdown import table
from tools.paper_claims.reading import NAMES, Verdict, listed, read

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


def _each_toy(columns: Mapping[str, tuple[Mapping[str, Mapping[str, float]], int]]) -> str:
    """A table of numbers by setting. Each column has the numbers of all methods, with their number of decimals."""
    methods = list(next(iter(next(iter(columns.values()))[0].values())))
    header = ["setting", *(f"{title}: {NAMES.get(name, name)}" for title in columns for name in methods)]
    rows = [
        [setting, *(f"{found[setting][name]:.{digits}f}" for found, digits in columns.values() for name in methods)]
        for setting in TOY_RUNS
    ]
    return table(header, rows)


def snelson_numbers(folder: Path) -> str:
    """Standard deviations, ratios and errors on Snelson's points."""
    means = {key: _toy(folder, "snelson", key, statistics.fmean) for key in ("outside", "rmse")}
    ratio = _toy(folder, "snelson", "ratio", min)
    columns = {"away": (means["outside"], 2), "ratio": (ratio, 1), "RMSE": (means["rmse"], 2)}
    return (
        "The columns *away* show the standard deviation two data widths away from the data. The ratio divides it by the standard "
        "deviation at the data (smallest ratio over seeds). All other numbers are means over seeds.\n\n"
        + _each_toy(columns)
    )


def moons_numbers(folder: Path) -> str:
    """Entropies at the moons and away from them, and the rules of the claims."""
    inside, outside, share = (
        _toy(folder, "two_moons", key, statistics.fmean) for key in ("inside", "outside", "uncertain")
    )
    shares = {setting: {name: 100 * one for name, one in own.items()} for setting, own in share.items()}
    return (
        "The table shows the mean entropy in nats at the moons and on a ring two data widths away. The largest possible entropy is "
        f"{math.log(2):.2f}. The columns *uncertain* show the percentage of points on the ring whose entropy is above half of "
        "the largest possible entropy. All numbers are means over seeds.\n\n"
        "FSVI counts as certain at the moons if its entropy there is below a tenth of the largest possible entropy. FSVI counts as "
        "uncertain on the ring if its entropy there is above half of the largest possible entropy.\n\n"
        + _each_toy({"moons": (inside, 2), "ring": (outside, 2), "uncertain": (shares, 0)})
    )


def snelson(folder: Path) -> Verdict:
    """The function's uncertainty grows away from the data."""
    found = _toy(folder, "snelson", "ratio", min)
    ratios = " and ".join(f"{own['fsvi']:.1f}" for own in found.values())
    words = f"In the two settings, FSVI has ratios of {ratios}. The claim counts as shown if both ratios are above 10"
    return all(own["fsvi"] > 10 for own in found.values()), words


def snelson_above_mean_field(folder: Path) -> Verdict:
    """FSVI's uncertainty grows more away from the data than MFVI's."""
    found = _toy(folder, "snelson", "ratio", min)
    fsvi, mfvi = (" and ".join(f"{own[name]:.1f}" for own in found.values()) for name in ("fsvi", "mfvi"))
    words = f"In the two settings, FSVI has ratios of {fsvi}. The ratios of MFVI are {mfvi}"
    return all(own["fsvi"] > own["mfvi"] for own in found.values()), words


def snelson_wider_than_mean_field(folder: Path) -> Verdict:
    """Away from the data, FSVI has a larger standard deviation than MFVI."""
    seeds = [read(folder / file)["scores"]["snelson"] for file in TOY_RUNS.values()]
    pairs = [list(zip(own["fsvi"], own["mfvi"], strict=True)) for own in seeds]
    wider = [sum(fsvi["outside"] > mfvi["outside"] for fsvi, mfvi in own) for own in pairs]
    counts = " and ".join(f"{count} of {len(own)} seeds" for count, own in zip(wider, pairs, strict=True))
    return all(count == len(own) for count, own in zip(wider, pairs, strict=True)), (
        f"In the two settings, FSVI has a larger standard deviation than MFVI with {counts}. The claim counts as shown if FSVI has "
        "the larger standard deviation with every seed"
    )


def _moons(folder: Path, setting: str) -> Verdict:
    found = {
        name: (statistics.fmean(one["inside"] for one in seeds), statistics.fmean(one["outside"] for one in seeds))
        for name, seeds in read(folder / TOY_RUNS[setting])["scores"]["two_moons"].items()
    }
    inside, outside = ({name: pair[place] for name, pair in found.items()} for place in (0, 1))
    return inside["fsvi"] < 0.1 * math.log(2) and outside["fsvi"] > 0.5 * math.log(2), (
        f"FSVI has a mean entropy of {inside['fsvi']:.2f} nats at the moons and {outside['fsvi']:.2f} nats on the ring"
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
    shares = " to ".join(sorted({f"{own['ensemble']:.0f}" for own in found.values()}, key=float))
    return all(own["ensemble"] < 25 for own in found.values()), (
        f"In both settings, the ensemble is uncertain at {shares} % of the points on the ring. The claim counts as shown if both "
        "percentages are below 25 %"
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
    most = max(row["seeds"] for row in rows.values())
    seeds = "1 seed" if most == 1 else f"first of {most} seeds"  # results store the histograms of the first seed only
    shown = entropy[ours] == max(entropy[name] for name in trained)
    return shown, f"{listed(entropy)} ({seeds})"


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
    content = _with_later(
        read(folder / "fashion_mnist.json"), [folder / f"fashion_mnist_{name}.json" for name in ("map", "mfvi")]
    )
    later = read(folder / "fashion_mnist_noise.json")
    for key in ("rows", "histograms"):
        content[key]["fsvi.noise"] = later[key]["fsvi"]
    shown, words = _surest(content, "fsvi.noise")
    return shown, f"The mean entropies in nats on MNIST are {words}"


def outside_entropy_notmnist(folder: Path) -> Verdict:
    """With notMNIST as context, FSVI is the least certain of out-of-distribution images."""
    shown, words = _surest(read(folder / "fashion_mnist.json"), "fsvi")
    return shown, f"The mean entropies in nats on MNIST are {words}"


def cifar10_outside_entropy(folder: Path) -> Verdict:
    """Trained on CIFAR-10, FSVI is the least certain of out-of-distribution images."""
    later = [folder / f"cifar10_{name}.json" for name in ("fsvi", "mfvi", "map_90")]  # as in the table of scores
    content = _with_later(read(folder / "cifar10.json"), later)
    contexts = {"notmnist": "notMNIST", "noise": "uniform noise"}
    shown, words = _surest(content, "fsvi")
    context = contexts[content["settings"]["context"]]
    return shown, (
        f"The mean entropies in nats on Fashion-MNIST (in three channels) are {words}. The context is {context}"
    )


def context_numbers(folder: Path) -> str:
    """Scores of FSVI by the number of context inputs."""
    content = read(folder / "fashion_mnist.json")
    lines = {
        "accuracy in percent": (_context(folder, "accuracy"), 1),
        "ECE in percent": (_context(folder, "ece"), 2),
        "AUROC in percent, by entropy": (_context(folder, "auroc_entropy"), 1),
        "mean entropy on MNIST in nats": (
            {count: _outside_entropy(content, name) for count, name in CONTEXT_SYSTEMS.items()},
            2,
        ),
    }
    rows = [[title, *(f"{value:.{digits}f}" for value in values.values())] for title, (values, digits) in lines.items()]
    return table(["context inputs", *CONTEXT_SYSTEMS], rows)


def _from_2_to_80(values: Mapping[str, float], digits: int) -> str:
    return f"{values['2']:.{digits}f} with 2 context inputs and {values['80']:.{digits}f} with 80"


def context_auroc(folder: Path) -> Verdict:
    """More context inputs increase entropy and AUROC on out-of-distribution images."""
    found, content = _context(folder, "auroc_entropy"), read(folder / "fashion_mnist.json")
    entropy = {count: _outside_entropy(content, name) for count, name in CONTEXT_SYSTEMS.items()}
    words = (
        f"The AUROC is {_from_2_to_80(found, 1)}. The mean entropy on MNIST, in nats, is {_from_2_to_80(entropy, 2)}"
    )
    return all(sorted(own.values()) == list(own.values()) for own in (found, entropy)), words


def context_accuracy(folder: Path) -> Verdict:
    """More context inputs do not change the test accuracy."""
    found = _context(folder, "accuracy")
    shown = max(found.values()) - min(found.values()) < 1
    return shown, f"The accuracy lies between {min(found.values()):.1f} and {max(found.values()):.1f} %"


def context_calibration(folder: Path) -> Verdict:
    """More context inputs increase the expected calibration error."""
    found = _context(folder, "ece")
    return found["80"] > 1.5 * found["2"], (
        f"The ECE in percent is {_from_2_to_80(found, 2)}. The claim counts as shown if the ECE with 80 context inputs is more "
        "than 1.5 times the ECE with 2 context inputs"
    )
