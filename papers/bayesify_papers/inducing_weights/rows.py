"""Results of the experiments as rows, beside the published numbers: each reader takes the folder that an experiment wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row
from bayesify_papers.shared.scores import CLASSIFICATION


def _percent(scores: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and ECE in percent, as the paper's tables have them."""
    return {key: scores[key] * (100 if key in ("accuracy", "ece") else 1) for key in CLASSIFICATION}


def regression(folder: Path) -> list[Row]:
    """The two-cluster regression, shown in a figure by the paper."""
    return grouped(read(folder / "regression.json")["outcomes"], ["system"], ["nll", "rmse", "gap_ratio"])


def classification(folder: Path) -> list[Row]:
    """Tables 3, 5, 11 and 12."""
    content, paper = read(folder / "results.json"), published("inducing_weights")
    known = content.get("dataset") == "cifar10"
    rows = []
    for system, scores in content["scores"].items():
        test = _percent(scores["test"])
        rows += [
            row({"system": system}, metric, test[metric], paper.find("cifar10", system, metric) if known else None)
            for metric in CLASSIFICATION
        ]
        for outside, found in scores["ood"].items():
            theirs = (paper.find("ood", system, outside) if known else None) or (None, None)
            own = {"system": system, "outside": outside}
            rows += [
                row(own, key, found[f"{key}_max_probability"], number)
                for key, number in zip(("auroc", "aupr"), theirs, strict=True)
            ]
    return rows


def fashion(folder: Path) -> list[Row]:
    """Fashion-MNIST, which the paper does not have."""
    by_seed = read(folder / "results.json")["by_seed"]
    entries = [{"system": system, **_percent(scores)} for seed in by_seed.values() for system, scores in seed.items()]
    return grouped(entries, ["system"], CLASSIFICATION)


def ablation(folder: Path) -> list[Row]:
    """Sizes of U and caps, shown in a figure by the paper."""
    keys = ("system", "inducing", "max_lambda", "max_std", "parameters")
    return grouped(({**one, **_percent(one)} for one in read(folder / "ablation.json")["rows"]), keys, CLASSIFICATION)


def pruning(folder: Path) -> list[Row]:
    """Pruned posteriors on Fashion-MNIST; the paper's table 7 is a ResNet-50 on CIFAR-10."""
    keys = ("system", "keep", "fine_tuned", "seeds", "parameters")
    return grouped(({**one, **_percent(one)} for one in read(folder / "pruning.json")["rows"]), keys, CLASSIFICATION)


def parameters(folder: Path) -> list[Row]:
    """Tables 9 and 10: counts, and percent of the deterministic network's."""
    found, paper = read(folder / "parameters.json")["rows"], published("inducing_weights")
    whole = found[0][2]
    rows = []
    for table, system, ours, theirs in found:
        setting = {"table": table, "system": system}
        rows.append(row(setting, "parameters", ours, theirs))
        rows.append(row(setting, "relative", 100 * ours / whole, paper.find(table, "relative", system)))
    return rows


def run_time(folder: Path) -> list[Row]:
    """Ratios to the deterministic network, shown in a figure by the paper."""
    figures = read(folder / "run_time.json")["figures"]
    return [{**row({"measured": name}, "ratio", value), "timing": True} for name, value in figures.items()]
