"""Tables of the documentation, made from the committed results. Run this program when results have changed.

python -m tools.paper_pages
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bayesify_papers.inducing_weights.scores import means_by_severity
from bayesify_papers.inducing_weights.systems import BASELINES, SYSTEMS
from bayesify_papers.shared.published import published
from bayesify_papers.shared.tables import number
from bayesify_papers.status import agrees, met, rounded

from tools.markdown import replaced, table
from tools.paper_claims.subnetwork import TIMES, by_level

ROOT = Path(__file__).parents[1]
START, END = "<!-- results: {} -->", "<!-- end of results -->"


def main() -> None:
    """Update the pages."""
    for name in PAGES:
        page = ROOT / "docs" / "experiments" / f"{name}.md"
        page.write_text(filled(page.read_text(), ROOT / "papers" / "results" / name.replace("-", "_"), name))


def filled(text: str, folder: Path, page: str) -> str:
    """A page in which every table between its marks is made again.

    Args:
        text: Text of the page.
        folder: Folder of the results. A table whose file is missing says so.
        page: Name of the page, a key of `PAGES`.
    """
    for name, make in PAGES[page].items():
        start, paths = START.format(name), sorted(folder.glob(f"{name}.json"))
        if start in text:
            contents = [json.loads(path.read_text()) for path in paths]
            made = make(contents if "*" in name else contents[0]) if contents else "Not measured yet."
            text = replaced(text, start, END, made)
    return text


def _machine(*contents: dict[str, Any]) -> str:
    """Hardware, version of torch and dates of runs on one kind of machine."""
    where, dates = contents[0]["hardware"], sorted({content["date"] for content in contents})
    return (
        f"Run on {where.get('gpu') or where['cpu']} with torch {contents[0]['versions']['torch']} on {', '.join(dates)}"
    )


def _source(content: dict[str, Any]) -> str:
    return f"{_machine(content)} by `{content['command']}`:\n\n"


def _fashion(content: dict[str, Any]) -> str:
    rows = []
    for system, mean in content["mean"].items():
        error = content["standard_error"].get(system, {})
        count = sum(system in part for part in content["by_seed"].values())
        cells = [
            number(factor * mean[key], digits) + (f" ± {number(factor * error[key], digits)}" if error else "")
            for key, factor, digits in (("accuracy", 100, 2), ("nll", 1, 3), ("ece", 100, 2))
        ]
        outside = [number(mean[f"ood/{name}/auroc_entropy"]) for name in ("mnist", "notmnist")]
        worst = [number(100 * mean[f"corrupted/5/{key}"], 1) for key in ("accuracy", "ece")]
        rows.append([SYSTEMS[system].title, str(count), f"{content['parameters'][system]:,}", *cells, *outside, *worst])
    header = [
        "system",
        "seeds",
        "parameters",
        "accuracy %",
        "NLL",
        "ECE %",
        "AUROC MNIST",
        "AUROC notMNIST",
        "accuracy % at severity 5",
        "ECE % at severity 5",
    ]
    tried = [
        [
            SYSTEMS[entry["system"]].title,
            ", ".join(f"`{key}={value:g}`" for key, value in entry["setting"].items()),
            number(100 * entry["accuracy"], 2),
            number(entry["nll"]),
            number(100 * entry["ece"], 2),
            "taken" if content["chosen"][entry["system"]] == entry["setting"] else "",
        ]
        for entry in content["tried"]
        if entry["setting"]
    ]
    grid = table(["system", "caps", "accuracy %", "NLL", "ECE %", ""], tried)
    return (
        f"{_source(content)}{table(header, rows)}\n\n"
        "Numbers are means and standard errors over seeds. The AUROC shows how well the entropy separates out-of-distribution "
        "images from test images. The last two columns are means over the six corruptions at their strongest.\n\n"
        f"The next table shows the settings that were tried, scored on held-out training images:\n\n{grid}"
    )


CIFAR10_COLUMNS = ["AUROC MNIST", "AUROC Fashion-MNIST", "accuracy % at severity 5", "ECE % at severity 5"]
CIFAR10_NOTE = (
    "The AUROC shows how well the entropy separates out-of-distribution images from test images. The out-of-distribution images "
    "are gray and have three channels. The columns of severity 5 are means over the six corruptions at their strongest, on {}."
)


def _cifar10(content: dict[str, Any]) -> str:
    rows = []
    for system, scores in content["scores"].items():
        test, worst = scores["test"], means_by_severity(scores["corrupted"])[5]
        cells = [number(100 * test["accuracy"], 2), number(test["nll"]), number(100 * test["ece"], 2)]
        cells += [number(scores["ood"][name]["auroc_entropy"]) for name in ("mnist", "fashion_mnist")]
        cells += [number(100 * worst[key], 1) for key in ("accuracy", "ece")]
        cells += [number(content["epochs"][system]["nll"][-1])]
        size, seconds = f"{content['parameters'][system]:,}", f"{content['seconds'][system]:.0f}"
        rows.append([SYSTEMS[system].title, size, seconds, *cells])
    header = ["system", "parameters", "seconds of training", "accuracy %", "NLL", "ECE %"]
    header += [*CIFAR10_COLUMNS, "training NLL, last epoch"]
    return (
        f"{_source(content)}{table(header, rows)}\n\n"
        "All numbers are from one seed. The columns are as in the table above, but with the first 500 test images under "
        "corruption. Several systems were trained at the same time on one GPU."
    )


def _cifar10_scores(scores: dict[str, Any]) -> list[float]:
    """The numbers of a row: accuracy, NLL, NLL at the best temperature, ECE, two AUROCs, and accuracy and ECE under corruption."""
    test, worst = scores["test"], means_by_severity(scores["corrupted"])[5]
    outside = [scores["ood"][name]["auroc_entropy"] for name in ("mnist", "fashion_mnist")]
    clean = [100 * test["accuracy"], test["nll"], test["calibrated_nll"], 100 * test["ece"]]
    return [*clean, *outside, 100 * worst["accuracy"], 100 * worst["ece"]]


def _cifar10_seeds(contents: list[dict[str, Any]]) -> str:
    """Test scores of every seed and their mean by system. The commands of one system differ only in the seed."""
    rows, commands = [], []
    order = {name: place for place, name in enumerate(SYSTEMS | BASELINES)}
    for system in sorted({name for content in contents for name in content["scores"]}, key=order.__getitem__):
        found = [content for content in contents if system in content["scores"]]
        commands.append(found[0]["command"])
        title, size = (SYSTEMS | BASELINES)[system].title, f"{found[0]['parameters'][system]:,}"
        epochs = str(found[0]["settings"]["epochs"])
        epochs += f" + {found[0]['settings']['swag_epochs']}" if system == "swag" else ""
        numbers = [_cifar10_scores(content["scores"][system]) for content in found]
        labels = [str(content["seed"]) for content in found]
        if len(found) > 1:
            numbers.append([statistics.mean(column) for column in zip(*numbers, strict=True)])
            labels.append("mean")
        for label, one in zip(labels, numbers, strict=True):
            cells = [number(value, digits) for value, digits in zip(one, (2, 4, 4, 2, 3, 3, 1, 1), strict=True)]
            rows.append([title, label, size, epochs, *cells])
    header = ["system", "seed", "parameters", "epochs", "accuracy %", "NLL", "NLL at the best temperature", "ECE %"]
    header += CIFAR10_COLUMNS
    listed = "\n".join(f"- `{command}`" for command in dict.fromkeys(commands))
    return (
        f"{_machine(*contents)}:\n\n{table(header, rows)}\n\n"
        f"{CIFAR10_NOTE.format('the first 1,000 test images')} The corruptions are Gaussian noise, shot noise, impulse "
        'noise, Gaussian blur, contrast and brightness. "200 + 20" means 20 more epochs for SWAG. The noise around the common '
        "start of the members of Ensemble-U has a standard deviation of 0.001 in the table and of 0.1 in the command below. "
        "The commands are for seed 0. For seeds 1 and 2 of the deterministic network, last-layer Laplace and FFG-U, and for "
        f"seed 1 of FFG-W, replace `--seed 0` and leave out `swag`:\n\n{listed}"
    )


def _pruning(contents: list[dict[str, Any]]) -> str:
    """Accuracy, NLL and ECE by the share that is kept, next to the paper's ResNet-50, which is fine-tuned after pruning."""
    rows = []
    contents = sorted(contents, key=lambda content: content["dataset"] != "cifar10")  # the data of the paper come first
    for content in contents:
        cifar10 = content["dataset"] == "cifar10"
        data = "CIFAR-10, ResNet-18" if cifar10 else "Fashion-MNIST, small ResNet"
        for row in content["rows"]:
            theirs: list[float | None] = [None] * 3
            if cifar10 and (row["keep"] == 1 or row["fine_tuned"]):
                keys = ("pruned", row["system"], float(row["keep"]))
                theirs = [published("inducing_weights").find(*keys, key) for key in ("accuracy", "nll", "ece")]
            tuned = "" if row["keep"] == 1 else f"{content['fine_tuning']} epochs" if row["fine_tuned"] else "no"
            ours = [
                number(scale * row[key], digits)
                for key, scale, digits in (("accuracy", 100, 2), ("nll", 1, 3), ("ece", 100, 2))
            ]
            paper = ["" if score is None else number(score, 2) for score in theirs]
            kept, size = f"{100 * row['keep']:g}", f"{row['parameters']:,}"
            rows.append([data, SYSTEMS[row["system"]].title, kept, tuned, size, *ours, *paper])
    header = ["data and network", "system", "kept %", "fine-tuned", "parameters", "accuracy %", "NLL", "ECE %"]
    header += ["paper (ResNet-50): accuracy %", "NLL", "ECE %"]
    listed = "\n".join(f"- `{content['command']}`" for content in contents)
    return f"{_machine(*contents)} by:\n\n{listed}\n\n{table(header, rows)}"


def _ablation(content: dict[str, Any]) -> str:
    rows = []
    for row in content["rows"]:
        caps = [number(row[key], 2) for key in ("max_lambda", "max_std")]
        scores = [number(100 * row[key], 2) for key in ("accuracy", "ece")]
        rows.append([SYSTEMS[row["system"]].title, str(row["inducing"]), *caps, f"{row['parameters']:,}", *scores])
    header = ["system", "M", "`max_lambda`", "`max_std`", "parameters", "accuracy %", "ECE %"]
    return f"Training used the first {content['num_train']:,} images. {_source(content)}" + table(header, rows)


def _regression(content: dict[str, Any]) -> str:
    grouped: dict[str, list[dict[str, float]]] = {}
    for outcome in content["outcomes"]:
        grouped.setdefault(outcome["system"], []).append(outcome)
    rows = []
    for system, outcomes in grouped.items():
        nlls = [outcome["nll"] for outcome in outcomes]
        spread = max(abs(nll - statistics.median(nlls)) for nll in nlls)
        means = [statistics.fmean(outcome[key] for outcome in outcomes) for key in ("rmse", "gap_ratio")]
        cells = [number(statistics.median(nlls)), number(spread), number(means[0]), number(means[1], 1)]
        rows.append([system, str(len(nlls)), *cells])
    header = ["system", "seeds", "median test NLL", "farthest from it", "RMSE", "std in the gap / at the data"]
    return _source(content) + table(header, rows)


SYSTEMS_OF_FUNCTION_SPACE = {
    "fsvi": "function space, context notMNIST",
    "fsvi.outlines": "context outlines of training images",
    "fsvi.noise": "context uniform noise",
    "fsvi.train": "context training images under noise",
    "mfvi": "mean-field",
    "map": "maximum a posteriori",
    "ensemble": "ensemble of 5",
}


def _function_space(content: dict[str, Any]) -> str:
    rows, printed = [], published("function_space")["table1"]
    for system, title in SYSTEMS_OF_FUNCTION_SPACE.items():
        if system not in content["rows"]:
            continue
        entry, theirs = content["rows"][system], printed[content["settings"]["dataset"]].get(system)
        keys = (("accuracy", 100, 1), ("ece", 1, 3), ("nll", 1, 3))
        keys += (("auroc_mutual_information", 100, 1), ("auroc_entropy", 100, 1))
        cells = [
            "none"
            if system == "map" and key == "auroc_mutual_information"  # one draw has none
            else number(scale * entry["mean"][key], digits)
            + (f" ± {number(scale * entry['std'][key], digits)}" if entry["seeds"] > 1 else "")
            for key, scale, digits in keys
        ]
        paper = [f"{theirs[key]:g}" for key, *_ in keys if key != "nll"] if theirs else [""] * 4
        if system == "fsvi" and content["settings"]["context"] == "noise":
            title = SYSTEMS_OF_FUNCTION_SPACE["fsvi.noise"]
        rows.append([title, str(entry["seeds"]), f"{entry['seconds']:.0f}", *cells, *paper])
    header = ["system", "seeds", "seconds", "accuracy %", "ECE", "NLL", "AUROC %, MI", "AUROC %, entropy"]
    header += ["paper: accuracy %", "ECE", "AUROC %, MI", "AUROC %, entropy"]
    points = {
        40 if name == "fsvi" else int(name.partition(".")[2]): entry["mean"]
        for name, entry in content["rows"].items()
        if name == "fsvi" or name.partition(".")[2].isdigit()
    }
    by_points = [
        [str(count), *(number(100 * mean[key], 1) for key in ("auroc_mutual_information", "auroc_entropy", "accuracy"))]
        for count, mean in sorted(points.items())
    ]
    made = f"{_source(content)}{table(header, rows)}\n\nSeconds are the training time of all seeds, with other work on the machine."
    if len(by_points) <= 1:
        return made
    return (
        f"{made}\n\nThe next table shows scores by the number of context inputs per step, with notMNIST as context:\n\n"
        + table(["context inputs", "AUROC %, MI", "AUROC %, entropy", "accuracy %"], by_points)
    )


def _function_space_toy(content: dict[str, Any]) -> str:
    titles = {"snelson": "Snelson", "two_moons": "two moons"}
    titles |= {"fsvi": "function space", "mfvi": "mean-field", "ensemble": "ensemble of 5"}
    rows = []
    for problem, methods in content["scores"].items():
        for method, seeds in methods.items():
            fit = "rmse" if "rmse" in seeds[0] else "accuracy"
            mean = {key: statistics.fmean(seed[key] for seed in seeds) for key in ("inside", "outside", fit)}
            least = min(seed["ratio"] for seed in seeds)
            cells = [number(mean["inside"], 2), number(mean["outside"], 2), number(least, 1)]
            cells.append(
                f"RMSE {number(mean[fit], 2)}" if fit == "rmse" else f"accuracy {number(100 * mean[fit], 1)} %"
            )
            ring = [seed["uncertain"] for seed in seeds if "uncertain" in seed]
            cells.append(f"{number(100 * statistics.fmean(ring), 0)} %" if ring else "")
            rows.append([titles[problem], titles[method], str(len(seeds)), *cells])
    header = ["data", "method", "seeds", "at the data", "two data widths away", "smallest ratio of a seed", "fit"]
    header.append("uncertain part of the ring")
    return _source(content) + table(header, rows)


def _corrupted_cifar(contents: list[dict[str, Any]]) -> str:
    """Means over corruptions by level, next to the paper's. Level 0 has the clean test images.

    Two runs have the same MAP estimate, whose row is that of the first run.
    """
    first, second = contents
    content = {key: {**first[key], **second[key], **first[key]} for key in ("scores", "systems")}
    titles, theirs = published("subnetwork")["titles"], published("subnetwork")["cifar10"]
    rows, within, both = [], [0, 0], [0, 0]  # one-sided and two-sided, without and with corruptions
    for score, key in (("LL", "nll"), ("error", "accuracy"), ("ECE", "ece"), ("Brier score", "brier")):
        name = {"nll": "ll", "accuracy": "error"}.get(key, key)
        for system, own in content["scores"].items():
            cells = []
            for level, found in by_level(own, key).items():
                ours = {"nll": -found, "accuracy": 1 - found}.get(key, found)
                paper, spread = (theirs[system][part][int(level)] for part in (name, f"{name}_std"))
                cell = {"ours": ours, "published": paper, "corrected": None, "published_spread": spread, "digits": 2}
                cell |= {"exact": False, "better": "higher" if name == "ll" else "lower"}
                within[int(level) > 0] += bool(met(cell))
                both[int(level) > 0] += bool(agrees(cell))
                cells.append(f"{rounded(ours, 2):f} ({rounded(paper, 2):f})")
            seconds = sum(content["systems"][system].get(step, 0) for step in TIMES)
            rows.append([score, titles[system], *cells, f"{seconds:.0f}"])
    header = ["", "system", *(f"level {level}" for level in range(6)), "seconds"]
    return (
        f"{''.join(map(_source, contents))}{table(header, rows)}\n\nThe seconds include training, selection and fitting, with "
        f"other work on the machine. At level 0, {within[0]} of {len(rows)} numbers are met or better, "
        f"{both[0]} of {len(rows)} agree. Above level 0, {within[1]} of {5 * len(rows)} are met or better, {both[1]} of "
        f"{5 * len(rows)} agree."
    )


PAGES: dict[str, dict[str, Callable[[Any], str]]] = {
    "inducing-weights": {
        "regression_inducing": _regression,
        "regression_others": _regression,
        "fashion_mnist": _fashion,
        "cifar10_resnet18_0": _cifar10,
        "cifar10_resnet18_one_cycle_*": _cifar10_seeds,
        "pruning*": _pruning,
        "ablation": _ablation,
    },
    "function-space": {
        "toy": _function_space_toy,
        "fashion_mnist": _function_space,
        "toy_paper_settings": _function_space_toy,
        "fashion_mnist_noise": _function_space,
        "fashion_mnist_map": _function_space,
        "fashion_mnist_mfvi": _function_space,
        "cifar10": _function_space,
        "cifar10_fsvi": _function_space,
        "cifar10_mfvi": _function_space,
        "cifar10_map": _function_space,
        "cifar10_map_long": _function_space,
        "cifar10_map_90": _function_space,
    },
    "subnetwork": {"corrupted_cifar*": _corrupted_cifar},
}
"""Functions that make tables, by page of docs/experiments and then by name of a results file. A name with a star has several
files."""


if __name__ == "__main__":
    main()
