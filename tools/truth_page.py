"""The figures and the table of docs/truth.md, from benchmarks/results/truth.json; run it after `python -m benchmarks.truth run`."""

import json
import math
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "truth.md", ROOT / "benchmarks" / "results" / "truth.json"
FIGURES = ROOT / "docs" / "figures"
START, END = "<!-- truth: from benchmarks/results, by python -m tools.truth_page -->", "<!-- end of truth -->"
MAX_FLOORS = 100.0
"""Multiple of the noise floor at which colors and axes end."""
Row = dict[str, Any]


def score(rows: list[Row]) -> float:
    """How many noise floors away, at least 1: geometric mean over runs and distances, each between 1 and `MAX_FLOORS`."""
    ratios = [
        min(max(value / max(row["floors"][name], 1e-6), 1.0), MAX_FLOORS)
        for row in rows
        for name, value in row["distances"].items()
    ]
    return math.exp(fmean(map(math.log, ratios))) if ratios else MAX_FLOORS


def only(row: Row, name: str) -> Row:
    """A row with one of its distances."""
    return {**row, "distances": {name: row["distances"][name]}}


def grouped(rows: list[Row]) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Methods from near to far, those apart last; problems; the score of each pair."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    own = {name: [row for row in rows if row["method"] == name] for name in methods}
    methods.sort(key=lambda name: (own[name][0]["apart"], score(own[name])))
    cells = {(m, p): score([row for row in own[m] if row["problem"] == p]) for m in methods for p in problems}
    return methods, problems, cells


def heat_map(rows: list[Row]) -> str:
    """Methods by problems as SVG: white at the noise floor, dark at a hundred floors."""
    methods, problems, cells = grouped(rows)
    left, top, width, height = 150, 90, 56, 20
    size = (left + width * len(problems) + 10, top + height * len(methods) + 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="11">'
    ]
    for column, problem in enumerate(problems):
        x = left + width * (column + 0.5)
        parts.append(f'<text transform="translate({x},{top - 8}) rotate(-45)">{escape(problem)}</text>')
    for line, method in enumerate(methods):
        y = top + height * line
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(method)}</text>')
        for column, problem in enumerate(problems):
            value = cells[method, problem]
            share = math.log(value) / math.log(MAX_FLOORS)
            color = "#{:02x}{:02x}{:02x}".format(*(round(255 + share * (end - 255)) for end in (27, 58, 92)))
            ink = "#fff" if share > 0.5 else "#222"
            x = left + width * column
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{color}" stroke="#ddd"/>'
            )
            parts.append(f'<text x="{x + width / 2}" y="{y + 14}" text-anchor="middle" fill="{ink}">{value:.1f}</text>')
    return "\n".join([*parts, "</svg>\n"])


def times(rows: list[Row]) -> str:
    """Mean training time against the mean score of each method as SVG, both axes logarithmic."""
    methods, _, _ = grouped(rows)
    points = []
    for name in methods:
        own = [row for row in rows if row["method"] == name]
        points.append((name, max(fmean(row["seconds"] for row in own), 0.1), score(own)))
    low, high = min(point[1] for point in points) / 1.2, max(point[1] for point in points) * 1.6
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="11">']
    parts.append('<path d="M50 20V360H630" fill="none" stroke="#222"/>')
    parts.append('<text x="340" y="390" text-anchor="middle">training time, s</text>')
    parts.append('<text transform="translate(16,190) rotate(-90)" text-anchor="middle">distance, noise floors</text>')
    for mark in (1, 3, 10, 30, 100):
        y = 360 - 340 * math.log(mark) / math.log(MAX_FLOORS)
        parts.append(f'<text x="44" y="{y + 4:.0f}" text-anchor="end">{mark}</text>')
    for name, seconds, value in points:
        x = 50 + 560 * math.log(seconds / low) / math.log(high / low)
        y = 360 - 340 * math.log(value) / math.log(MAX_FLOORS)
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="#1b3a5c"/>')
        parts.append(f'<text x="{x + 5:.0f}" y="{y + 4:.0f}">{escape(name)} ({seconds:.1f} s)</text>')
    return "\n".join([*parts, "</svg>\n"])


def contents(stored: dict[str, Any]) -> str:
    """What stands on the page: which truths there are, and the distances of each method."""
    rows = [row for row in stored["rows"] if row["distances"]]
    methods, problems, _ = grouped(rows)
    names = list(dict.fromkeys(name for row in rows for name in row["distances"]))
    lines = []
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        floors = [score([only(row, name) for row in own if name in row["distances"]]) for name in names]
        spread = [fmean(row["spread"][part] for row in own) for part in ("inside", "outside")]
        rank = "apart" if own[0]["apart"] else f"{score(own):.1f}"
        lines.append(
            [f"`{method}`", rank, *(f"{value:.1f}" for value in floors), *(f"{value:.2f}" for value in spread)]
        )
    made = [
        [f"`{name}`", "closed form" if told.get("closed_form") else f"{told['chains']} chains, {told['trajectories']} trajectories",
         *([ "-", "-"] if told.get("closed_form") else [f"{told['r_hat']:.3f}", f"{told['effective_draws']:.0f}"]),
         f"{told['seconds']:.0f}", "yes" if told["proven"] else "no"]
        for name, told in stored["truths"].items()
    ]  # fmt: skip
    failed = [f"`{row['method']}` on {row['problem']}: {row['note']}" for row in stored["rows"] if not row["distances"]]
    seeds = len({row["seed"] for row in rows})
    told = f"{len(problems)} of 12 problems, {len(methods)} methods, {seeds} seed{'s' * (seeds > 1)}, `{stored['command']}`."
    truths = table(["problem", "made by", "R-hat, largest", "effective draws, fewest", "seconds", "proven"], made)
    head = ["method", "all", *names, "spread inside", "spread outside"]
    found = f"{told}\n\n{truths}\n\n![Distances](figures/truth-distances.svg)\n\n![Time](figures/truth-times.svg)\n\n"
    found += f"Distances in noise floors, and the standard deviation of functions by that of the truth:\n\n{table(head, lines)}"
    return found + (f"\n\nNot run: {'; '.join(sorted(set(failed)))}." if failed else "")


def page(text: str) -> str:
    """The page with its generated part as the results have it."""
    if not RESULTS.exists():
        return replaced(text, START, END, "No run is committed yet.")
    return replaced(text, START, END, contents(json.loads(RESULTS.read_text())))


def main() -> None:
    """Write figures and page."""
    if RESULTS.exists():
        rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["distances"]]
        FIGURES.mkdir(exist_ok=True)
        (FIGURES / "truth-distances.svg").write_text(heat_map(rows))
        (FIGURES / "truth-times.svg").write_text(times(rows))
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
