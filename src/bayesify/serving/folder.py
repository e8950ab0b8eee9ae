"""A folder with a trained estimator, the facts about it, and its model card."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bayesify.serving.about import FORMAT_VERSION, About
from bayesify.serving.card import render_card
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.storage import tensor_files, write_file
from bayesify.storage.atomic import read_together, write_together
from bayesify.storage.save_load import contents_of, restore
from bayesify.tables.errors import InputError
from bayesify.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MODEL, ABOUT, CARD, FIGURE, ROWS = "model.safetensors", "model.json", "MODEL.md", "MODEL.svg", "rows.json.gz"
"""Names of the files: the estimator with its preparation and recalibration, the facts about the model, the model card, the
figures of the card, and the training rows if they are kept."""
FACTS_HASH, MODEL_HASH = "facts_sha256", "model_sha256"
"""Keys of two checksums. The checksum of the facts is stored in `model.safetensors`, and the checksum of `model.safetensors` is
stored in `model.json`."""

T = TypeVar("T")
Estimator = BayesianRegressor | BayesianClassifier


@dataclass(frozen=True)
class ModelFolder:
    """An estimator and the facts about it.

    Args:
        estimator: Estimator that was trained on a data frame.
        about: Facts about the model.
        remarks: Warnings about the folder, if it was read from disk.
        figure: Figures of the model card, as SVG; empty if there are none, or if the folder was read from disk.
        rows: Training rows to store in the folder; `None` if no rows are stored, or if the folder was read from disk.
    """

    estimator: Estimator
    about: About
    remarks: tuple[str, ...] = ()
    figure: str = ""
    rows: DataFrame | None = None

    def write(self, folder: Path) -> None:
        """Write all files or none; see `write_together`.

        `model.safetensors` contains the checksum of the facts. `model.json` contains the facts and the checksum of
        `model.safetensors`. The checksums prevent files of two models from being mixed up.

        Raises:
            OSError: If the folder cannot be written. In this case, the old contents of the folder stay unchanged.
        """
        rows = b"" if self.rows is None else pack_rows(self.rows)
        about = replace(self.about, rows_sha256=hashlib.sha256(rows).hexdigest() if rows else "")
        facts = json.loads(json.dumps(about.config()))
        extra = {FIGURE: self.figure.encode(), ROWS: rows}
        header, tensors = contents_of(self.estimator)
        with write_together(folder) as draft:
            bound = {FACTS_HASH: _digest(facts)}
            facts[MODEL_HASH] = tensor_files.write(draft / MODEL, "model", header | bound, tensors)
            facts["sha256"] = _digest(facts)
            write_file(draft / CARD, render_card(self.about, FIGURE if self.figure else ""))
            for name, content in extra.items():
                if content:
                    write_file(draft / name, content)
            write_file(draft / ABOUT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        for name, content in extra.items():
            if not content:
                (folder / name).unlink(missing_ok=True)  # the file belongs to an earlier model

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a folder that `write` has written.

        Raises:
            InputError: If this is not a model folder, or if its files are damaged, were changed, belong to two models, or have
                another format.
        """

        folder = Path(folder)

        def read(about: Path, model: Path) -> tuple[dict[str, Any], About, Any, Any]:
            return *_read_facts(folder, about), *_read_tensors(folder, model)

        facts, about, header, tensors = _read_together(folder, read)
        if (facts.pop(MODEL_HASH, None), header.get(FACTS_HASH)) != (header["sha256"], _digest(facts)):
            raise InputError(
                f"{folder}: {ABOUT} and {MODEL} belong to different models; copy both files of one model, or train again"
            )
        try:
            estimator = restore(folder / MODEL, header, tensors)
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"{folder / MODEL}: the file cannot be read: {error}") from error
        expected = BayesianClassifier if about.task == "classification" else BayesianRegressor
        if not isinstance(estimator, expected):
            raise InputError(
                f"{folder}: {ABOUT} describes a {about.task}, but {MODEL} holds another kind of model; train again"
            )
        if tuple(column.name for column in about.columns) != used_columns(estimator):
            raise InputError(f"{folder}: {ABOUT} and {MODEL} have different columns; train again")
        remarks = []
        if about.version != __version__:
            remarks.append(f"{folder} was written by bayesify {about.version}; this is bayesify {__version__}.")
        return cls(estimator, about, tuple(remarks))


def used_columns(estimator: Estimator) -> tuple[str, ...]:
    """The columns of the table from which an estimator predicts, in order; empty if the estimator was trained on an array."""
    columns = estimator.fitted_.columns
    return () if columns is None else columns.used


def read_about(folder: Path) -> About:
    """Read the facts in a folder but not its model; raises the same errors as `ModelFolder.read`."""
    return _read_together(folder, lambda about, model: _read_facts(folder, about)[1])


def read_kept_rows(folder: Path, about: About) -> DataFrame | None:
    """The training rows of a folder with these facts; `None` if the folder stores no rows. Raises `InputError` for rows of
    another model."""
    if not about.rows_sha256:
        return None

    def read(path: Path) -> DataFrame:
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != about.rows_sha256:
            raise InputError(
                f"{folder / ROWS}: the file is missing or belongs to another model; train again on all rows"
            )
        return unpack_rows(path.read_bytes())

    return read_together(folder, (ROWS,), read)


def _read_together(folder: Path, read: Callable[[Path, Path], T]) -> T:
    """Call a function that reads `model.json` and `model.safetensors`, and make sure that both files belong to the same model."""
    if not folder.is_dir():
        what = "this path is a file; give the folder that bayesify fit wrote"
        raise InputError(f"{folder}: {what if folder.exists() else 'there is no such folder'}")

    def checked(*paths: Path) -> T:
        for name, path in zip((ABOUT, MODEL), paths, strict=True):
            if not path.is_file():
                raise InputError(f"{folder}: the folder has no {name}; give the folder that bayesify fit wrote")
        return read(*paths)

    try:
        return read_together(folder, (ABOUT, MODEL), checked)
    except OSError as error:
        raise InputError(f"{folder}: the folder cannot be read: {error.strerror or error}") from error


def _read_facts(folder: Path, path: Path) -> tuple[dict[str, Any], About]:
    """The contents of `model.json`, checked for format and checksum, as plain data and as an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT_VERSION:
            raise InputError(
                f"{folder}: the folder was written by bayesify {found['version']} in format {found['format']}, but "
                f"bayesify {__version__} reads format {FORMAT_VERSION}; train again with this version, or use bayesify "
                f"{found['version']}"
            )
        if found.pop("sha256") != _digest(found):
            raise ValueError("the contents do not match the checksum")
        return found, About.restore(found)
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / ABOUT}: the file is damaged or was changed; train again") from error


def _read_tensors(folder: Path, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        return tensor_files.read(path, "model")
    except ValueError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InputError(f"{folder / MODEL}: the file cannot be read: {reason}") from error


def _digest(facts: Mapping[str, Any]) -> str:
    """A checksum of plain data, which does not depend on the order of entries."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def pack_rows(frame: DataFrame) -> bytes:
    """Rows as compressed JSON with one list per line: first the column names, then the cells of each row.

    Every cell is read back exactly, even a text that looks empty or looks like a number. Empty cells are stored as `null`, and
    dates and other objects as texts.
    """
    columns = [_cells(frame[name]) for name in frame.columns]
    lines = [list(map(str, frame.columns)), *zip(*columns, strict=True)]
    return gzip.compress("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(), mtime=0)


def unpack_rows(content: bytes) -> DataFrame:
    """Rows from the result of `pack_rows`."""
    import pandas

    names, *rows = (json.loads(line) for line in gzip.decompress(content).decode().split("\n")[:-1])
    cells = zip(*rows, strict=True) if rows else ([] for _ in names)
    # Empty cells are NaN, as in tables that are read from files.
    filled = [[math.nan if cell is None else cell for cell in column] for column in cells]
    return pandas.DataFrame({name: pandas.Series(column) for name, column in zip(names, filled, strict=True)})


def _cells(column: Series) -> list[Any]:
    from pandas.api import types

    empty = column.isna().tolist()
    cells = column.astype(str).tolist() if types.is_datetime64_any_dtype(column.dtype) else column.tolist()
    return [None if gap else _plain(cell) for gap, cell in zip(empty, cells, strict=True)]


def _plain(cell: Any) -> Any:
    """A cell as a number, a truth value or a text."""
    found = cell.item() if hasattr(cell, "item") else cell
    return found if isinstance(found, (bool, int, float, str)) else str(found)
