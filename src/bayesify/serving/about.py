"""The facts about a model in a folder: its table, columns, choices and scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesify.arguments.plain import Plain
from bayesify.serving.judged import Group
from bayesify.version import __version__

FORMAT_VERSION = 5
"""Version of the folder's format."""
MAX_TEXT_CHARACTERS = 80
"""Texts in the folder are cut after this many characters."""


@dataclass(frozen=True)
class Column(Plain):
    """A column of the training rows.

    In a column of numbers or dates, `knots` are quantiles of the column, and `shares` contains, for each knot, the fraction of
    nonempty cells that are at most this knot. In a text column, `shares` contains, for each text in `texts`, the fraction of
    nonempty cells that are equal to this text.
    """

    name: str
    kind: str  # `"number"`, `"date"` or `"text"`
    low: float | str | None = None  # smallest number or date
    high: float | str | None = None  # largest number or date
    texts: tuple[str, ...] = ()  # most frequent texts
    num_different: int = 0  # number of different cells
    num_missing: int = 0  # number of empty cells
    knots: tuple[float, ...] = ()  # quantiles of the numbers, or of the dates in days; at most 21
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class About(Plain):
    """Facts about a model in a folder.

    Args:
        table: Name of the file on which the model was trained.
        target: Name of the column that the model predicts.
        task: `"regression"` or `"classification"`.
        num_rows: Number of training rows.
        fingerprint: Hash of the training rows.
        columns: Contents of all columns except the target.
        target_column: Contents of the target column.
        choices: Chosen method, likelihood and transform, and their scores.
        scores: Mapping from names to scores, computed on rows that the model had not seen.
        scored_on: Description of the scored rows.
        notes: Sentences that say how the table was read.
        seed: Seed of the training run.
        missing: Texts that stand for empty cells, in addition to the usual texts.
        commas: Columns whose numbers have a decimal comma in the table.
        version: Version of bayesify that wrote the folder.
        format: Version of the folder's format.
        groups: Scores of groups of rows that the model had not seen.
        groups_on: Description of the rows from which `groups` and `confusion` were computed.
        confusion: Number of rows for each true class and each predicted class.
        identifiers: Columns that the model does not use and whose cells are all different in the training rows.
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
    identifiers: tuple[str, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Sentences, without duplicates, that say how the table was read and which columns were left out."""
        return list(dict.fromkeys((*self.notes, *self.choices.get("left_out", ()))))
