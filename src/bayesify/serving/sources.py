"""Tables by path or by name: files, standard input, and data sets with a known target."""

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
"""Data sets that are part of scikit-learn, and their loaders."""
PACKED_EXTENSIONS = (".gz", ".bz2", ".xz", ".zip")
EXTENSIONS = (
    *PACKED_EXTENSIONS,
    ".csv",
    ".tsv",
    ".txt",
    ".xlsx",
    ".xls",
    ".parquet",
    ".json",
    ".jsonl",
    ".ndjson",
    ".data",
)
"""Extensions of files with tables."""


@dataclass(frozen=True)
class Source:
    """A table that was read.

    Args:
        frame: Rows of the table.
        name: Short name of the table, see `short_name`.
        where: Name of the table in messages.
        notes: Sentences about how the table was read.
        target: Target column, if the table is a data set that was given by name; `None` for a file.
        task: Task, if the table is a data set that was given by name; `None` for a file.
        standard: Training and test rows of the data set's own splits.
    """

    frame: DataFrame
    name: str
    where: str
    notes: tuple[str, ...] = ()
    target: str | None = None
    task: Task | None = None
    standard: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def read_source(data: str, reading: Reading | None = None) -> Source:
    """Read a table by path, from standard input (`-`), or by name: a data set of UCI or of scikit-learn.

    Raises:
        InputError: If there is no such file or name, or the table cannot be read.
        FileNotFoundError: If a data set by name is not on disk and cannot be downloaded.
    """
    if not is_path(data):
        return _named(data)
    frame, notes = read_table(Path(data), reading)
    return Source(frame, short_name(data), "standard input" if data == STDIN else Path(data).name, tuple(notes))


def short_name(data: str) -> str:
    """The name for folders of a table's results: the file name without its extensions, in characters that are safe in names."""
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
        raise InputError(f"{name}: neither a file nor a known data set; {suggest(name, known)}")
    table = uci.load(short)
    frame = DataFrame(table.X, columns=[f"x{index + 1}" for index in range(table.X.shape[1])])
    frame["y"] = table.y.reshape(-1)
    pairs = tuple((split.train, split.test) for split in table.splits)
    return Source(frame, name, name, (), "y", table.task, pairs)
