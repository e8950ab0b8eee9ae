"""The tables of docs/unseen-tables.md, made from benchmarks/results/tables and benchmarks/results/stress.json.

Run this program after `python -m benchmarks.tables collect`.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.table_sources import EVERY_SOURCE, NEW_SOURCES, Source
from tools import tables_page as seen
from tools.markdown import replaced, table
from tools.tables_page import OURS, Found, Runs, kind, mean, number

PAGE, STRESS = seen.ROOT / "docs" / "unseen-tables.md", seen.RESULTS.parent / "stress.json"
START, END = "<!-- unseen: by python -m tools.unseen_tables_page -->", "<!-- end of unseen -->"
NOT_RIVALS = (OURS, "bayesify-ensemble", "constant")
MIN_GROUP_ROWS = 30
"""Smallest number of test rows of a separate group. The rows of smaller groups form one group."""
LEVEL = 0.9


def sources(found: Found) -> list[Source]:
    """The new tables on which our method ran."""
    return [source for source in NEW_SOURCES if source.name in found.get(OURS, {})]


def rivals(found: Found, name: str) -> dict[str, Runs]:
    """The runs of each rival on a table, on the folds that our method has."""
    ours = found[OURS][name]
    both = {
        method: {fold: run for fold, run in tables.get(name, {}).items() if fold in ours}
        for method, tables in found.items()
        if method not in NOT_RIVALS
    }
    return {method: runs for method, runs in both.items() if runs}


def best_on_validation(found: Found, source: Source) -> str:
    """The rival with the smallest loss on validation rows, over the folds that all rivals of the table have."""
    every = rivals(found, source.name)
    folds = set.intersection(*(set(runs) for runs in every.values()))

    def average(runs: Runs) -> float:
        parts = [runs[fold] for fold in folds]
        return float(sum(run["validation"] * run["held"] for run in parts) / sum(run["held"] for run in parts))

    return min(every, key=lambda method: average(every[method]))


def best_on_test(found: Found, source: Source) -> str:
    """The rival with the best score relative to ours on test rows."""
    every = rivals(found, source.name)
    return max(every, key=lambda method: log_ratio(every[method], kind(source.task)[0])[0])


def log_ratio(runs: Runs, key: str) -> tuple[float, float]:
    r"""Logarithm of our score divided by a rival's, and its standard error over paired test rows.

    With our scores a and the rival's b, its square is the variance of $a / \bar a - b / \bar b$ over rows, divided by their number.
    """
    num = sum(run["num"] for run in runs.values())
    b, bb = (sum(run[name] for run in runs.values()) / num for name in (key, "squares"))
    a, aa, ab = (sum(run["ours"][index] for run in runs.values()) / num for index in range(3))
    spread = aa / a**2 - 2 * ab / (a * b) + bb / b**2
    return math.log(a / b), math.sqrt(max(spread, 0.0) / num)


def combined(parts: Sequence[tuple[float, float]]) -> str:
    """A geometric mean with its standard error over test rows."""
    value = math.exp(sum(part for part, _ in parts) / len(parts))
    return f"{value:.3f} ± {value * math.sqrt(sum(error**2 for _, error in parts)) / len(parts):.3f}"


def shown(part: tuple[float, float]) -> str:
    value = math.exp(part[0])
    return f"{value:.2f} ± {value * part[1]:.2f}"


# -- sections ----------------------------------------------------------------------------------------------------------


def summary(found: Found) -> str:
    rows = []
    kinds = (("CRPS of numbers and counts", False), ("log-loss of classes", True))
    for title, classes in kinds:
        wanted = [source for source in sources(found) if (source.task == "classification") == classes]
        cells = [title, str(len(wanted))]
        for best in (best_on_validation, best_on_test):
            parts = [log_ratio(found[best(found, source)][source.name], kind(source.task)[0]) for source in wanted]
            cells.append(combined(parts) if parts else "")
        rows.append(cells)
    header = [
        "",
        "tables",
        "ratio to the rival that is best on validation rows",
        "ratio to the rival that is best on test rows",
    ]
    return table(header, rows)


def by_rival(found: Found) -> str:
    rows = []
    for method in found:
        if method in (OURS, "bayesify-ensemble") or not any(one.name in found[method] for one in sources(found)):
            continue
        cells = [method]
        for classes in (False, True):
            names = [source for source in sources(found) if (source.task == "classification") == classes]
            parts = [
                log_ratio(found[method][source.name], kind(source.task)[0])
                for source in names
                if source.name in found[method]
            ]
            cells.append(f"{combined(parts)} ({len(parts)})" if parts else "")
        runs = [run for source in sources(found) for run in found[method].get(source.name, {}).values()]
        coverage = [run for run in runs if "inside_90" in run]
        inside = sum(run.get("drawn_90", run["inside_90"]) for run in coverage)
        cells.append(f"{100 * inside / sum(run['num'] for run in coverage):.0f}" if coverage else "")
        rows.append(cells)
    return table(["rival", "CRPS, ours / rival", "log-loss, ours / rival", "coverage of its 90 % intervals, %"], rows)


def each(found: Found) -> str:
    rows = []
    ran = {method for source in sources(found) for method in rivals(found, source.name)}
    methods = [method for method in found if method in ran]
    for source in sources(found):
        key = kind(source.task)[0]
        chosen, winner = best_on_validation(found, source), best_on_test(found, source)
        cells = [source.name, number(mean(found[OURS][source.name].values(), key))]
        cells += [f"{shown(log_ratio(found[method][source.name], key))} ({method})" for method in (chosen, winner)]
        every = rivals(found, source.name)
        cells += [f"{math.exp(log_ratio(every[name], key)[0]):.2f}" if name in every else "" for name in methods]
        rows.append(cells)
    return table(
        ["table", "our score", "ratio to the best on validation rows", "ratio to the best on test rows", *methods], rows
    )


def off(num: int, inside: float) -> bool:
    """Whether a coverage differs from 90 % by more than 4 points and by more than 3 standard errors."""
    gap, error = abs(inside / num - LEVEL), math.sqrt(LEVEL * (1 - LEVEL) / num)
    return gap > seen.MAX_COVERAGE_GAP and gap > seen.MAX_COVERAGE_ERRORS * error


def groups(runs: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Number of rows, and of rows inside their intervals, for each group with enough test rows and for all other rows together."""
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        for name, (num, inside) in run.get("groups_90", {}).items():
            before = found.get(name, (0, 0))
            found[name] = before[0] + num, before[1] + inside
    large = {name: part for name, part in found.items() if part[0] >= MIN_GROUP_ROWS}
    small = [part for name, part in found.items() if name not in large]
    if small and sum(part[0] for part in small) >= MIN_GROUP_ROWS:
        large["all smaller ones"] = sum(part[0] for part in small), sum(part[1] for part in small)
    return large


def coverage(runs: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Number of rows, and of rows inside their 90 % intervals."""
    parts = [(run["num"], run.get("drawn_90", run["inside_90"])) for run in runs]
    return sum(num for num, _ in parts), sum(inside for _, inside in parts)


def held(found: Found, every: Iterable[Source]) -> str:
    """Number of tables and of groups whose coverage is within the limits."""
    all_runs = [list(found[OURS].get(one.name, {}).values()) for one in every if one.task != "classification"]
    tables = [off(*coverage(runs)) for runs in all_runs if runs]
    parts = [off(*part) for runs in all_runs for part in groups(runs).values()]
    return f"on {tables.count(False)} of {len(tables)} tables and in {parts.count(False)} of {len(parts)} groups"


def intervals(found: Found) -> str:
    rows = []
    for source in sources(found):
        if source.task == "classification":
            continue
        runs = list(found[OURS][source.name].values())
        num, inside = coverage(runs)
        tenths = [[sum(run["tenths_90"][index][part] for run in runs) for part in (0, 1)] for index in range(10)]
        own = groups(runs)
        bad = {name: part for name, part in own.items() if off(*part)}
        worst = max(own, key=lambda name: abs(own[name][1] / own[name][0] - LEVEL), default="")
        cells = [source.name, seen.share(inside / num, math.sqrt(LEVEL * (1 - LEVEL) / num), 90)]
        cells.append(" ".join(f"{100 * b / a:.0f}{'✗' if off(a, b) else ''}" for a, b in tenths))
        cells.append(f"{len(own) - len(bad)} of {len(own)}" if own else "")
        cells.append(f"{worst}: {100 * own[worst][1] / own[worst][0]:.0f} ({own[worst][0]} rows)" if own else "")
        rows.append(cells)
    together = (
        f"On the old and the new tables together, the coverage is within these limits {held(found, EVERY_SOURCE)}"
    )
    header = [
        "table",
        "coverage of 90 % intervals, %",
        "by tenth of the predicted mean, low to high",
        "groups within the limits",
        "group with the worst coverage",
    ]
    return (
        "A coverage is within the limits if it differs from 90 % by at most 4 points or 3 standard errors. On the new tables, the "
        f"coverage is within these limits {held(found, NEW_SOURCES)}. {together}. ✗ marks a coverage outside the limits."
        f"\n\n{table(header, rows)}"
    )


def stress(_: Found) -> str:
    if not STRESS.exists():
        return "Not run."
    tables = [one for one in json.loads(STRESS.read_text())["figures"].values() if isinstance(one, dict)]
    rows = []
    for name in dict.fromkeys(one["kind"] for one in tables):
        part = [one for one in tables if one["kind"] == name]
        ratio = geometric_mean([one["crps_over_constant"] for one in part])
        cells = [name, len(part), sum(one["exploded"] for one in part), max(one["furthest"] for one in part), ratio]
        cells.append(sum(one["inside_90"] for one in part) / len(part))
        cells.append(max(one["upper_ranges"] for one in part))
        rows.append([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells])
    header = [
        "kind",
        "tables",
        "rows exploded",
        "furthest mean, 1 is the limit",
        "CRPS / CRPS of one guess",
        "coverage of 90 % intervals",
        "highest upper end: distance to the largest target, divided by the range of the targets",
    ]
    total = sum(one["exploded"] for one in tables)
    return (
        "A row explodes if its predicted mean lies outside the training targets by more than half of their range. For targets of "
        "at least 0, a row explodes if its predicted mean is above 1.5 times the largest target. Rows that bayesify marks "
        "as `unusual` are not counted. "
        f"bayesify ran on {len(tables)} simulated tables, and {total or 'no'} rows exploded.\n\n{table(header, rows)}"
    )


def about(found: Found) -> str:
    rows = []
    for source in NEW_SOURCES:
        runs = list(found.get(OURS, {}).get(source.name, {}).values())
        train = f"{max(run['train'] for run in runs):,}" if runs else ""
        split = f"forward by `{source.order}`" if source.order else "random"
        item = f"{source.package}, `{source.item}`"
        cells = [source.name, f"{source.target} ({source.task})", item, source.license, f"`{source.sha256[:12]}`"]
        rows.append([*cells, train, split, str(len(runs))])
    return table(["table", "target", "from", "license", "sha256", "rows to train on", "split", "folds"], rows)


def tables() -> str:
    """The generated part of the page in Markdown."""
    found = seen.stored()
    ran = bool(sources(found))
    parts: list[tuple[str, Callable[[Found], str]]] = [
        ("## Against the best rival", summary),
        (
            "## Against each rival\n\nThe ratios are geometric means over tables. Parentheses give the number of tables.",
            by_rival,
        ),
        (
            "## Table by table\n\nEach ratio is bayesify's score divided by the rival's score. A ratio below 1 means that "
            "bayesify is better.",
            each,
        ),
        ("## Intervals", intervals),
        ("## Tables that try to break bayesify", stress),
        ("## The tables", about),
    ]
    return "\n\n".join(
        f"{title}\n\n{make(found) if ran or make in (stress, about) else 'Not run.'}" for title, make in parts
    )


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text(), START, END, tables()))


if __name__ == "__main__":
    main()
