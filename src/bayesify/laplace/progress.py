"""A progress bar over the examples of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bayesify.laplace.curvature import Pieces
from bayesify.running.progress import Display


@contextmanager
def showing(pieces: Pieces, loader: Iterable[Any], title: str, show: bool) -> Iterator[None]:
    """Show how many examples of a pass are done, on a terminal with `rich`; nothing elsewhere."""
    dataset: Any = getattr(loader, "dataset", None)
    total = len(dataset) if hasattr(dataset, "__len__") else None
    if pieces.num_examples is not None:
        total = min(pieces.num_examples, total or pieces.num_examples)
    columns = ("{task.description}", "bar", "percent", "left")
    with Display(*columns, show=show, total=total, transient=False, description=title) as bar:
        if bar.shown:
            pieces.progress = lambda count: bar.update(advance=count)
        yield
