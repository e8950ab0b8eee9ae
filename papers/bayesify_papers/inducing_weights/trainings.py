"""One training of one system: from a job, which is plain data, to predictions in a file and scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify.network import BayesianNetwork
from bayesify.weights.catalog import count_parameters
from bayesify_papers.inducing_weights import predictions
from bayesify_papers.inducing_weights.sources import Normalization, Source
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, train


@dataclass(frozen=True)
class Training:
    """One network to train and to score.

    Args:
        system: From `SYSTEMS`.
        recipe: How.
        source: On what.
        seed: Of everything random.
        device: Where.
        file: Where its predictions go, relative to the run's folder, without the ending; nowhere if empty.
    """

    system: str
    recipe: Recipe
    source: Source
    seed: int = 0
    device: str = "cpu"
    file: str = ""


class Problem:
    """The images of a source on a device, ready for training.

    Args:
        source: Which.
        device: Where.
    """

    def __init__(self, source: Source, device: str | torch.device) -> None:
        self.source, self.device = source, torch.device(device)
        data = source.images()
        self.scale = Normalization(data.train_images)
        self.x = self.scale(data.train_images, self.device)  # [N, C, H, W]
        self.y = torch.from_numpy(data.train_labels.astype(np.int64)).to(self.device)  # [N]
        self.test_labels = torch.from_numpy(data.test_labels.astype(np.int64))
        self.num_classes = int(self.y.max()) + 1

    def train(self, name: str, recipe: Recipe, seed: int) -> tuple[BayesianNetwork, list[dict[str, Any]]]:
        """One network of a system, and what its epochs were like."""
        return train(SYSTEMS[name], recipe, self.x, self.y, num_classes=self.num_classes, seed=seed)

    def predict(
        self, networks: Sequence[BayesianNetwork], num_draws: int, seed: int
    ) -> dict[str, predictions.StoredPrediction]:
        """What networks predict together for every set of the source."""
        return {name: self.predict_one(networks, name, num_draws, seed) for name in self.source.scored()}

    def predict_one(
        self, networks: Sequence[BayesianNetwork], name: str, num_draws: int, seed: int
    ) -> predictions.StoredPrediction:
        """The same for one set."""
        pictures: Tensor = self.scale(self.source.scored()[name], self.device)
        return predictions.predict(networks, pictures, num_draws, seed)

    def score(self, prediction: predictions.StoredPrediction) -> dict[str, float]:
        """Accuracy, NLL, ECE and Brier score on the images to be scored; needs no package but torch."""
        return {
            "accuracy": float((prediction.labels == self.test_labels).double().mean()),
            "nll": float(-prediction.log_prob(self.test_labels).mean()),
            "ece": metrics.reliability(prediction, self.test_labels).ece,
            "brier": float(metrics.brier(prediction.class_probs, self.test_labels).mean()),
        }


_PROBLEMS: dict[tuple[Source, str], Problem] = {}


def problem(source: Source, device: str) -> Problem:
    """The problem of a source; a process keeps the last one, since its next training mostly has the same."""
    if (source, device) not in _PROBLEMS:
        _PROBLEMS.clear()
        _PROBLEMS[source, device] = Problem(source, device)
    return _PROBLEMS[source, device]


def classify(job: Training, folder: Path) -> dict[str, Any]:
    """Train, write the predictions, and return scores, numbers of parameters and seconds of training."""
    given, system, start = problem(job.source, job.device), SYSTEMS[job.system], time.perf_counter()
    network, history = given.train(job.system, job.recipe, job.seed)
    trained = time.perf_counter()
    made = given.predict([network], system.count_draws(job.recipe), job.seed)
    if job.file:
        path = folder / f"{job.file}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        predictions.write(path, made)
    return {
        "system": job.system,
        "seed": job.seed,
        **given.score(made["test"]),
        "parameters": count_parameters(network),
        "train_seconds": round(trained - start, 1),
        "last_epoch": history[-1],
    }
