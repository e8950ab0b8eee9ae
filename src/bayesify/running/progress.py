"""The one display of how far something is."""

from __future__ import annotations

import sys
from typing import Any, Self


class Display:
    """A line on standard error that says how far something is: on a terminal with `rich`, nothing elsewhere. A context manager.

    Args:
        columns: What it shows, in order: `"bar"`, `"count"` (3/10), `"bytes"`, `"percent"`, `"elapsed"`, `"left"`, or text with
            `{task.description}` and `{task.fields[...]}` in it.
        show: Whether to show anything.
        total: How much there is to do, `None` if unknown.
        console: Of `rich`, in place of one on standard error.
        transient: Whether the line goes when all is done.
        fields: What texts show at first: `description`, and others by any name.
    """

    def __init__(
        self,
        *columns: str,
        show: bool = True,
        total: float | None = None,
        console: Any = None,
        transient: bool = True,
        **fields: Any,
    ) -> None:
        self._bar: Any = None
        if not show or not (sys.stderr.isatty() if console is None else console.is_terminal):
            return
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
        except ImportError:
            return
        kinds: dict[str, Any] = {
            "bar": BarColumn,
            "count": MofNCompleteColumn,
            "bytes": DownloadColumn,
            "percent": TaskProgressColumn,
            "elapsed": TimeElapsedColumn,
            "left": TimeRemainingColumn,
        }
        made = [kinds[column]() if column in kinds else TextColumn(column) for column in columns]
        self._bar = Progress(*made, console=console or Console(stderr=True), transient=transient)
        self._task = self._bar.add_task(fields.pop("description", ""), total=total, **fields)

    @property
    def shown(self) -> bool:
        """Whether there is a line."""
        return self._bar is not None

    def update(self, **changes: Any) -> None:
        """Show other numbers: `completed`, `total`, `advance` by which more is done, `description` and fields."""
        if self._bar is not None:
            self._bar.update(self._task, **changes)

    def stop(self) -> None:
        """Leave the line as it is."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
