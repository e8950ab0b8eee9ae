"""The drawing of the architecture page, made from the package's imports. Run this program when imports between rooms have changed.

python -m tools.architecture_drawing
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import fsum
from operator import mul
from pathlib import Path
from xml.sax.saxutils import escape

from tools.import_graph import LAYERS, PACKAGE, room_graph

DRAWING = Path(__file__).parents[1] / "docs" / "architecture.svg"

WIDTH, LABEL_WIDTH, MARGIN = 880, 150, 12
ROW_HEIGHT, BOX_HEIGHT = 48, 26
LETTER_WIDTH, BOX_PADDING, GAP = 7.3, 9, 16
LINE_SPACE = 9
"""Width of an arrow that passes a row between two boxes."""
STRAIGHTNESS = (1.0, 2.0, 12.0)
"""Weights that straighten segments of an arrow: between two boxes, between a box and a passed row, and between two passed rows."""
SWEEPS = 120
COLORS = ("#e8eef9", "#f6f2e6")

Node = tuple[str, ...]
"""A room, `(room,)`, or the point at which an arrow passes a row, `(importer, imported, row)`."""


def main() -> None:
    """Update the drawing."""
    DRAWING.write_text(drawing())


def drawing() -> str:
    """The drawing as SVG: boxes are rooms, bands are layers, and an arrow points from a room to a room that it imports.

    Arrows that follow from others are left out: if A imports B and B imports C, there is no arrow from A to C.
    """
    edges = reduced({name: others - {""} for name, others in room_graph().items() if name})
    rows = rows_of(edges)
    lines = {(upper, lower): path_of(upper, lower, rows) for upper in sorted(edges) for lower in sorted(edges[upper])}
    places = placed(rows, lines)
    return "\n".join([*_head(rows), *_bands(rows), *_arrows(lines, places, rows), *_boxes(rows, places), "</svg>", ""])


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Edges of an acyclic graph that do not follow from other edges."""

    def reached(name: str) -> set[str]:
        return edges[name].union(*(reached(other) for other in edges[name]))

    return {name: others.difference(*(reached(other) for other in others)) for name, others in edges.items()}


def rows_of(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms of each row from bottom to top. A layer has as many rows as needed for all arrows to point down."""
    rows: list[list[str]] = []
    for rooms in LAYERS.values():
        height: dict[str, int] = {}
        while len(height) < len(rooms):
            for name in (name for name in rooms if name not in height):
                below = edges[name] & set(rooms)
                if below <= set(height):
                    height[name] = max((height[other] + 1 for other in below), default=0)
        rows += [[name for name in rooms if height[name] == level] for level in range(max(height.values()) + 1)]
    return rows


def path_of(upper: str, lower: str, rows: Sequence[Sequence[str]]) -> list[Node]:
    """The nodes of an arrow from top to bottom."""
    row = {name: index for index, names in enumerate(rows) for name in names}
    assert row[upper] > row[lower], f"{upper} imports {lower}, which is not below it"
    passed = range(row[upper] - 1, row[lower], -1)
    return [(upper,), *((upper, lower, str(index)) for index in passed), (lower,)]


def placed(rows: Sequence[Sequence[str]], lines: Mapping[tuple[str, str], Sequence[Node]]) -> dict[Node, float]:
    """Horizontal center of each node, with few crossings and nearly straight arrows."""
    nodes: list[list[Node]] = [[(name,) for name in names] for names in rows]
    neighbors: dict[Node, list[Node]] = {}
    for line in lines.values():
        for node in line[1:-1]:
            nodes[int(node[2])].append(node)
        for one, other in itertools.pairwise(line):
            neighbors.setdefault(one, []).append(other)
            neighbors.setdefault(other, []).append(one)
    row = {node: index for index, names in enumerate(nodes) for node in names}
    best: dict[Node, float] = {}
    place: dict[Node, float] = {}
    for names in nodes:
        place |= _spread(names, {node: (LABEL_WIDTH + index * 60.0, 1.0) for index, node in enumerate(names)})
    for sweep in range(SWEEPS):
        order = range(len(nodes)) if sweep % 2 else range(len(nodes) - 1, -1, -1)
        for index in order:
            side = 1 if sweep % 2 == 0 else -1
            wanted: dict[Node, tuple[float, float]] = {}
            for node in nodes[index]:
                known = [
                    other for other in neighbors.get(node, ()) if sweep > SWEEPS // 2 or row[other] == index + side
                ]
                pull = [_pull(node, other) for other in known]
                mean = fsum(map(mul, pull, [place[other] for other in known])) / sum(pull) if known else place[node]
                wanted[node] = mean, max(sum(pull), 0.1)
            if sweep <= SWEEPS // 2:  # the first half finds the order, the second half the exact positions
                nodes[index].sort(key=lambda node: (wanted[node][0], node))
            place |= _spread(nodes[index], wanted)
        if sweep <= SWEEPS // 2 and (not best or _crossings(lines, place, row) < _crossings(lines, best, row)):
            best = dict(place)
        if sweep == SWEEPS // 2:
            place = dict(best)
            nodes = [sorted(names, key=lambda node: place[node]) for names in nodes]
    return place


def _spread(names: Sequence[Node], wanted: Mapping[Node, tuple[float, float]]) -> dict[Node, float]:
    """Positions nearest to the wanted ones (weighted) that keep order and distances, by isotonic regression."""
    offsets = [0.0]
    for one, other in itertools.pairwise(names):
        offsets.append(offsets[-1] + (_width(one) + _width(other)) / 2 + GAP * (len(one) == 1 or len(other) == 1))
    pools: list[list[float]] = []  # mean, weight, count
    for node, offset in zip(names, offsets, strict=True):
        pools.append([wanted[node][0] - offset, wanted[node][1], 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, weight, count = pools.pop()
            total = pools[-1][1] + weight
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * weight) / total, total, pools[-1][2] + count]
    least = LABEL_WIDTH + MARGIN + _width(names[0]) / 2
    most = WIDTH - MARGIN - _width(names[-1]) / 2 - offsets[-1]
    starts = [min(max(mean, least), most) for mean, _, count in pools for _ in range(int(count))]
    return {node: start + offset for node, start, offset in zip(names, starts, offsets, strict=True)}


def _pull(one: Node, other: Node) -> float:
    return STRAIGHTNESS[(len(one) == 3) + (len(other) == 3)]


def _crossings(
    lines: Mapping[tuple[str, str], Sequence[Node]], place: Mapping[Node, float], row: Mapping[Node, int]
) -> int:
    pieces: dict[int, list[tuple[float, float]]] = {}
    for line in lines.values():
        for one, other in itertools.pairwise(line):
            pieces.setdefault(row[one], []).append((place[one], place[other]))
    pairs = (pair for parts in pieces.values() for pair in itertools.combinations(parts, 2))
    return sum((one[0] - other[0]) * (one[1] - other[1]) < 0 for one, other in pairs)


def _width(node: Node) -> float:
    return LINE_SPACE if len(node) == 3 else 2 * BOX_PADDING + LETTER_WIDTH * len(_label(node[0]))


def _label(room: str) -> str:
    return f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"


def _middle(rows: Sequence[Sequence[str]], index: int) -> float:
    """Vertical center of a row of boxes on the page. The bottom row is the last."""
    return MARGIN + (len(rows) - index - 0.5) * ROW_HEIGHT


def _head(rows: Sequence[Sequence[str]]) -> list[str]:
    height = 2 * MARGIN + len(rows) * ROW_HEIGHT
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<title>The rooms of bayesify in their layers; arrows point from a room to the rooms that it imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.8 L8 4 L0 7.2 z" fill="#5b6b8c"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]


def _bands(rows: Sequence[Sequence[str]]) -> list[str]:
    found = []
    for number, (title, rooms) in enumerate(LAYERS.items()):
        own = [index for index, names in enumerate(rows) if names[0] in rooms]
        top, bottom = _middle(rows, own[-1]) - ROW_HEIGHT / 2, _middle(rows, own[0]) + ROW_HEIGHT / 2
        found.append(
            f'<rect x="{MARGIN}" y="{top + 2:g}" width="{WIDTH - 2 * MARGIN}" height="{bottom - top - 4:g}" rx="6" '
            f'fill="{COLORS[number % len(COLORS)]}"/>'
        )
        words = _wrapped(title)
        first = (top + bottom) / 2 - 8 * (len(words) - 1) + 4
        spans = "".join(
            f'<tspan x="{MARGIN + 10}" y="{first + 16 * k:g}">{escape(w)}</tspan>' for k, w in enumerate(words)
        )
        found.append(f'<text fill="#3a4660" font-weight="600">{spans}</text>')
    return found


def _wrapped(title: str, most: int = 18) -> list[str]:
    lines = [""]
    for word in title.split():
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1] + word) < most else [*lines, word]
    return lines


def _arrows(
    lines: Mapping[tuple[str, str], Sequence[Node]], place: Mapping[Node, float], rows: Sequence[Sequence[str]]
) -> list[str]:
    row = {name: index for index, names in enumerate(rows) for name in names}
    ends = _ends(lines, place)
    found = []
    for (upper, lower), line in lines.items():
        xs = [ends[upper, lower][0], *(place[node] for node in line[1:-1]), ends[upper, lower][1]]
        heights = [_middle(rows, row[upper] - step) for step in range(len(line))]
        tops = [heights[0] + BOX_HEIGHT / 2, *(y - BOX_HEIGHT / 2 for y in heights[1:])]
        parts = [f"M{xs[0]:.0f} {tops[0]:.0f}"]
        for step in range(1, len(line)):
            start = tops[0] if step == 1 else heights[step - 1] + BOX_HEIGHT / 2
            if step > 1:
                parts.append(f"V{start:.0f}")
            end, bend = tops[step], (tops[step] - start) * 0.5
            parts.append(
                f"C{xs[step - 1]:.0f} {start + bend:.0f} {xs[step]:.0f} {end - bend:.0f} {xs[step]:.0f} {end:.0f}"
            )
        found.append(
            f'<path d="{" ".join(parts)}" fill="none" stroke="#5b6b8c" stroke-width="1.2" marker-end="url(#tip)"/>'
        )
    return found


def _ends(
    lines: Mapping[tuple[str, str], Sequence[Node]], place: Mapping[Node, float]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Points at which arrows leave and reach boxes. Arrows at one box are side by side, ordered by their other ends."""
    leaves: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    arrives: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    for key, line in lines.items():
        leaves.setdefault(key[0], []).append((place[line[1]], key))
        arrives.setdefault(key[1], []).append((place[line[-2]], key))

    def sides(groups: Mapping[str, list[tuple[float, tuple[str, str]]]]) -> dict[tuple[str, str], float]:
        found = {}
        for name, group in groups.items():
            room = _width((name,)) - 2 * BOX_PADDING
            step = min(LINE_SPACE, room / len(group))
            for index, (_, key) in enumerate(sorted(group)):
                found[key] = place[name,] + (index - (len(group) - 1) / 2) * step
        return found

    starts, stops = sides(leaves), sides(arrives)
    return {key: (starts[key], stops[key]) for key in lines}


def _boxes(rows: Sequence[Sequence[str]], place: Mapping[Node, float]) -> list[str]:
    found = []
    for index, names in enumerate(rows):
        y = _middle(rows, index)
        for name in names:
            x, width = place[name,], _width((name,))
            found.append(
                f'<rect x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="4" '
                f'fill="#ffffff" stroke="#3a4660"/><text x="{x:.0f}" y="{y + 4.5:.0f}" text-anchor="middle" '
                f'fill="#16202f">{escape(_label(name))}</text>'
            )
    return found


if __name__ == "__main__":
    main()
