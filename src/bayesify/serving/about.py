"""The facts about a model in a folder: its table, columns, choices and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesify.arguments.plain import Plain
from bayesify.serving.judged import Group
from bayesify.version import __version__

FORMAT_VERSION = 4
"""Version of the folder's format."""
MAX_TEXT_CHARACTERS = 80
"""Maximum number of characters of a text that the folder keeps."""


@dataclass(frozen=True)
class Column(Plain):
    """A column of the training rows.

    Args:
        name: Name of the column.
        kind: `"number"`, `"date"` or `"text"`.
        low: Smallest number or date of the column.
        high: Largest number or date of the column.
        texts: Most frequent texts of the column.
        num_different: Number of different cells.
        num_missing: Number of empty cells.
        knots: Quantiles of the numbers, or of the dates in days; 21 at most.
        shares: Share of the nonempty cells that are at most each knot, or that equal each of `texts`.
    """

    name: str
    kind: str
    low: float | str | None = None
    high: float | str | None = None
    texts: tuple[str, ...] = ()
    num_different: int = 0
    num_missing: int = 0
    knots: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class About(Plain):
    """Facts about a model in a folder.

    Args:
        table: Name of the file that the model was trained on.
        target: Name of the column that the model predicts.
        task: `"regression"` or `"classification"`.
        num_rows: Number of training rows.
        fingerprint: Hash of the training rows.
        columns: Contents of the columns, without the target.
        target_column: Contents of the target column.
        choices: Method, likelihood and transform that were chosen, and their scores.
        scores: Scores by name, on rows that the model had not seen.
        scored_on: Description of the scored rows.
        notes: Sentences about how the table was read.
        seed: Seed of the training run.
        missing: Texts that stand for empty cells, in addition to the usual ones.
        commas: Columns whose numbers the table writes with a decimal comma.
        version: Version of bayesify that wrote the folder.
        format: Version of the folder's format.
        groups: Scores of groups of rows that the model had not seen.
        groups_on: Description of the rows behind `groups` and `confusion`.
        confusion: Number of rows by true class and predicted class.
        rows_sha256: Checksum of the file of training rows; empty if the folder has no such file.
        identifiers: Columns that the model does not use and that hold a different cell in every training row.
    """

    table: str
    target: str
    task: str
    num_rows: int
    fingerprint: str
    columns: tuple[Column, ...]
    target_column: Column
    choices: Mapping[str, Any]
    scores: Mapping[str, float]
    scored_on: str
    notes: tuple[str, ...] = ()
    seed: int = 0
    missing: tuple[str, ...] = ()
    commas: tuple[str, ...] = ()
    version: str = __version__
    format: int = FORMAT_VERSION
    groups: tuple[Group, ...] = ()
    groups_on: str = ""
    confusion: tuple[tuple[int, ...], ...] = ()
    rows_sha256: str = ""
    identifiers: tuple[str, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Sentences about how the table was read and which columns were left out, without duplicates."""
        return list(dict.fromkeys((*self.notes, *self.choices.get("left_out", ()))))
