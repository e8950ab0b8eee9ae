"""Figures of experiments, drawn if matplotlib is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
"""Whether figures can be drawn."""

DATA_COLOR, BAND_COLOR, MEAN_COLOR = "#c2571a", "#4a90c4", "#1b3a5c"
"""Colors of data, bands and means."""


@contextmanager
def panels(
    path: Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    *,
    kinds: tuple[str, ...] = ("png", "svg"),
    **share: bool,
) -> Iterator[list[Any]]:
    """The axes of a figure, row by row. The figure is saved at the end of the `with` block.

    Args:
        path: Path of the figure. Its suffix is replaced.
        size: Size of the figure in inches.
        kinds: Suffixes of the files.
        share: `sharex` and `sharey` of matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(sheet)
    axes: list[Any] = list(sheet.subplots(rows, columns, squeeze=False, **share).flatten())  # type: ignore[call-overload]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        sheet.savefig(path.with_suffix(f".{kind}"), dpi=150)
