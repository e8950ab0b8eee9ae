"""Scores of stored predictions, and checks against requirements."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify_papers.inducing_weights.systems import BASELINES, SYSTEMS
from bayesify_papers.shared import predictions
from bayesify_papers.shared.sources import COMPARED_KINDS

TEMPERATURES = [math.exp(step / 50) for step in range(-100, 101)]
"""Temperatures that `calibrated_nll` tries: 0.14 to 7.4 in steps of 2 %, which are too small to matter near the minimum."""


def score(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of every system with predictions in a folder.

    Args:
        folder: Folder that `classification` wrote, with `labels.npz` and one file per system.

    Returns:
        By system: `accuracy, nll, ece, brier` of `test` and of each corrupted set (and `calibrated_nll` of `test`), and the scores
        of `metrics.ood` for each out-of-distribution set.

    Raises:
        FileNotFoundError: If there are no predictions.
    """
    if not (folder / "labels.npz").is_file():
        raise FileNotFoundError(f"{folder} has no labels.npz; give the folder that a run wrote")
    with np.load(folder / "labels.npz", allow_pickle=False) as stored:
        labels = {name: torch.from_numpy(stored[name].astype(np.int64)) for name in stored}
    found = {name: folder / f"{name}.npz" for name in SYSTEMS | BASELINES if (folder / f"{name}.npz").is_file()}
    if not found:
        raise FileNotFoundError(f"{folder} has no predictions; give the folder that a run wrote")
    return {name: _score_system(predictions.read(path), labels) for name, path in found.items()}


def _score_system(stored: dict[str, predictions.StoredPrediction], labels: dict[str, Tensor]) -> dict[str, Any]:
    scores: dict[str, Any] = {"corrupted": {}, "ood": {}}
    for name, prediction in stored.items():
        kind, _, rest = name.partition("/")
        if kind == "test":
            scores["test"] = metrics.evaluate(prediction, labels["test"])
            scores["test"]["calibrated_nll"] = calibrated_nll(prediction.class_probs, labels["test"])
        elif kind == "corrupted":
            scores["corrupted"][rest] = metrics.evaluate(prediction, labels["test"][: len(prediction)])
        else:
            scores["ood"][rest] = metrics.ood(stored["test"], prediction)
    return scores


def calibrated_nll(probs: Tensor, labels: Tensor) -> float:
    r"""NLL in nats after temperature scaling, which removes differences in calibration (Ashukha et al. 2020).

    $p_T \propto p^{1/T}$. The T with the lowest NLL on even-numbered images scores the odd-numbered images, and vice versa.

    Args:
        probs: Probabilities, [B, C].
        labels: Labels, [B].
    """
    logs = probs.double().clamp_min(1e-37).log()
    halves = [(logs[start::2], labels[start::2]) for start in (0, 1)]

    def nll(temperature: float, part: tuple[Tensor, Tensor]) -> float:
        return torch.nn.functional.cross_entropy(part[0] / temperature, part[1]).item()

    best = [min(TEMPERATURES, key=lambda one: nll(one, half)) for half in halves]
    return sum(nll(best[1 - k], half) * len(half[1]) for k, half in enumerate(halves)) / len(labels)


def means_by_severity(
    corrupted: Mapping[str, Mapping[str, float]], kinds: Collection[str] = COMPARED_KINDS
) -> dict[int, dict[str, float]]:
    """Accuracy and ECE at each severity, averaged over kinds of corruption.

    Args:
        corrupted: Scores by kind and severity, such as `contrast-5`.
        kinds: Kinds to average over, if they are there.
    """
    grouped: dict[int, list[Mapping[str, float]]] = {}
    for name, entry in corrupted.items():
        kind, _, severity = name.rpartition("-")
        if kind in kinds:
            grouped.setdefault(int(severity), []).append(entry)
    return {
        severity: {key: float(np.mean([entry[key] for entry in entries])) for key in ("accuracy", "ece")}
        for severity, entries in grouped.items()
    }


def requirement(scores: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of text: whether FFG-U and Ensemble-U are within 1 % of the deterministic accuracy at no more than half its ECE."""
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
