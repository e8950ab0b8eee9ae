"""The progress bar of training."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from bayesify.predictive.findings import Findings
from bayesify.running.progress import Display

FIRST_LINE_SECONDS, MAX_SECONDS_BETWEEN_LINES = 10.0, 60.0
"""Seconds before the first line where there is no terminal, and between two lines after a while: each wait is twice the last."""


class ProgressBar:
    """A line on the terminal: epoch, batch, NLL per example and KL apart.

    A context manager. Without `rich` it prints one line per epoch. Where standard error is not a terminal it prints a line now
    and then, none in a short training.

    Args:
        show: Whether to show anything.
        total: Epochs.
        batches: Batches per epoch, `None` if unknown.
    """

    def __init__(self, show: bool, total: int, batches: int | None) -> None:
        self._show = show
        self._terminal = show and sys.stderr.isatty()
        self._total = total
        self._batches = batches
        self._bar = Display(
            "epoch {task.fields[epoch]}",
            "bar",
            "NLL {task.fields[nll]}  KL {task.fields[kl]} nats{task.fields[extra]}",
            "left",
            show=show,
            total=total * batches if batches else None,
            transient=False,
            epoch=f"0/{total}",
            nll="-",
            kl="-",
            extra="",
        )
        self._last = time.perf_counter()
        self._wait = 0.1 if self._terminal else FIRST_LINE_SECONDS

    def __enter__(self) -> ProgressBar:
        self._bar.__enter__()
        return self

    def step(self, epoch: int, batch: int, means: Callable[[], tuple[float, float]]) -> None:
        """Show a step, at most ten times a second on a terminal; only then NLL and KL are asked for."""
        now = time.perf_counter()
        if not self._show or now - self._last < self._wait or (self._terminal and not self._bar.shown):
            return
        self._last = now
        if self._bar.shown:
            done = (epoch - 1) * self._batches + batch if self._batches else None
            self._update(done, epoch, *means())
            return
        self._wait = min(MAX_SECONDS_BETWEEN_LINES, 2 * self._wait)
        self._print(epoch, *means(), f"  batch {batch}" + (f"/{self._batches}" if self._batches else ""))

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the numbers of a whole epoch; without a terminal, none."""
        extra = f"  validation NLL {row['validation_nll']:.4f}" if "validation_nll" in row else ""
        if self._bar.shown:
            done = row["epoch"] * self._batches if self._batches else None
            self._update(done, row["epoch"], row["nll"], row.get("kl", math.nan), extra)
        elif self._terminal:
            self._print(row["epoch"], row["nll"], row.get("kl", math.nan), extra)

    def _print(self, epoch: int, nll: float, kl: float, extra: str) -> None:
        print(f"epoch {epoch}/{self._total}  NLL {nll:.4f}  KL {kl:.1f} nats{extra}", file=sys.stderr, flush=True)

    def tell(self, findings: Findings) -> None:
        """Say what is amiss, under the bar."""
        self._bar.stop()
        for finding in findings if self._show else ():
            print(f"fit: {finding}", file=sys.stderr, flush=True)

    def _update(self, done: int | None, epoch: int, nll: float, kl: float, extra: str | None = None) -> None:
        fields = {"epoch": f"{epoch}/{self._total}", "nll": f"{nll:.4f}", "kl": f"{kl:.1f}"}
        if extra is not None:
            fields["extra"] = extra
        self._bar.update(completed=done, **fields)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
