"""The tables of docs/choices.md, made from files of benchmarks/results. Run this program after these benchmarks."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "choices.md", ROOT / "benchmarks" / "results"
SCORES = ("accuracy", "nll", "ece", "mutual_information")
TITLES = {
    "last_layer": "last layer",
    "kronecker": "Kronecker, all layers",
    "diagonal": "diagonal, all layers",
    "largest_variance_1000": "subnetwork of 1,000 weights, largest variance",
    "largest_swag_variance_1000": "subnetwork of 1,000 weights, largest SWAG variance",
}
PRECISIONS = {"default": "default", "neal": "that of `Neal()`", "one": "1"}
Row = dict[str, float]


def mean_rows(rows: list[tuple[Row, Row]]) -> list[str]:
    """Means over pairs of a method's and its network's scores: differences of accuracy and NLL, ECE, and mutual information."""
    accuracy, nll, ece, information = (
        fmean(row[key] - (network[key] if key in ("accuracy", "nll") else 0.0) for row, network in rows)
        for key in SCORES
    )
    return [f"{100 * accuracy:+.1f}", f"{nll:+.3f}", f"{ece:.3f}", f"{information:.1g}"]


HEAD = ["accuracy, points", "NLL", "ECE", "mutual information"]


def laplace() -> str:
    """Prior precisions of Laplace by structure: means over four networks and three seeds."""
    stored = json.loads((RESULTS / "laplace_defaults.json").read_text())
    figures: dict[str, Any] = stored["figures"]
    lines = []
    for structure, title in TITLES.items():
        for precision, words in PRECISIONS.items():
            key = f"{structure}, prior {precision}"
            rows = [(entry[key]["mc"], entry["network"]) for entry in figures.values() if key in entry]
            lines.append([title, words, *mean_rows(rows)])
    where = f"The table shows means over {len(figures)} runs (networks times seeds), made by `{stored['command']}`:"
    return where + "\n\n" + table(["weights", "prior precision", *HEAD], lines)


def defaults() -> str:
    """Table of every method with its default arguments, and with other priors if they were tried."""
    path = RESULTS / "defaults.json"
    if not path.exists():
        return "The suite of defaults (`python -m benchmarks.defaults`) has no committed run yet."
    stored = json.loads(path.read_text())
    rows = [row for row in stored["figures"].values() if "error" not in row]
    networks = {(row["network"], row["seed"]): row for row in rows if row["method"] == "network"}
    by_method: dict[str, list[tuple[Row, Row]]] = {}
    for row in rows:
        if row["method"] != "network":
            by_method.setdefault(row["method"], []).append((row, networks[row["network"], row["seed"]]))
    lines = [[f"`{method}`", str(len(found)), *mean_rows(found)] for method, found in by_method.items()]
    where = f"The table shows means over {len(networks)} runs (networks times seeds), made by `{stored['command']}`:"
    return where + "\n\n" + table(["method", "runs", *HEAD], lines)


def widths() -> str:
    """Table of NLL and ECE of two methods under priors of several widths. The network has many weights per image; two seeds."""
    rows = list(json.loads((RESULTS / "default_prior_widths.json").read_text())["figures"].values())

    def cell(method: str) -> str:
        own = [row for row in rows if row["network"] == "strided_cnn" and row["method"] == method]
        return ", ".join(f"{fmean(row[key] for row in own):.3f}" for key in ("nll", "ece"))

    words = {8: ", the default"}
    lines = [["none: the network", cell("network"), cell("network")]]
    for width in (4, 8, 16, 32):
        name = f"`Neal({width})`{words.get(width, '')}"
        lines.append([name, *(cell(f"{method},prior=neal{width}") for method in ("dropout", "mean_field"))])
    return table(["prior", "dropout, NLL and ECE", "mean-field"], lines)


PARTS = {"laplace": laplace, "defaults": defaults, "widths": widths}


def page(text: str) -> str:
    """The page with each generated part replaced."""
    for name, make in PARTS.items():
        start, end = f"<!-- {name}: by python -m tools.choices_page -->", f"<!-- end of {name} -->"
        text = replaced(text, start, end, make())
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
