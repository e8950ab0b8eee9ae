"""The folder of a comparison: what it was made from, and the results of its runs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.compare.errors import InputError
from bayesify.compare.problems import Problem

SETTINGS, DATA, RESULTS, REPORT = "settings.json", "data.npz", "results.json", "report.html"
FORMAT = 1
WORDS = {"target": "--target", "seed": "--seed", "format": "format"}
"""How settings are called in messages."""


def open_folder(folder: Path, problem: Problem, settings: Mapping[str, Any], *, resume: bool) -> Path:
    """Make the folder ready for runs: data and settings are in it, and nothing that does not belong to them.

    Args:
        folder: Made if it is not there.
        problem: What runs read.
        settings: What results depend on, as plain data.
        resume: Whether results of earlier runs are wanted.

    Returns:
        The file with the data, which runs read.

    Raises:
        InputError: If the folder cannot be written, holds results that nobody asked to go on with, or results of other settings.
    """
    wanted = {"format": FORMAT, "fingerprint": problem.fingerprint, **settings}
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: is a file; give a folder")
    known = _read(folder / SETTINGS)
    finished = len(list((folder / "jobs").glob("*.json")))
    if known is not None and finished and not resume:
        raise InputError(
            f"{folder}: holds {finished} finished runs; go on with them by --resume, or choose another folder by --out"
        )
    if known is not None and finished:
        for key, value in wanted.items():
            if known.get(key) != value:
                raise InputError(
                    f"{folder}: its runs were made with {_other(key, known.get(key), value)}; "
                    "use the same, or choose another folder by --out"
                )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, **problem.arrays())  # type: ignore[arg-type]
        write_bytes(folder / DATA, buffer.getvalue())
        write_bytes(folder / SETTINGS, json.dumps(wanted, indent=1).encode())
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}; choose another folder by --out") from error
    return (folder / DATA).absolute()


def _other(key: str, known: Any, wanted: Any) -> str:
    """What differs, in words."""
    if key == "fingerprint":
        return "another table, or with another --task, --ignore, --ood or --max-rows"
    if key == "quick":
        return "--quick" if known else "full training, without --quick"
    return f"{WORDS.get(key, key)} {known}, not {wanted}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: If it cannot be written; what was there before is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def drop_failed(folder: Path) -> int:
    """Forget runs that failed, so that they are tried again; returns how many."""
    dropped = 0
    for path in (folder / "jobs").glob("*.json"):
        stored = _read(path)
        if stored is None or "error" in stored.get("result", {}):
            path.unlink()
            dropped += 1
    return dropped
