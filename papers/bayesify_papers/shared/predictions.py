"""Predictions of a system for several sets of images. They are stored in a file and read back in a form that `metrics` accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bayesify import BayesianNetwork, ClassificationPredictive, Laplace
from bayesify.baselines import FixedDraws
from bayesify.draws import Draws
from bayesify.predictive.base import Outputs
from bayesify.predictor import Drawable, Predictor
from bayesify_papers.shared import records

DEVICE_MEMORY_BYTES = 2 * 2**30
"""Budget in bytes for activations on a GPU."""


LAPLACE_BATCH = 1000
"""Number of images that a Laplace posterior predicts at a time."""


class StoredPrediction(ClassificationPredictive):
    """A mixture of categorical distributions that is known only by its probabilities and its components' mean entropy.

    Args:
        probs: Probabilities of the mixture, [B, C].
        aleatoric_entropy: Mean over draws of each draw's entropy, [B].
    """

    def __init__(self, probs: Tensor, aleatoric_entropy: Tensor) -> None:
        super().__init__(Outputs(kept=probs.log().unsqueeze(0)))
        self.stored_entropy = aleatoric_entropy

    @classmethod
    def of(cls, probs: Tensor) -> StoredPrediction:
        """A prediction from probabilities alone; all its entropy is aleatoric. Zeros become 1e-37 because logs are stored."""
        probs = probs.double().clamp_min(1e-37).cpu()
        return cls(probs.float(), torch.special.entr(probs).sum(-1).float())

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean over draws of each draw's entropy in nats, [B]."""
        return self.stored_entropy


def predict_sets(
    networks: Sequence[Predictor], sets: Mapping[str, Callable[[], Tensor]], num_draws: int, seed: int
) -> dict[str, StoredPrediction]:
    """Joint predictions of networks for sets of images. Each network uses the same draws for all sets.

    Args:
        networks: Networks of equal weight; or one Laplace posterior, which predicts by its closed form.
        sets: Functions by name of a set. Each returns images on the networks' device, [B, C, H, W].
    """
    if isinstance(networks[0], Laplace):
        return {name: _closed_form(networks[0], images()) for name, images in sets.items()}
    drawn = []
    for network in networks:
        assert isinstance(network, Drawable)
        device = next(network.module.parameters()).device if isinstance(network, BayesianNetwork) else None
        generator = torch.Generator(device or "cpu").manual_seed(seed)
        drawn.append(network.prediction_draws(num_draws, generator=generator))
    return {name: _mixture(networks, drawn, images()) for name, images in sets.items()}


def _closed_form(laplace: Laplace, x: Tensor) -> StoredPrediction:
    made = [cast(ClassificationPredictive, laplace.predict(part)) for part in x.split(LAPLACE_BATCH)]
    return StoredPrediction(
        torch.cat([part.class_probs for part in made]).cpu(), torch.cat([part.aleatoric_entropy for part in made]).cpu()
    )


def _mixture(networks: Sequence[Predictor], drawn: Sequence[Draws], x: Tensor) -> StoredPrediction:
    outputs, memory = [], DEVICE_MEMORY_BYTES if x.is_cuda else None
    for network, draws in zip(networks, drawn, strict=True):
        fixed = FixedDraws(draws, network.require_likelihood("predict"))
        outputs.append(fixed.predict(x, keep_outputs=True, memory=memory).outputs)
    log_probs = torch.cat(outputs).double().log_softmax(-1)  # [S, B, C]
    probs, entropy = log_probs.exp().mean(0), torch.special.entr(log_probs.exp()).sum(-1).mean(0)
    return StoredPrediction(probs.float().cpu(), entropy.float().cpu())


def combine(parts: Sequence[dict[str, StoredPrediction]]) -> dict[str, StoredPrediction]:
    """Joint prediction of several networks of equal weight for each set.

    Args:
        parts: Predictions of each network by set. All networks have the same sets.

    Raises:
        ValueError: If the sets differ.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("combine: the networks predict different sets; give predictions of one run")
    return {
        name: StoredPrediction(
            torch.stack([part[name].class_probs for part in parts]).mean(0),
            torch.stack([part[name].aleatoric_entropy for part in parts]).mean(0),
        )
        for name in parts[0]
    }


def write(path: Path, predictions: dict[str, StoredPrediction]) -> None:
    """Store predictions by the name of their set in one `.npz`, which atomically replaces an earlier file."""
    arrays: dict[str, np.ndarray] = {}
    for name, prediction in predictions.items():
        arrays[f"{name}/probs"] = prediction.class_probs.numpy()
        arrays[f"{name}/aleatoric_entropy"] = prediction.aleatoric_entropy.numpy()
    records.write_arrays(path, **arrays)


def read(path: Path) -> dict[str, StoredPrediction]:
    """Predictions that `write` stored."""
    with np.load(path, allow_pickle=False) as stored:
        names = dict.fromkeys(key.rpartition("/")[0] for key in stored)
        return {
            name: StoredPrediction(
                torch.from_numpy(stored[f"{name}/probs"]), torch.from_numpy(stored[f"{name}/aleatoric_entropy"])
            )
            for name in names
        }
