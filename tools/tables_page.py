"""The tables of docs/tables.md, made from the runs in benchmarks/results/tables.

Run this program after `python -m benchmarks.tables collect`.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.table_sources import SOURCES
from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "tables.md", ROOT / "benchmarks" / "results" / "tables"
TIMES = RESULTS.parent / "tables_times.json"
START, END = "<!-- tables: from benchmarks/results/tables, by python -m tools.tables_page -->", "<!-- end of tables -->"
PEER, OURS = "boosted trees", "bayesify"
TITLES = {
    OURS: "**bayesify**",
    PEER: "boosted trees (scikit-learn)",
    "constant": "a constant guess, without columns",
    "forest": "forest",
}
LEVELS, MACHINE = (50, 90, 95), "x86_64"
MAX_COVERAGE_GAP, MAX_COVERAGE_ERRORS = 0.04, 3.0
"""Largest accepted distance of a coverage from its level: 4 points, or 3 standard errors."""
Runs = dict[int, dict[str, Any]]
Found = dict[str, dict[str, Runs]]
"""Runs by method, table and fold."""


def stored() -> Found:
    """Runs by method, table and fold: first ours, then the peer to which all methods are compared."""
    found: Found = {}
    for path in sorted(RESULTS.glob("*.json")):
        for run in json.loads(path.read_text()):
            found.setdefault(run["method"], {}).setdefault(run["table"], {})[run["fold"]] = run
    first = [OURS, PEER, "LightGBM", "CatBoost", "NGBoost", "forest", "linear"]
    return {name: found[name] for name in [*first, *sorted(set(found) - set(first))] if name in found}


def mean(runs: Iterable[dict[str, Any]], key: str) -> float | None:
    """Mean of a score over all test rows of the folds."""
    runs = list(runs)
    if not runs or any(run.get(key) is None for run in runs):
        return None
    return float(sum(run[key] for run in runs) / sum(run["num"] for run in runs))


def ratio(runs: Runs, peer: Runs, key: str) -> float | None:
    """A score as a ratio to the peer's, over the folds that both have."""
    both = runs.keys() & peer.keys()
    ours, theirs = (mean((of[fold] for fold in both), key) for of in (runs, peer))
    return None if ours is None or theirs is None else ours / theirs


def same_folds(found: Found, method: str, table: str) -> list[dict[str, Any]]:
    """Runs of a method on the folds of a table that our method has."""
    ours, runs = found[OURS][table], found.get(method, {}).get(table, {})
    return [runs[fold] for fold in sorted(ours.keys() & runs.keys())]


def ece(runs: Iterable[dict[str, Any]]) -> float:
    """Expected calibration error, with the bins of all folds together."""
    runs = list(runs)
    gaps = [sum(run["bin_confidence"][index] - run["bin_correct"][index] for run in runs) for index in range(15)]
    return sum(map(abs, gaps)) / sum(run["num"] for run in runs)


def coverage(runs: Iterable[dict[str, Any]], level: int, closed: bool = False) -> tuple[float, float]:
    """Share of the test rows inside their intervals, and its standard error if the true share equals the level.

    For predicted counts, a whole number at an interval's end counts by the part of its probability that belongs to the interval.
    With `closed`, it counts fully.
    """
    runs = list(runs)
    num, share = sum(run["num"] for run in runs), level / 100
    inside = sum(
        run[f"inside_{level}"] if closed else run.get(f"drawn_{level}", run[f"inside_{level}"]) for run in runs
    )
    return inside / num, math.sqrt(share * (1 - share) / num)


def spent(runs: Iterable[dict[str, Any]]) -> str:
    """Median seconds of the runs on the machine with the most runs."""
    found = [run["seconds"] for run in runs if run.get("machine", MACHINE) == MACHINE]
    return f"{median(found):.1f}" if found else ""


def kind(task: str) -> tuple[str, str]:
    return ("log_loss", "log-loss") if task == "classification" else ("crps", "CRPS")


# -- sections ----------------------------------------------------------------------------------------------------------


def summary(found: Found) -> str:
    rows = []
    for method, tables in found.items():
        cells = []
        for task in ("regression", "count", "classification"):
            wanted = [source.name for source in SOURCES if source.task == task]
            made = [ratio(tables[name], found[PEER].get(name, {}), kind(task)[0]) for name in wanted if name in tables]
            known = [value for value in made if value is not None]
            few = f" ({len(known)})" if len(known) < len(wanted) else ""
            cells.append(f"{geometric_mean(known):.3f}{few}" if known else "")
        cells.append(spent(run for runs in tables.values() for run in runs.values()))
        rows.append([TITLES.get(method, method), *cells])
    return (
        f"We divide the score of a method by the score of {TITLES[PEER]} on the same rows. The table shows the geometric mean of "
        "this ratio over tables; a ratio below 1 is better. Parentheses give the number of tables if a method did not "
        "run on all tables. Seconds are the median processor time of a fold; for bayesify, without the tables of classes.\n\n"
        + table(["", "CRPS, numbers", "CRPS, counts", "log-loss, classes", "seconds"], rows)
    )


def each(found: Found, task: str) -> str:
    """Table of every method's score on every table of a kind, as a ratio to the peer's score, which is also given."""
    key, title = kind(task)
    methods = [method for method in found if method != PEER]
    rows = []
    for source in SOURCES:
        if source.task != task or source.name not in found.get(PEER, {}):
            continue
        peer = found[PEER][source.name]
        values = {
            method: ratio(found[method][source.name], peer, key) for method in methods if source.name in found[method]
        }
        best = min((value for value in values.values() if value is not None), default=None)
        cells = []
        for method in methods:
            value = values.get(method)
            shown = "" if value is None else f"{value:.2f}"
            cells.append(f"**{shown}**" if value is not None and value == best and value < 1 else shown)
        rows.append([source.name, number(mean(peer.values(), key)), *cells])
    return table(["table", f"{title} of boosted trees", *methods], rows)


def intervals(found: Found) -> str:
    rows = []
    for source in SOURCES:
        if source.task == "classification" or source.name not in found.get(OURS, {}):
            continue
        runs, peer = found[OURS][source.name], found[PEER].get(source.name, {})
        cells = [share(*coverage(runs.values(), level), level) for level in LEVELS]
        if counts(runs):
            closed = [coverage(runs.values(), level, closed=True)[0] for level in LEVELS]
            cells = [f"{cell} ({100 * value:.0f})" for cell, value in zip(cells, closed, strict=True)]
        thirds = [
            sum(run["thirds_inside_90"][index] for run in runs.values())
            / sum(run["thirds_num"][index] for run in runs.values())
            for index in range(3)
        ]
        cells.append(" / ".join(f"{100 * value:.0f}" for value in thirds))
        wide = ratio(runs, peer, "width_90")
        cells.append("" if wide is None else f"{wide:.2f}")
        theirs = same_folds(found, PEER, source.name)
        cells.append(share(*coverage(theirs, 90), 90) if theirs else "")
        cells.append(number(mean(runs.values(), "nll")))
        rows.append([source.name, *cells])
    thirds = ("90 % by third", "width of 90 % / trees'", "trees' 90 %", "NLL")
    return table(["table", *(f"{level} %" for level in LEVELS), *thirds], rows)


def counts(runs: Runs) -> bool:
    """Whether some fold predicts whole numbers."""
    return any("drawn_50" in run for run in runs.values())


def share(value: float, error: float, level: int) -> str:
    """A coverage with its standard error. A cross marks a coverage that is off by more than 4 points and 3 standard errors."""
    off = abs(value - level / 100)
    mark = " ✗" if off > MAX_COVERAGE_GAP and off > MAX_COVERAGE_ERRORS * error else ""
    return f"{100 * value:.0f} ± {100 * error:.0f}{mark}"


def classes(found: Found) -> str:
    rows = []
    for source in SOURCES:
        if source.task != "classification" or source.name not in found.get(OURS, {}):
            continue
        of = [same_folds(found, method, source.name) for method in (OURS, PEER, "constant")]
        right = [f"{100 * (mean(runs, 'correct') or 0.0):.1f}" if runs else "" for runs in of]
        gaps = [f"{100 * ece(runs):.1f}" if runs else "" for runs in of]
        rows.append([source.name, *right[:2], *gaps[:2], right[2]])
    header = [
        "accuracy, %",
        "accuracy of boosted trees",
        "calibration error, %",
        "calibration error of boosted trees",
        "always the most frequent class",
    ]
    return table(["table", *header], rows)


def losses(found: Found) -> str:
    """Tables on which boosted trees are better than the default, or its coverage is off."""
    behind, outside, closed = [], [], []
    for source in SOURCES:
        runs = found.get(OURS, {}).get(source.name)
        if runs is None:
            continue
        value = ratio(runs, found[PEER].get(source.name, {}), kind(source.task)[0])
        if value is not None and value > 1:
            behind.append((value, source.name))
        if source.task != "classification":
            for level in LEVELS:
                shown = share(*coverage(runs.values(), level), level)
                if "✗" in shown:
                    outside.append(f"{source.name} ({level} %: {shown.removesuffix(' ✗')})")
                if counts(runs):
                    value, error = coverage(runs.values(), level, closed=True)
                    closed += (
                        [f"{source.name} ({level} %: {100 * value:.0f})"] if "✗" in share(value, error, level) else []
                    )
    worst = ", ".join(f"{name} ({value:.2f})" for value, name in sorted(behind, reverse=True))
    return (
        f"bayesify is behind boosted trees on these tables: {worst or 'none'}.\n\n"
        "Intervals whose coverage differs from their level by more than 4 points and more than 3 standard errors: "
        f"{', '.join(outside) or 'none'}.\n\n"
        "If only a few counts are likely, closed intervals contain more rows than their level. The list would then be: "
        f"{', '.join(closed) or 'none'}."
    )


def seconds(found: Found) -> str:
    rows = []
    for title, low, high in (("up to 1,000", 0, 1000), ("1,000 to 3,000", 1000, 3000), ("3,000 to 5,000", 3000, 5001)):
        every = ([run for of in tables.values() for run in of.values()] for tables in found.values())
        rows.append([title, *(spent(run for run in runs if low <= run["train"] < high) for runs in every)])
    return table(["rows to train on", *found], rows)


def quiet(_: Found) -> str:
    rows = [
        [fit["table"], f"{fit['train']:,}", f"{fit['wall']:.1f}", f"{fit['seconds']:.1f}", f"{fit['steps']:,}"]
        for fit in json.loads(TIMES.read_text())["fits"]
    ]
    return table(["table", "rows", "seconds", "processor seconds", "steps"], rows)


def sources(found: Found) -> str:
    rows = []
    for source in SOURCES:
        every = [tables[source.name] for tables in found.values() if source.name in tables]
        train = max((run["train"] for runs in every for run in runs.values()), default=0)
        folds = f"{max(map(len, every), default=0)}, {len(found.get(OURS, {}).get(source.name, {}))}"
        item = source.package if source.item == source.name else f"{source.package}, `{source.item}`"
        rows.append([source.name, f"{source.target} ({source.task})", item, f"{train:,}", folds])
    return table(["table", "target", "from", "rows to train on", "folds, folds of bayesify"], rows)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def tables() -> str:
    """The generated part of the page in Markdown."""
    names = {source.name for source in SOURCES}
    found = {method: {name: runs for name, runs in of.items() if name in names} for method, of in stored().items()}
    found = {method: of for method, of in found.items() if of}
    if PEER not in found:
        return "No runs are stored."
    parts: list[tuple[str, Callable[[Found], str]]] = [
        ("## In one table", summary),
        ("## Where it loses", losses),
        (
            "## Numbers\n\nThe table shows the CRPS divided by the CRPS of boosted trees. The best ratio below 1 is bold.",
            lambda of: each(of, "regression"),
        ),
        ("## Counts\n\nThe table shows the CRPS divided by the CRPS of boosted trees.", lambda of: each(of, "count")),
        (
            "## Classes\n\nThe table shows the log-loss divided by the log-loss of boosted trees.",
            lambda of: each(of, "classification"),
        ),
        ("The next table shows the accuracy and the calibration of bayesify's default:", classes),
        (
            "## Intervals\n\nThe table shows the coverage of bayesify's default intervals in percent, with its standard error over "
            "test rows. ✗ marks a coverage that differs from its level by more than 4 points and more than 3 standard errors. One "
            "column sorts the rows by the predicted median, from low to high, and shows the coverage of each third. For counts, "
            "parentheses give the coverage of closed intervals.",
            intervals,
        ),
        (
            "## Seconds\n\nThe table shows the median processor seconds of a fold on one thread (x86-64), with all steps included. "
            "The column of bayesify does not include the tables of classes.",
            seconds,
        ),
        (
            "The next table shows the default fit of bayesify alone. It ran on the first fold of each table, on two otherwise idle "
            "cores (x86-64). The column of steps is for the member of the ensemble that reached its best score last. The goals are "
            "10 seconds on 500 rows and 60 seconds on 5,000 rows. `breast_cancer` and `letter` ran with the former default, which "
            "took about half as long for classes.",
            quiet,
        ),
        ("## The tables", sources),
    ]
    about_ours = (losses, classes, intervals)
    shown = [(title, make) for title, make in parts if OURS in found or make not in about_ours]
    shown = [(title, make) for title, make in shown if make is not quiet or TIMES.exists()]
    return "\n\n".join(f"{title}\n\n{make(found)}" for title, make in shown)


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text(), START, END, tables()))


if __name__ == "__main__":
    main()
