"""Tables by path or by name: files, standard input, and data sets that come with their target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.tables.errors import InputError
from bayesify.tables.files import STDIN, Reading, is_path, read_table
from bayesify.tables.targets import Task

if TYPE_CHECKING:
    from pandas import DataFrame

SCIKIT_LEARN = {"diabetes": "load_diabetes", "iris": "load_iris", "breast_cancer": "load_breast_cancer"}
"""Data sets that scikit-learn brings, and their loaders there."""
PACKED = (".gz", ".bz2", ".xz", ".zip")
EXTENSIONS = (*PACKED, ".csv", ".tsv", ".txt", ".xlsx", ".xls", ".parquet", ".json", ".jsonl", ".ndjson", ".data")
"""What ends the names of files with tables."""


@dataclass(frozen=True)
class Source:
    """A table that was read.

    Args:
        frame: Its rows.
        name: See `short_name`.
        where: What messages call it.
        notes: How it was read, in sentences.
        target: The column that a data set by name is about; `None` for a file.
        task: What that poses.
        standard: Training and test rows of splits that a data set comes with.
    """

    frame: DataFrame
    name: str
    where: str
    notes: tuple[str, ...] = ()
    target: str | None = None
    task: Task | None = None
    standard: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def read_source(data: str, reading: Reading | None = None) -> Source:
    """A table by path, `-` for standard input, or by name: one of UCI's, or one that scikit-learn brings.

    Raises:
        InputError: If there is no such file or name, or it cannot be read.
        FileNotFoundError: If a data set by name is in no folder and cannot be downloaded.
    """
    if not is_path(data):
        return _named(data)
    frame, notes = read_table(Path(data), reading)
    return Source(frame, short_name(data), "standard input" if data == STDIN else Path(data).name, tuple(notes))


def short_name(data: str) -> str:
    """What folders of a table's results are called after: the file without its extensions, in signs that names may have."""
    if data == STDIN:
        return "table"
    path = Path(data)
    while path.suffix.lower() in EXTENSIONS:
        path = path.with_suffix("")
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in path.name) or "table"


def _named(name: str) -> Source:
    from pandas import DataFrame

    from bayesify.datasets import uci

    if name in SCIKIT_LEARN:
        import sklearn.datasets

        bunch: Any = getattr(sklearn.datasets, SCIKIT_LEARN[name])()
        frame = DataFrame(bunch.data, columns=[str(column) for column in bunch.feature_names])
        labels = getattr(bunch, "target_names", None)
        frame["target"] = bunch.target if labels is None else [str(labels[code]) for code in bunch.target]
        task: Task = "regression" if labels is None else "classification"
        return Source(frame, name, name, (), "target", task)
    short = {file: key for key, file in uci.REGRESSION.items()}.get(name, name)
    known = (*uci.REGRESSION, *uci.CLASSIFICATION, *SCIKIT_LEARN)
    if short not in known:
        raise InputError(f"{name}: neither a file here nor a data set; {suggest(name, known)}")
    table = uci.load(short)
    frame = DataFrame(table.X, columns=[f"x{index + 1}" for index in range(table.X.shape[1])])
    frame["y"] = table.y.reshape(-1)
    pairs = tuple((split.train, split.test) for split in table.splits)
    return Source(frame, name, name, (), "y", table.task, pairs)
