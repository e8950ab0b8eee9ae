"""Small figures as inline SVG: lines, points and an axis each, which scale with the page and print sharply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

Numbers = Sequence[float] | np.ndarray
WIDTH, HEIGHT = 320, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 42
INK, LINE, FAINT, SECOND = "#1b3a5c", "#2f7ab8", "#b9c4d0", "#c2571a"


@dataclass
class Plot:
    """A figure under construction.

    Args:
        x: Ends of the horizontal axis.
        y: Ends of the vertical axis.
        x_label: Under the horizontal axis.
        y_label: Beside the vertical axis.
        title: What the figure shows, for readers who hear the page.
        percent: Whether both axes are shares, shown as percentages: `"x"`, `"y"`, `"xy"` or `""`.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    title: str
    percent: str = ""
    marks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.y = _widened(self.x), _widened(self.y)

    def _across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def _up(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def line(self, xs: Numbers, ys: Numbers, color: str = LINE, *, dash: str = "", width: float = 2) -> Plot:
        """A line through points."""
        points = " ".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in zip(xs, ys, strict=True))
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self.marks.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"{style}/>')
        return self

    def points(self, xs: Numbers, ys: Numbers, color: str = LINE, radius: float = 3) -> Plot:
        """Dots."""
        for x, y in zip(xs, ys, strict=True):
            self.marks.append(
                f'<circle cx="{self._across(x):.1f}" cy="{self._up(y):.1f}" r="{radius}" fill="{color}"/>'
            )
        return self

    def bars(self, edges: Sequence[float], heights: Sequence[float], color: str = FAINT) -> Plot:
        """Bars from the lower end of the vertical axis."""
        base = self._up(self.y[0])
        for left, right, height in zip(edges, edges[1:], heights, strict=False):
            x, top = self._across(left), self._up(height)
            width = max(0.0, self._across(right) - x - 1)
            self.marks.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(0.0, base - top):.1f}" fill="{color}"/>'
            )
        return self

    def band(self, low: float, high: float, y: float, color: str = LINE, width: float = 8) -> Plot:
        """A horizontal bar at a height."""
        return self.line([low, high], [y, y], color, width=width)

    def svg(self) -> str:
        """The figure as an element of a page."""
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *(_grid_line(self._across(tick), None) for tick in ticks(*self.x)),
            *(_grid_line(None, self._up(tick)) for tick in ticks(*self.y)),
            *self.marks,
        ]
        for tick in ticks(*self.x):
            text = _label(tick, "x" in self.percent)
            parts.append(
                f'<text x="{self._across(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'
            )
        for tick in ticks(*self.y):
            text = _label(tick, "y" in self.percent)
            parts.append(f'<text x="{LEFT - 6}" y="{self._up(tick) + 4:.1f}" text-anchor="end">{text}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_label)}</text>')
        center = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text x="12" y="{center}" text-anchor="middle" transform="rotate(-90 12 {center})">{escape(self.y_label)}</text>'
        )
        return "".join((*parts, "</svg>"))


def _grid_line(x: float | None, y: float | None) -> str:
    if x is not None:
        return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e6ebf0"/>'
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6ebf0"/>'


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About N round numbers between two ends."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * position for position in range(first, last + 1)]


def _label(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.0f}"
    if value == 0 or abs(value) < 1e-12:
        return "0"
    for unit, sign in ((1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= abs(value) < 1e9:
            return f"{value / unit:.4g}{sign}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def ranking(rows: Sequence[tuple[str, float, float, bool]], baseline: float | None, label: str) -> str:
    """Means and standard errors of many methods under each other, best on top.

    Args:
        rows: Title, mean, standard error, and whether it is no different from the best.
        baseline: Where a dashed line goes.
        label: Of the axis.

    Returns:
        An SVG element.
    """
    row_height, left, right, bottom = 22, 174, 26, 42
    height, width = row_height * len(rows) + bottom + 8, 440
    means = sorted(mean for _, mean, _, _ in rows)
    spread = sorted(error for _, _, error, _ in rows)[len(rows) // 2]
    # One method that went wrong does not press all others together: beyond this it is cut, with an arrow.
    limit = means[0] + max(4 * (means[len(means) // 2] - means[0]), 6 * spread, 1e-9)
    shown = [(mean - error, mean + error) for _, mean, error, _ in rows if mean <= limit]
    low, high = _widened((min(pair[0] for pair in shown), max(pair[1] for pair in shown)))
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def across(value: float) -> float:
        return left + (width - left - right) * (min(max(value, low), high) - low) / (high - low)

    parts = [
        f'<svg class="ranking" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)} of every method">'
    ]
    for tick in ticks(low, high):
        x = across(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - bottom}" stroke="#e6ebf0"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{_label(tick, False)}</text>')
    if baseline is not None and low <= baseline <= high:
        x = across(baseline)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - bottom}" stroke="{SECOND}" stroke-dasharray="5 3"/>'
        )
    for position, (title, mean, error, close) in enumerate(rows):
        y = 4 + row_height * (position + 0.5)
        color = INK if position == 0 else LINE if close else "#8592a0"
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(title)}</text>')
        if mean > high:
            parts.append(
                f'<text x="{width - right}" y="{y + 4:.1f}" text-anchor="end" fill="{color}">{mean:.3g} →</text>'
            )
            continue
        parts.append(
            f'<line x1="{across(mean - error):.1f}" x2="{across(mean + error):.1f}" y1="{y}" y2="{y}" '
            f'stroke="{color}" stroke-width="3"/><circle cx="{across(mean):.1f}" cy="{y}" r="5" fill="{color}"/>'
        )
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{escape(label)}</text></svg>')
    return "".join(parts)
