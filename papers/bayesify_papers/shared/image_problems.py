"""Images of a source on a device: training, prediction and scores of networks on them."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from bayesify import BayesianNetwork
from bayesify.predictor import Predictor
from bayesify_papers.shared import predictions
from bayesify_papers.shared.predictions import StoredPrediction
from bayesify_papers.shared.scores import classification_scores
from bayesify_papers.shared.sources import Normalization, Source, as_labels, unit_pixels

Trained = tuple[BayesianNetwork, list[dict[str, Any]]]
"""A network and the training history of its epochs."""


class ImageProblem:
    """The images of a source on a device, ready for training.

    Args:
        source: Source of the images.
        device: Device of the tensors.
        unit: Whether pixels are scaled to the range from 0 to 1. Otherwise they have mean 0 and variance 1.
    """

    def __init__(self, source: Source, device: str | torch.device, unit: bool = False) -> None:
        self.source, self.device = source, torch.device(device)
        data = source.images()
        source.outside_images()  # a missing or damaged file is an error before training, not after it
        self.scale = unit_pixels if unit else Normalization(data.train_images)
        self.x = self.scale(data.train_images, self.device)  # [N, C, H, W]
        self.y = as_labels(data.train_labels).to(self.device)  # [N]
        self.test_labels = as_labels(data.test_labels)
        self.num_classes = int(self.y.max()) + 1

    def predict(
        self, networks: Sequence[Predictor], num_draws: int, seed: int, precision: str = "float32"
    ) -> dict[str, StoredPrediction]:
        """Joint predictions of networks for every set of the source, in `"float32"` or `"bf16"`.

        Networks with BatchNorm layers should predict in the precision of their training, in which their statistics were kept.
        """
        sets = {name: partial(self.scale, images, self.device) for name, images in self.source.scored().items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
            return predictions.predict_sets(networks, sets, num_draws, seed)

    def score(self, prediction: StoredPrediction) -> dict[str, float]:
        """Accuracy, NLL, ECE and Brier score on the images to be scored."""
        return classification_scores(prediction, self.test_labels)

    def run(
        self, train: Callable[[], Trained], num_draws: int, seed: int, path: Path | None, precision: str = "float32"
    ) -> tuple[dict[str, Any], dict[str, StoredPrediction], BayesianNetwork]:
        """Train a network and predict every set.

        Args:
            train: Function that trains and returns the network and its history.
            path: File of the predictions. They are not stored if it is `None`.
            precision: Precision of the predictions; see `predict`.

        Returns:
            A dict of the scores, the seconds of training and the history of the last epoch; the predictions; and the network.
        """
        start = time.perf_counter()
        network, history = train()
        seconds = time.perf_counter() - start
        made = self.predict([network], num_draws, seed, precision)
        if path is not None:
            predictions.write(path, made)
        found = {**self.score(made["test"]), "train_seconds": round(seconds, 1), "last_epoch": history[-1]}
        return found, made, network


def falling_late(epochs: int) -> Callable[[torch.optim.Optimizer], Any]:
    """The scheduler of both papers on images. It divides the learning rate by 10 after two thirds of the epochs."""
    return lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [-(-2 * epochs // 3)])


@lru_cache(maxsize=1)
def problem(source: Source, device: str, unit: bool = False) -> ImageProblem:
    """The problem of a source. A process keeps the last problem because its next training run usually has the same one."""
    return ImageProblem(source, device, unit)
