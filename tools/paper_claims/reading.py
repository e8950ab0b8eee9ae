"""Readers of the papers' results for the checks of claims."""

import errno
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Verdict = tuple[bool | None, str]
"""Whether a claim is shown (`None` if no result can decide), and a sentence of numbers."""


def read(path: Path) -> Any:
    """Content of a results file."""
    return json.loads(path.read_text())


def matching(folder: Path, pattern: str) -> list[Path]:
    """Results files in order.

    Raises:
        FileNotFoundError: If there is no file, because a check without files shows nothing.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no results", str(folder / pattern))
    return found


def medians_by_system(outcomes: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Median of a number over seeds, by system."""
    return {
        system: statistics.median(one[key] for one in outcomes if one["system"] == system)
        for system in dict.fromkeys(one["system"] for one in outcomes)
    }


NAMES = {
    "ffg_u": "FFG-U",
    "ffg_w": "FFG-W",
    "ensemble_u": "Ensemble-U",
    "ensemble_w": "Ensemble-W",
    "deterministic": "Deterministic",
    "fsvi": "FSVI",
    "fsvi.noise": "FSVI",
    "mfvi": "MFVI",
    "map": "MAP",
    "ensemble": "Ensemble",
    "swag": "SWAG",
    "dropout": "Dropout",
    "diagonal": "Diagonal Laplace",
    "subnetwork": "Subnetwork",
    "random": "Random subnetwork",
    "walsh_hadamard": "WHVI",
    "fashion_mnist": "Fashion-MNIST",
    "notmnist": "notMNIST",
}
"""Displayed names of systems and data sets. Other names are displayed as they are stored."""


def listed(values: Mapping[Any, float], digits: int = 2) -> str:
    """Numbers with their names as text."""
    return ", ".join(f"{NAMES.get(name, name)} {value:.{digits}f}" for name, value in values.items())


def prose(*parts: str) -> str:
    """Sentences, from parts without a final period."""
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)
