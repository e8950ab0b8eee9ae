"""Where, when and how a result was made."""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bayesify.version import __version__


def facts(module: str, arguments: list[str]) -> dict[str, Any]:
    """Date, command, hardware and versions.

    Args:
        module: Dotted name of the script.
        arguments: What it was given.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", module, *arguments]),
        "hardware": {"cpu": _processor(), "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": {"bayesify": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, replacing the file at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
