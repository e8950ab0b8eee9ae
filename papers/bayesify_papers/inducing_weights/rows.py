"""Results of the experiments as rows, next to the published numbers. Each reader takes the folder that an experiment wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayesify_papers.inducing_weights.scores import means_by_severity
from bayesify_papers.inducing_weights.systems import BASELINES, SYSTEMS, Recipe
from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row
from bayesify_papers.shared.scores import CLASSIFICATION_SCORES
from bayesify_papers.shared.sources import COMPARED_KINDS


def _percent(scores: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and ECE in percent, as in the paper's tables."""
    return {key: scores[key] * (100 if key in ("accuracy", "ece") else 1) for key in CLASSIFICATION_SCORES}


def regression(folder: Path) -> list[Row]:
    """The two-cluster regression, which the paper shows in a figure."""
    return grouped(read(folder / "regression.json")["outcomes"], ["system"], ["nll", "rmse", "gap_ratio"])


def network_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's network. Only networks of full depth and width are named `ResNet-50` or `ResNet-18`."""
    if settings.get("bottleneck"):
        kind, whole = "ResNet-50", True
    else:
        kind, whole = "ResNet-18", settings.get("depth", 1) == 2
    width = settings.get("width", 32)
    return kind if whole and width == 64 else f"{kind if whole else 'small ResNet'}, width {width}"


def recipe_in_words(settings: Mapping[str, Any], system: str) -> str:
    """A description of a system's training. Seeds with the same description are averaged."""
    parts = [f"{settings.get('epochs')} epochs", f"batches of {settings.get('batch')}"]
    parts += ["mirrored and shifted images"] * bool(settings.get("augment"))
    parts += [f"cutout of {settings['cutout']} pixels"] if settings.get("cutout") else []
    parts += ["one-cycle learning rate"] * (settings.get("schedule") == "one_cycle")
    parts += ["averaged parameters"] * bool(settings.get("average"))
    point = (SYSTEMS | BASELINES)[system].point
    if system in ("ffg_u", "ensemble_u") and settings.get("start_epochs"):
        parts[0] += f" after {settings['start_epochs']} of a deterministic network"
    cap = settings.get("max_lambda", Recipe.max_lambda)
    if system == "ffg_u" and cap != Recipe.max_lambda:
        parts.append("lambda without a cap" if cap is None else f"max_lambda {cap:g}")
    if system in ("ffg_u", "ensemble_u") and settings.get("inducing_by_stage"):
        parts.append(f"M of {settings['inducing_by_stage']} in the stages")
    optimizer = "point" if point else "inducing" if system in ("ffg_u", "ensemble_u") else ""
    parts += ["SGD"] * (settings.get(f"{optimizer}_optimizer") == "sgd")
    weight = settings.get("kl_weight", 1.0)
    parts += [f"KL weight {weight:g}"] * (not point and weight != 1)
    return ", ".join(parts)


def classification(folder: Path) -> list[Row]:
    """Tables 3, 5, 11 and 12; `images` is `test` or `corrupted`, which stands for the six kinds of corruption of every run. Runs
    with more kinds also have means over all their kinds.

    The published numbers are of a ResNet-50 trained on all images. A run with another network or with held-out images has no
    published number.
    """
    content, paper = read(folder / "results.json"), published("inducing_weights")
    settings = content.get("settings", {})
    network = network_name(settings)
    held_out = ", images held out" if content.get("validation") else ""
    about = {"dataset": f"{content.get('dataset')}{held_out}", "network": network}
    known = about == {"dataset": "cifar10", "network": "ResNet-50"}
    size = settings.get("inducing", 64)  # M, which table 5 has twice
    rows = []

    def add(setting: dict[str, str], metric: str, ours: float, *path: str, place: int | None = None) -> None:
        theirs = paper.find(*path) if known else None
        number = theirs if theirs is None or place is None else theirs[place]
        trained = setting["system"].removesuffix(f"_{size}")
        facts = {
            "seed": content.get("seed"),
            "recipe": recipe_in_words(settings, trained),
            "epochs": settings.get("epochs"),
        }
        seconds = content["seconds"].get(trained)
        rows.append({**row({**about, **setting}, metric, ours, number), **facts, "seconds": seconds})

    for system, scores in content["scores"].items():
        name = f"{system}_{size}" if size != 64 and system in ("ffg_u", "ensemble_u") else system
        for metric, ours in _percent(scores["test"]).items():
            add({"system": name, "images": "test"}, metric, ours, "cifar10", name, metric)
        every = {one.rpartition("-")[0] for one in scores["corrupted"]}
        averaged = {"corrupted": set(COMPARED_KINDS)}
        if every > averaged["corrupted"]:
            averaged[f"corrupted, {len(every)} kinds"] = every
        for images, kinds in averaged.items():
            for severity, means in means_by_severity(scores["corrupted"], kinds).items():
                own = {"system": name, "images": images, "severity": str(severity)}
                for metric in ("accuracy", "ece"):
                    add(own, metric, 100 * means[metric], "corrupted", name, metric, place=severity - 1)
        for outside, found in scores["ood"].items():
            for place, metric in enumerate(("auroc", "aupr")):
                own = {"system": name, "outside": outside}
                add(own, metric, found[f"{metric}_max_probability"], "ood", name, outside, place=place)
    return rows


def fashion(folder: Path) -> list[Row]:
    """Fashion-MNIST, which the paper does not have. Scores on corrupted and out-of-distribution images are means over seeds."""
    content = read(folder / "results.json")
    by_seed = content["by_seed"]
    entries = [
        {"system": system, "images": "test", **_percent(scores)}
        for seed in by_seed.values()
        for system, scores in seed.items()
    ]
    rows = grouped(entries, ["system", "images"], CLASSIFICATION_SCORES)
    for system, means in content["mean"].items():
        seeds = sum(system in own for own in by_seed.values())
        for name, ours in means.items():
            kind, _, rest = name.partition("/")
            place, _, metric = rest.partition("/")
            if kind == "corrupted":
                own = {"system": system, "images": kind, "severity": place}
                rows.append({**row(own, metric, 100 * ours), "runs": seeds})
            elif kind == "ood" and metric.endswith("_max_probability"):
                own = {"system": system, "outside": place}
                rows.append({**row(own, metric.removesuffix("_max_probability"), ours), "runs": seeds})
    return rows


def ablation(folder: Path) -> list[Row]:
    """Sizes of U and caps, which the paper shows in a figure."""
    keys = ("system", "inducing", "max_lambda", "max_std", "parameters")
    return grouped(
        ({**one, **_percent(one)} for one in read(folder / "ablation.json")["rows"]), keys, CLASSIFICATION_SCORES
    )


def pruning(folder: Path) -> list[Row]:
    """Pruned posteriors on Fashion-MNIST. The paper's table 7 has a ResNet-50 on CIFAR-10."""
    keys = ("system", "keep", "fine_tuned", "seeds", "parameters")
    return grouped(
        ({**one, **_percent(one)} for one in read(folder / "pruning.json")["rows"]), keys, CLASSIFICATION_SCORES
    )


def parameters(folder: Path) -> list[Row]:
    """Tables 9 and 10: parameter counts, also in percent of the deterministic network's."""
    found, paper = read(folder / "parameters.json")["rows"], published("inducing_weights")
    whole = found[0][2]
    rows = []
    for table, system, ours, theirs in found:
        setting = {"table": table, "system": system}
        rows.append(row(setting, "parameters", ours, theirs))
        rows.append(row(setting, "relative", 100 * ours / whole, paper.find(table, "relative", system)))
    return rows
