"""Every published number beside ours: what `papers/tables.json` holds, and `bayesify reproduce --status` prints.

The file is an object of two lists, made by `python -m tools.every_table` from what the papers published and what was run.

cells, one for every published number of the tables that are compared with:

    paper, experiment              of `EXPERIMENTS`
    table, row, column             where the paper prints it
    published, published_spread    as printed; spread_is "deviation" or "error" (of the mean), or null where none is printed
    corrected, correction          the published number after a correction, and what that is; null where there is none
    ours, ours_spread, seeds       our mean, its standard error, and over how many seeds or splits; null where it was not run
    ours_mixture                   ours of the mixture of draws, where `ours` is over single draws, as the authors score; else null
    better                         "higher" or "lower"
    met                            see `met`; null where it was not run, or ours is shown and not compared, for the `reason`
    command                        what runs it again; null where no program here does
    date, hardware, seconds        of the run; seconds of training: of a GPU, or of a processor for all splits together
    reason                         why it is missing or not met: what was tried and the best explanation

figures, one for every claim that a paper shows without numbers, or that was tried on other data than the paper's:

    paper, experiment, figure, claim
    shown                          true, false, or null where it was not run
    command
    reason                         the numbers behind it, or why there are none
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayesify_papers.catalog import CATALOG, PAPERS
from bayesify_papers.shared.tables import brief, table, with_spread

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "inducing-weights": (
        "two-cluster regression",
        "in-distribution",
        "parameter counts and run time",
        "ablation",
        "corruptions",
        "strangers",
        "pruning",
    ),
    "subnetwork": (
        "toy",
        "UCI",
        "rotated MNIST",
        "corrupted CIFAR-10",
        "strangers",
        "ensemble size",
        "rejection",
        "ResNet-50",
    ),
    "function-space": ("Snelson", "moons", "Fashion-MNIST", "CIFAR-10", "context ablation"),
    "walsh-hadamard": (
        "table 2",
        "tables 7 and 8",
        "table 9",
        "geometry and approximability",
        "random features",
        "timing",
    ),
    "global-inducing": ("cubic", "deep linear", "UCI networks", "UCI deep GPs", "CIFAR-10"),
}
"""The experiments of the five papers."""

MAX_WORSE_SHARE = 0.01
"""Of a published number without a spread: how much worse ours may be."""

Entry = dict[str, Any]


def load() -> dict[str, list[Entry]]:
    """What `tables.json` holds.

    Raises:
        FileNotFoundError: If the file is missing, beside the package in the repository and inside it where it is installed.
    """
    here = Path(__file__).parent
    for path in (here.parent / "tables.json", here / "tables.json"):
        if path.is_file():
            content: dict[str, list[Entry]] = json.loads(path.read_text("utf-8"))
            return content
    raise FileNotFoundError(f"{here.parent / 'tables.json'} is missing; make it with python -m tools.every_table")


def met(cell: Mapping[str, Any]) -> bool | None:
    """Whether our number is no worse than the corrected, or else the published, one by more than its spread.

    Where no spread is printed, by more than 1 % of it. `None` if there is no number of ours.
    """
    if cell["ours"] is None:
        return None
    aim = cell["published"] if cell["corrected"] is None else cell["corrected"]
    spread = MAX_WORSE_SHARE * abs(aim) if cell["published_spread"] is None else cell["published_spread"]
    worse = aim - cell["ours"] if cell["better"] == "higher" else cell["ours"] - aim
    return bool(worse <= spread + 1e-9)


def counts(content: Mapping[str, Sequence[Entry]], paper: str) -> dict[str, int]:
    """How many of a paper's experiments, cells and claims were run, and met or shown."""
    cells = [cell for cell in content["cells"] if cell["paper"] == paper]
    figures = [figure for figure in content["figures"] if figure["paper"] == paper]
    ran = [cell for cell in cells if cell["ours"] is not None]
    compared = [cell for cell in ran if cell["met"] is not None]
    seen = [figure for figure in figures if figure["shown"] is not None]
    return {
        "experiments": len(EXPERIMENTS[paper]),
        "run": len({entry["experiment"] for entry in (*ran, *seen)}),
        "cells": len(cells),
        "ran": len(ran),
        "compared": len(compared),
        "met": sum(cell["met"] for cell in compared),
        "claims": len(figures),
        "tried": len(seen),
        "shown": sum(figure["shown"] for figure in seen),
    }


def summary(content: Mapping[str, Sequence[Entry]]) -> str:
    """A line for each paper, and one for all; then what a share alone does not say."""
    found = {title: counts(content, paper) for paper, title in PAPERS.items()}
    found["all"] = {key: sum(own[key] for own in found.values()) for key in next(iter(found.values()))}
    lines = [
        [
            title,
            f"{own['run']} of {own['experiments']}",
            f"{own['cells']:,}",
            f"{own['cells'] - own['ran']:,}",
            f"{own['ran'] - own['compared']:,}",
            f"{own['met']:,} of {own['compared']:,}",
            f"{own['met'] / own['compared']:.0%}" if own["compared"] else "-",
            f"{own['shown']} of {own['tried']} ({own['claims'] - own['tried']} not run)",
        ]
        for title, own in found.items()
    ]
    header = ["paper", "experiments run", "cells", "not run", "not compared", "met", "", "claims shown"]
    return "\n".join([table(header, lines), *remarks(content)])


def remarks(content: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Papers whose compared numbers are of one or two of their tables; and what is not compared, by the rule."""
    lines = []
    for paper, title in PAPERS.items():
        every = [cell for cell in content["cells"] if cell["paper"] == paper]
        ran = [cell for cell in every if cell["ours"] is not None]
        tables = list(dict.fromkeys(cell["table"] for cell in ran if cell["met"] is not None))
        if 0 < len(tables) < min(3, len({cell["table"] for cell in every})):
            lines.append(f"{title}: all numbers that are compared are of {' and '.join(tables)}.")
        for experiment in EXPERIMENTS[paper]:
            apart = [cell for cell in ran if cell["met"] is None and cell["experiment"] == experiment]
            if apart:
                would = sum(bool(met(cell)) for cell in apart)
                lines.append(
                    f"{title}: numbers of {experiment} that are not compared: {len(apart)}; by the rule {would} would be met."
                )
    return lines


def details(content: Mapping[str, Sequence[Entry]], names: Sequence[str]) -> str:
    """Every cell and every claim of papers or experiments, with the reasons.

    Args:
        content: From `load`.
        names: Papers such as `subnetwork`, experiments such as `subnetwork/rotated MNIST`, or commands of the catalog such as
            `subnetwork/rotated-mnist`.

    Raises:
        ValueError: If there is no such paper or experiment.
    """
    known = [*EXPERIMENTS, *(f"{paper}/{one}" for paper, own in EXPERIMENTS.items() for one in own)]
    if unknown := [name for name in names if name not in known and name not in CATALOG]:
        raise ValueError(
            f"no entries of {unknown[0]!r}; choose from {', '.join(known)}, or see bayesify reproduce --list"
        )
    text = []
    for key in ("cells", "figures"):
        chosen = [entry for entry in content[key] if not _names(entry).isdisjoint(names)]
        text.append((_cells if key == "cells" else _figures)(chosen))
    return "\n\n".join(part for part in text if part)


def _names(entry: Entry) -> set[str]:
    """Names by which an entry is found: its paper, its experiment, and what runs it in the catalog."""
    words = (entry["command"] or "").split()
    return {entry["paper"], f"{entry['paper']}/{entry['experiment']}", *(CATALOG.keys() & words)}


def _cells(cells: Sequence[Entry]) -> str:
    blocks = []
    for name in dict.fromkeys((cell["experiment"], cell["table"]) for cell in cells):
        own = [cell for cell in cells if (cell["experiment"], cell["table"]) == name]
        lines = [
            [
                cell["row"],
                cell["column"],
                with_spread(cell["published"], cell["published_spread"]),
                brief(cell["corrected"]),
                with_spread(cell["ours"], cell["ours_spread"]),
                {True: "yes", False: "no", None: "-"}[cell["met"]],
            ]
            for cell in own
        ]
        blocks.append(table(["row", "column", "published", "corrected", "ours", "met"], lines, f"{name[0]}: {name[1]}"))
        reasons = dict.fromkeys(cell["reason"] for cell in own if cell["reason"])
        blocks += [f"  {reason}" for reason in reasons]
    return "\n".join(blocks)


def _figures(figures: Sequence[Entry]) -> str:
    words = {True: "shown", False: "not shown", None: "not run"}
    return "\n".join(
        f"{one['experiment']}, {one['figure']}: {one['claim']}: {words[one['shown']]}. {one['reason']}"
        for one in figures
    )
