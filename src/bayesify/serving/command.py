"""The commands `bayesify fit` and `bayesify predict`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bayesify.serving import terminal
from bayesify.serving.terminal import INTERRUPTED_EXIT_CODE, names_of, need, plain, refuse, say

if TYPE_CHECKING:
    from bayesify.serving.about import About
    from bayesify.serving.folder import ModelFolder
    from bayesify.serving.predicting import Outcome
    from bayesify.tables.files import Reading
    from bayesify.tables.targets import Task

Table = Annotated[
    str, typer.Argument(metavar="TABLE", help="A CSV, Excel, Parquet or JSON file, or - for standard input.")
]
MethodName = Annotated[str, typer.Option(help="auto, temperature_scaled, or a name that 'bayesify methods' lists.")]
FolderOut = Annotated[Path | None, typer.Option(help="Folder for the model (default: bayesify-model-NAME).")]
Quick = Annotated[bool, typer.Option("--quick", help="Train briefly, for a first look.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the contents of the folder.")]
KeepRows = Annotated[
    bool,
    typer.Option("--keep-rows", help="Store the training rows in the folder, so that --update needs only new rows."),
]
Update = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Retrain the model in FOLDER with the additional rows in TABLE. Unless the model was fitted with "
        "--keep-rows, TABLE must contain the old rows first, then the new rows.",
    ),
]

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder written by bayesify fit or compare.")]
New = Annotated[
    Path,
    typer.Argument(
        metavar="NEW", help="A table with the same columns, or - for standard input; the target column is optional."
    ),
]
Csv = Annotated[
    Path | None, typer.Option(help="CSV file to write (default: NEW-predictions.csv in the current folder).")
]
IntervalLevel = Annotated[float, typer.Option(help="Share of rows whose true value should lie inside the interval.")]
Quantiles = Annotated[
    list[str] | None, typer.Option(help="Quantiles of a numeric target to write, such as 0.1,0.5,0.9.")
]
Above = Annotated[
    list[str] | None,
    typer.Option(
        help="Write the probability that the target exceeds this number, such as 500000. For several numbers, "
        "separate them by commas or repeat the option."
    ),
]
Below = Annotated[
    list[str] | None,
    typer.Option(
        help="Write the probability that the target stays below this number. For several numbers, separate them by commas or "
        "repeat the option."
    ),
]
DecisionCosts = Annotated[
    str,
    typer.Option(
        "--costs",
        help="Write the decision with the lowest expected cost, given costs as TRUTH:DECISION=COST,... or as "
        "a CSV file.",
    ),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Write which columns move each prediction, which widen its interval, and why a row is unusual.",
    ),
]

LOCK = ".update.lock"
"""File that locks a folder during an update."""


def fit(
    table: Table,
    target: terminal.Target = "",
    method: MethodName = "auto",
    out: FolderOut = None,
    task: terminal.TaskName = None,
    ignore: terminal.Ignore = "",
    sheet: terminal.Sheet = "",
    encoding: terminal.Encoding = "",
    missing: terminal.Missing = "",
    quick: Quick = False,
    seed: Seed = 0,
    force: Force = False,
    keep_rows: KeepRows = False,
    update: Update = None,
) -> None:
    """Train a model on a table and store the model in a folder, for use with bayesify predict.

    Texts, dates and empty cells need no preparation. The folder contains the model, facts about the model, and MODEL.md, a page
    that describes the model. The last printed line is the folder's path. With --update, the model in a folder is trained again
    with more rows.
    """
    need("fit", "pandas", "sklearn", extra="compare")
    from bayesify.serving.sources import short_name
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading, check_there

    folder = out or update or Path(f"bayesify-model-{short_name(table)}")
    try:
        check_there(table)
        if update is not None and folder != update:
            _check_free(folder, force)
        reading = Reading(sheet, encoding, names_of(missing))
        if update is not None:
            from bayesify.storage.locks import locked  # imported only for an update, because it imports torch

            values = {"target": target, "task": task, "ignore": ignore, "quick": quick, "seed": seed}
            given = [f"--{option}" for option, value in values.items() if value] + ["--method"] * (method != "auto")
            # Without the lock, the second of two simultaneous updates would lose the rows of the first.
            with locked(folder / LOCK) if folder == update and folder.is_dir() else nullcontext():
                model = _train_more(update, table, reading, keep_rows, given)
                model.write(folder)
        else:
            check = partial(_check_free, folder, force)
            model = _train(
                table, target, reading, check, method=method, task=task, ignore=names_of(ignore), seed=seed, keep_rows=keep_rows,
                effort="quick" if quick else "full",
            )  # fmt: skip
            model.write(folder)
    except (InputError, FileNotFoundError) as error:
        refuse(f"bayesify fit: {error}", 2)
    except OSError as error:
        kept = "; its old contents are still there" if force or update else ""
        refuse(f"bayesify fit: {folder} cannot be written: {error.strerror or error}{kept}", 1)
    except KeyboardInterrupt:
        refuse("Interrupted; no model was written.", INTERRUPTED_EXIT_CODE)
    _print_fitted(model.about, folder)


def _check_free(folder: Path, force: bool) -> None:
    from bayesify.tables.errors import InputError

    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not force)):
        raise InputError(f"{folder}: this folder already exists; give another --out, or use --force to replace it")


def _train(
    table: str, target: str, reading: Reading, check: Callable[[], None], *, task: Task | None, **options: Any
) -> ModelFolder:
    """Train a model on a table. `check` is called after the target was found, so that a misspelled target is reported first."""
    from bayesify.serving.sources import read_source
    from bayesify.tables.targets import find_column

    source = read_source(table, reading)
    column = find_column(source.frame, target or source.target, source.where)
    check()
    from bayesify.serving.fitting import fit_table  # imported after the table was read, because it imports torch

    say(Console(stderr=True), f"training on {len(source.frame):,} rows of {source.where} ...", style="dim")
    return fit_table(
        source.frame,
        column,
        name=source.where,
        notes=source.notes,
        task=task or source.task,
        missing=reading.missing,
        verbose=True,
        **options,
    )


def _train_more(folder: Path, table: str, reading: Reading, keep_rows: bool, given: list[str]) -> ModelFolder:
    from bayesify.serving.folder import ModelFolder
    from bayesify.serving.sources import read_source
    from bayesify.serving.updating import like_training, update_table
    from bayesify.tables.errors import InputError

    if given:
        raise InputError(
            f"{given[0]}: this option cannot be combined with --update, which takes the setting from {folder}; omit the "
            "option, or omit --update to train a new model"
        )
    source = read_source(table, like_training(ModelFolder.read(folder).about, reading))
    say(Console(stderr=True), f"training {folder} with {len(source.frame):,} rows of {source.where} ...", style="dim")
    return update_table(
        folder,
        source.frame,
        name=source.where,
        notes=source.notes,
        missing=reading.missing,
        keep_rows=keep_rows,
        verbose=True,
    )


def _print_fitted(about: About, folder: Path) -> None:
    console = Console()
    for note in about.remarks:
        say(console, note, style="dim", soft_wrap=True)
    _print_scores(console, about.scores, about.scored_on)
    say(console, f"Next: bayesify predict {shlex.quote(str(folder))} new.csv", soft_wrap=True)
    print(plain(folder.absolute()))


def predict(
    folder: Folder,
    new: New,
    out: Csv = None,
    level: IntervalLevel = 0.9,
    quantiles: Quantiles = None,
    above: Above = None,
    below: Below = None,
    costs: DecisionCosts = "",
    explain: Explain = False,
    sheet: terminal.Sheet = "",
    encoding: terminal.Encoding = "",
    missing: terminal.Missing = "",
) -> None:
    """Predict the rows of a table with the model in a folder, and write a CSV file with intervals or probabilities.

    Rows keep their order. If the table contains the target, scores are printed. Columns whose cells differ from the training rows
    are listed. The last printed line is the path of the CSV file.
    """
    need("predict", "pandas", "sklearn", extra="compare")
    errors = Console(stderr=True)
    from bayesify.serving.sources import short_name
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading

    path = out or Path(f"{short_name(str(new))}-predictions.csv")
    replaced = path.exists()
    try:
        for path_given in (folder, new):
            if not path_given.exists() and str(path_given) != "-":
                raise InputError(f"{path_given}: there is no such file or folder; check the path")
        reading = Reading(sheet, encoding, names_of(missing))
        from bayesify.serving.questions import Questions, check_level, number_of

        options = ("--quantiles", quantiles), ("--above", above), ("--below", below)
        levels, over, under = (
            [number_of(option, text) for text in names_of(",".join(given or []))] for option, given in options
        )
        asked = Questions(levels, over, under, costs, explain)
        check_level("--level", level)
        from bayesify.serving.folder import ModelFolder  # after the options, because it imports torch
        from bayesify.serving.predicting import predict_table

        model = ModelFolder.read(folder)
        for remark in model.remarks:
            say(errors, remark, soft_wrap=True)
        outcome = predict_table(model, new, path, level=level, reading=reading, asked=asked)
    except InputError as error:
        refuse(f"bayesify predict: {error}", 2)
    except OSError as error:
        refuse(f"bayesify predict: {path} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        refuse("Interrupted; nothing was written.", INTERRUPTED_EXIT_CODE)
    _print_predicted(outcome, model.about.target, errors)
    if replaced:
        say(errors, f"The file {path} existed already and was replaced.", soft_wrap=True)
    print(plain(path.absolute()))


def _print_predicted(outcome: Outcome, target: str, errors: Console) -> None:
    for warning in outcome.warnings:
        say(errors, f"Warning: {warning}", style="bold yellow", soft_wrap=True)
    console = Console()
    for note in outcome.notes:
        say(console, note, style="dim", soft_wrap=True)
    say(console, f"{outcome.num_rows:,} rows, {outcome.num_unusual:,} of them unusual (unlike the training rows).")
    for sentence in outcome.moved:
        say(console, sentence, soft_wrap=True)
    if outcome.scores.num_rows:
        _print_scores(console, outcome.scores.means(), f"{outcome.scores.num_rows:,.0f} rows with {target}")
    if outcome.scores.unknown:
        rows = f"{outcome.scores.unknown:,.0f} of these rows"
        say(console, f"{rows} have a class that did not occur in training; they count as wrong.")


def _print_scores(console: Console, scores: Mapping[str, float], where: str) -> None:
    from bayesify.serving.card import words_of
    from bayesify.tables.written_numbers import significant

    say(console, f"Scores on {where}:")
    for name, value in scores.items():
        say(console, f"  {significant(value)}  {words_of(name)}", soft_wrap=True)
