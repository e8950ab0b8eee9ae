"""Progress bar of a training run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from bayesify.predictive.findings import Findings
from bayesify.running.progress import Display

FIRST_LINE_SECONDS, MAX_SECONDS_BETWEEN_LINES = 10.0, 60.0
"""Without a terminal: seconds before the first line, and maximum seconds between lines; each wait is twice the one before."""


class ProgressBar:
    """Line on the terminal with the epoch, the batch, the NLL per example and the KL.

    A context manager. Without `rich` it prints one line per epoch. If standard error is not a terminal, it prints an occasional
    line, and none in a short run.

    Args:
        show: Whether to show anything.
        total: Number of epochs.
        batches: Number of batches per epoch, `None` if unknown.
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
        """Show a step, at most ten times a second on a terminal; `means` is called only if the step is shown."""
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
        """Show the numbers of a whole epoch, if there is a terminal."""
        extra = f"  validation NLL {row['validation_nll']:.4f}" if "validation_nll" in row else ""
        if self._bar.shown:
            done = row["epoch"] * self._batches if self._batches else None
            self._update(done, row["epoch"], row["nll"], row.get("kl", math.nan), extra)
        elif self._terminal:
            self._print(row["epoch"], row["nll"], row.get("kl", math.nan), extra)

    def _print(self, epoch: int, nll: float, kl: float, extra: str) -> None:
        print(f"epoch {epoch}/{self._total}  NLL {nll:.4f}  KL {kl:.1f} nats{extra}", file=sys.stderr, flush=True)

    def tell(self, findings: Findings) -> None:
        """Print the findings under the bar."""
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
