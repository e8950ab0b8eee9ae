"""Tables of the documentation, from the results that were committed; run it after results changed.

python -m tools.paper_pages [--page docs/experiments/inducing-weights.md] [--results DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesify_papers.inducing_weights.ablation import setting_cells
from bayesify_papers.inducing_weights.pruning import published_score
from bayesify_papers.inducing_weights.systems import SYSTEMS
from bayesify_papers.shared.tables import number

PAGE, RESULTS = Path("docs") / "experiments" / "inducing-weights.md", Path("papers") / "results" / "inducing_weights"
START, END = "<!-- results: {} -->", "<!-- end of results -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the page up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    chosen.page.write_text(filled(chosen.page.read_text(), chosen.results))
    return 0


def filled(text: str, folder: Path) -> str:
    """A page with every table between its marks made anew.

    Args:
        text: The page.
        folder: Where the results lie; a table whose file is missing says so.
    """
    for name, make in TABLES.items():
        start = START.format(name)
        if start not in text:
            continue
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        path = folder / f"{name}.json"
        made = make(json.loads(path.read_text())) if path.is_file() else "Not measured yet."
        text = f"{before}{start}\n\n{made}\n\n{END}{after}"
    return text


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _source(content: dict[str, Any]) -> str:
    where = content["hardware"]
    return (
        f"{where.get('gpu') or where['cpu']}, torch {content['versions']['torch']}, {content['date']}, "
        f"`{content['command']}`:\n\n"
    )


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
        "MNIST",
        "notMNIST",
        "severity 5 %",
        "its ECE %",
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
    grid = _markdown(["system", "caps", "accuracy %", "NLL", "ECE %", ""], tried)
    return (
        f"{_source(content)}{_markdown(header, rows)}\n\n"
        "Means and standard errors over seeds; MNIST and notMNIST are AUROC by entropy; severity 5 is the mean over the six "
        "corruptions at their strongest.\n\nWhat was tried, scored on the training images that were held out:\n\n"
        + grid
    )


def _pruning(content: dict[str, Any]) -> str:
    rows = []
    for row in content["rows"]:
        theirs = [published_score(row, key) for key in ("accuracy", "ece")]
        rows.append(
            [
                SYSTEMS[row["system"]].title,
                f"{100 * row['keep']:g}",
                "" if row["keep"] == 1 else "yes" if row["fine_tuned"] else "no",
                f"{row['parameters']:,}",
                *(number(100 * row[key], 2) for key in ("accuracy", "ece")),
                *("" if score is None else number(score, 2) for score in theirs),
            ]
        )
    header = ["system", "kept %", "fine-tuned", "parameters", "accuracy %", "ECE %", "paper: accuracy %", "ECE %"]
    return _source(content) + _markdown(header, rows)


def _ablation(content: dict[str, Any]) -> str:
    rows = [
        [
            SYSTEMS[row["system"]].title,
            *setting_cells(row),
            number(100 * row["accuracy"], 2),
            number(100 * row["ece"], 2),
        ]
        for row in content["rows"]
    ]
    header = ["system", "M", "`max_lambda`", "`max_std`", "parameters", "accuracy %", "ECE %"]
    return f"First {content['num_train']:,} training images, {_source(content)}" + _markdown(header, rows)


def _regression(content: dict[str, Any]) -> str:
    grouped: dict[str, list[dict[str, float]]] = {}
    for outcome in content["outcomes"]:
        grouped.setdefault(outcome["system"], []).append(outcome)
    rows = []
    for system, outcomes in grouped.items():
        nlls = [outcome["nll"] for outcome in outcomes]
        spread = max(abs(nll - statistics.median(nlls)) for nll in nlls)
        means = [statistics.fmean(outcome[key] for outcome in outcomes) for key in ("rmse", "gap_ratio")]
        rows.append(
            [
                system,
                str(len(nlls)),
                number(statistics.median(nlls)),
                number(spread),
                number(means[0]),
                number(means[1], 1),
            ]
        )
    header = ["system", "seeds", "median test NLL", "farthest from it", "RMSE", "std in the gap / at the data"]
    return _source(content) + _markdown(header, rows)


TABLES = {
    "regression_inducing": _regression,
    "regression_others": _regression,
    "fashion_mnist": _fashion,
    "pruning": _pruning,
    "ablation": _ablation,
}
"""By the name of a file of results: the function that makes its table."""


if __name__ == "__main__":
    sys.exit(main())
