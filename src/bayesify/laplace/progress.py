"""A progress bar over the examples of a pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bayesify.laplace.curvature import Pieces


@contextmanager
def showing(pieces: Pieces, loader: Iterable[Any], title: str, show: bool) -> Iterator[None]:
    """Show how many examples of a pass are done, on a terminal with `rich`; nothing elsewhere."""
    if not show or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield
        return
    dataset: Any = getattr(loader, "dataset", None)
    total = len(dataset) if hasattr(dataset, "__len__") else None
    if pieces.num_examples is not None:
        total = min(pieces.num_examples, total or pieces.num_examples)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        pieces.progress = lambda count: bar.advance(task, count)
        yield
