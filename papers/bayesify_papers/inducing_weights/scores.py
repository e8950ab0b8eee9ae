"""Scores of stored predictions, and their tables beside the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify_papers.inducing_weights.systems import SYSTEMS
from bayesify_papers.shared import predictions
from bayesify_papers.shared.published import published
from bayesify_papers.shared.scores import CLASSIFICATION
from bayesify_papers.shared.tables import number, table

PAPER = published("inducing_weights")

MEASURES = ("max_probability", "entropy", "mutual_information")


def score(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of every system whose predictions lie in a folder.

    Args:
        folder: What `classification` wrote: `labels.npz`, and one file per system.

    Returns:
        By system: `test` and each corrupted set with `accuracy, nll, ece, brier`; each set from elsewhere with the scores of
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


def tables(scores: dict[str, dict[str, Any]], dataset: str, run: dict[str, Any]) -> str:
    """All tables as text.

    Args:
        scores: From `score`.
        dataset: What the systems were trained on.
        run: Facts of the run: `parameters` and `seconds` by system, and `settings`.
    """
    return "\n\n".join([_in_distribution(scores, dataset, run), _outside(scores, dataset), _corrupted(scores, dataset)])


def _in_distribution(scores: dict[str, dict[str, Any]], dataset: str, run: dict[str, Any]) -> str:
    paper = PAPER["cifar10"] if dataset == "cifar10" else {}
    rows = []
    for name, system in scores.items():
        test, theirs = system["test"], paper.get(name, {})
        rows.append(
            [
                SYSTEMS[name].title,
                f"{run.get('parameters', {}).get(name, 0):,}",
                number(run.get("seconds", {}).get(name), 0),
                number(100 * test["accuracy"], 2),
                number(test["nll"]),
                number(100 * test["ece"], 2),
                number(test["brier"]),
                *(number(theirs.get(key), 2) for key in CLASSIFICATION),
            ]
        )
    header = ["system", "parameters", "train s", "acc %", "nll", "ece %", "brier"]
    header += ["paper acc", "paper nll", "paper ece", "paper brier"]
    source = (
        "the paper's columns are its table 5, a ResNet-50 trained 200 to 300 epochs"
        if paper
        else f"the paper has no numbers for {dataset}"
    )
    return table(header, rows, f"In distribution, {dataset}; {source}.")


def _outside(scores: dict[str, dict[str, Any]], dataset: str) -> str:
    sets = list(dict.fromkeys(name for system in scores.values() for name in system["ood"]))
    header = ["system", "outside", *(f"{kind} {short}" for short in ("p", "H", "MI") for kind in ("auroc", "aupr"))]
    rows = [
        [SYSTEMS[name].title, outside]
        + [number(system["ood"][outside][f"{kind}_{by}"]) for by in MEASURES for kind in ("auroc", "aupr")]
        for outside in sets
        for name, system in scores.items()
        if outside in system["ood"]
    ]
    title = "Out of distribution, by maximum probability (p), entropy (H) and mutual information (MI)"
    if dataset != "cifar10":
        return table(header, rows, f"{title}; the paper has no numbers for {dataset}.")
    rows += [
        [SYSTEMS[name].title + ", paper", outside, number(auroc, 2), number(aupr, 2), "-", "-", "-", "-"]
        for name, theirs in PAPER["ood"].items()
        for outside, (auroc, aupr) in theirs.items()
    ]
    return table(header, rows, f"{title}; the paper's rows are its table 3, other sets than ours.")


def _corrupted(scores: dict[str, dict[str, Any]], dataset: str) -> str:
    by_severity = {name: means_by_severity(system["corrupted"]) for name, system in scores.items()}
    severities = sorted({severity for means in by_severity.values() for severity in means})
    kinds = sorted({name.rpartition("-")[0] for system in scores.values() for name in system["corrupted"]})
    header = [
        "system",
        *(f"acc {severity}" for severity in severities),
        *(f"ece {severity}" for severity in severities),
    ]
    rows = [
        [SYSTEMS[name].title]
        + [number(100 * means[severity][key], 2) for key in ("accuracy", "ece") for severity in severities]
        for name, means in by_severity.items()
        if means
    ]
    note = f"Corrupted test images, percent, mean over {', '.join(kinds) or 'no corruptions'}"
    if dataset != "cifar10":
        return table(header, rows, f"{note}; the paper has no numbers for {dataset}.")
    rows += [
        [SYSTEMS[name].title + ", paper"]
        + [number(theirs[key][severity - 1], 2) for key in ("accuracy", "ece") for severity in severities]
        for name, theirs in PAPER["corrupted"].items()
    ]
    return table(header, rows, f"{note}; the paper's rows are its tables 11 and 12, means over 19 corruptions.")


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
