"""Results of the experiments as rows, next to the published numbers. Each reader takes the folder that an experiment wrote."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read, read_lines
from bayesify_papers.shared.rows import Published, Row, grouped, row

PAPER = published("subnetwork")


def toy(folder: Path) -> list[Row]:
    """Standard deviations at the data, between the clusters and beyond the data, which the paper shows in a figure."""
    content = read(folder / "toy.json")
    entries = [{"dataset": content["dataset"], **one} for one in content["outcomes"]]
    return grouped(entries, ("dataset", "system", "num_weights"), ("at_data", "in_gap", "outside"))


def uci(folder: Path) -> list[Row]:
    """Subnetworks of networks of many sizes on UCI data, which the paper shows in a figure."""
    keys = ("dataset", "gap", "hidden_layers", "width", "num_weights")
    return grouped(read_lines(*sorted(folder.glob("*.jsonl"))), keys, ["log_likelihood"])


def _shifted(folder: Path, dataset: str, outside: str, places: Mapping[str, int]) -> list[Row]:
    content = read(folder / "results.json")
    paper = content["dataset"] == dataset
    rows = []
    for system, found in content["scores"].items():
        facts = content["systems"].get(system, {})
        seconds = round(sum(facts.get(f"{what}_seconds", 0) for what in ("train", "select", "fit")), 1)
        theirs = (PAPER.find(dataset, system) if paper else None) or {}
        columns: dict[str, list[Mapping[str, float]]] = {}
        for name, scores in found["shifted"].items():
            columns.setdefault(name.rpartition("-")[2], []).append(scores)
        for shift, sets in columns.items():
            for metric in ("ll", "error", "ece", "brier"):
                values = [{**one, "ll": -one["nll"], "error": 1 - one["accuracy"]}[metric] for one in sets]
                number: Published = None
                if metric in theirs and shift in places:
                    place = places[shift]
                    spread = theirs[f"{metric}_std"][place] if f"{metric}_std" in theirs else None
                    number = (theirs[metric][place], spread)
                setting = {"system": system, "shift": shift, "seed": content["seed"]}
                rows.append({**row(setting, metric, statistics.fmean(values), number), "seconds": seconds})
        for name, scores in found["ood"].items():
            known = PAPER.find("ood_auroc", dataset, system) if paper and name == outside else None
            setting = {"system": system, "outside": name, "seed": content["seed"]}
            rows.append({**row(setting, "auroc", scores["auroc_entropy"], known), "seconds": seconds})
    return rows


def rotated_mnist(folder: Path) -> list[Row]:
    """Tables 1 to 14."""
    return _shifted(folder, "mnist", "fashion_mnist", {str(angle): at for at, angle in enumerate(PAPER["angles"])})


def corrupted_cifar(folder: Path) -> list[Row]:
    """Tables 1 and 15 to 20."""
    return _shifted(folder, "cifar10", "svhn", {str(severity): severity for severity in range(6)})
