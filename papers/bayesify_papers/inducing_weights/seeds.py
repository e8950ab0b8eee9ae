"""Scores of several seeds of the same systems: means, standard errors, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bayesify_papers.inducing_weights import scores
from bayesify_papers.inducing_weights.systems import SYSTEMS
from bayesify_papers.shared.scores import standard_error
from bayesify_papers.shared.tables import number, table

Scores = dict[str, dict[str, Any]]
"""What `scores.score` gives: by system."""


def score(folder: Path) -> dict[int, Scores]:
    """Scores of every seed, from its folder `seed-...`.

    Raises:
        FileNotFoundError: If there is none.
    """
    places = {
        int(place.name.partition("-")[2]): place
        for place in folder.glob("seed-*")
        if any((place / f"{system}.npz").is_file() for system in SYSTEMS)
    }
    if not places:
        raise FileNotFoundError(f"{folder} holds no predictions; give the folder that a run wrote")
    return {seed: scores.score(places[seed]) for seed in sorted(places)}


def gather(found: dict[int, Scores]) -> dict[str, dict[str, list[float]]]:
    """Every number by system and by name, such as `ece`, `ood/mnist/auroc_entropy` or `corrupted/5/ece`, one entry a seed."""
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
    """Means and standard errors of all numbers, and the scores in distribution of each seed."""
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


def tables(found: dict[int, Scores], about: dict[str, Any]) -> str:
    """All tables as text: in distribution, elsewhere, corrupted.

    Args:
        found: From `score`.
        about: Facts of the study.
    """
    gathered = gather(found)
    rows = [
        [
            SYSTEMS[system].title,
            str(len(entry["ece"])),
            f"{about['parameters'][system]:,}",
            number(about["seconds"][system], 0),
            *(_cell(entry[key], *units) for key, units in UNITS.items()),
        ]
        for system, entry in gathered.items()
    ]
    header = ["system", "seeds", "parameters", "train s", "acc %", "nll", "ece %", "brier"]
    title = f"Test images of {about['dataset']}, mean and standard error over seeds"
    shared = f"; {about['workers']} trainings shared the device" if about.get("workers", 1) > 1 else ""
    whole = table(header, rows, f"{title}{shared}.")
    parts = [whole, _names(gathered, "ood/", "auroc_", "Other images, AUROC.", 1)]
    parts += [
        _names(gathered, "corrupted/", key, f"Corrupted test images by severity, {title}.", 100)
        for key, title in (("accuracy", "accuracy in %"), ("ece", "ECE in %"))
    ]
    return "\n\n".join(part for part in parts if part)


UNITS = {"accuracy": (100, 2), "nll": (1, 3), "ece": (100, 2), "brier": (1, 3)}
"""Factor and digits of each score in the tables."""


def _names(gathered: dict[str, dict[str, list[float]]], start: str, part: str, title: str, factor: float) -> str:
    names = list(
        dict.fromkeys(key for entry in gathered.values() for key in entry if key.startswith(start) and part in key)
    )
    if not names:
        return ""
    header = ["system", *(name.removeprefix(start).replace(part, "").replace("_", " ").strip("/") for name in names)]
    digits = 3 if factor == 1 else 1
    rows = [
        [SYSTEMS[system].title, *(number(factor * statistics.fmean(entry[name]), digits) for name in names)]
        for system, entry in gathered.items()
    ]
    return table(header, rows, title)


def _cell(values: list[float], factor: float, digits: int) -> str:
    error = standard_error(values)
    mean = number(factor * statistics.fmean(values), digits)
    return mean if error is None else f"{mean} ± {number(factor * error, digits)}"


def requirement(found: dict[int, Scores]) -> list[str]:
    """For each seed and for the means, in words, what `scores.requirement` judges."""
    gathered = gather(found)
    keys: Iterable[str] = ("accuracy", "ece")
    means = {
        system: {"test": {key: statistics.fmean(entry[key]) for key in keys}} for system, entry in gathered.items()
    }
    lines = [f"seed {seed}, {line}" for seed, part in found.items() for line in scores.requirement(part)]
    return lines + [f"means, {line}" for line in scores.requirement(means)]
