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
"""If there is no terminal: seconds before the first line, and maximum seconds between lines. Each wait is twice as long
as the previous wait."""


class ProgressBar(Display):
    """Line on the terminal with the epoch, the batch, the NLL per example and the KL.

    If standard error is not a terminal, it prints a line now and then, and no line in a short run. `total` is the number
    of epochs, and `batches` the number of batches per epoch, if known.
    """

    def __init__(self, show: bool, total: int, batches: int | None) -> None:
        self._show, self._total, self._batches = show, total, batches
        columns = ("{task.fields[epoch]}", "bar", "{task.fields[scores]}", "left")
        work = total * batches if batches else None
        fields = {"epoch": f"epoch 0/{total}", "scores": "NLL -  KL - nats"}
        super().__init__(*columns, show=show, total=work, transient=False, **fields)
        self._validation = ""
        self._last = time.perf_counter()
        self._wait = 0.1 if self.shown else FIRST_LINE_SECONDS

    def step(self, epoch: int, batch: int, means: Callable[[], tuple[float, float]]) -> None:
        """Show a step; on a terminal, at most ten times per second. `means` is called only if the step is shown."""
        now = time.perf_counter()
        if not self._show or now - self._last < self._wait:
            return
        self._last, extra = now, self._validation
        if not self.shown:
            self._wait = min(MAX_SECONDS_BETWEEN_LINES, 2 * self._wait)
            extra = f"  batch {batch}" + (f"/{self._batches}" if self._batches else "")
        self._write(epoch, (epoch - 1) * (self._batches or 0) + batch, *means(), extra)

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the numbers of a whole epoch, if there is a terminal."""
        self._validation = f"  validation NLL {row['validation_nll']:.4f}" if "validation_nll" in row else ""
        if self.shown:
            done = row["epoch"] * (self._batches or 0)
            self._write(row["epoch"], done, row["nll"], row.get("kl", math.nan), self._validation)

    def _write(self, epoch: int, done: int, nll: float, kl: float, extra: str) -> None:
        count, scores = f"epoch {epoch}/{self._total}", f"NLL {nll:.4f}  KL {kl:.1f} nats{extra}"
        if self.shown:
            self.update(completed=done if self._batches else None, epoch=count, scores=scores)
        else:
            print(f"{count}  {scores}", file=sys.stderr, flush=True)

    def tell(self, findings: Findings) -> None:
        """Print the findings under the bar."""
        self.stop()
        for finding in findings if self._show else ():
            print(f"fit: {finding}", file=sys.stderr, flush=True)
