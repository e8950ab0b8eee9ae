"""Scores of stored predictions, and what is asked of them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify_papers.inducing_weights.systems import SYSTEMS
from bayesify_papers.shared import predictions


def score(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of every system whose predictions lie in a folder.

    Args:
        folder: What `classification` wrote: `labels.npz`, and one file per system.

    Returns:
        By system: `test` and each corrupted set with `accuracy, nll, ece, brier`; each foreign set with the scores of
        `metrics.ood`.

    Raises:
        FileNotFoundError: If there are no predictions.
    """
    if not (folder / "labels.npz").is_file():
        raise FileNotFoundError(f"{folder} holds no labels.npz; give the folder that a run wrote")
    with np.load(folder / "labels.npz", allow_pickle=False) as stored:
        labels = {name: torch.from_numpy(stored[name].astype(np.int64)) for name in stored}
    found = {name: folder / f"{name}.npz" for name in SYSTEMS if (folder / f"{name}.npz").is_file()}
    if not found:
        raise FileNotFoundError(f"{folder} holds no predictions; give the folder that a run wrote")
    return {name: _score_system(predictions.read(path), labels) for name, path in found.items()}


def _score_system(stored: dict[str, predictions.StoredPrediction], labels: dict[str, Tensor]) -> dict[str, Any]:
    scores: dict[str, Any] = {"corrupted": {}, "ood": {}}
    for name, prediction in stored.items():
        kind, _, rest = name.partition("/")
        if kind == "test":
            scores["test"] = metrics.evaluate(prediction, labels["test"])
        elif kind == "corrupted":
            scores["corrupted"][rest] = metrics.evaluate(prediction, labels["test"][: len(prediction)])
        else:
            scores["ood"][rest] = metrics.ood(stored["test"], prediction)
    return scores


def means_by_severity(corrupted: dict[str, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Accuracy and ECE at each severity, means over the kinds of corruption."""
    grouped: dict[int, list[dict[str, float]]] = {}
    for name, entry in corrupted.items():
        grouped.setdefault(int(name.rpartition("-")[2]), []).append(entry)
    return {
        severity: {key: float(np.mean([entry[key] for entry in entries])) for key in ("accuracy", "ece")}
        for severity, entries in grouped.items()
    }


def requirement(scores: dict[str, dict[str, Any]]) -> list[str]:
    """Whether FFG-U and Ensemble-U reach the deterministic accuracy within 1 % at no more than half its ECE, in words."""
    if "deterministic" not in scores:
        return []
    plain = scores["deterministic"]["test"]
    lines = []
    for name in ("ffg_u", "ensemble_u"):
        if name not in scores:
            continue
        test = scores[name]["test"]
        loss, share = 100 * (plain["accuracy"] - test["accuracy"]), test["ece"] / max(plain["ece"], 1e-9)
        met = "met" if loss <= 1.0 and share <= 0.5 else "NOT met"
        lines.append(
            f"{SYSTEMS[name].title}: {loss:+.2f} points of accuracy below the deterministic network, {share:.2f} of its ECE; "
            f"within 1 point and 0.5: {met}"
        )
    return lines
