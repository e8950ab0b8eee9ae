"""Results of papers as the checks of claims read them."""

import errno
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Verdict = tuple[bool | None, str]
"""Whether a claim is shown, `None` where nothing tells, and the numbers in words."""


def read(path: Path) -> Any:
    """A file of results."""
    return json.loads(path.read_text())


def matching(folder: Path, pattern: str) -> list[Path]:
    """Files of results in order.

    Raises:
        FileNotFoundError: If there are none: a check without files shows nothing.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no results", str(folder / pattern))
    return found


def medians_by_system(outcomes: list[dict[str, Any]], key: str) -> dict[str, float]:
    """By system, the median of a number over seeds."""
    return {
        system: statistics.median(one[key] for one in outcomes if one["system"] == system)
        for system in dict.fromkeys(one["system"] for one in outcomes)
    }


def listed(values: Mapping[Any, float], digits: int = 2) -> str:
    """Numbers with their names."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
