"""Every published number next to ours: what `papers/tables.json` holds, and `bayesify reproduce --status` prints.

The file is an object of two lists, made by `python -m tools.every_table` from what the papers published and what was run.

cells, one for every published number of the tables that are compared with:

    paper, experiment              of `EXPERIMENTS`
    table, row, column             where the paper prints it
    published, published_spread    as printed; spread_is "deviation" or "error" (of the mean), or null where none is printed
    digits, exact                  decimals that the paper prints; whether it is a count, or a share of counts
    corrected, correction          the published number after a correction, and what that is; null where there is none
    misprint                       why the published number is no number of this cell; null where it is one
    ours, ours_spread, seeds       our mean, its standard error, and over how many seeds or splits; null where it was not run
    ours_other, other_is           a second number of ours, such as that of the mixture of draws, and what it is; else null
    better                         "higher" or "lower"
    corrupted                      whether it is of corrupted images, of which ours are other ones than the paper's
    repeated                       whether the paper prints it in another table too, so that one run of ours counts twice
    met, agrees                    one-sided and two-sided, see the functions; null where it was not run, or a misprint
    command                        what runs it again; null where no program here does
    date, hardware, seconds        of the run; seconds of training: of a GPU, or of a processor for all splits together
    reason                         why it is missing or not met: what was tried and the best explanation

figures, one for every claim of a paper: a ranking of its tables or text, or what it shows in a figure without numbers:

    paper, experiment, figure, claim
    shown                          whether our results show it; null where nothing that was run tells
    printed                        whether the paper's own printed numbers show it; null where it prints none
    command
    reason                         the numbers behind it, or why there are none
    cause                          where it is not shown: what is known of why, and the cheapest run that would tell; else null
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
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

TOLERATED_SHARE = 0.01
"""Of a published number without a spread: by how much ours may differ."""

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
    """One-sided: whether our number is no worse than the published one by more than its spread.

    Where no spread is printed, by more than 1 % of the number. A count has to be equal. Ours is rounded to the printed decimals
    first, after the correction, if there is one, was taken off. `None` if there is no number of ours.
    """
    if cell["ours"] is None:
        return None
    worse = _difference(cell) * (-1 if cell["better"] == "higher" else 1)
    return agrees(cell) or (not cell["exact"] and worse < 0)


def agrees(cell: Mapping[str, Any]) -> bool | None:
    """Two-sided: whether our number differs from the published one, to either side, by no more than `met` allows."""
    if cell["ours"] is None:
        return None
    spread = TOLERATED_SHARE * abs(cell["published"]) if cell["published_spread"] is None else cell["published_spread"]
    return bool(abs(_difference(cell)) <= (0 if cell["exact"] else spread) + 1e-9)


def _difference(cell: Mapping[str, Any]) -> float:
    """Ours less the published number, in the printed decimals."""
    correction = 0.0 if cell["corrected"] is None else cell["corrected"] - cell["published"]
    ours = Decimal(str(round(cell["ours"] - correction, 9)))  # 0.165 is 0.165, whatever its last bit
    return float(ours.quantize(Decimal(1).scaleb(-cell["digits"]))) - float(cell["published"])


def counts(content: Mapping[str, Sequence[Entry]], paper: str | None = None) -> dict[str, int]:
    """How many experiments, cells and claims of a paper, or of all, were run, and came out as published.

    `met` and `agrees` count among the compared cells, `clean_met` and `clean_agrees` among the `clean` ones, which are those
    without corrupted images. `one_seed` counts compared cells of a single seed or split.
    """
    papers = list(EXPERIMENTS) if paper is None else [paper]
    cells, figures = ([one for one in content[key] if one["paper"] in papers] for key in ("cells", "figures"))
    ran = [cell for cell in cells if cell["ours"] is not None]
    compared = [cell for cell in ran if cell["met"] is not None]
    clean = [cell for cell in compared if not cell["corrupted"]]
    seen = [figure for figure in figures if figure["shown"] is not None]
    return {
        "experiments": sum(len(EXPERIMENTS[name]) for name in papers),
        "run": len({(entry["paper"], entry["experiment"]) for entry in (*ran, *seen)}),
        "cells": len(cells),
        "ran": len(ran),
        "compared": len(compared),
        "met": sum(cell["met"] for cell in compared),
        "agrees": sum(cell["agrees"] for cell in compared),
        "clean": len(clean),
        "clean_met": sum(cell["met"] for cell in clean),
        "clean_agrees": sum(cell["agrees"] for cell in clean),
        "one_seed": sum(cell["seeds"] == 1 for cell in compared),
        "claims": len(figures),
        "shown": sum(figure["shown"] for figure in seen),
        "not_shown": sum(not figure["shown"] for figure in seen),
    }


def summary(content: Mapping[str, Sequence[Entry]]) -> str:
    """A line for each paper, and one for all; then what a share alone does not say."""
    found = {title: counts(content, paper) for paper, title in PAPERS.items()} | {"all": counts(content)}

    def share(own: Mapping[str, int], part: str, whole: str) -> str:
        return f"{own[part]:,} of {own[whole]:,} ({own[part] / own[whole]:.0%})" if own[whole] else "-"

    lines = [
        [
            title,
            f"{own['run']} of {own['experiments']}",
            f"{own['ran']:,} of {own['cells']:,}",
            share(own, "met", "compared"),
            share(own, "agrees", "compared"),
            share(own, "clean_met", "clean"),
            share(own, "clean_agrees", "clean"),
            f"{own['one_seed']:,}",
            f"{own['shown']} / {own['not_shown']} / {own['claims'] - own['shown'] - own['not_shown']}",
        ]
        for title, own in found.items()
    ]
    header = ["paper", "experiments run", "numbers run", "met or better", "agree"]
    header += ["clean: met or better", "clean: agree", "one seed", "claims: shown / not / untested"]
    return "\n".join([table(header, lines), "", *remarks(content)])


def remarks(content: Mapping[str, Sequence[Entry]]) -> list[str]:
    """What the columns of the summary mean, and papers whose compared numbers are of one or two of their tables."""
    lines = [
        "met or better: one-sided, no worse than the published number by more than its spread, or 1 % where none is printed.",
        "agree: two-sided, within that spread to either side. Counts must be equal. Ours is rounded to the printed decimals.",
        "clean: without corrupted images, of which ours are fewer and other ones than the papers'.",
        "one seed: how many of the numbers run are of a single seed.",
    ]
    if repeated := sum(cell["repeated"] and cell["ours"] is not None for cell in content["cells"]):
        lines.append(f"{repeated} of the numbers run stand in two tables of their paper; they count in both.")
    for paper, title in PAPERS.items():
        every = [cell for cell in content["cells"] if cell["paper"] == paper]
        tables = list(dict.fromkeys(cell["table"] for cell in every if cell["met"] is not None))
        if 0 < len(tables) < min(3, len({cell["table"] for cell in every})):
            lines.append(f"{title}: all numbers run are of {' and '.join(tables)}.")
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
                *({True: "yes", False: "no", None: "-"}[cell[rule]] for rule in ("met", "agrees")),
                str(cell["seeds"] or "-"),
            ]
            for cell in own
        ]
        header = ["row", "column", "published", "corrected", "ours", "met", "agrees", "seeds"]
        blocks.append(table(header, lines, f"{name[0]}: {name[1]}"))
        reasons = dict.fromkeys(cell[key] for key in ("reason", "misprint") for cell in own if cell[key])
        blocks += [f"  {reason}" for reason in reasons]
    return "\n".join(blocks)


VERDICTS = {False: "not shown", None: "untested", True: "shown"}
"""Words for `shown`, in the order in which claims are listed."""


def by_verdict(figures: Sequence[Entry]) -> list[Entry]:
    """Claims with those that are not shown first, then the untested ones."""
    return sorted(figures, key=lambda one: list(VERDICTS).index(one["shown"]))


def _figures(figures: Sequence[Entry]) -> str:
    return "\n".join(
        f"{one['experiment']}, {one['figure']}: {one['claim']}: {VERDICTS[one['shown']]}. {one['reason']}"
        + (f" {one['cause']}" if one["cause"] else "")
        for one in by_verdict(figures)
    )
