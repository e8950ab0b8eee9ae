"""The commands `bayesify fit` and `bayesify predict`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from bayesify.serving.terminal import plain, say

NEEDED = ("pandas", "sklearn")
INTERRUPTED = 130


Sheet = Annotated[str, typer.Option(help="Of a spreadsheet (default: the first that holds anything).")]
Encoding = Annotated[str, typer.Option(help="Of a text file, such as latin-1 (default: detected).")]
Missing = Annotated[str, typer.Option(help="Texts that stand for empty cells, separated by commas.")]


def fit(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="A CSV, Excel, Parquet or JSON file, - for standard input.")
    ],
    target: Annotated[str, typer.Option(help="The column to predict.")] = "",
    method: Annotated[str, typer.Option(help="auto, a name from 'bayesify methods', or temperature_scaled.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the model (default: bayesify-model-NAME).")] = None,
    task: Annotated[
        Literal["regression", "classification"] | None, typer.Option(help="If it is not to be detected.")
    ] = None,
    ignore: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    sheet: Sheet = "",
    encoding: Encoding = "",
    missing: Missing = "",
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the folder.")] = False,
) -> None:
    """Train on a table and keep the model in a folder, for bayesify predict.

    Texts, dates and empty cells are taken as they are. The folder holds the model, facts about it, and a page to read, MODEL.md;
    its path is the last line.
    """
    errors = _errors("fit")
    from bayesify.serving.sources import read_source, short_name
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading, check_there
    from bayesify.tables.targets import find_column

    folder = out or Path(f"bayesify-model-{short_name(table)}")
    try:
        check_there(table)
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not force)):
            raise InputError(f"{folder}: is there already; give another --out, or --force to replace it")
        source = read_source(table, Reading(sheet, encoding, _names(missing)))
        column = find_column(source.frame, target or source.target, source.where)
        from bayesify.serving.fitting import fit_table  # which reads torch: not before the table is known to be one

        say(errors, f"training on {len(source.frame):,} rows of {source.where} ...", style="dim")
        model = fit_table(
            source.frame,
            column,
            name=source.where,
            notes=source.notes,
            method=method,
            task=task or source.task,
            ignore=_names(ignore),
            seed=seed,
            missing=_names(missing),
        )
        model.write(folder)
    except (InputError, FileNotFoundError) as error:
        _refuse(errors, f"bayesify fit: {error}", 2)
    except OSError as error:
        _refuse(errors, f"bayesify fit: {folder} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _refuse(errors, "Interrupted; no model was written.", INTERRUPTED)
    console, about = Console(), model.about
    for note in about.remarks:
        say(console, note, style="dim", soft_wrap=True)
    _print_scores(console, about.scores, about.scored_on)
    say(console, f"Next: bayesify predict {shlex.quote(str(folder))} new.csv", soft_wrap=True)
    print(plain(folder.absolute()))


def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What bayesify fit or compare wrote.")],
    new: Annotated[
        Path,
        typer.Argument(
            metavar="NEW", help="A table with the same columns, - for standard input; the target may be absent."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="CSV to write (default: NEW-predictions.csv, here).")] = None,
    level: Annotated[float, typer.Option(help="Of the intervals: the share of rows that they are to hold.")] = 0.9,
    sheet: Sheet = "",
    encoding: Encoding = "",
    missing: Missing = "",
) -> None:
    """Predict the rows of a table with a model in a folder, and write a CSV with intervals or probabilities.

    Rows keep their order. Where the table holds the target, scores are printed. The path of the CSV is the last line.
    """
    errors = _errors("predict")
    from bayesify.serving.sources import short_name
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import Reading

    path = out or Path(f"{short_name(str(new))}-predictions.csv")
    try:
        for path_given in (folder, new):
            if not path_given.exists() and str(path_given) != "-":
                raise InputError(f"{path_given}: there is no such file or folder")
        reading = Reading(sheet, encoding, _names(missing))
        from bayesify.serving.folder import ModelFolder
        from bayesify.serving.predicting import predict_table
        from bayesify.version import __version__

        model = ModelFolder.read(folder)
        if model.about.version != __version__:
            message = f"{folder} was written by bayesify {model.about.version}; this is {__version__}."
            say(errors, message, soft_wrap=True)
        outcome = predict_table(model, new, path, level=level, reading=reading)
    except InputError as error:
        _refuse(errors, f"bayesify predict: {error}", 2)
    except OSError as error:
        _refuse(errors, f"bayesify predict: {path} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _refuse(errors, "Interrupted; nothing was written.", INTERRUPTED)
    for warning in outcome.warnings:
        say(errors, f"Warning: {warning}", style="bold yellow", soft_wrap=True)
    console = Console()
    for note in outcome.notes:
        say(console, note, style="dim", soft_wrap=True)
    say(console, f"{outcome.num_rows:,} rows, {outcome.num_unusual:,} of them unlike the training rows.")
    if outcome.scores.num_rows:
        _print_scores(console, outcome.scores.means(), f"{outcome.scores.num_rows:,.0f} rows with {model.about.target}")
    if outcome.scores.unknown:
        say(console, f"{outcome.scores.unknown:,} of these have a class that was not in training; they count as wrong.")
    print(plain(path.absolute()))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _errors(command: str) -> Console:
    console = Console(stderr=True)
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        _refuse(console, f"bayesify {command} needs {', '.join(missing)}; pip install 'bayesify[compare]'", 1)
    return console


def _refuse(console: Console, message: str, code: int) -> NoReturn:
    say(console, message, soft_wrap=True)
    raise typer.Exit(code)


def _print_scores(console: Console, scores: Mapping[str, float], where: str) -> None:
    from bayesify.serving.card import shown, words_of

    say(console, f"Scores of {where}:")
    for name, value in scores.items():
        say(console, f"  {shown(value)}  {words_of(name)}", soft_wrap=True)
