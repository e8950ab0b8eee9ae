"""Figures of experiments, where matplotlib is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
"""Whether figures can be drawn."""

DATA_COLOR, BAND_COLOR, MEAN_COLOR = "#c2571a", "#4a90c4", "#1b3a5c"
"""Colors."""


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
    """The axes of a figure, row by row; it is saved at the end of the `with` block.

    Args:
        path: Where it goes; the ending is replaced.
        rows: Of panels.
        columns: Of panels.
        size: Of the figure in inches.
        kinds: Endings of the files.
        share: `sharex`, `sharey`.
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
