"""Results of the experiments as rows, beside the published numbers: each reader takes the folder that an experiment wrote."""

from __future__ import annotations

import math
from pathlib import Path

from bayesify_papers.shared.published import published
from bayesify_papers.shared.records import read
from bayesify_papers.shared.rows import Row, grouped, row


def toy(folder: Path) -> list[Row]:
    """Uncertainty away from the data, shown in a figure by the paper."""
    entries = [
        {"problem": problem, "method": method, **scores}
        for problem, methods in read(folder / "results.json")["scores"].items()
        for method, seeds in methods.items()
        for scores in seeds
    ]
    return grouped(entries, ("problem", "method"), ("inside", "outside", "ratio", "rmse", "accuracy"))


def images(folder: Path) -> list[Row]:
    """Table 1."""
    content = read(folder / "results.json")
    dataset = content["settings"]["dataset"]
    rows = []
    for system, entry in content["rows"].items():
        for metric in ("accuracy", "nll", "ece", "auroc_mutual_information", "auroc_entropy"):
            scale = 100 if metric.startswith(("accuracy", "auroc")) else 1
            theirs = published("function_space").find("table1", dataset, system, metric)
            one = row({"dataset": dataset, "system": system}, metric, scale * entry["mean"][metric], theirs)
            error = scale * entry["std"][metric] / math.sqrt(entry["seeds"]) if entry["seeds"] > 1 else None
            rows.append({**one, "runs": entry["seeds"], "error": error})
    return rows
