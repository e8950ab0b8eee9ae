"""Tables from files, from standard input, and from named data sets with a known target."""

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
    """A table that was read."""

    frame: DataFrame
    name: str  # short name of the table; see `short_name`
    where: str  # name of the table in messages
    notes: tuple[str, ...] = ()  # sentences that say how the table was read
    target: str | None = None  # target column of a named data set
    task: Task | None = None  # task of a named data set
    standard: tuple[
        tuple[np.ndarray, np.ndarray], ...
    ] = ()  # training and test rows of the splits that a data set defines


def read_source(data: str, reading: Reading | None = None) -> Source:
    """Read a table from the file with this path, from standard input (`-`), or from the UCI or scikit-learn data set with this
    name."""
    if not is_path(data):
        return _named(data)
    frame, notes = read_table(Path(data), reading)
    return Source(frame, short_name(data), "standard input" if data == STDIN else Path(data).name, tuple(notes))


def short_name(data: str) -> str:
    """The file name without its extensions, reduced to characters that are safe in names; used to name folders of results."""
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
        raise InputError(f"{name}: this is neither a file nor a known data set; {suggest(name, known)}")
    table = uci.load(short)
    frame = DataFrame(table.X, columns=[f"x{index + 1}" for index in range(table.X.shape[1])])
    frame["y"] = table.y.reshape(-1)
    pairs = tuple((split.train, split.test) for split in table.splits)
    return Source(frame, name, name, (), "y", table.task, pairs)
