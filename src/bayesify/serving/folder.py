"""A folder with a trained estimator, the facts about it, and its model card."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from bayesify.serving.about import FORMAT_VERSION, About
from bayesify.serving.card import render_card
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.storage import tensor_files, write_file
from bayesify.storage.atomic import write_together
from bayesify.storage.save_load import contents_of, restore
from bayesify.tables.errors import InputError
from bayesify.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MODEL, ABOUT, CARD, FIGURE = "model.safetensors", "model.json", "MODEL.md", "MODEL.svg"
"""Names of the files: the estimator with the facts about it (and the training rows if they are kept), a copy of the facts for
readers, the model card, and the figures of the card."""

Estimator = BayesianRegressor | BayesianClassifier


@dataclass(frozen=True)
class ModelFolder:
    """An estimator and the facts about it.

    Args:
        estimator: Estimator that was trained on a data frame.
        about: Facts about the model.
        remarks: Warnings about the folder, if it was read from disk.
        figure: Figures of the model card, as SVG; empty if there are none, or if the folder was read from disk.
        rows: Training rows, packed by `pack_rows`; empty if the folder stores no rows.
    """

    estimator: Estimator
    about: About
    remarks: tuple[str, ...] = ()
    figure: str = ""
    rows: bytes = b""

    def write(self, folder: Path) -> None:
        """Write all files; `model.safetensors` comes last, see `write_together`. `model.safetensors` alone is the model, so that
        a reader never finds parts of two models.

        Raises:
            OSError: If the folder cannot be written. The folder's old contents then stay unchanged.
        """
        facts, (header, tensors) = self.about.config(), contents_of(self.estimator)
        own = {"about": facts, "rows": torch.tensor(np.frombuffer(self.rows, np.uint8))}
        packed, more = tensor_files.pack(own, "folder")
        with write_together(folder, last=MODEL) as draft:
            tensor_files.write(draft / MODEL, "model", header | {"folder": packed}, tensors | more)
            write_file(draft / ABOUT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
            write_file(draft / CARD, render_card(self.about, FIGURE if self.figure else ""))
            if self.figure:
                write_file(draft / FIGURE, self.figure)
        if not self.figure:
            (folder / FIGURE).unlink(missing_ok=True)  # the figure of an earlier model

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a folder that `write` has written.

        Raises:
            InputError: If this is not a model folder, or if its model is damaged, was changed, or has another format.
        """
        folder = Path(folder)
        path = folder / MODEL
        if not folder.is_dir():
            what = "this path is a file; give the folder that bayesify fit wrote"
            raise InputError(f"{folder}: {what if folder.exists() else 'there is no such folder'}")
        if not path.is_file():
            raise InputError(f"{folder}: the folder has no {MODEL}; give the folder that bayesify fit wrote")
        try:
            header, tensors = tensor_files.read(path, "model")
            own = tensor_files.unpack(header.get("folder", {"about": {"format": "4 or older"}}), tensors)
            facts, writer = own["about"], header["library_version"]
            if facts["format"] != FORMAT_VERSION:
                raise InputError(
                    f"{folder}: the folder was written by bayesify {writer} in format {facts['format']}, but bayesify "
                    f"{__version__} reads format {FORMAT_VERSION}; train again, or use the version that wrote it"
                )
            about, rows = About.restore(facts), own["rows"].numpy().tobytes()
            estimator = restore(path, header, tensors)
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise InputError(f"{path}: the file cannot be read: {reason}; train again, or use a copy") from error
        other = f"{folder} was written by bayesify {about.version}; this is bayesify {__version__}."
        return cls(estimator, about, (other,) if about.version != __version__ else (), rows=rows)


def used_columns(estimator: Estimator) -> tuple[str, ...]:
    """The table's columns from which an estimator predicts, in order; empty if the estimator was trained on an array."""
    columns = estimator.fitted_.columns
    return () if columns is None else columns.used


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
