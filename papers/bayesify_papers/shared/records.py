"""Result files. They hold results and a record of when, where and how these were made."""

import json
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify import __version__
from bayesify.storage import write_atomically, write_file

PLACES = ("device", "folder")
"""Settings that say where a run computes and where its data are. A run may continue in another place."""


def facts(module: str, arguments: list[str]) -> dict[str, Any]:
    """Record of a run: date, command, hardware and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", module, *arguments]),
        "hardware": {"cpu": _processor(), "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": {"bayesify": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON and atomically replace the file."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def read(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """Content of a file that `write` wrote; empty if there is no file.

    Raises:
        FileNotFoundError: If there is no file and it is needed.
    """
    if not path.is_file():
        if needed:
            raise FileNotFoundError(f"{path.parent} has no file {path.name}; give the folder that a run wrote")
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def begin_run(
    path: Path, settings: Mapping[str, Any], facts: Mapping[str, Any] | None = None, **results: Any
) -> dict[str, Any]:
    """Record of a run: its facts, its settings, and the results of an earlier run to resume from.

    Call this function before anything is trained. A new record is written at once, so that an interrupted first training run cannot
    continue with other settings.

    Args:
        results: Results of a new record by key, such as an empty list.

    Raises:
        ValueError: If the earlier run differs in one of the settings.
    """
    stored, new = read_run(path, settings), {**(facts or {}), **settings}
    content = {**new, **results, **stored, **new}
    if not stored:
        write(path, content)
    return content


def read_run(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Record that `begin_run` wrote; empty if there is none.

    Raises:
        ValueError: If the record differs in one of the settings, except those in `PLACES`. A missing setting equals `None`.
    """
    content = read(path)
    other = _changed({key: content.get(key) for key in settings}, json.loads(json.dumps(settings))) if content else []
    if other:
        raise ValueError(
            f"{path} was written with other settings ({', '.join(other)}); choose another folder, or empty this one"
        )
    return content


def _changed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names of the settings that differ, at any depth."""
    names: list[str] = []
    for key in {**wanted, **stored}:
        former, value = stored.get(key), wanted.get(key)
        if isinstance(former, dict) and isinstance(value, dict):
            names += _changed(former, value)
        elif former != value and key not in PLACES:
            names.append(key)
    return names


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one per line, and atomically replace the file."""
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Write an `.npz` and atomically replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    """Rows of several files, in the order of the files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
