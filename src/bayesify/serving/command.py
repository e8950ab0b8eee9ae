"""The commands `bayesify fit` and `bayesify predict`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from bayesify.serving.terminal import plain, say

NEEDED = ("pandas", "sklearn")
INTERRUPTED = 130


def fit(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A file with a table: CSV, Parquet, ...")],
    target: Annotated[str, typer.Option(help="The column to predict.")] = "",
    method: Annotated[str, typer.Option(help="auto, or a name from 'bayesify methods'.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the model (default: bayesify-model-NAME).")] = None,
    task: Annotated[
        Literal["regression", "classification"] | None, typer.Option(help="If it is not to be detected.")
    ] = None,
    ignore: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the folder.")] = False,
) -> None:
    """Train on a table and keep the model in a folder, for bayesify predict.

    Texts, dates and empty cells are taken as they are. The folder holds the model, facts about it, and a page to read, MODEL.md;
    its path is the last line.
    """
    errors = _errors("fit")
    from bayesify.tables.errors import InputError
    from bayesify.tables.files import read_table
    from bayesify.tables.targets import find_column

    folder = out or Path(f"bayesify-model-{table.stem}")
    try:
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not force)):
            raise InputError(f"{folder}: is there already; give another --out, or --force to replace it")
        frame, notes = read_table(table)
        column = find_column(frame, target or None, table.name)
        from bayesify.serving.fitting import fit_table  # which reads torch: not before the table is known to be one

        ignored = [name.strip() for name in ignore.split(",") if name.strip()]
        say(errors, f"training on {len(frame):,} rows of {table.name} ...", style="dim")
        model = fit_table(
            frame, column, name=table.name, notes=notes, method=method, task=task, ignore=ignored, seed=seed
        )
        model.write(folder)
    except InputError as error:
        _refuse(errors, f"bayesify fit: {error}", 2)
    except OSError as error:
        _refuse(errors, f"bayesify fit: {folder} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _refuse(errors, "Interrupted; no model was written.", INTERRUPTED)
    console, about = Console(), model.about
    for note in (*about.notes, *about.choices.get("left_out", ())):
        say(console, note, style="dim", soft_wrap=True)
    _print_scores(console, about.scores, about.scored_on)
    say(console, f"Next: bayesify predict {folder} new.csv", soft_wrap=True)
    print(plain(folder.absolute()))


def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What bayesify fit wrote.")],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="A table with the same columns; the target may be absent.")
    ],
    out: Annotated[Path | None, typer.Option(help="CSV to write (default: NEW-predictions.csv, here).")] = None,
    level: Annotated[float, typer.Option(help="Of the intervals: the share of rows that they are to hold.")] = 0.9,
) -> None:
    """Predict the rows of a table with a model in a folder, and write a CSV with intervals or probabilities.

    Rows keep their order. Where the table holds the target, scores are printed. The path of the CSV is the last line.
    """
    errors = _errors("predict")
    from bayesify.tables.errors import InputError

    path = out or Path(f"{new.stem}-predictions.csv")
    try:
        for path_given in (folder, new):
            if not path_given.exists() and str(path_given) != "-":
                raise InputError(f"{path_given}: there is no such file or folder")
        from bayesify.serving.folder import ModelFolder
        from bayesify.serving.predicting import predict_table
        from bayesify.version import __version__

        model = ModelFolder.read(folder)
        if model.about.version != __version__:
            message = f"{folder} was written by bayesify {model.about.version}; this is {__version__}."
            say(errors, message, soft_wrap=True)
        outcome = predict_table(model, new, path, level=level)
    except InputError as error:
        _refuse(errors, f"bayesify predict: {error}", 2)
    except OSError as error:
        _refuse(errors, f"bayesify predict: {path} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _refuse(errors, "Interrupted; nothing was written.", INTERRUPTED)
    console = Console()
    for note in outcome.notes:
        say(console, note, style="dim", soft_wrap=True)
    say(console, f"{outcome.num_rows:,} rows, {outcome.num_unusual:,} of them unlike the training rows.")
    if outcome.scores.num_rows:
        _print_scores(console, outcome.scores.means(), f"{outcome.scores.num_rows:,} rows with {model.about.target}")
    if outcome.scores.unknown:
        say(console, f"{outcome.scores.unknown:,} of these have a class that was not in training; they count as wrong.")
    print(plain(path.absolute()))


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
    from bayesify.serving.card import WORDS, shown

    say(console, f"Scores of {where}:")
    for name, value in scores.items():
        say(console, f"  {shown(value)}  {WORDS.get(name, name.replace('_', ' '))}", soft_wrap=True)
