"""Results of the experiments as rows, beside the published numbers: each reader takes the folder that an experiment wrote."""

from collections.abc import Mapping
from pathlib import Path

from bayesify_papers.inducing_weights.scores import means_by_severity
from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row
from bayesify_papers.shared.scores import CLASSIFICATION_SCORES


def _percent(scores: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and ECE in percent, as the paper's tables have them."""
    return {key: scores[key] * (100 if key in ("accuracy", "ece") else 1) for key in CLASSIFICATION_SCORES}


def regression(folder: Path) -> list[Row]:
    """The two-cluster regression, shown in a figure by the paper."""
    return grouped(read(folder / "regression.json")["outcomes"], ["system"], ["nll", "rmse", "gap_ratio"])


def classification(folder: Path) -> list[Row]:
    """Tables 3, 5, 11 and 12; `images` is `test` or `corrupted`."""
    content, paper = read(folder / "results.json"), published("inducing_weights")
    known = content.get("dataset") == "cifar10"
    size = content.get("settings", {}).get("inducing", 64)  # M, which table 5 has twice
    rows = []

    def add(setting: dict[str, str], metric: str, ours: float, *path: str, place: int | None = None) -> None:
        theirs = paper.find(*path) if known else None
        number = theirs if theirs is None or place is None else theirs[place]
        seconds = content["seconds"].get(setting["system"].removesuffix(f"_{size}"))
        rows.append({**row(setting, metric, ours, number), "seconds": seconds})

    for system, scores in content["scores"].items():
        name = f"{system}_{size}" if size != 64 and system in ("ffg_u", "ensemble_u") else system
        for metric, ours in _percent(scores["test"]).items():
            add({"system": name, "images": "test"}, metric, ours, "cifar10", name, metric)
        for severity, means in means_by_severity(scores["corrupted"]).items():
            own = {"system": system, "images": "corrupted", "severity": str(severity)}
            for metric in ("accuracy", "ece"):
                add(own, metric, 100 * means[metric], "corrupted", system, metric, place=severity - 1)
        for outside, found in scores["ood"].items():
            for place, metric in enumerate(("auroc", "aupr")):
                own = {"system": system, "outside": outside}
                add(own, metric, found[f"{metric}_max_probability"], "ood", system, outside, place=place)
    return rows


def fashion(folder: Path) -> list[Row]:
    """Fashion-MNIST, which the paper does not have."""
    by_seed = read(folder / "results.json")["by_seed"]
    entries = [{"system": system, **_percent(scores)} for seed in by_seed.values() for system, scores in seed.items()]
    return grouped(entries, ["system"], CLASSIFICATION_SCORES)


def ablation(folder: Path) -> list[Row]:
    """Sizes of U and caps, shown in a figure by the paper."""
    keys = ("system", "inducing", "max_lambda", "max_std", "parameters")
    return grouped(
        ({**one, **_percent(one)} for one in read(folder / "ablation.json")["rows"]), keys, CLASSIFICATION_SCORES
    )


def pruning(folder: Path) -> list[Row]:
    """Pruned posteriors on Fashion-MNIST; the paper's table 7 is a ResNet-50 on CIFAR-10."""
    keys = ("system", "keep", "fine_tuned", "seeds", "parameters")
    return grouped(
        ({**one, **_percent(one)} for one in read(folder / "pruning.json")["rows"]), keys, CLASSIFICATION_SCORES
    )


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
