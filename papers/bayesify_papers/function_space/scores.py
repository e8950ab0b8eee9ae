"""Scores of stored predictions, and checks against the paper's numbers."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify_papers.function_space.rows import images
from bayesify_papers.function_space.trainings import Training
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.published import published
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import classification_scores, reliability_curve, separation
from bayesify_papers.shared.sources import as_labels

PAPER = published("function_space")
TITLES = {"fsvi": "FSVI", "mfvi": "MFVI", "map": "MAP", "ensemble": "Ensemble of 5"}
NUM_BINS = 20
"""Number of bins of the entropy histograms, from 0 to the logarithm of the number of classes."""


def evaluate(folder: Path, data: str | None = None) -> int:
    """Score the predictions of a run, print the tables and write `results.json`.

    Args:
        data: Folder of the data; by default the environment variable `BAYESIFY_DATA`.

    Raises:
        FileNotFoundError: If the folder has no run.
    """
    about = records.read(folder / "study.json", needed=True)
    settings = about["settings"]
    found = score_all(folder, settings["dataset"], data)
    spent = about.get("seconds", {})
    rows = {row: {**summarize(entries), "seconds": seconds(row, spent)} for row, entries in found.items()}
    lines = requirement(rows) if settings["dataset"] == "fashion_mnist" else []
    curves = {
        name: {row: entries[0][key] for row, entries in found.items()}
        for name, key in (("histograms", "histogram"), ("reliability", "reliability"))
    }
    content = {**about, "rows": rows, "requirement": lines, **curves}
    records.write(folder / "results.json", content)
    print("\n\n".join([show(images(folder)), *lines]))
    return 0


def score_all(folder: Path, dataset: str, data: str | None) -> dict[str, list[dict[str, Any]]]:
    """Scores of every stored training run by row: `fsvi`, `fsvi.CONTEXT`, `fsvi.POINTS`, `mfvi`, `map`, `ensemble`."""
    files = {path.stem: path for path in sorted((folder / "predictions").glob("*.npz"))}
    if not files:
        raise FileNotFoundError(f"{folder} has no predictions; give the folder that a run wrote")
    labels = as_labels(Training("", dataset=dataset, folder=data).source.images().test_labels)
    found: dict[str, list[dict[str, Any]]] = {}
    members: dict[str, list[dict[str, predictions.StoredPrediction]]] = {}
    for name, path in files.items():
        row, seed, *member = name.split("-")
        made = predictions.read(path)
        if member:
            members.setdefault(seed, []).append(made)
        if not member or member == ["0"]:
            found.setdefault(row, []).append(score_one(made, labels))
    for parts in members.values():
        if len(parts) > 1:
            found.setdefault("ensemble", []).append(score_one(predictions.combine(parts), labels))
    return found


def score_one(made: dict[str, predictions.StoredPrediction], labels: Tensor) -> dict[str, Any]:
    """Scores, histograms of entropy and the reliability curve (figure 5) of one prediction."""
    scores = classification_scores(made["test"], labels) | separation(made)
    top = float(np.log(made["test"].class_probs.shape[-1]))
    histogram = {
        "entropy_test" if name == "test" else "entropy_outside": [
            int(count) for count in torch.histc(prediction.entropy.clamp(0, top), NUM_BINS, 0, top)
        ]
        for name, prediction in made.items()
    }
    return {**scores, "histogram": histogram, "reliability": reliability_curve(made["test"], labels)}


def summarize(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every number."""
    keys = [key for key in entries[0] if key not in ("histogram", "reliability")]
    return {
        "seeds": len(entries),
        "mean": {key: statistics.fmean(entry[key] for entry in entries) for key in keys},
        "std": {key: statistics.stdev([entry[key] for entry in entries]) if len(entries) > 1 else 0.0 for key in keys},
        "worst": {
            key: (max if key in ("ece", "nll", "brier") else min)(entry[key] for entry in entries) for key in keys
        },
    }


def seconds(row: str, spent: Mapping[str, float]) -> float | None:
    """Seconds of all training runs of a row together; `None` if they were not recorded."""
    own = []
    for name, one in spent.items():
        made, _, *member = name.split("-")
        if made == "map" if row == "ensemble" else made == row and member in ([], ["0"]):
            own.append(one)
    return round(sum(own), 1) if own else None


def title(row: str) -> str:
    """A row's name in tables."""
    system, _, context = row.partition(".")
    return f"{TITLES.get(system, system)}{f', context {context}' if context else ''}"


def requirement(rows: Mapping[str, Any]) -> list[str]:
    """Lines of text: whether the worst seed of every function-space row reaches the paper's numbers, and which row is best."""
    lines = []
    for row, entry in rows.items():
        if not row.startswith("fsvi") or row.partition(".")[2].isdigit():
            continue
        missed = []
        for key, wanted in PAPER["required"].items():
            value = entry["worst"][key] * (1 if key == "ece" else 100)
            if value > wanted if key == "ece" else value < wanted:
                missed.append(f"{key} {value:.3f}")
        state = "met by every seed" if not missed else "NOT met by the worst seed: " + ", ".join(missed)
        lines.append(f"{title(row)}: accuracy 91 %, ECE 0.02, AUROC 91 % and 86 %: {state}")
    for key, words in (
        ("accuracy", "highest accuracy"),
        ("auroc_mutual_information", "highest AUROC by mutual information"),
        ("auroc_entropy", "highest AUROC by entropy"),
    ):
        best = max(rows, key=lambda row: rows[row]["mean"][key])
        lines.append(f"{words}: {title(best)}, {100 * rows[best]['mean'][key]:.2f} %")
    least = min(rows, key=lambda row: rows[row]["mean"]["ece"])
    lines.append(f"lowest ECE: {title(least)}, {rows[least]['mean']['ece']:.4f}")
    return lines
