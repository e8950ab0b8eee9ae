"""Writer of docs/experiments/cifar10.md and its plot: our rows of CIFAR-10 next to rows that others printed for other networks.

python -m tools.cifar10_page     # after results of CIFAR-10, or the claims, changed
"""

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bayesify_papers import status
from bayesify_papers.inducing_weights.rows import network_name, recipe_in_words
from bayesify_papers.inducing_weights.systems import BASELINES, SYSTEMS
from bayesify_papers.shared.scores import standard_error
from bayesify_papers.shared.tables import number

from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "experiments" / "cifar10.md"
PLOT = PAGE.with_suffix(".svg")
RESULTS = ROOT / "papers" / "results" / "inducing_weights"
PRINTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
START, END = "<!-- made: {} -->", "<!-- end -->"

WIDTH, HEIGHT, MARGIN, BOTTOM = 1040, 700, 56, 44
ACCURACY, NLL = (93.0, 97.0), (0.095, 0.215)
"""Ranges of the axes. Rows outside these ranges are named below the plot."""
PIXELS_PER_ROOT_MILLION = 1.8
"""Radius of the point of a network with a million parameters. The area of a point is proportional to the number of parameters."""
SETTINGS = ("ResNet-50", "ResNet-18", "ResNet-18 (360 epochs)", "ResNet-18 (40 epochs)")
"""Settings of claims about CIFAR-10. The setting of some claims is such a name in parentheses after a score."""
LETTER_WIDTH, LETTER_HEIGHT = 6.6, 12.0
OURS, OTHERS = "#1f5fbf", ("#8a8f98", "#b3742a")


@dataclass(frozen=True)
class Point:
    """A row with its position in the plot.

    Args:
        name: Label of the point.
        accuracy: Accuracy in percent.
        nll: Negative log-likelihood in nats.
        ece: Expected calibration error in percent.
        parameters: Number of trained parameters in millions.
        color: Color of the point. Our points are filled.
        about: Further cells of our tables.
    """

    name: str
    accuracy: float
    nll: float
    ece: float
    parameters: float
    color: str
    about: tuple[str, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether the point lies within the axes."""
        return ACCURACY[0] <= self.accuracy <= ACCURACY[1] and NLL[0] <= self.nll <= NLL[1]

    @property
    def place(self) -> tuple[float, float]:
        """Pixels from the left and from the top."""
        across = (self.accuracy - ACCURACY[0]) / (ACCURACY[1] - ACCURACY[0])
        down = (NLL[1] - self.nll) / (NLL[1] - NLL[0])
        return MARGIN + across * (WIDTH - 2 * MARGIN), MARGIN / 2 + down * (HEIGHT - MARGIN / 2 - BOTTOM)

    @property
    def radius(self) -> float:
        """Radius of the point in pixels."""
        return PIXELS_PER_ROOT_MILLION * math.sqrt(self.parameters)


def main() -> None:
    """Write the plot and the generated parts of the page."""
    PLOT.write_text(drawing())
    PAGE.write_text(filled(PAGE.read_text()))


def ours() -> list[Point]:
    """Means over seeds of every system, network, size M, KL weight, start and number of epochs, for the one-cycle recipe."""
    contents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("cifar10_*one_cycle*.json"))]
    groups: dict[tuple[str, int, str, int, float, int, int, str], list[dict[str, Any]]] = {}
    for content in (one for one in contents if not one["validation"]):
        settings = content["settings"]
        for system in content["scores"]:
            at, size = list(SYSTEMS | BASELINES).index(system), settings["inducing"]
            recipe = size, -settings.get("kl_weight", 1.0), settings.get("start_epochs", 0), settings["epochs"]
            words = recipe_in_words(settings, system)
            groups.setdefault((network_name(settings), at, system, *recipe, words), []).append(content)
    points = [_mean(network, system, groups[key]) for key in sorted(groups) for network, _, system, *_ in [key]]
    times = Counter(point.name for point in points)
    return [
        replace(point, name=f"{point.name}, {key[-2]} epochs") if times[point.name] > 1 else point
        for key, point in zip(sorted(groups), points, strict=True)
    ]


def _mean(network: str, system: str, runs: Sequence[dict[str, Any]]) -> Point:
    tests = [run["scores"][system]["test"] for run in runs]
    found = {key: statistics.fmean(test[key] for test in tests) for key in tests[0]}
    errors = {key: standard_error([test[key] for test in tests]) for key in tests[0]}
    kinds = (("accuracy", 100, 2), ("nll", 1, 4), ("calibrated_nll", 1, 4), ("ece", 100, 2))
    cells = [
        number(scale * found[key], digits) + (f" ± {number(scale * errors[key], digits)}" if errors[key] else "")
        for key, scale, digits in kinds
    ]
    size, settings = runs[0]["parameters"][system], runs[0]["settings"]
    epochs, changes = str(settings["epochs"]), []
    if system == "swag":
        epochs = f"{epochs} + {settings['swag_epochs']}"
    if settings.get("kl_weight", 1.0) != 1:
        changes.append(f"KL weight {settings['kl_weight']}")
    if system in ("ffg_u", "ensemble_u"):
        sizes = settings.get("inducing_by_stage") or settings["inducing"]
        changes += [f"M = {sizes}"] * (sizes != 64)
        changes += ["SGD"] * (settings.get("inducing_optimizer") == "sgd")
        if settings.get("start_epochs"):
            changes.append("deterministic start")
            epochs = f"{settings['start_epochs']} + {epochs}"
    title = (SYSTEMS | BASELINES)[system].title + (f" ({', '.join(changes)})" if changes else "")
    about = (title, network, str(len(runs)), f"{size:,}", epochs, *cells)
    return Point(
        title if network == "ResNet-18" else f"{title}, {network.removeprefix('ResNet-18, ')}",
        100 * found["accuracy"],
        found["nll"],
        100 * found["ece"],
        size / 1e6,
        OURS,
        about,
    )


def others() -> Iterator[tuple[str, str, list[Point]]]:
    """Title, source and rows of each group that others printed, numbered consecutively."""
    count = 0
    for color, group in zip(OTHERS, PRINTED["groups"], strict=True):
        points = [Point(str(count + at), *row[1:], color, (row[0],)) for at, row in enumerate(group["rows"], 1)]
        count += len(points)
        yield group["title"], group["source"], points


def drawing() -> str:
    """The plot as SVG: accuracy to the right, NLL upwards, areas of points proportional to their parameters."""
    groups = list(others())
    mine = [point for point in ours() if point.inside]
    printed = [point for *_, points in groups for point in points if point.inside]
    key = [(OURS, "filled: bayesify, ResNet-18 unless named")]
    key += [
        (color, f"{points[0].name} to {points[-1].name}: {title.partition(',')[0]}, as printed")
        for color, (title, _, points) in zip(OTHERS, groups, strict=True)
    ]
    order = sorted((*printed, *mine), key=lambda point: -point.radius)
    parts = [*_head(), *_axes(), *_line(), *map(_circle, order), *_labels(mine, printed)]
    for at, (color, words) in enumerate(key):
        parts.append(_text(MARGIN + 12, HEIGHT - BOTTOM - 70 + 17 * at, words, color, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _head() -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>CIFAR-10: test NLL against test accuracy; the area of a point is proportional to its number of parameters</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
    ]


def _axes() -> list[str]:
    left, right, top, bottom = MARGIN, WIDTH - MARGIN, MARGIN / 2, HEIGHT - BOTTOM
    parts = [f'<path d="M{left} {top:g} V{bottom} H{right}" fill="none" stroke="#3a4660"/>']
    for tick in range(round(2 * ACCURACY[0]), round(2 * ACCURACY[1]) + 1):
        x, _ = Point("", tick / 2, NLL[0], 0, 0, "").place
        parts.append(_text(x, bottom + 18, f"{tick / 2:g}"))
    for tick in range(math.ceil(50 * NLL[0]), math.floor(50 * NLL[1]) + 1):
        _, y = Point("", ACCURACY[0], tick / 50, 0, 0, "").place
        parts.append(_text(left - 8, y + 4, f"{tick / 50:.2f}", anchor="end"))
    parts.append(_text((left + right) / 2, HEIGHT - 8, "test accuracy in percent (higher is better)"))
    parts.append(
        f'<text transform="translate(14 {(top + bottom) / 2:g}) rotate(-90)" text-anchor="middle" fill="#3a4660">'
        "test NLL in nats (lower is better)</text>"
    )
    return parts


def _line() -> list[str]:
    """The accuracy of a row without an NLL."""
    x, y = Point("", PRINTED["line"]["accuracy"], NLL[1], 0, 0, "").place
    return [
        f'<path d="M{x:.1f} {y:g} V{HEIGHT - BOTTOM}" stroke="#8a8f98" stroke-dasharray="4 4"/>',
        _text(x + 6, HEIGHT - BOTTOM - 8, PRINTED["line"]["title"], "#5d626b", "start"),
    ]


def _circle(point: Point) -> str:
    (x, y), mine = point.place, point.color == OURS
    fill = f'fill="{point.color}" fill-opacity="0.75"' if mine else 'fill="none"'
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{point.radius:.1f}" {fill} stroke="{point.color}" stroke-width="1.3"/>'
    )


def _labels(mine: Sequence[Point], printed: Sequence[Point]) -> list[str]:
    """Labels of points, ours first. Each label takes the position inside the plot at which it covers the fewest labels, then the
    fewest of our points. Our labels also avoid the points of others. A line leads to a label far above or below its point."""
    taken: list[tuple[float, ...]] = []
    parts = []

    def covered(box: tuple[float, ...], own: Point) -> tuple[int, ...]:
        outside = box[0] < MARGIN or box[2] > WIDTH
        points = ([_square(point) for point in some if point is not own] for some in (mine, printed))
        found = [sum(_overlap(box, other) for other in some) for some in (taken, *points)]
        return (outside, *found) if own.color == OURS else (outside, *found[:2])

    for point in (*mine, *printed):
        (x, y), width = point.place, LETTER_WIDTH * len(point.name)
        beside, above = point.radius + width / 2 + 4, point.radius + 10
        shifts = [(0.0, 4.0)] if point.color != OURS and 2 * point.radius > width else []
        shifts += [(beside, 4.0), (-beside, 4.0), (0.0, 4 - above), (0.0, 4 + above), (beside, 16.0), (-beside, -8.0)]
        shifts += [
            (beside, -8.0),
            (-beside, 16.0),
            (0.0, 16 + above),
            (beside, 28.0),
            (-beside, -20.0),
            (beside, -20.0),
            (-beside, 40.0),
        ]
        boxes = [
            (x + dx - width / 2, y + dy - 10, x + dx + width / 2, y + dy + LETTER_HEIGHT - 10) for dx, dy in shifts
        ]
        costs = [covered(box, point) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        dx, dy = shifts[best]
        if abs(dy - 4) > LETTER_HEIGHT:
            parts.append(_leader(point, boxes[best]))
        parts.append(_text(x + dx, y + dy, point.name, point.color if point.color == OURS else "#43474e"))
    return parts


def _leader(point: Point, box: Sequence[float]) -> str:
    """A thin line from a point to the nearest place of its label."""
    (x, y), (left, top, right, bottom) = point.place, box
    end = min(max(x, left), right), min(max(y, top), bottom)
    return f'<path d="M{x:.1f} {y:.1f} L{end[0]:.1f} {end[1]:.1f}" stroke="{point.color}" stroke-width="0.8"/>'


def _square(point: Point) -> tuple[float, ...]:
    """Left, top, right and bottom of a point in pixels."""
    (x, y), radius = point.place, point.radius
    return x - radius, y - radius, x + radius, y + radius


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _text(x: float, y: float, words: str, color: str = "#3a4660", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def filled(text: str) -> str:
    """The page with its tables replaced."""
    header = [
        "system",
        "network",
        "seeds",
        "parameters",
        "epochs",
        "accuracy %",
        "NLL",
        "NLL at the best temperature",
        "ECE %",
    ]
    body = table(header, [point.about for point in ours()])
    text = replaced(text, START.format("ours"), END, body)
    blocks, missing = [], [point.name for point in ours() if not point.inside]
    for title, source, points in others():
        rows = [
            [
                point.name,
                *point.about,
                f"{point.accuracy:g}",
                f"{point.nll:g}",
                f"{point.ece:g}",
                f"{point.parameters:g}",
            ]
            for point in points
        ]
        header = ["number", "system", "accuracy %", "NLL", "calibration error %", "million parameters"]
        blocks.append(f"**{title}** ({source}):\n\n{table(header, rows)}")
        missing += [point.name for point in points if not point.inside]
    text = replaced(text, START.format("others"), END, "\n\n".join(blocks))
    outside = (
        f"Results {' and '.join(missing)} lie outside the plot." if missing else "No result lies outside the plot."
    )
    text = replaced(text, START.format("outside"), END, outside)
    return replaced(text, START.format("claims"), END, _claims())


def _claims() -> str:
    """Rankings that Ritter et al. state for CIFAR-10, with our verdicts."""
    rows: dict[str, dict[str, str]] = {}
    for one in status.by_verdict(status.load()["figures"]):
        if one["paper"] != "inducing-weights" or " on CIFAR-10" not in one["claim"] or not one["setting"]:
            continue
        setting = next(name for name in reversed(SETTINGS) if name in one["setting"])
        score = one["setting"].removesuffix(f"({setting})").strip()
        claim = one["title"] if score == setting else f"{one['title']} ({score})"
        row = rows.setdefault(claim, {"in the paper": one["figure"]})
        row[setting] = status.VERDICTS[one["shown"]]
        if one["printed"] is not None:
            row["the paper's own numbers"] = status.VERDICTS[one["printed"]]
    header = ["in the paper", *SETTINGS, "the paper's own numbers"]
    return table(["claim", *header], [[claim, *(row.get(key, "") for key in header)] for claim, row in rows.items()])


if __name__ == "__main__":
    main()
