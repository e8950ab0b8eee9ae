"""The folder of a comparison: its settings, its data, and the results of its runs."""

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
FORMAT_VERSION = 6
OTHER_FOLDER_REMEDY = "choose another folder with --out"


@contextmanager
def open_folder(folder: Path, table: ComparedTable, settings: Mapping[str, Any], *, resume: bool) -> Iterator[Path]:
    """Lock the folder, write the data and the settings, and yield the path of the data file that the runs read.

    Raises `InputError` if the folder cannot be written or is in use, if it contains results and `resume` is false, or if these
    results have other or unreadable settings.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: this path is a file; give a folder")
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK))
            _check(folder, wanted := {"format": FORMAT_VERSION, "fingerprint": table.fingerprint, **settings}, resume)
            buffer = io.BytesIO()
            np.savez(buffer, **table.arrays())  # type: ignore[arg-type]
            write_file(folder / DATA, buffer.getvalue())
            write_file(folder / SETTINGS, json.dumps(wanted, indent=1).encode())
        except InUse as error:
            raise InputError(f"{folder}: {error}; wait until the folder is free, or {OTHER_FOLDER_REMEDY}") from error
        except OSError as error:
            reason = f"the folder cannot be written ({error.strerror or error})"
            raise InputError(f"{folder}: {reason}; {OTHER_FOLDER_REMEDY}") from error
        yield (folder / DATA).absolute()


def _check(folder: Path, wanted: Mapping[str, Any], resume: bool) -> None:
    """Raise `InputError` if the folder has finished runs that must not be overwritten or that may have other settings."""
    finished = len(list((folder / "jobs").glob("*.json")))
    if not finished:
        return
    try:
        known = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError, RecursionError):
        known = None
    if not isinstance(known, dict):
        unknown = f"but their settings are unknown because {SETTINGS} is missing or damaged"
        raise InputError(
            f"{folder}: the folder has {finished} finished runs, {unknown}; delete the folder, or {OTHER_FOLDER_REMEDY}"
        )
    if not resume:
        held = f"the folder already holds {finished} finished runs"
        raise InputError(f"{folder}: {held}; continue with --resume, or {OTHER_FOLDER_REMEDY}")
    for key, value in wanted.items():
        if known.get(key) != value:
            other = f"the runs in this folder were made with {_other(key, known.get(key), value)}"
            raise InputError(f"{folder}: {other}; use the same settings, or {OTHER_FOLDER_REMEDY}")


def _other(key: str, known: Any, wanted: Any) -> str:
    if key == "fingerprint":
        return "a different table, or with a different --task, --ignore, --group, --time, --ood or --max-rows"
    if key == "quick":
        return "--quick" if known else "full training, without --quick"
    return f"{key if key == 'format' else f'--{key}'} {known} instead of {wanted}"


def drop_failed(folder: Path) -> None:
    """Delete the results of runs that failed or whose files are damaged, so that these runs are repeated."""
    for path in (folder / "jobs").glob("*.json"):
        found = read_result(folder, path.stem)
        if found is None or any("error" in run for run in found[1].get("runs", [])):
            path.unlink()
