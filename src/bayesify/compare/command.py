"""The command `bayesify compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bayesify.serving import terminal
from bayesify.serving.terminal import INTERRUPTED, names_of, need, plain, refuse, say

if TYPE_CHECKING:
    from bayesify.compare.comparison import Comparison
    from bayesify.compare.question import Question

MIN_WIDE_COLUMNS = 110
"""Columns of a terminal that shows the whole table."""


Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="A CSV, Excel, Parquet or JSON file, - for standard input, or a data set such as iris."
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        help="Separated by commas, or all (default: a few); plain network, linear model and trees are always there.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Train briefly on fewer splits, for a first look.")]
Splits = Annotated[int, typer.Option(help="Splits (default: 10, with --quick 5; half as many from 2,000 rows on).")]
OutOfDistribution = Annotated[
    Path | None, typer.Option(help="Out-of-distribution rows with the same columns; tests whether they are detected.")
]
Group = Annotated[str, typer.Option(help="A column; rows with the same cell are on the same side of every split.")]
Time = Annotated[str, typer.Option(help="A column; train on earlier rows, test on later ones.")]
MaxRows = Annotated[
    int, typer.Option(help="Use a random choice of more rows than these; 20,000, or 5,000 with --quick.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of splits, networks, training and prediction.")]
Out = Annotated[Path | None, typer.Option(help="Folder of report and results (default: bayesify-compare-NAME).")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the finished runs in the folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON in place of the table.")]
Engine = Annotated[Literal["local", "dask", "ray"], typer.Option(help="Where runs are done.")]
Workers = Annotated[int, typer.Option(help="Runs at a time (default: one per processor core).")]


def compare(
    data: Data,
    target: terminal.Target = "",
    only: Methods = "",
    quick: Quick = False,
    splits: Splits = 0,
    task: terminal.TaskName = None,
    ood: OutOfDistribution = None,
    ignore: terminal.Ignore = "",
    group: Group = "",
    time: Time = "",
    sheet: terminal.Sheet = "",
    encoding: terminal.Encoding = "",
    missing: terminal.Missing = "",
    max_rows: MaxRows = 0,
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
    engine: Engine = "local",
    workers: Workers = 0,
) -> None:
    """Compare methods on your own table, and say which one to use and how sure to be.

    Reads the table, finds out the task, trains networks, a linear model and boosted trees over several splits, each network as
    bayesify fit trains it, prints the scores and writes an HTML report; its path is the last line. The recommended method is
    trained on all rows, for bayesify predict. Every finished run is kept: Ctrl-C reports what is there, and --resume continues.
    """
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading, check_there

    try:
        check_there(data)  # before anything large is loaded
        need("compare", "pandas", "sklearn", "jinja2", "scipy")
        from bayesify.compare.question import Question

        question = Question(
            data, target or None, task, names_of(only), names_of(ignore), ood, splits or None, max_rows or None, quick,
            seed, group or None, time or None, Reading(sheet, encoding, names_of(missing)),
        )  # fmt: skip
    except (InputError, FileNotFoundError) as error:
        refuse(f"bayesify compare: {error}", 2)
    folder = out or Path(f"bayesify-compare-{question.name}")
    _report(_run(question, folder, resume, engine, workers or None), folder, as_json)


def _run(question: Question, folder: Path, resume: bool, engine: str, workers: int | None) -> Comparison:
    """The comparison; what hinders it ends the command."""
    from bayesify.compare.comparison import compare as run
    from bayesify.running.progress import TimeLeft
    from bayesify.tables.errors import InputError

    try:
        with TimeLeft("runs", console=Console(stderr=True), description="reading the table") as progress:
            report = partial(_write, folder)
            return run(
                question, folder, resume=resume, engine=engine, workers=workers, progress=progress.tell, report=report
            )
    except (InputError, FileNotFoundError) as error:
        refuse(f"bayesify compare: {error}", 2)
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror or error}; finished runs are kept."
        refuse(f"bayesify compare: {reason} Mend that and run the same command with --resume.", 1)
    except KeyboardInterrupt:
        refuse("Interrupted before a run was finished; nothing is there to report.", INTERRUPTED)


def _report(comparison: Comparison, folder: Path, as_json: bool) -> None:
    """Print what was found; the exit status says whether it is whole."""
    from bayesify.compare.folder import REPORT

    if as_json:
        print(comparison.to_json())
    else:
        _print(comparison)
        print(plain((folder / REPORT).absolute()))
    if comparison.unfinished:
        refuse("Interrupted; the same command with --resume continues.", INTERRUPTED)
    if comparison.summary.best is None:
        raise typer.Exit(1)


def _write(folder: Path, comparison: Comparison, running: str = "") -> None:
    from bayesify.compare.folder import REPORT, RESULTS
    from bayesify.compare.page import render
    from bayesify.storage import write_file

    if not running:
        write_file(folder / RESULTS, comparison.to_json())
    write_file(folder / REPORT, render(comparison, running))


def _print(comparison: Comparison) -> None:
    from bayesify.compare.summary import COLUMNS, cell

    summary, console, verdict = comparison.summary, Console(), comparison.verdict
    hidden = {"coverage_50", "coverage_95", "kilobytes"}
    if console.width < MIN_WIDE_COLUMNS:
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
    for note in comparison.table.notes:
        say(console, note, style="dim")
    for caution in comparison.table.cautions:
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
