"""Writer of the figures and the table of docs/truth.md, from benchmarks/results/truth.json.

Run this program after `python -m benchmarks.truth run`.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "truth.md", ROOT / "benchmarks" / "results" / "truth.json"
FIGURES = ROOT / "docs" / "figures"
START, END = "<!-- truth: from benchmarks/results, by python -m tools.truth_page -->", "<!-- end of truth -->"
NUTS = ROOT / "benchmarks" / "results" / "truth_nuts.json"
CLOSED_FORM_PROBLEMS, MAX_LISTED_METHODS = ("linear", "process"), 8
"""Problems with closed forms, and number of methods that are shown for them."""
NUTS_TEXT = """The No-U-Turn sampler ran three chains on the same densities, from the same trained starts, for the same time. A row
agrees if its farthest distance is below 1, or below the distance between two halves of the NUTS chains. Effective draws are
those of the median function, per second of one core, including warm-up and training of the members. The chains of
`heteroscedastic` were kept every 32 trajectories. All kept draws are then independent, so its figure is a lower bound."""
MAX_FLOORS = 100.0
"""Multiple of the noise floor at which colors and axes end."""
Row = dict[str, Any]


def score(rows: list[Row]) -> float:
    """Distance in noise floors: geometric mean over runs and distances, each clipped to the range from 1 to `MAX_FLOORS`."""
    ratios = [
        min(max(value / max(row["floors"][name], 1e-6), 1.0), MAX_FLOORS)
        for row in rows
        for name, value in row["distances"].items()
    ]
    return math.exp(fmean(map(math.log, ratios))) if ratios else MAX_FLOORS


def only(row: Row, name: str) -> Row:
    """A row reduced to one of its distances."""
    return {**row, "distances": {name: row["distances"][name]}}


def shared(rows: list[Row]) -> list[str]:
    """Problems on which every method without its own prior was run. Methods are ranked on these problems."""
    ranked = {row["method"] for row in rows if not row["apart"]}
    problems = dict.fromkeys(row["problem"] for row in rows)
    return [name for name in problems if ranked <= {row["method"] for row in rows if row["problem"] == name}]


def grouped(rows: list[Row]) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Methods from the nearest to the farthest, then the unranked methods; problems; and the score of each pair that was run."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    own = {name: [row for row in rows if row["method"] == name] for name in methods}
    common = set(shared(rows))
    ranking = {name: score([row for row in own[name] if row["problem"] in common]) for name in methods}
    methods.sort(key=lambda name: (own[name][0]["apart"], ranking[name]))
    cells = {(row["method"], row["problem"]): 0.0 for row in rows}
    return methods, problems, {(m, p): score([row for row in own[m] if row["problem"] == p]) for m, p in cells}


def heat_map(rows: list[Row]) -> str:
    """Heat map of methods by problems as SVG: white at the noise floor, dark at a hundred floors."""
    methods, problems, cells = grouped(rows)
    left, top, width, height = 150, 90, 56, 20
    size = (left + width * len(problems) + 10, top + height * len(methods) + 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="11">'
    ]
    unproven = {row["problem"] for row in rows if not row.get("proven", True)}
    for column, problem in enumerate(problems):
        x, name = left + width * (column + 0.5), problem + " (unproven)" * (problem in unproven)
        parts.append(f'<text transform="translate({x},{top - 8}) rotate(-45)">{escape(name)}</text>')
    for line, method in enumerate(methods):
        y = top + height * line
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(method)}</text>')
        for column, problem in enumerate(problems):
            if (method, problem) not in cells:
                continue
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
    """Plot of each method's mean training time and mean score as SVG, with logarithmic axes."""
    methods, _, _ = grouped(rows)
    common, points = set(shared(rows)), []
    for name in methods:
        own = [row for row in rows if row["method"] == name and row["problem"] in common]
        points.append((name, max(fmean(row["seconds"] for row in own), 0.1), score(own)))
    low, high = min(point[1] for point in points) / 1.2, max(point[1] for point in points) * 1.6
    top = 1.5 * max(point[2] for point in points)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 460" font-family="sans-serif" font-size="11">']
    parts.append('<path d="M50 20V420H750" fill="none" stroke="#222"/>')
    parts.append('<text x="400" y="450" text-anchor="middle">training time, s</text>')
    parts.append('<text transform="translate(16,220) rotate(-90)" text-anchor="middle">distance, noise floors</text>')
    for mark in (1, 2, 3, 5, 10, 20, 50, 100):
        if mark <= top:
            parts.append(
                f'<text x="44" y="{424 - 400 * math.log(mark) / math.log(top):.0f}" text-anchor="end">{mark}</text>'
            )
    taken: list[tuple[float, float, float]] = []  # left, right and height of labels
    for name, seconds, value in sorted(points, key=lambda point: -point[2]):
        x = 50 + 700 * math.log(seconds / low) / math.log(high / low)
        y = 420 - 400 * math.log(max(value, 1.0)) / math.log(top)
        label = f"{name} ({seconds:.1f} s)"
        wide = 6.2 * len(label)
        left = x + 8 if x + 8 + wide < 755 else x - 8 - wide
        heights = sorted((y + 12 * shift for shift in range(-20, 21)), key=lambda height: abs(height - y))
        free = next(
            h for h in heights if all(left > last or left + wide < first or abs(h - t) > 11 for first, last, t in taken)
        )
        taken.append((left, left + wide, free))
        parts.append(f'<path d="M{x:.0f} {y:.0f}L{left if left > x else left + wide:.0f} {free:.0f}" stroke="#bbb"/>')
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="#1b3a5c"/>')
        parts.append(f'<text x="{left:.0f}" y="{free + 4:.0f}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def truths_table(truths: dict[str, Any]) -> str:
    """Table of the references: how each was made, and whether it is proven."""
    head = ["problem", "proven", "made by", "R-hat, largest", "effective draws, fewest", "R-hat of log density",
            "energy error, nats", "accepted", "seconds"]  # fmt: skip
    lines = []
    for name, told in truths.items():
        made = ["closed form", *["-"] * 5]
        if not told.get("closed_form"):
            made = [f"{told['chains']} chains of {told['trajectories']:,.0f} trajectories", f"{told['r_hat']:.3f}",
                    f"{told['effective_draws']:,.0f}", f"{told['log_density_r_hat']:.3f}", f"{told['energy_error']:.2f}",
                    f"{100 * told['acceptance']:.0f} %"]  # fmt: skip
        lines.append([f"`{name}`", "yes" if told["proven"] else "**no**", *made, f"{told['seconds']:,.0f}"])
    return table(head, lines)


def floors_table(rows: list[Row], names: list[str]) -> str:
    """Table of the noise floors of each problem."""
    floors = {row["problem"]: row["floors"] for row in rows}
    lines = [
        [f"`{problem}`", *(f"{own[name]:.3f}" if name in own else "-" for name in names)]
        for problem, own in floors.items()
    ]
    return table(["problem", *names], lines)


def nuts_table(stored: dict[str, Any]) -> str:
    """Table that compares microcanonical chains with the No-U-Turn sampler."""
    lines = []
    for row in stored["rows"]:
        worst = max(row["distances"], key=lambda name: row["distances"][name] / row["floors"][name])
        own = max(row["nuts_halves"][name] / row["floors"][name] for name in row["floors"])
        lines.append([f"`{row['problem']}`", f"{row['distances'][worst] / row['floors'][worst]:.2f} (`{worst}`)", f"{own:.2f}",
                      f"{row['nuts']['r_hat']:.3f}", f"{row['microcanonical']['r_hat']:.3f}",
                      f"{row['effective_draws_per_second']['nuts']:.1f}",
                      f"{row['effective_draws_per_second']['microcanonical']:.1f}", f"{row['times_faster']:.1f}"])  # fmt: skip
    head = ["problem", "farthest distance, floors", "two halves of NUTS, floors", "R-hat of NUTS", "R-hat here",
            "effective draws per second, NUTS", "here", "ratio"]  # fmt: skip
    return table(head, lines)


def exact_table(rows: list[Row]) -> str:
    """Table of each method's distances on the problems with closed forms, in noise floors, nearest first."""
    own = [row for row in rows if row["problem"] in CLOSED_FORM_PROBLEMS and not row["apart"]]
    methods = sorted({row["method"] for row in own}, key=lambda name: worst_ratio(own, name, CLOSED_FORM_PROBLEMS))
    lines = [
        [f"`{name}`", *(f"{worst_ratio(own, name, (problem,)):.1f}" for problem in CLOSED_FORM_PROBLEMS)]
        for name in methods[:MAX_LISTED_METHODS]
    ]
    return table(["method", *(f"{problem}, farthest distance" for problem in CLOSED_FORM_PROBLEMS)], lines)


def worst_ratio(rows: list[Row], method: str, problems: Sequence[str]) -> float:
    """The largest distance in noise floors, after the mean over seeds."""
    own = [row for row in rows if row["method"] == method and row["problem"] in problems]
    keys = {(row["problem"], name) for row in own for name in row["distances"]}
    return max(
        fmean(row["distances"][name] / row["floors"][name] for row in own if row["problem"] == problem)
        for problem, name in keys
    )


def contents(stored: dict[str, Any]) -> str:
    """Generated part of the page: the references, and the distances of each method."""
    rows = [row for row in stored["rows"] if row["distances"]]
    methods, problems, _ = grouped(rows)
    names = list(dict.fromkeys(name for row in rows for name in row["distances"]))
    common, lines = shared(rows), []
    for method in methods:
        own = [row for row in rows if row["method"] == method and row["problem"] in common]
        parts = [[only(row, name) for row in own if name in row["distances"]] for name in names]
        floors = [f"{score(part):.1f}" if part else "-" for part in parts]
        spread = [fmean(row["spread"][part] for row in own) for part in ("inside", "outside")]
        rank = "apart" if own[0]["apart"] else f"{score(own):.1f}"
        seconds = fmean(row["seconds"] for row in own)
        lines.append([f"`{method}`", rank, *floors, *(f"{value:.2f}" for value in spread), f"{seconds:.1f}"])  # fmt: skip
    failed = [
        f"`{row['method']}` on {row['problem']} (`{row['note']}`)" for row in stored["rows"] if not row["distances"]
    ]
    seeds, total = len({row["seed"] for row in rows}), sum(row["seconds"] for row in stored["rows"])
    told = (
        f"{len(stored['rows'])} of {12 * len(methods) * seeds} runs were made ({len(problems)} of 12 problems, {len(methods)} "
        f"methods, up to {seeds} seeds). They took {total / 60:.0f} minutes on one core in total."
    )
    if len(common) < len(problems):
        told += (
            f" The ranking uses the {len(common)} problems on which all ranked methods were run: {', '.join(common)}."
        )
    made = Counter(row["cores"] for row in stored["rows"] if "cores" in row)
    if len(made) > 1:
        each = ", ".join(f"{count} on a machine with {cores} cores" for cores, count in made.most_common())
        if rest := len(stored["rows"]) - made.total():
            each += f", {rest} without a record"
        told += f" The runs were made on several machines ({each}), so their seconds are not comparable."
    if stored.get("settings"):
        told += f" The settings were {', '.join(f'`{name}={value:g}`' for name, value in stored['settings'].items())}."
    head = ["method", "all", *names, "spread inside", "spread outside", "seconds"]
    sections = [
        told,
        "## Every method",
        "![Distances](figures/truth-distances.svg)",
        "![Time](figures/truth-times.svg)",
        "Distances are in noise floors. Spreads are standard deviations of functions divided by those of the truth. Seconds are"
        " the time of a training run. Click a column heading to sort the table.",
        table(head, lines),
        *([f"These runs ended with an error: {'; '.join(sorted(set(failed)))}."] if failed else []),
        *(["## Exact methods on exact problems", exact_table(rows)] if {*problems} >= {*CLOSED_FORM_PROBLEMS} else []),
        *(["## Agreement with NUTS", nuts_table(json.loads(NUTS.read_text())), NUTS_TEXT] if NUTS.exists() else []),
        "## Are the references right?",
        truths_table(stored["truths"]),
        "The noise floor of each distance:",
        floors_table(rows, names),
    ]
    return "\n\n".join(sections)


def page(text: str) -> str:
    """The page with its generated part replaced."""
    if not RESULTS.exists():
        return replaced(text, START, END, "There are no committed results yet.")
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
