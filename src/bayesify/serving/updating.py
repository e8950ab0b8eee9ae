"""Update of a model in a folder: a new model, trained on the old and the new rows, replaces the old model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bayesify.serving.about import About
from bayesify.serving.fitting import fingerprint, fit_table, read_rows
from bayesify.serving.folder import ModelFolder, pack_rows, unpack_rows
from bayesify.tables import InputError, Reading
from bayesify.tables.columns import kind_of
from bayesify.tables.targets import Task, label_of
from bayesify.tables.written_numbers import DECIMAL_COMMAS, is_number

if TYPE_CHECKING:
    from pandas import DataFrame

FITTED_ELSEWHERE = ("method", "random_state", "network", "verbose")
"""Parameters of the estimator that an update passes separately."""
MIN_REPEATED_SHARE = 0.5
"""If the folder already stores at least this share of the table's rows, an update says so."""


def like_training(about: About, reading: Reading) -> Reading:
    """Options for reading a second table such that ambiguous cells are read as in the training table."""
    texts = [*about.identifiers, *(column.name for column in about.columns if column.kind == "text")]
    if about.task == "classification" and any(map(_only_text, about.target_column.texts)):
        texts.append(about.target)
    missing = (*about.missing, *reading.missing)
    return replace(reading, missing=missing, texts=tuple(texts), commas=about.commas)


def _only_text(label: str) -> bool:
    """Whether the label of a class, such as `north` or `007`, cannot come from a number or a truth value in the training rows."""
    return label_of(float(label)) != label if is_number(label) else label not in ("True", "False")


def update_table(
    folder: Path,
    frame: DataFrame,
    *,
    name: str = "the table",
    notes: Sequence[str] = (),
    missing: Sequence[str] = (),
    keep_rows: bool = False,
    verbose: bool = False,
) -> ModelFolder:
    """Train a folder's method again on the old rows and on new rows from a table, with the folder's target, columns and seed.

    The result is equal to the model that `fit_table` trains on all rows. New texts and new classes are allowed. The folder itself
    is not changed; `ModelFolder.write` replaces its contents later.

    Args:
        folder: Folder that `bayesify fit` wrote. If the folder stores its training rows (`--keep-rows`), the table must contain
            only new rows. Otherwise the table must begin with the training rows.
        frame: The table, read with the options from `like_training`.
        name: Name of the table.
        notes: Sentences that say how the table was read.
        missing: Further texts that stand for empty cells.
        keep_rows: Whether the new folder stores the training rows; it always does if the old folder stores its rows.
        verbose: Whether to show progress.

    Raises:
        InputError: If the folder cannot be read, if the table must begin with the training rows but does not, if the table lacks
            the target or another column, or if a column contains other kinds of cells than in training.
    """
    model = ModelFolder.read(folder)
    about, kept = model.about, unpack_rows(model.rows) if model.rows else None
    task: Task = "classification" if about.task == "classification" else "regression"
    used = [column.name for column in about.columns]
    _check_columns(about, frame, folder, name)
    others = [f"Column {column!r} is not used." for column in frame.columns if column not in (*used, about.target)]
    commas = {*about.commas, *frame.attrs.get(DECIMAL_COMMAS, ())}
    frame = frame[[*used, about.target]]
    every = frame if kept is None else _joined(kept, frame)
    others += _repeated_rows(kept, frame, name)
    every.attrs[DECIMAL_COMMAS] = [column for column in every.columns if column in commas]
    if kept is None:
        _check_rows(about, task, frame, folder, name)
    given = model.estimator.get_params(deep=False)
    options = {key: value for key, value in given.items() if key not in FITTED_ELSEWHERE}
    updated = fit_table(
        every, about.target, name=about.table if kept is None else f"{about.table} and {name}", notes=(*notes, *others),
        method=str(about.choices["method"]), task=task, seed=about.seed, keep_rows=keep_rows or kept is not None,
        missing=tuple(dict.fromkeys((*about.missing, *missing))), verbose=verbose, **options,
    )  # fmt: skip
    return replace(updated, about=replace(updated.about, identifiers=about.identifiers))


def _check_columns(about: About, frame: DataFrame, folder: Path, name: str) -> None:
    """Raise `InputError` if a column of the table is missing or contains another kind of cells than in training."""
    for column in (*(column.name for column in about.columns), about.target):
        if column not in frame.columns:
            raise InputError(
                f"{name}: column {column!r}, which {folder} needs, is missing; give all columns of the training rows"
            )
    for known in about.columns:
        if known.kind == "text" or not frame[known.name].notna().any():
            continue
        if (kind := kind_of(known.name, frame[known.name])) != known.kind:
            held = f"holds {kind}s, but it held {known.kind}s when {folder} was trained"
            raise InputError(f"{name}: column {known.name!r} {held}; give {known.kind}s")


def _joined(kept: DataFrame, frame: DataFrame) -> DataFrame:
    import pandas

    return pandas.concat([kept.astype(object), frame.astype(object)], ignore_index=True).infer_objects()


def _repeated_rows(kept: DataFrame | None, frame: DataFrame, name: str) -> list[str]:
    """One warning if the folder already stores most rows of the table, for example because the same file was passed twice."""
    if kept is None or not len(frame):
        return []
    import pandas

    # Pack the table as the stored rows were packed, so that dates and numbers compare equal.
    every = _joined(kept, unpack_rows(pack_rows(frame[kept.columns])))
    codes = pandas.util.hash_pandas_object(every, index=False)
    repeated = int(codes[len(kept) :].isin(codes[: len(kept)]).sum())
    if repeated < MIN_REPEATED_SHARE * len(frame):
        return []
    return [
        f"The folder already stores {repeated:,} of the {len(frame):,} rows of {name}, and these rows now count twice. "
        "If they are the same observations, train again with --force on a table that has each of them once."
    ]


def _check_rows(about: About, task: Task, frame: DataFrame, folder: Path, name: str) -> None:
    used = [column.name for column in about.columns]
    values, inputs = read_rows(frame, about.target, name, task, ())[1:]
    count = about.num_rows
    if len(values) <= count or fingerprint(inputs[used].iloc[:count], values[:count]) != about.fingerprint:
        raise InputError(
            f"{folder}: the folder does not store its {count:,} training rows, so {name} must begin with these rows, "
            f"but it does not; put the old rows at the top of {name}, or train on all rows with --force. To store the rows in the "
            "folder, use --keep-rows"
        )
