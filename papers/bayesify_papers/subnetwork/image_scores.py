"""Scores of stored predictions on shifted images."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify import metrics
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.rows import Row, show
from bayesify_papers.shared.scores import reliability_curve
from bayesify_papers.shared.sources import as_labels

REJECTED_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of rejected images at which the rejection-classification curve is tabulated."""


def score(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of every variant with predictions in a folder.

    Args:
        folder: Folder that `shifted_images.run` wrote.

    Returns:
        By variant: `shifted` with `accuracy, nll, ece, brier` of each set, `reliability` with the curve of each set, `ood`
        with AUROC by entropy and by maximum probability, and `rejection` with accuracies at `REJECTED_SHARES`, where every
        out-of-distribution image counts as an error.

    Raises:
        FileNotFoundError: If there are no predictions.
    """
    names = records.read(folder / "run.json", needed=True)["systems"]
    with np.load(folder / "labels.npz", allow_pickle=False) as stored:
        labels = as_labels(stored["labels"])
    return {name: _score(predictions.read(folder / f"{name}.npz"), labels) for name in names}


def _score(made: Mapping[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    scores: dict[str, Any] = {"shifted": {}, "reliability": {}, "ood": {}, "rejection": {}}
    plain = next(prediction for name, prediction in made.items() if name.startswith("shifted/"))
    for name, prediction in made.items():
        kind, _, rest = name.partition("/")
        if kind == "shifted":
            scores["shifted"][rest] = metrics.evaluate(prediction, labels)
            scores["reliability"][rest] = reliability_curve(prediction, labels)
            continue
        ranked = metrics.ood(plain, prediction)
        scores["ood"][rest] = {key: ranked[key] for key in ("auroc_entropy", "auroc_max_probability")}
        curve = metrics.rejection_curve(plain, labels, outside=prediction, num_points=len(REJECTED_SHARES))
        scores["rejection"][rest] = [float(value) for value in curve.accuracy]
    return scores


def evaluate(folder: Path, read: Callable[[Path], list[Row]], judge: Callable[[Mapping[str, Any]], list[str]]) -> int:
    """Score the predictions of a run, write and print `results.json`, and return the exit status.

    Args:
        folder: Folder that `shifted_images.run` wrote.
        read: Function from the folder to rows.
        judge: Function from the scores to lines of text.
    """
    scores = score(folder)
    lines = judge(scores)
    about = records.read(folder / "run.json")
    records.write(folder / "results.json", {**about, "scores": scores, "requirement": lines})
    print("\n\n".join([show(read(folder)), *lines]))
    return 0
