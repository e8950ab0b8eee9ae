"""The progress bar of training."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any


class ProgressBar:
    """A line on the terminal: epoch, batch, NLL per example and KL apart; nothing where standard error is not a terminal.

    A context manager. Without `rich` it prints one line per epoch.

    Args:
        show: Whether to show anything.
        total: Epochs.
        batches: Batches per epoch, `None` if unknown.
    """

    def __init__(self, show: bool, total: int, batches: int | None) -> None:
        self._show = show and sys.stderr.isatty()
        self._total = total
        self._batches = batches
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def __enter__(self) -> ProgressBar:
        if self._show:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
            except ImportError:
                return self
            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("NLL {task.fields[nll]}  KL {task.fields[kl]} nats{task.fields[extra]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=False,
            )
            steps = self._total * self._batches if self._batches else None
            self._task = self._bar.add_task("", total=steps, epoch=f"0/{self._total}", nll="-", kl="-", extra="")
            self._bar.start()
        return self

    def step(self, epoch: int, batch: int, means: Callable[[], tuple[float, float]]) -> None:
        """Show a step, at most ten times a second; only then NLL and KL are asked for."""
        now = time.perf_counter()
        if self._bar is None or now - self._last < 0.1:
            return
        self._last = now
        done = (epoch - 1) * self._batches + batch if self._batches else None
        self._update(done, epoch, *means())

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the numbers of a whole epoch."""
        extra = f"  validation NLL {row['validation_nll']:.4f}" if "validation_nll" in row else ""
        if self._bar is not None:
            done = row["epoch"] * self._batches if self._batches else None
            self._update(done, row["epoch"], row["nll"], row.get("kl", math.nan), extra)
        elif self._show:
            kl = row.get("kl", math.nan)
            line = f"epoch {row['epoch']}/{self._total}  NLL {row['nll']:.4f}  KL {kl:.1f} nats{extra}"
            print(line, file=sys.stderr)

    def _update(self, done: int | None, epoch: int, nll: float, kl: float, extra: str | None = None) -> None:
        fields = {"epoch": f"{epoch}/{self._total}", "nll": f"{nll:.4f}", "kl": f"{kl:.1f}"}
        if extra is not None:
            fields["extra"] = extra
        self._bar.update(self._task, completed=done, **fields)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
