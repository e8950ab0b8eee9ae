"""Results of the experiments as rows, next to the published numbers. Each reader takes the folder that an experiment wrote."""

from pathlib import Path

from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row


def cubic(folder: Path) -> list[Row]:
    """Standard deviations in the gap of a cubic, which the paper shows in a figure."""
    entries = [
        {"posterior": method, **scores}
        for method, seeds in read(folder / "results.json")["scores"].items()
        for scores in seeds.values()
    ]
    return grouped(entries, ["posterior"], ("elbo", "gap_std", "data_std", "train_rmse"))


def composition(folder: Path) -> list[Row]:
    """Bounds by the number of inducing points, and contributions of layers, which the paper has in appendices I and J."""
    entries = [
        {
            "posterior": method,
            "elbo": scores["elbo"],
            "gap_std": scores["gap_std"],
            **{f"share_{at}": one for at, one in enumerate(scores["shares"], 1)},
            **{f"mixing_cost_{at}": one for at, one in enumerate(scores["mixing_costs"], 1)},
        }
        for method, seeds in read(folder / "results.json")["scores"].items()
        for scores in seeds.values()
    ]
    layers = range(1, 4)
    metrics = ["elbo", "gap_std", *(f"share_{at}" for at in layers), *(f"mixing_cost_{at}" for at in layers)]
    return grouped(entries, ["posterior"], metrics)


def deep_linear(folder: Path) -> list[Row]:
    """Bounds of deep linear networks, which the paper shows in a figure."""
    content = read(folder / "results.json")
    rows = []
    for name, scores in content["bounds"].items():
        method, width, depth = name.rsplit("-", 2)
        setting = {"posterior": method, "width": int(width), "depth": int(depth), "evidence": content["evidence"]}
        rows.append(row(setting, "elbo", scores["elbo"]))
    return rows


def uci(folder: Path) -> list[Row]:
    """Scores of UCI regressions over the standard splits."""
    rows = []
    for content in map(read, sorted(folder.glob("*.json"))):
        if "scores" in content:
            setting = {key: content[key] for key in ("dataset", "model", "prior")}
            rows += [row(setting, metric, content["scores"][metric]) for metric in ("elbo", "log_likelihood", "rmse")]
    return rows


def cifar(folder: Path) -> list[Row]:
    """Table 1."""
    content = read(folder / "results.json")
    rows = []
    for name, scores in content["scores"].items():
        system, _, prior = name.rpartition("_")
        known = published("global_inducing").find("cifar10", system, prior) if content["dataset"] == "cifar10" else None
        theirs = dict(zip(("log_likelihood", "accuracy", "elbo"), known or (), strict=False))
        for metric in ("log_likelihood", "accuracy", "elbo", "ece"):
            ours = scores[metric] * (100 if metric == "accuracy" else 1)
            one = row({"posterior": system, "prior": prior}, metric, ours, theirs.get(metric))
            rows.append({**one, "seconds": scores["seconds"]})
    return rows
