"""Results of the experiments as rows, next to the published numbers. Each reader takes the folder that an experiment wrote."""

import math
from pathlib import Path

from bayesify_papers.function_space.trainings import OUTSIDE_SETS
from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row


def toy(folder: Path) -> list[Row]:
    """Uncertainty away from the data, which the paper shows in a figure."""
    entries = [
        {"problem": problem, "method": method, **scores}
        for problem, methods in read(folder / "results.json")["scores"].items()
        for method, seeds in methods.items()
        for scores in seeds
    ]
    return grouped(entries, ("problem", "method"), ("inside", "outside", "ratio", "uncertain", "rmse", "accuracy"))


def images(folder: Path) -> list[Row]:
    """Table 1. If the AUROC is against other images than the paper's, its name ends in theirs."""
    content = read(folder / "results.json")
    dataset, outside = content["settings"]["dataset"], content["settings"].get("outside")
    ending = f"_{outside}" if outside and outside != OUTSIDE_SETS[dataset][0] else ""
    rows = []
    for system, entry in content["rows"].items():
        for metric in ("accuracy", "nll", "ece", "auroc_mutual_information", "auroc_entropy"):
            scale = 100 if metric.startswith(("accuracy", "auroc")) else 1
            name = metric + ending if metric.startswith("auroc") else metric
            theirs = published("function_space").find("table1", dataset, system, name)
            one = row({"dataset": dataset, "system": system}, name, scale * entry["mean"][metric], theirs)
            error = scale * entry["std"][metric] / math.sqrt(entry["seeds"]) if entry["seeds"] > 1 else None
            rows.append({**one, "runs": entry["seeds"], "error": error, "seconds": entry.get("seconds")})
    return rows
