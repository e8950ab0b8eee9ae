"""Figures of predictions, drawn by matplotlib without a display and returned as data URIs."""

import base64
import io
from typing import Any

import numpy as np

from bayesify.datasets import toy
from bayesify.demo.run import MAP_SIDE, Outcome

MEAN_COLOR, EPISTEMIC_COLOR, TOTAL_COLOR = "#1b3a5c", "#4a90c4", "#c3dcee"
DATA_COLOR, TRUTH_COLOR = "#222222", "#c2571a"
CLASS_COLORS = ("#f2c14e", "#ffffff")
PANEL_INCHES = (3.0, 2.2)
"""Width and height of a panel in inches; at this size, its text is as large as the page's text."""


def bands(data: toy.Regression, outcome: Outcome) -> str:
    """The prediction of a regression as an SVG data URI: the mean, bands of two standard deviations (epistemic and total), the
    data and the true function. All panels of a problem have the same axes."""
    figure, axes = _panel()
    grid = data.grid[:, 0].numpy()
    mean, epistemic, total = (outcome.figure[key].numpy() for key in ("mean", "epistemic_std", "std"))
    axes.fill_between(grid, mean - 2 * total, mean + 2 * total, color=TOTAL_COLOR, linewidth=0)
    axes.fill_between(grid, mean - 2 * epistemic, mean + 2 * epistemic, color=EPISTEMIC_COLOR, linewidth=0)
    axes.plot(grid, mean, color=MEAN_COLOR, linewidth=1.6)
    axes.plot(grid, data.truth[:, 0].numpy(), color=TRUTH_COLOR, linewidth=1.3, linestyle=(0, (4, 2)))
    axes.plot(data.x[:, 0].numpy(), data.y[:, 0].numpy(), "o", color=DATA_COLOR, markersize=1.8, markeredgewidth=0)
    axes.set(xlim=(grid[0], grid[-1]), ylim=(-2.6, 2.6), xlabel="x", ylabel="y", yticks=(-2, -1, 0, 1, 2))
    return _encode(figure, "svg")


def entropy_map(data: toy.Classification, outcome: Outcome) -> str:
    """The prediction of a classification as a PNG data URI: the entropy, the line of equal probabilities, and the data. All maps of
    a problem use the same color scale."""
    figure, axes = _panel()
    entropy, probs = (outcome.figure[key].reshape(MAP_SIDE, MAP_SIDE).numpy() for key in ("entropy", "probs"))
    left, right, lower, upper = data.box
    axes.imshow(
        entropy, extent=data.box, origin="lower", cmap="Blues", vmin=0, vmax=np.log(2), aspect="auto",
        interpolation="bilinear",
    )  # fmt: skip
    across, up = np.linspace(left, right, MAP_SIDE), np.linspace(lower, upper, MAP_SIDE)
    if probs.min() < 0.5 < probs.max():
        axes.contour(across, up, probs, levels=[0.5], colors=TRUTH_COLOR, linewidths=1.3)
    x, y = data.x.numpy(), data.y.numpy()
    for label, (marker, color) in enumerate(zip(("o", "s"), CLASS_COLORS, strict=True)):
        points = x[y == label]
        axes.scatter(points[:, 0], points[:, 1], s=9, c=color, marker=marker, edgecolors=DATA_COLOR, linewidths=0.5)
    axes.set(xlim=(left, right), ylim=(lower, upper), xlabel="first input", ylabel="second input")
    return _encode(figure, "png")


def _panel() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=PANEL_INCHES)  # computing a layout would take half of a panel's time
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.16, 0.2, 0.82, 0.77))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _encode(figure: Any, kind: str) -> str:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # Without a date and with a fixed salt, the same outcome gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "bayesify"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"
