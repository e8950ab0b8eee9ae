"""Scores of several seeds of the same systems: means and standard errors."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bayesify_papers.inducing_weights import scores
from bayesify_papers.inducing_weights.systems import SYSTEMS
from bayesify_papers.shared.scores import standard_error

Scores = dict[str, dict[str, Any]]
"""Scores by system, from `scores.score`."""


def score(folder: Path) -> dict[int, Scores]:
    """Scores of every seed, from its folder `seed-...`.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    places = {
        int(place.name.partition("-")[2]): place
        for place in folder.glob("seed-*")
        if any((place / f"{system}.npz").is_file() for system in SYSTEMS)
    }
    if not places:
        raise FileNotFoundError(f"{folder} has no predictions; give the folder that a run wrote")
    return {seed: scores.score(places[seed]) for seed in sorted(places)}


def gather(found: dict[int, Scores]) -> dict[str, dict[str, list[float]]]:
    """Every number by system and name, such as `ece`, `ood/mnist/auroc_entropy` or `corrupted/5/ece`, with one entry per seed."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for by_system in found.values():
        for system, entry in by_system.items():
            numbers = dict(entry["test"])
            numbers |= {
                f"ood/{name}/{key}": value for name, part in entry["ood"].items() for key, value in part.items()
            }
            for severity, part in scores.means_by_severity(entry["corrupted"]).items():
                numbers |= {f"corrupted/{severity}/{key}": value for key, value in part.items()}
            for key, value in numbers.items():
                gathered.setdefault(system, {}).setdefault(key, []).append(value)
    return {system: gathered[system] for system in SYSTEMS if system in gathered}


def summary(found: dict[int, Scores]) -> dict[str, Any]:
    """Means and standard errors of all numbers, and each seed's scores on the test images."""
    gathered = gather(found)
    return {
        "seeds": list(found),
        "mean": {
            system: {key: round(statistics.fmean(values), 5) for key, values in entry.items()}
            for system, entry in gathered.items()
        },
        "standard_error": {
            system: {key: round(standard_error(values) or 0.0, 5) for key, values in entry.items()}
            for system, entry in gathered.items()
            if len(entry["ece"]) > 1
        },
        "by_seed": {
            seed: {
                system: {key: round(value, 5) for key, value in entry["test"].items()} for system, entry in part.items()
            }
            for seed, part in found.items()
        },
    }


def requirement(found: dict[int, Scores]) -> list[str]:
    """Lines of `scores.requirement` for each seed and for the means."""
    gathered = gather(found)
    keys: Iterable[str] = ("accuracy", "ece")
    means = {
        system: {"test": {key: statistics.fmean(entry[key]) for key in keys}} for system, entry in gathered.items()
    }
    lines = [f"seed {seed}, {line}" for seed, part in found.items() for line in scores.requirement(part)]
    return lines + [f"means, {line}" for line in scores.requirement(means)]
