"""Scores of stored predictions on shifted images, and their tables beside the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify import metrics
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.published import published
from bayesify_papers.shared.sources import as_labels
from bayesify_papers.shared.tables import number, table

PAPER = published("subnetwork")
REJECTED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a rejection-classification curve that are tabulated."""


def score(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of every variant whose predictions lie in a folder.

    Args:
        folder: What `shifted_images.run` wrote.

    Returns:
        By variant: `shifted` with `accuracy, nll, ece, brier` of each set, `ood` with AUROC by entropy and by maximum
        probability, and `rejection` with accuracies at `REJECTED` when every other image counts as an error.

    Raises:
        FileNotFoundError: If there are no predictions.
    """
    names = records.read(folder / "run.json", needed=True)["systems"]
    with np.load(folder / "labels.npz", allow_pickle=False) as stored:
        labels = as_labels(stored["labels"])
    return {name: _score(predictions.read(folder / f"{name}.npz"), labels) for name in names}


def _score(made: Mapping[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    scores: dict[str, Any] = {"shifted": {}, "ood": {}, "rejection": {}}
    plain = next(prediction for name, prediction in made.items() if name.startswith("shifted/"))
    for name, prediction in made.items():
        kind, _, rest = name.partition("/")
        if kind == "shifted":
            scores["shifted"][rest] = metrics.evaluate(prediction, labels)
            continue
        ranked = metrics.ood(plain, prediction)
        scores["ood"][rest] = {key: ranked[key] for key in ("auroc_entropy", "auroc_max_probability")}
        curve = metrics.rejection_curve(plain, labels, outside=prediction, num_points=len(REJECTED))
        scores["rejection"][rest] = [float(value) for value in curve.accuracy]
    return scores


def title(name: str) -> str:
    """A variant's name for tables: the paper's for the systems that it has."""
    base, _, ending = name.rpartition("_")
    known = {**PAPER["titles"], "last_layer": "Last layer", "largest_magnitude": "Largest magnitude"}
    if name in known:
        return known[name]
    return f"{known.get(base, base)}, {ending}"


def shift_table(
    scores: Mapping[str, Any],
    key: str,
    columns: Mapping[str, Sequence[str]],
    theirs: Mapping[str, Mapping[str, Sequence[float]]],
    text: str,
) -> str:
    """One score by shift, each system's row followed by the paper's.

    Args:
        scores: From `score`.
        key: `"ll"`, `"error"`, `"ece"` or `"brier"`.
        columns: Names of the sets whose mean makes each column, by its title.
        theirs: Published numbers by system and score, one per column; empty if the columns are not the paper's.
        text: The table's title.
    """
    rows = []
    for name, system in scores.items():
        cells = []
        for sets in columns.values():
            values = [_value(system["shifted"][one], key) for one in sets if one in system["shifted"]]
            cells.append(number(float(np.mean(values)), 2) if values else "-")
        rows.append([title(name), *cells])
        if name in theirs:
            rows.append([f"  paper's {title(name)}", *(number(value, 2) for value in theirs[name][key])])
    return table([key, *columns], rows, text)


def _value(scores: Mapping[str, float], key: str) -> float:
    if key == "ll":
        return -scores["nll"]
    return 1 - scores["accuracy"] if key == "error" else scores[key]


def ood_table(scores: Mapping[str, Any], dataset: str, paper_set: str) -> str:
    """AUROC against every other set of images, and the paper's where it has one."""
    outside = list(dict.fromkeys(name for system in scores.values() for name in system["ood"]))
    rows = []
    for name, system in scores.items():
        theirs = PAPER.find("ood_auroc", dataset, name)
        cells = [
            number(system["ood"][one][key]) for one in outside for key in ("auroc_entropy", "auroc_max_probability")
        ]
        rows.append([title(name), *cells, "-" if theirs is None else f"{theirs[0]:.2f} ({theirs[1]:.2f})"])
    header = ["auroc", *(f"{one} {by}" for one in outside for by in ("H", "p")), f"paper, {paper_set}"]
    return table(
        header,
        rows,
        "Out of distribution: AUROC by entropy (H) and by maximum probability (p); the paper's is its table 1.",
    )


def rejection_table(scores: Mapping[str, Any]) -> str:
    """Accuracy after turning away the least certain of test images and other images together (figure 6)."""
    rows = [
        [title(name), outside, *(number(value, 3) for value in curve)]
        for name, system in scores.items()
        for outside, curve in system["rejection"].items()
    ]
    header = ["accuracy", "outside", *(f"{share:.0%}" for share in REJECTED)]
    return table(
        header,
        rows,
        "Rejection-classification by entropy, by the share turned away; the paper shows figure 6 and no numbers.",
    )


def tables(
    scores: Mapping[str, Any],
    dataset: str,
    outside: str,
    columns: Mapping[str, Sequence[str]],
    places: Mapping[str, int],
    text: str,
) -> str:
    """All tables as text.

    Args:
        scores: From `score`.
        dataset: What was trained on; the paper's numbers stand beside ours where they are of that set.
        outside: The paper's other set of images, in words.
        columns: Names of the sets whose mean makes each column, by its title.
        places: Of the columns in the paper's rows.
        text: What the columns are, and the source of the paper's rows.
    """
    paper = PAPER.find(dataset) or {}
    theirs = {
        name: {key: [values[places[column]] for column in columns] for key, values in system.items()}
        for name, system in paper.items()
    }
    names = {"ll": "Log-likelihood", "error": "Error", "ece": "Expected calibration error", "brier": "Brier score"}
    texts = [shift_table(scores, key, columns, theirs, f"{name} {text}") for key, name in names.items()]
    return "\n\n".join([*texts, ood_table(scores, dataset, outside), rejection_table(scores)])
