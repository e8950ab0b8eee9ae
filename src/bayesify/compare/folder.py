"""The folder of a comparison: what it was made from, and the results of its runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.compare.compared_table import ComparedTable
from bayesify.scale_out.result_files import read_result
from bayesify.storage import write_file
from bayesify.storage.locks import InUse, locked
from bayesify.tables.errors import InputError

SETTINGS, DATA, RESULTS, REPORT, LOCK = "settings.json", "data.npz", "results.json", "report.html", ".lock"
FORMAT = 5
WORDS = {"target": "--target", "seed": "--seed", "format": "format"}
"""How settings are called in messages."""


@contextmanager
def open_folder(folder: Path, table: ComparedTable, settings: Mapping[str, Any], *, resume: bool) -> Iterator[Path]:
    """Hold the folder, ready for runs: data and settings are in it, and nothing that does not belong to them.

    Yields:
        The file with the data, which runs read.

    Raises:
        InputError: If the folder cannot be written, is in use, holds results that nobody asked to go on with, results of other
            settings, or results whose settings cannot be read.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: is a file; give a folder")
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK))
            _check(folder, wanted := {"format": FORMAT, "fingerprint": table.fingerprint, **settings}, resume)
            buffer = io.BytesIO()
            np.savez(buffer, **table.arrays())  # type: ignore[arg-type]
            write_file(folder / DATA, buffer.getvalue())
            write_file(folder / SETTINGS, json.dumps(wanted, indent=1).encode())
        except InUse as error:
            raise InputError(f"{folder}: {error}; wait for it, or choose another folder by --out") from error
        except OSError as error:
            words = error.strerror or error
            raise InputError(f"{folder}: cannot be written: {words}; choose another folder by --out") from error
        yield (folder / DATA).absolute()


def _check(folder: Path, wanted: Mapping[str, Any], resume: bool) -> None:
    """Refuse a folder whose finished runs are not wanted, or cannot be known to belong to what is wanted."""
    finished = len(list((folder / "jobs").glob("*.json")))
    if not finished:
        return
    known = _read(folder / SETTINGS)
    if known is None:
        raise InputError(
            f"{folder}: what its {finished} finished runs were made from is not known, as {SETTINGS} is missing or damaged; "
            "delete the folder, or choose another by --out"
        )
    if not resume:
        raise InputError(
            f"{folder}: holds {finished} finished runs; go on with them by --resume, or choose another folder by --out"
        )
    for key, value in wanted.items():
        if known.get(key) != value:
            raise InputError(
                f"{folder}: its runs were made with {_other(key, known.get(key), value)}; "
                "use the same, or choose another folder by --out"
            )


def _other(key: str, known: Any, wanted: Any) -> str:
    """What differs, in words."""
    if key == "fingerprint":
        return "another table, or with another --task, --ignore, --group, --time, --ood or --max-rows"
    if key == "quick":
        return "--quick" if known else "full training, without --quick"
    return f"{WORDS.get(key, key)} {known}, not {wanted}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def drop_failed(folder: Path) -> None:
    """Forget runs that failed or whose files are damaged, so that they are done again."""
    for path in (folder / "jobs").glob("*.json"):
        found = read_result(folder, path.stem)
        runs = found[1].get("runs", []) if found is not None and isinstance(found[1], dict) else None
        if runs is None or any("error" in run for run in runs):
            path.unlink()
