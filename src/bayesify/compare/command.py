"""The command `bayesify compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bayesify.serving import terminal
from bayesify.serving.terminal import INTERRUPTED, names_of, need, plain, refuse, say

if TYPE_CHECKING:
    from bayesify.compare.comparison import Comparison, Told

WIDE = 110
"""Columns of a terminal that shows the whole table."""
LEAST_SHARE = 0.05
"""Share of the work from which on the time that is left is told."""


def compare(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A CSV, Excel, Parquet or JSON file, - for standard input, or a data set such as iris.",
        ),
    ],
    target: terminal.Target = "",
    only: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Separated by commas, or all (default: a few); plain network, linear model and trees are always there.",
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Train briefly on fewer splits, for a first look.")] = False,
    splits: Annotated[
        int, typer.Option(help="Splits (default: 10, with --quick 5; half as many from 2,000 rows on).")
    ] = 0,
    task: terminal.TaskName = None,
    ood: Annotated[
        Path | None,
        typer.Option(help="Out-of-distribution rows with the same columns; tests whether they are detected."),
    ] = None,
    ignore: terminal.Ignore = "",
    group: Annotated[
        str, typer.Option(help="A column; rows with the same cell are on the same side of every split.")
    ] = "",
    time: Annotated[str, typer.Option(help="A column; train on earlier rows, test on later ones.")] = "",
    sheet: terminal.Sheet = "",
    encoding: terminal.Encoding = "",
    missing: terminal.Missing = "",
    max_rows: Annotated[
        int, typer.Option(help="Use a random choice of more rows than these; 20,000, or 5,000 with --quick.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of splits, networks, training and prediction.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of report and results (default: bayesify-compare-NAME).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the finished runs in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON in place of the table.")] = False,
    engine: Annotated[Literal["local", "dask", "ray"], typer.Option(help="Where runs are done.")] = "local",
    workers: Annotated[int, typer.Option(help="Runs at a time (default: one per processor core).")] = 0,
) -> None:
    """Compare methods on your own table, and say which one to use and how sure to be.

    Reads the table, finds out the task, trains networks, a linear model and boosted trees over several splits with tuning on
    validation rows, prints the scores and writes an HTML report; its path is the last line. The recommended method is trained
    on all rows, for bayesify predict. Every finished run is kept: Ctrl-C reports what is there, and --resume continues.
    """
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading, check_there

    try:
        check_there(data)  # before anything large is loaded
    except InputError as error:
        refuse(f"bayesify compare: {error}", 2)
    need("compare", "pandas", "sklearn", "jinja2", "scipy")
    from bayesify.compare.comparison import compare as run
    from bayesify.compare.folder import REPORT
    from bayesify.compare.question import Question
    from bayesify.compare.record import as_json as to_json

    folder = out
    try:
        question = Question(
            data,
            target or None,
            task,
            names_of(only),
            names_of(ignore),
            ood,
            splits or None,
            max_rows or None,
            quick,
            seed,
            group or None,
            time or None,
            Reading(sheet, encoding, names_of(missing)),
        )
        folder = out or Path(f"bayesify-compare-{question.name}")
        page = (folder / REPORT).absolute()
        with _Progress(Console(stderr=True)) as progress:
            comparison = run(
                question,
                folder,
                resume=resume,
                engine=engine,
                workers=workers or None,
                progress=progress.tell,
                report=partial(_write, folder),
            )
    except (InputError, FileNotFoundError) as error:
        refuse(f"bayesify compare: {error}", 2)
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror or error}; finished runs are kept."
        refuse(f"bayesify compare: {reason} Mend that and run the same command with --resume.", 1)
    except KeyboardInterrupt:
        refuse("Interrupted before a run was finished; nothing is there to report.", INTERRUPTED)
    if as_json:
        print(to_json(comparison))
    else:
        _print(comparison)
        print(plain(page))
    if comparison.unfinished:
        refuse("Interrupted; the same command with --resume continues.", INTERRUPTED)
    if comparison.summary.best is None:
        raise typer.Exit(1)


def _write(folder: Path, comparison: Comparison, running: str = "") -> None:
    from bayesify.compare.folder import REPORT, RESULTS
    from bayesify.compare.page import render
    from bayesify.compare.record import as_json
    from bayesify.storage import write_file

    if not running:
        write_file(folder / RESULTS, as_json(comparison))
    write_file(folder / REPORT, render(comparison, running))


def _print(comparison: Comparison) -> None:
    from bayesify.compare.summary import COLUMNS, cell

    summary, console, verdict = comparison.summary, Console(), comparison.verdict
    hidden = {"coverage_50", "coverage_95", "kilobytes"}
    if console.width < WIDE:
        hidden |= {"calibration", "ece", "predict_ms"}
    columns = [column for column in COLUMNS[summary.task] if column.key not in hidden]
    listing = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    listing.add_column("method", no_wrap=True)
    for column in columns:
        first, _, second = column.heading.rpartition(" ")
        heading = f"{first}\n{second}" if first else f"{second}\n{column.unit}"
        listing.add_column(heading, justify="right", no_wrap=True)
    for row in summary.ranked:
        listing.add_row(row.title, *(cell(row, column, spread=column.key == "nll") for column in columns))
    console.print(listing)
    for row in summary.rows:
        if row.failure:
            say(console, f"{row.title} {row.failure}", style="yellow")
    for note in comparison.problem.notes:
        say(console, note, style="dim")
    for caution in comparison.problem.cautions:
        say(console, caution, style="yellow")
    if verdict is not None:
        say(console, f"\n{verdict.headline}", style="bold")
        for sentence in verdict.sentences:
            say(console, sentence)
    if comparison.winner is not None:
        say(console, f"\n{comparison.winner.words}")
        for line in comparison.commands:
            say(console, line, soft_wrap=True)
    print()


class _Progress:
    """How far runs are, on the error stream: a bar in a terminal, else a line now and then; with the time that is left."""

    EVERY = 10.0
    """Seconds between lines."""

    def __init__(self, console: Console) -> None:
        from bayesify.running.progress import Display

        columns = ("{task.description:<34}", "bar", "count", "{task.fields[left]}")
        self._console = console
        self._bar = Display(*columns, console=console, description="reading the table", left="")
        self._start = self._said = monotonic()

    def tell(self, told: Told) -> None:
        """Show how far runs are."""
        now = monotonic()
        passed = now - self._start
        share = told.work_done / told.work
        left = "" if share < LEAST_SHARE else f"about {_duration(passed * (1 - share) / share)} left"
        self._bar.update(description=told.name, completed=told.done, total=told.total, left=left)
        if not self._console.is_terminal and now - self._said >= self.EVERY:
            self._said = now
            line = f"{told.done} of {told.total} runs finished after {_duration(passed)}{', ' + left if left else ''}: {told.name}"
            say(self._console, line, soft_wrap=True)

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
