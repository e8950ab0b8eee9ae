"""Progress displays, including one for training runs."""

import math
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Self

from bayesify.predictive.findings import Findings

MIN_LINE_SECONDS = 10.0
"""Number of seconds between lines if there is no terminal."""
MIN_WORK_SHARE = 0.05
"""The remaining time is shown after this share of the work."""


class Display:
    """Context manager that shows a progress line on standard error. Without a terminal, nothing is shown.

    The columns are `"bar"`, `"count"` (3/10), `"bytes"`, `"percent"`, `"elapsed"`, `"left"`, or texts. A text may contain
    `{task.description}` and `{task.fields[...]}`; `fields` gives the initial values of these fields. `total` is the total amount
    of work; `None` if it is unknown. With `transient`, the line disappears at the end. `console` replaces the console of `rich`
    on standard error.
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
        if not show or not _is_terminal(console):
            return
        import rich.console
        import rich.progress

        kinds: dict[str, Any] = {
            "bar": rich.progress.BarColumn,
            "count": rich.progress.MofNCompleteColumn,
            "bytes": rich.progress.DownloadColumn,
            "percent": rich.progress.TaskProgressColumn,
            "elapsed": rich.progress.TimeElapsedColumn,
            "left": rich.progress.TimeRemainingColumn,
        }
        made = [kinds[column]() if column in kinds else rich.progress.TextColumn(column) for column in columns]
        console = console or rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(*made, console=console, transient=transient)
        self._task = self._bar.add_task(fields.pop("description", ""), total=total, **fields)

    @property
    def shown(self) -> bool:
        """Whether a line is shown."""
        return self._bar is not None

    def update(self, **changes: Any) -> None:
        """Update `completed`, `total`, `advance` (the amount of new work), `description` or fields of the line."""
        if self._bar is not None:
            self._bar.update(self._task, **changes)

    def stop(self) -> None:
        """Stop updating the line."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class TimeLeft(Display):
    """Shows progress and the remaining time on standard error: as a bar in a terminal, otherwise as an occasional line.

    `unit` is the word for what is counted, such as "runs" in the line `3 of 10 runs finished`. With `bound=True`, the work may
    end early, so that the total and the remaining time are upper bounds. For `console` see `Display`.
    """

    def __init__(
        self, unit: str, *, bound: bool = False, console: Any = None, show: bool = True, description: str = ""
    ) -> None:
        self._unit, self._most, self._show = unit, "at most " if bound else "", show
        self._console = console
        columns = ("{task.description:<34}", "bar", "count", "{task.fields[left]}")
        super().__init__(*columns, show=show, console=console, description=description, left="")
        self._start = self._said = monotonic()

    def tell(self, name: str, done: int, total: int, share: float | None = None) -> None:
        """Show the progress of the work `name`. `share` is the finished fraction of the work; it defaults to `done / total`,
        which is right if all parts cost the same."""
        now, share = monotonic(), done / max(total, 1) if share is None else share
        if not self._show:
            return
        passed = now - self._start
        left = ""
        if share >= MIN_WORK_SHARE:
            left = f"{self._most or 'about '}{duration(passed * (1 - share) / share)} left"
        self.update(description=name, completed=done, total=total, left=left)
        if self.shown or now - self._said < MIN_LINE_SECONDS or _is_terminal(self._console):
            return
        self._said = now
        count = f"{done:,} of {self._most}{total:,} {self._unit} finished after {duration(passed)}"
        line = f"{count}{', ' if left else ''}{left}: {name}"
        if self._console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _is_terminal(console: Any) -> bool:
    return bool(sys.stderr.isatty() if console is None else console.is_terminal)


def duration(seconds: float) -> str:
    """A duration in readable form."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"


FIRST_LINE_SECONDS, MAX_SECONDS_BETWEEN_LINES = 10.0, 60.0
"""If there is no terminal: seconds before the first line, and maximum seconds between lines. Each wait is twice as long
as the previous wait."""


class ProgressBar(Display):
    """Line on the terminal with the epoch, the batch, the NLL per example and the KL.

    If standard error is not a terminal, a line is printed now and then; a short run prints no line. `total` is the number of
    epochs, and `batches` the number of batches per epoch, if known.
    """

    def __init__(self, show: bool, total: int, batches: int | None) -> None:
        self._show, self._total, self._batches = show, total, batches
        columns = ("{task.fields[epoch]}", "bar", "{task.fields[scores]}", "left")
        work = total * batches if batches else None
        fields = {"epoch": f"epoch 0/{total}", "scores": "NLL -  KL - nats"}
        super().__init__(*columns, show=show, total=work, transient=False, **fields)
        self._validation = ""
        self._last = monotonic()
        self._wait = 0.1 if self.shown else FIRST_LINE_SECONDS

    def step(self, epoch: int, batch: int, means: Callable[[], tuple[float, float]]) -> None:
        """Show a step; on a terminal, at most ten times per second. `means` is called only if the step is shown."""
        now = monotonic()
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
