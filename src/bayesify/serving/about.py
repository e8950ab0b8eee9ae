"""The facts about a model in a folder: its table, columns, choices and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesify.arguments.plain import Plain
from bayesify.serving.judged import Group
from bayesify.version import __version__

FORMAT = 4
"""Of the folder."""
MAX_TEXT_SIGNS = 80
"""Signs of a text that the folder keeps."""


@dataclass(frozen=True)
class Column(Plain):
    """A column of the training rows.

    Args:
        name: Name of the column.
        kind: `"number"`, `"date"` or `"text"`.
        low: Its smallest number or date.
        high: Its largest number or date.
        texts: Its most frequent texts.
        num_different: Different cells.
        num_missing: Empty cells.
        knots: Quantiles of its numbers, or of its dates in days, 21 at most.
        shares: Share of the cells that are not empty up to each of these, or with each of the texts.
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
    """What is known about a model in a folder.

    Args:
        table: Name of the file that it was trained on.
        target: The column that it predicts.
        task: `"regression"` or `"classification"`.
        num_rows: Rows that it was trained on.
        fingerprint: A hash of these rows.
        columns: What they hold, without the target.
        target_column: What the target holds.
        choices: Method, likelihood and transform that were chosen, and what they scored.
        scores: On rows that the model had not seen, by name.
        scored_on: Which rows these were, in words.
        notes: How the table was read, in sentences.
        seed: Seed of the training.
        missing: Texts that stand for empty cells, beside the usual ones.
        commas: Columns whose numbers the table writes with a decimal comma.
        version: Of bayesify.
        format: Of the folder.
        groups: How well groups of rows are predicted that the model had not seen.
        groups_on: Which rows these were, in words.
        confusion: Rows of each class by the class that was predicted for them, of the same rows.
        rows_sha256: Checksum of the file of training rows; empty where the folder holds none.
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
    format: int = FORMAT
    groups: tuple[Group, ...] = ()
    groups_on: str = ""
    confusion: tuple[tuple[int, ...], ...] = ()
    rows_sha256: str = ""

    @property
    def remarks(self) -> list[str]:
        """How the table was read and which columns were left out, each sentence once."""
        return list(dict.fromkeys((*self.notes, *self.choices.get("left_out", ()))))
