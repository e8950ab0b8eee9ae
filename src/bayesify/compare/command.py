"""The command `bayesify compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bayesify.serving import terminal
from bayesify.serving.terminal import INTERRUPTED_EXIT_CODE, names_of, need, plain, refuse, say

if TYPE_CHECKING:
    from bayesify.compare.comparison import Comparison
    from bayesify.compare.question import Question

MIN_WIDE_COLUMNS = 110
"""Minimum width of a terminal in which the whole table is shown."""


Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A CSV, Excel, Parquet or JSON file, - for standard input, or the name of a data set such as iris.",
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        help="Names of methods separated by commas, or all (default: a few methods). A plain network, a linear model "
        "and trees are always included.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Train briefly on fewer splits, for a first look.")]
Splits = Annotated[
    int, typer.Option(help="Number of splits (default: 10, or 5 with --quick; half as many for 2,000 or more rows).")
]
OutOfDistribution = Annotated[
    Path | None,
    typer.Option(
        help="A table with the same columns and unfamiliar (out-of-distribution) rows; tests whether these rows are "
        "detected."
    ),
]
Group = Annotated[
    str,
    typer.Option(
        help="Name of a column; rows with the same value in this column stay on the same side of every split."
    ),
]
Time = Annotated[
    str,
    typer.Option(
        help="Name of a column of dates or numbers; methods are trained on earlier rows and tested on later ones."
    ),
]
MaxRows = Annotated[
    int,
    typer.Option(
        help="Maximum number of rows (default: 20,000, or 5,000 with --quick). From a larger table, random rows are "
        "used."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of splits, networks, training and prediction.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the report and the results (default: bayesify-compare-NAME).")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue a comparison; the finished runs in the folder are kept.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of the table.")]
Engine = Annotated[Literal["local", "dask", "ray"], typer.Option(help="Engine that executes the runs.")]
Workers = Annotated[int, typer.Option(help="Number of simultaneous runs (default: one per processor core).")]


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
    """Compare methods on your own table and recommend one.

    Reads the table, detects the task, and trains networks, a linear model and boosted trees on several splits. Each
    network is trained in the same way as by bayesify fit. Prints the scores and writes an HTML report; the last printed
    line is its path. Trains the recommended method on all rows, for use with bayesify predict. Stores every finished run: after
    Ctrl-C, the report contains these runs, and --resume continues the comparison.
    """
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading, check_there

    try:
        check_there(data)  # fail early, before large packages are loaded
        need("compare", "pandas", "sklearn", "jinja2", "scipy", extra="compare")
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
    """Run the comparison; if an error occurs, print it and end the command."""
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
        refuse(f"bayesify compare: {reason} Fix the problem, then run the same command with --resume.", 1)
    except KeyboardInterrupt:
        reason = "Interrupted before the comparison was finished; to continue, run the same command with --resume."
        refuse(reason, INTERRUPTED_EXIT_CODE)


def _report(comparison: Comparison, folder: Path, as_json: bool) -> None:
    """Print the results; the exit status says whether they are complete."""
    from bayesify.compare.folder import REPORT

    if as_json:
        print(comparison.to_json())
    else:
        _print(comparison)
        print(plain((folder / REPORT).absolute()))
    if comparison.unfinished:
        refuse("Interrupted; to continue, run the same command with --resume.", INTERRUPTED_EXIT_CODE)
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
