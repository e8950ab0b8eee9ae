"""Results of every experiment in one form: a setting, a score, our number and the published one.

Each reader takes the folder that an experiment wrote. A row is plain data:

    setting               what was run, such as {"dataset": "yacht", "model": "WHVI"}
    metric                the score's name
    runs, ours, error     how many seeds or splits, their mean, and its standard error
    published             the paper's number, None where it has none for this setting
    published_std         its standard deviation
    difference            ours less the published number
    deviations            the difference in published standard deviations, None where there is none or 0.00 was printed
    timing                True for measured times, which differ from run to run
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Published = tuple[float, float | None] | float | None


def row(setting: Mapping[str, Any], metric: str, values: float | Sequence[float], published: Published = None) -> Row:
    """One row.

    Args:
        setting: What was run.
        metric: The score's name.
        values: Of each run, or their mean; in the unit of the published number.
        published: Mean and standard deviation, or the mean alone.
    """
    every = [float(value) for value in ([values] if isinstance(values, (int, float)) else values)]
    spread = statistics.stdev(every) if len(every) > 1 else None
    ours = statistics.fmean(every)
    mean, std = published if isinstance(published, tuple) else (published, None)
    difference = None if mean is None else ours - mean
    return {
        "setting": dict(setting),
        "metric": metric,
        "runs": len(every),
        "ours": ours,
        "error": None if spread is None else spread / math.sqrt(len(every)),
        "published": mean,
        "published_std": std,
        "difference": difference,
        "deviations": difference / std if difference is not None and std else None,
    }


def grouped(
    entries: Iterable[Mapping[str, Any]],
    keys: Sequence[str],
    metrics: Sequence[str],
    published: Callable[[str, Mapping[str, Any]], Published] = lambda metric, setting: None,
) -> list[Row]:
    """A row for each score of each setting, over the entries that share it.

    Args:
        entries: Runs: keys and scores in one dictionary.
        keys: That make a setting.
        metrics: Scores.
        published: The paper's number by score and setting.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    rows = []
    for values, own in groups.items():
        setting = dict(zip(keys, values, strict=True))
        rows += [
            row(setting, metric, [one[metric] for one in own], published(metric, setting))
            for metric in metrics
            if metric in own[0]
        ]
    return rows


def _json(folder: Path, name: str = "results.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def _lines(folder: Path) -> list[dict[str, Any]]:
    paths = [path for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith("-validation")]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


# -- Walsh-Hadamard ---------------------------------------------------------------------------------------------------------

_NETWORK = ("dataset", "model", "hidden_layers", "width")


def walsh_hadamard_table2(folder: Path) -> list[Row]:
    """Table 2: one hidden layer. Data sets whose targets are not the paper's have no published number."""
    from bayesify_papers.walsh_hadamard.published import COMPARABLE, SHALLOW_MNLL, SHALLOW_RMSE

    tables = {"rmse": SHALLOW_RMSE, "mnll": SHALLOW_MNLL}

    def find(metric: str, own: Mapping[str, Any]) -> Published:
        return tables[metric][own["dataset"]].get(own["model"]) if own["dataset"] in COMPARABLE else None

    return grouped(_lines(folder), _NETWORK, list(tables), find)


def walsh_hadamard_deep(folder: Path) -> list[Row]:
    """Tables 7 and 8: two hidden layers. Data sets whose targets are not the paper's have no published number."""
    from bayesify_papers.walsh_hadamard.published import COMPARABLE, DEEP_MNLL, DEEP_RMSE

    tables = {"rmse": DEEP_RMSE, "mnll": DEEP_MNLL}

    def find(metric: str, own: Mapping[str, Any]) -> Published:
        sizes = tables[metric].get(own["model"], {}) if own["dataset"] in COMPARABLE else {}
        return sizes.get(own["width"], {}).get(own["dataset"])

    return grouped(_lines(folder), _NETWORK, list(tables), find)


def walsh_hadamard_table9(folder: Path) -> list[Row]:
    """Table 9: classification."""
    from bayesify_papers.walsh_hadamard.published import CLASSIFICATION_ERROR, CLASSIFICATION_MNLL

    tables = {"error": CLASSIFICATION_ERROR, "mnll": CLASSIFICATION_MNLL}

    def find(metric: str, own: Mapping[str, Any]) -> Published:
        sizes = tables[metric].get(own["model"], {})
        return sizes.get((own["hidden_layers"], own["width"]), {}).get(own["dataset"])

    return grouped(_lines(folder), _NETWORK, list(tables), find)


def approximability(folder: Path) -> list[Row]:
    """Distances of random matrices to the family, shown in a figure by the paper."""
    return grouped(_json(folder, "approximability.json")["rows"], ["size"], ["median", "zero_matrix"])


def random_features(folder: Path) -> list[Row]:
    """Gaussian processes by random features, shown in a figure by the paper."""
    keys = ("function", "system", "covariance", "block", "parameters")
    return grouped(_json(folder, "random_features.json")["rows"], keys, ["rmse", "nll"])


def transform_time(folder: Path) -> list[Row]:
    """Time of the transform over that of a dense product, shown in a figure by the paper."""
    found = grouped(_json(folder, "transform_time.json")["rows"], ("by", "size", "batch"), ["ratio"])
    return [{**one, "timing": True} for one in found]


# -- Inducing weights -------------------------------------------------------------------------------------------------------

_CLASSIFICATION = ("accuracy", "nll", "ece", "brier")


def _percent(scores: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and ECE in percent, as the paper's tables have them."""
    return {key: scores[key] * (100 if key in ("accuracy", "ece") else 1) for key in _CLASSIFICATION}


def cosine_regression(folder: Path) -> list[Row]:
    """The two-cluster regression, shown in a figure by the paper."""
    return grouped(_json(folder, "regression.json")["outcomes"], ["system"], ["nll", "rmse", "gap_ratio"])


def inducing_classification(folder: Path) -> list[Row]:
    """Tables 3, 5, 11 and 12."""
    from bayesify_papers.inducing_weights import published

    content = _json(folder)
    paper = content.get("dataset") == "cifar10"
    rows = []
    for system, scores in content["scores"].items():
        theirs = published.CIFAR10.get(system, {}) if paper else {}
        ranks = published.CIFAR10_OOD.get(system, {}) if paper else {}
        test = _percent(scores["test"])
        rows += [row({"system": system}, metric, test[metric], theirs.get(metric)) for metric in _CLASSIFICATION]
        for outside, found in scores["ood"].items():
            pair = dict(zip(("auroc", "aupr"), ranks.get(outside, (None, None)), strict=True))
            own = {"system": system, "outside": outside}
            rows += [row(own, key, found[f"{key}_max_probability"], number) for key, number in pair.items()]
    return rows


def inducing_fashion(folder: Path) -> list[Row]:
    """Fashion-MNIST, which the paper does not have."""
    by_seed = _json(folder)["by_seed"]
    entries = [{"system": system, **_percent(scores)} for seed in by_seed.values() for system, scores in seed.items()]
    return grouped(entries, ["system"], _CLASSIFICATION)


def inducing_ablation(folder: Path) -> list[Row]:
    """Sizes of U and caps, shown in a figure by the paper."""
    rows = _json(folder, "ablation.json")["rows"]
    keys = ("system", "inducing", "max_lambda", "max_std", "parameters")
    return grouped(({**one, **_percent(one)} for one in rows), keys, _CLASSIFICATION)


def inducing_pruning(folder: Path) -> list[Row]:
    """Pruned posteriors on Fashion-MNIST; the paper's table 7 is a ResNet-50 on CIFAR-10."""
    rows = _json(folder, "pruning.json")["rows"]
    keys = ("system", "keep", "fine_tuned", "seeds", "parameters")
    return grouped(({**one, **_percent(one)} for one in rows), keys, _CLASSIFICATION)


def inducing_parameters(folder: Path) -> list[Row]:
    """Tables 9 and 10."""
    found = _json(folder, "parameters.json")["rows"]
    return [row({"system": system}, "parameters", ours, theirs) for system, ours, theirs in found]


def inducing_run_time(folder: Path) -> list[Row]:
    """Ratios to the deterministic network, shown in a figure by the paper."""
    figures = _json(folder, "run_time.json")["figures"]
    return [{**row({"measured": name}, "ratio", value), "timing": True} for name, value in figures.items()]


# -- Subnetworks ------------------------------------------------------------------------------------------------------------


def subnetwork_toy(folder: Path) -> list[Row]:
    """Standard deviations at the data, between and beyond them, shown in a figure by the paper."""
    content = _json(folder, "toy.json")
    entries = [{"dataset": content["dataset"], **one} for one in content["outcomes"]]
    return grouped(entries, ("dataset", "system", "num_weights"), ("at_data", "in_gap", "outside"))


def subnetwork_uci(folder: Path) -> list[Row]:
    """Subnetworks of networks of many sizes on UCI data, shown in a figure by the paper."""
    return grouped(_lines(folder), ("dataset", "gap", "hidden_layers", "width", "num_weights"), ["log_likelihood"])


def _shifted(
    folder: Path, dataset: str, outside: str, tables: Mapping[str, Any], places: Mapping[str, int]
) -> list[Row]:
    from bayesify_papers.subnetwork.published import OOD_AUROC

    content = _json(folder)
    paper = content["dataset"] == dataset
    rows = []
    for system, found in content["scores"].items():
        theirs = tables.get(system, {}) if paper else {}
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
                rows.append(row(setting, metric, statistics.fmean(values), number))
        for name, scores in found["ood"].items():
            known = OOD_AUROC[dataset].get(system) if paper and name == outside else None
            setting = {"system": system, "outside": name, "seed": content["seed"]}
            rows.append(row(setting, "auroc", scores["auroc_entropy"], known))
    return rows


def rotated_mnist(folder: Path) -> list[Row]:
    """Tables 1 to 14."""
    from bayesify_papers.subnetwork.published import ANGLES, ROTATED_MNIST

    places = {str(angle): place for place, angle in enumerate(ANGLES)}
    return _shifted(folder, "mnist", "fashion_mnist", ROTATED_MNIST, places)


def corrupted_cifar(folder: Path) -> list[Row]:
    """Tables 1 and 15 to 20."""
    from bayesify_papers.subnetwork.published import CORRUPTED_CIFAR10

    return _shifted(folder, "cifar10", "svhn", CORRUPTED_CIFAR10, {str(severity): severity for severity in range(6)})


# -- Function space ---------------------------------------------------------------------------------------------------------


def function_space_toy(folder: Path) -> list[Row]:
    """Uncertainty away from the data, shown in a figure by the paper."""
    entries = [
        {"problem": problem, "method": method, **scores}
        for problem, methods in _json(folder)["scores"].items()
        for method, seeds in methods.items()
        for scores in seeds
    ]
    return grouped(entries, ("problem", "method"), ("inside", "outside", "ratio", "rmse", "accuracy"))


def function_space_images(folder: Path) -> list[Row]:
    """Table 1."""
    from bayesify_papers.function_space.published import TABLE

    content = _json(folder)
    dataset = content["settings"]["dataset"]
    rows = []
    for system, entry in content["rows"].items():
        for metric in ("accuracy", "nll", "ece", "auroc_mutual_information", "auroc_entropy"):
            scale = 100 if metric.startswith(("accuracy", "auroc")) else 1
            theirs = TABLE.get(dataset, {}).get(system, {}).get(metric)
            one = row({"dataset": dataset, "system": system}, metric, scale * entry["mean"][metric], theirs)
            error = scale * entry["std"][metric] / math.sqrt(entry["seeds"]) if entry["seeds"] > 1 else None
            rows.append({**one, "runs": entry["seeds"], "error": error})
    return rows


# -- Global inducing points -------------------------------------------------------------------------------------------------


def global_inducing_cubic(folder: Path) -> list[Row]:
    """Standard deviations in the gap of a cubic, shown in a figure by the paper."""
    entries = [
        {"posterior": method, **scores}
        for method, seeds in _json(folder)["scores"].items()
        for scores in seeds.values()
    ]
    return grouped(entries, ["posterior"], ("elbo", "gap_std", "data_std", "train_rmse"))


def deep_linear(folder: Path) -> list[Row]:
    """Bounds of deep linear networks, shown in a figure by the paper."""
    content = _json(folder)
    rows = []
    for name, scores in content["bounds"].items():
        method, width, depth = name.rsplit("-", 2)
        setting = {"posterior": method, "width": int(width), "depth": int(depth), "evidence": content["evidence"]}
        rows.append(row(setting, "elbo", scores["elbo"]))
    return rows


def global_inducing_uci(folder: Path) -> list[Row]:
    """UCI regressions over the standard splits."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if "scores" in content:
            setting = {key: content[key] for key in ("dataset", "model", "prior")}
            rows += [row(setting, metric, content["scores"][metric]) for metric in ("elbo", "log_likelihood", "rmse")]
    return rows


def global_inducing_cifar(folder: Path) -> list[Row]:
    """Table 1."""
    from bayesify_papers.global_inducing.published import CIFAR10

    content = _json(folder)
    rows = []
    for name, scores in content["scores"].items():
        system, _, prior = name.rpartition("_")
        known = CIFAR10.get(system, {}).get(prior) if content["dataset"] == "cifar10" else None
        theirs: dict[str, float] = (
            dict(zip(("log_likelihood", "accuracy", "elbo"), known, strict=True)) if known else {}
        )
        for metric in ("log_likelihood", "accuracy", "elbo", "ece"):
            ours = scores[metric] * (100 if metric == "accuracy" else 1)
            rows.append(row({"posterior": system, "prior": prior}, metric, ours, theirs.get(metric)))
    return rows
