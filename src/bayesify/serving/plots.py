"""Small SVG figures with lines, points and axes, which scale with the page and print sharply."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Self

import numpy as np

Numbers = Sequence[float] | np.ndarray
WIDTH, HEIGHT = 320, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 42
INK, LINE, FAINT, SECOND, GRID = "#1b3a5c", "#2f7ab8", "#b9c4d0", "#c2571a", "#e6ebf0"


@dataclass
class Plot:
    """A figure under construction."""

    x: tuple[float, float]  # ends of the horizontal axis
    y: tuple[float, float]  # ends of the vertical axis
    x_label: str
    y_label: str
    title: str  # description of the figure, also for screen readers
    percent: str = ""  # axes whose values are shares and are shown as percentages: `"x"`, `"y"`, `"xy"` or `""`
    marks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.y = _widened(self.x), _widened(self.y)

    def _across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def _up(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def line(self, xs: Numbers, ys: Numbers, color: str = LINE, *, dash: str = "", width: float = 2) -> Self:
        """Add a line through points."""
        points = " ".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in zip(xs, ys, strict=True))
        style = {"stroke_dasharray": dash} if dash else {}
        self.marks.append(tag("polyline", points=points, fill="none", stroke=color, stroke_width=width, **style))
        return self

    def points(self, xs: Numbers, ys: Numbers, color: str = LINE, radius: float = 3) -> Self:
        """Add dots."""
        for x, y in zip(xs, ys, strict=True):
            self.marks.append(tag("circle", cx=self._across(x), cy=self._up(y), r=radius, fill=color))
        return self

    def bars(self, edges: Sequence[float], heights: Sequence[float], color: str = FAINT) -> Self:
        """Add bars from the lower end of the vertical axis."""
        base = self._up(self.y[0])
        for left, right, height in zip(edges, edges[1:], heights, strict=False):
            x, top = self._across(left), self._up(height)
            width, height = max(0.0, self._across(right) - x - 1), max(0.0, base - top)
            self.marks.append(tag("rect", x=x, y=top, width=width, height=height, fill=color))
        return self

    def svg(self, **attributes: Any) -> str:
        """The figure as an SVG element; `attributes` are added to the element."""
        across = [(self._across(tick), _label(tick, "x" in self.percent)) for tick in ticks(*self.x)]
        up = [(self._up(tick), _label(tick, "y" in self.percent)) for tick in ticks(*self.y)]
        center = (TOP + HEIGHT - BOTTOM) / 2
        parts = [
            *(_line((x, x), (TOP, HEIGHT - BOTTOM)) for x, _ in across),
            *(_line((LEFT, WIDTH - RIGHT), (y, y)) for y, _ in up),
            *self.marks,
            *(_text(x, HEIGHT - BOTTOM + 16, text) for x, text in across),
            *(_text(LEFT - 6, y + 4, text, "end") for y, text in up),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, self.x_label),
            _text(12, center, self.y_label, transform=f"rotate(-90 12 {center})"),
        ]
        more = "".join(f' {name}="{value}"' for name, value in attributes.items())
        opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}"{more}>'
        return "".join((opening, *parts, "</svg>"))


def side_by_side(plots: Sequence[Plot]) -> str:
    """The contents of an SVG file with figures next to each other, each under its title."""
    width, height = WIDTH * len(plots), HEIGHT + 24
    parts = [tag("rect", width=width, height=height, fill="#fff")]
    for place, plot in enumerate(plots):
        parts.append(tag("text", plot.title, x=WIDTH * place + LEFT, y=18, font_weight="bold"))
        parts.append(plot.svg(x=WIDTH * place, y=24, width=WIDTH, height=HEIGHT))
    style = f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}"'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "".join((opening, *parts, "</svg>\n"))


def tag(kind: str, text: str = "", **attributes: Any) -> str:
    """An SVG element; fractional attribute values are rounded to one decimal place."""
    shown = ""
    for key, value in attributes.items():
        number = f"{value:.1f}" if isinstance(value, float) else value
        shown += f' {key.replace("_", "-")}="{number}"'
    return f"<{kind}{shown}>{escape(text)}</{kind}>"


def _line(xs: tuple[float, float], ys: tuple[float, float], color: str = GRID, **style: Any) -> str:
    return tag("line", x1=xs[0], x2=xs[1], y1=ys[0], y2=ys[1], stroke=color, **style)


def _text(x: float, y: float, text: str, anchor: str = "middle", **style: Any) -> str:
    return tag("text", text, x=x, y=y, text_anchor=anchor, **style)


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
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
    """An SVG element that shows means and standard errors of many methods, one below the other, and a dashed `baseline`.

    Each row consists of a title, a mean, its standard error, and whether the method is tied with the best; the best is on top.
    """
    row_height, left, right, bottom = 22, 174, 26, 42
    height, width = row_height * len(rows) + bottom + 8, 440
    means = sorted(mean for _, mean, _, _ in rows)
    spread = sorted(error for _, _, error, _ in rows)[len(rows) // 2]
    # Cut off outliers at this limit and mark them with an arrow, so that one bad method does not squeeze the others together.
    limit = means[0] + max(4 * (means[len(means) // 2] - means[0]), 6 * spread, 1e-9)
    shown = [(mean - error, mean + error) for _, mean, error, _ in rows if mean <= limit]
    low, high = _widened((min(pair[0] for pair in shown), max(pair[1] for pair in shown)))
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def across(value: float) -> float:
        return left + (width - left - right) * (min(max(value, low), high) - low) / (high - low)

    parts: list[str] = []
    for tick in ticks(low, high):
        parts += (
            _line((across(tick),) * 2, (4, height - bottom)),
            _text(across(tick), height - bottom + 18, _label(tick, False)),
        )
    if baseline is not None and low <= baseline <= high:
        x = across(baseline)
        parts.append(_line((x, x), (4, height - bottom), SECOND, stroke_dasharray="5 3"))
    for position, (title, mean, error, close) in enumerate(rows):
        y = 4 + row_height * (position + 0.5)
        color = INK if position == 0 else LINE if close else "#8592a0"
        parts.append(_text(left - 8, y + 4, title, "end"))
        if mean > high:
            parts.append(_text(width - right, y + 4, f"{mean:.3g} →", "end", fill=color))
            continue
        parts.append(_line((across(mean - error), across(mean + error)), (y, y), color, stroke_width=3))
        parts.append(tag("circle", cx=across(mean), cy=y, r=5, fill=color))
    parts.append(_text((left + width - right) / 2, height - 6, label))
    size, title = f'viewBox="0 0 {width} {height}"', f"{escape(label)} of each method"
    return "".join((f'<svg class="ranking" {size} role="img" aria-label="{title}">', *parts, "</svg>"))
