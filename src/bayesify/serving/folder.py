"""A trained estimator in a folder: its file, what it was made from, and a page about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bayesify.serving.about import FORMAT, About
from bayesify.serving.card import render_card
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.storage import write_file
from bayesify.storage.save_load import load, save
from bayesify.tables.errors import InputError
from bayesify.version import __version__

MODEL, ABOUT, CARD = "model.safetensors", "model.json", "MODEL.md"
"""Names of the files: the estimator with preparation and recalibration, the facts about it, and the page."""


@dataclass(frozen=True)
class ModelFolder:
    """An estimator and what is known about it.

    Args:
        estimator: Trained on a data frame.
        about: The facts.
    """

    estimator: BayesianRegressor | BayesianClassifier
    about: About

    def write(self, folder: Path) -> None:
        """Write the three files; the estimator comes first, so that a folder with facts is whole.

        Raises:
            OSError: If the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        save(self.estimator, folder / MODEL)
        write_file(folder / CARD, render_card(self.about))
        facts = json.loads(json.dumps(self.about.config()))
        facts["sha256"] = _digest(facts)
        write_file(folder / ABOUT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder that `write` made.

        Raises:
            InputError: If it is no such folder, its files are damaged or altered, or another version's.
        """
        about = read_about(folder)
        try:
            estimator = load(folder / MODEL)
        except (ValueError, OSError) as error:
            raise InputError(f"{folder / MODEL}: cannot be read: {error}") from error
        expected = BayesianClassifier if about.task == "classification" else BayesianRegressor
        if not isinstance(estimator, expected):
            raise InputError(f"{folder}: {ABOUT} tells of a {about.task}, and {MODEL} holds none; train again")
        left_out = [note for note in estimator.choices_["left_out"] if " was left out: " in note]
        known = [name for name in estimator.feature_names_in_ if not any(f"{name!r}" in note for note in left_out)]
        if [column.name for column in about.columns] != known:
            raise InputError(f"{folder}: {ABOUT} and {MODEL} are about different columns; train again")
        return cls(estimator, about)


def read_about(folder: Path) -> About:
    """The facts in a folder, without its model.

    Raises:
        InputError: See `ModelFolder.read`.
    """
    if not folder.is_dir():
        what = "is a file; give the folder that bayesify fit wrote" if folder.exists() else "there is no such folder"
        raise InputError(f"{folder}: {what}")
    missing = [name for name in (ABOUT, MODEL) if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: holds no {missing[0]}; give the folder that bayesify fit wrote")
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise InputError(
                f"{folder}: was written by bayesify {found['version']} in format {found['format']}, and bayesify {__version__} "
                f"reads format {FORMAT}; fit again with this version, or use that one"
            )
        if found.pop("sha256") != _digest(found):
            raise ValueError("contents do not match the checksum")
        return About.restore(found)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{folder / ABOUT}: is damaged or altered; train again") from error


def _digest(facts: Mapping[str, Any]) -> str:
    """A checksum of plain data, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
