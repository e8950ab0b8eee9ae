"""Every published number next to ours: the content of `papers/tables.json`, which `bayesify reproduce --status` prints.

The file is an object of two lists. `python -m tools.every_table` makes it from the published numbers and our results.

cells, one for every published number of the compared tables:

    paper, experiment              a paper and an experiment of `EXPERIMENTS`
    table, row, column             place of the number in the paper
    published, published_spread    as printed; spread_is "deviation" or "error" (of the mean), or null without a spread
    digits, exact                  number of printed decimals; whether the number is a count, or a share of counts
    corrected, correction          the published number after a correction, and the correction in words; null without a correction
    misprint                       why the printed number is not the value of this cell; null unless it is a misprint
    ours, ours_spread, seeds       our mean, its standard error, and the number of seeds or splits; null if it was not run
    ours_other, other_is           a second number of ours, for example of the mixture of draws, and its description; otherwise null
    better                         "higher" or "lower"
    corrupted                      whether it is a score on corrupted images; ours are other images than the paper's
    repeated                       whether the paper also prints it in another table, so that one run of ours counts twice
    met, agrees                    one-sided and two-sided comparison, see the functions; null if not run, or a misprint
    command                        command that runs it again; null if no program here does
    date, hardware, seconds        date, hardware and training time of the run: on a GPU, or on a CPU for all splits together
    reason                         why it is missing or not met: what was tried, and the best explanation
    note, training                 remark on a number that was run, and the settings of its training; null if there are none

figures, one for every claim of a paper: a ranking in its tables or text, or a finding that it shows in a figure without numbers:

    paper, experiment, figure, claim
    title, setting                 the claim as the page of claims prints it, which several entries may share, and its setting there
    variant                        whether the setting is ours while another entry is nearer to the paper's; counted apart
    ran                            whether there are numbers of ours, even if they cannot decide
    shown                          whether our results show it; null if no run can decide
    printed                        whether the paper's own printed numbers show it; null if it prints none
    command
    reason                         the numbers behind the verdict, or why there are none
    brief                          of a ranking: `ours`, the comparisons that hold; `fails`, where others fail; `not_run`, systems;
                                   `unrun`, places; `other`, comparisons that hold with other numbers of ours; `paper`, with the
                                   paper's; `remark`
    cause                          if the claim is not shown: known causes, and the cheapest run that would decide; otherwise null
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
        "out-of-distribution images",
        "pruning",
    ),
    "subnetwork": (
        "toy",
        "UCI",
        "rotated MNIST",
        "corrupted CIFAR-10",
        "out-of-distribution images",
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
"""Largest relative difference from a published number that has no spread."""

Entry = dict[str, Any]


def load() -> dict[str, list[Entry]]:
    """The content of `tables.json`.

    Raises:
        FileNotFoundError: If the file is missing, both next to the package (in the repository) and inside it (installed).
    """
    here = Path(__file__).parent
    for path in (here.parent / "tables.json", here / "tables.json"):
        if path.is_file():
            content: dict[str, list[Entry]] = json.loads(path.read_text("utf-8"))
            return content
    raise FileNotFoundError(f"{here.parent / 'tables.json'} is missing; make it with python -m tools.every_table")


def rounded(value: float, digits: int) -> Decimal:
    """A number in the decimals in which pages print it and in which it is compared."""
    near = Decimal(str(round(value, 9)))  # binary 0.165 must not round as 0.16499...
    return near.quantize(Decimal(1).scaleb(-digits))


def met(cell: Mapping[str, Any]) -> bool | None:
    """One-sided comparison: whether our number is worse than the published one by at most its spread.

    If no spread is printed, 1 % of the number is allowed. A count has to be equal. Our number and the published number, after its
    correction if there is one, are compared in the printed decimals. The result is `None` if we have no number.
    """
    if cell["ours"] is None:
        return None
    worse = _difference(cell) * (-1 if cell["better"] == "higher" else 1)
    return agrees(cell) or (not cell["exact"] and worse < 0)


def agrees(cell: Mapping[str, Any]) -> bool | None:
    """Two-sided comparison: whether our number differs from the published one in either direction by at most what `met` allows."""
    if cell["ours"] is None:
        return None
    spread = TOLERATED_SHARE * abs(cell["published"]) if cell["published_spread"] is None else cell["published_spread"]
    return bool(abs(_difference(cell)) <= (0 if cell["exact"] else spread) + 1e-9)


def _difference(cell: Mapping[str, Any]) -> float:
    """Our number minus the published or corrected number, in the printed decimals."""
    theirs = cell["published"] if cell["corrected"] is None else cell["corrected"]
    return float(rounded(cell["ours"], cell["digits"]) - rounded(theirs, cell["digits"]))


def counts(content: Mapping[str, Sequence[Entry]], paper: str | None = None) -> dict[str, int]:
    """Counts of experiments, cells and claims, of one paper or of all: how many there are, were run, and came out as published.

    `met` and `agrees` count compared cells. `clean_met` and `clean_agrees` count `clean` cells, which are compared cells without
    corrupted images. `one_seed` counts compared cells with a single seed or split.
    """
    papers = list(EXPERIMENTS) if paper is None else [paper]
    cells, figures = ([one for one in content[key] if one["paper"] in papers] for key in ("cells", "figures"))
    ran = [cell for cell in cells if cell["ours"] is not None]
    compared = [cell for cell in ran if cell["met"] is not None]
    clean = [cell for cell in compared if not cell["corrupted"]]
    seen = [figure for figure in figures if figure["ran"]]
    claims, ours = ([one for one in figures if one["variant"] == variant] for variant in (False, True))
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
        "claims": len(claims),
        "shown": sum(one["shown"] is True for one in claims),
        "not_shown": sum(one["shown"] is False for one in claims),
        "variants": len(ours),
        "variants_shown": sum(one["shown"] is True for one in ours),
        "variants_not_shown": sum(one["shown"] is False for one in ours),
    }


def summary(content: Mapping[str, Sequence[Entry]]) -> str:
    """A table with a line for each paper and one for all papers, followed by remarks on the columns."""
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
            f"{own['variants_shown']} / {own['variants_not_shown']} / "
            f"{own['variants'] - own['variants_shown'] - own['variants_not_shown']}",
        ]
        for title, own in found.items()
    ]
    header = ["paper", "experiments run", "numbers run", "met or better", "agree"]
    header += ["clean: met or better", "clean: agree", "one seed", "claims: shown / not / untested", "our settings"]
    return "\n".join([table(header, lines), "", *remarks(content)])


def remarks(content: Mapping[str, Sequence[Entry]]) -> list[str]:
    """The meaning of the summary's columns, the papers whose compared numbers come from only one or two tables, and counts."""
    lines = [
        "met or better: our number is worse than the published one by at most its spread, or by 1 % if no spread is printed.",
        "agree: our number is within this spread in either direction. Counts must be equal. We round to the printed decimals.",
        "clean: without corrupted images, because our corrupted images are fewer and different from the papers'.",
        "one seed: numbers that we ran with a single seed.",
        "our settings: the same counts of claims for settings of ours, if the claim is also judged nearer to the paper's setting.",
    ]
    if repeated := sum(cell["repeated"] and cell["ours"] is not None for cell in content["cells"]):
        lines.append(f"{repeated} of the numbers run are printed in two tables of their paper and count in both.")
    for paper, title in PAPERS.items():
        every = [cell for cell in content["cells"] if cell["paper"] == paper]
        tables = list(dict.fromkeys(cell["table"] for cell in every if cell["met"] is not None))
        if 0 < len(tables) < min(3, len({cell["table"] for cell in every})):
            lines.append(f"{title}: all numbers run come from {' and '.join(tables)}.")
        judged = [cell for cell in every if cell["met"] is not None]
        counts, scores = ([cell for cell in judged if cell["exact"] == exact] for exact in (True, False))
        if counts:
            met, agree = (sum(cell[rule] for cell in scores) for rule in ("met", "agrees"))
            lines.append(
                f"{title}: {len(counts)} of the numbers run are counts, of which {sum(cell['met'] for cell in counts)} are equal. "
                f"Of the {len(scores)} scores, {met} ({met / len(scores):.0%}) are met or better and {agree} "
                f"({agree / len(scores):.0%}) agree."
            )
    return lines


def details(content: Mapping[str, Sequence[Entry]], names: Sequence[str]) -> str:
    """Every cell and every claim of papers or experiments, with the reasons.

    Args:
        content: Content of the file, from `load`.
        names: Papers such as `subnetwork`, experiments such as `subnetwork/rotated MNIST`, or commands of the catalog such as
            `subnetwork/rotated-mnist`.

    Raises:
        ValueError: If there is no such paper or experiment.
    """
    known = [*EXPERIMENTS, *(f"{paper}/{one}" for paper, own in EXPERIMENTS.items() for one in own)]
    if unknown := [name for name in names if name not in known and name not in CATALOG]:
        raise ValueError(
            f"there are no entries of {unknown[0]!r}; choose from {', '.join(known)}, or see bayesify reproduce --list"
        )
    text = []
    for key in ("cells", "figures"):
        chosen = [entry for entry in content[key] if not _names(entry).isdisjoint(names)]
        text.append((_cells if key == "cells" else _figures)(chosen))
    return "\n\n".join(part for part in text if part)


def _names(entry: Entry) -> set[str]:
    """Names by which an entry is found: its paper, its experiment, and the catalog's experiments in its command."""
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
        reasons = dict.fromkeys(
            cell[key] for key in ("reason", "note", "training", "misprint") for cell in own if cell[key]
        )
        blocks += [f"  {reason}" for reason in reasons]
    return "\n".join(blocks)


VERDICTS = {False: "not shown", None: "untested", True: "shown"}
"""Words for `shown`, in the order in which claims are listed."""


def by_verdict(figures: Sequence[Entry]) -> list[Entry]:
    """Claims ordered by verdict: not shown, untested, shown."""
    return sorted(figures, key=lambda one: list(VERDICTS).index(one["shown"]))


def _figures(figures: Sequence[Entry]) -> str:
    return "\n".join(
        f"{one['experiment']}, {one['figure']}: {one['claim']}: {VERDICTS[one['shown']]}"
        f"{' (our setting)' * one['variant']}. {one['reason']}" + (f" {one['cause']}" if one["cause"] else "")
        for one in by_verdict(figures)
    )
