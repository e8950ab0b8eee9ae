"""Result files: where, when and how a result was made, and what it is."""

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


def facts(module: str, arguments: list[str]) -> dict[str, Any]:
    """Date, command, hardware and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", module, *arguments]),
        "hardware": {"cpu": _processor(), "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": {"bayesify": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON, replacing the file at once."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def read(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """What `write` wrote; empty where there is no such file.

    Raises:
        FileNotFoundError: If there is no such file and it is needed.
    """
    if not path.is_file():
        if needed:
            raise FileNotFoundError(f"{path.parent} holds no {path.name}; give the folder that a run wrote")
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read_run(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run wrote to go on from; empty if there is none.

    Raises:
        ValueError: If its settings, by any of the given keys, are others.
    """
    content = read(path)
    if content and any(content.get(key) != value for key, value in json.loads(json.dumps(settings)).items()):
        raise ValueError(f"{path} is of other settings; choose another folder, or remove it")
    return content


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one a line, replacing the file at once."""
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Write an `.npz`, replacing the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    """Rows of files in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
