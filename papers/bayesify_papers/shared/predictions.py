"""Predictions of a system on several sets of images: made, stored in a file, and read back as what `metrics` takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify import ClassificationPredictive, Laplace
from bayesify.predictive.base import Outputs
from bayesify.predictor import Predictor
from bayesify_papers.shared import records

DEVICE_MEMORY_BYTES = 2 * 2**30
"""Budget in bytes for activations on a GPU."""


LAPLACE_BATCH = 1000
"""Images that a Laplace posterior predicts at a time."""


class StoredPrediction(ClassificationPredictive):
    """A mixture of categorical distributions of which only the mixture and its mean entropy are known.

    Args:
        probs: Probabilities of the mixture, [B, C].
        aleatoric_entropy: Mean over draws of each draw's entropy, [B].
    """

    def __init__(self, probs: Tensor, aleatoric_entropy: Tensor) -> None:
        super().__init__(Outputs(kept=probs.log().unsqueeze(0)))
        self.stored_entropy = aleatoric_entropy

    @classmethod
    def of(cls, probs: Tensor) -> StoredPrediction:
        """Of probabilities alone, whose own entropy is all that there is; zeros become the smallest numbers."""
        probs = probs.double().clamp_min(1e-37).cpu()
        return cls(probs.float(), torch.special.entr(probs).sum(-1).float())

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean over draws of each draw's entropy in nats, [B]."""
        return self.stored_entropy


def predict(networks: Sequence[Predictor], x: Tensor, num_draws: int, seed: int) -> StoredPrediction:
    """What networks predict together, each by the same draws for every x.

    Args:
        networks: Of equal weight; or one Laplace posterior, which predicts by its closed form.
        x: Images on the networks' device, [B, C, H, W].
        num_draws: Of each network.
        seed: Of the draws.
    """
    if isinstance(networks[0], Laplace):
        made = [networks[0].predict(part) for part in x.split(LAPLACE_BATCH)]
        parts = [StoredPrediction(one.class_probs.cpu(), one.aleatoric_entropy.cpu()) for one in made]
        return StoredPrediction(
            torch.cat([part.class_probs for part in parts]), torch.cat([part.aleatoric_entropy for part in parts])
        )
    outputs = []
    for network in networks:
        generator = torch.Generator(x.device).manual_seed(seed)
        memory = DEVICE_MEMORY_BYTES if x.is_cuda else None
        made = network.predict(x, num_draws, generator=generator, keep_outputs=True, memory=memory)
        outputs.append(made.outputs)
    log_probs = torch.cat(outputs).double().log_softmax(-1)  # [S, B, C]
    probs, entropy = log_probs.exp().mean(0), torch.special.entr(log_probs.exp()).sum(-1).mean(0)
    return StoredPrediction(probs.float().cpu(), entropy.float().cpu())


def combine(parts: Sequence[dict[str, StoredPrediction]]) -> dict[str, StoredPrediction]:
    """What several networks of equal weight predict together, set by set.

    Args:
        parts: What each predicts, by set; the same sets in each.

    Raises:
        ValueError: If the sets differ.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("combine: predictions of different sets; give those of one run")
    return {
        name: StoredPrediction(
            torch.stack([part[name].class_probs for part in parts]).mean(0),
            torch.stack([part[name].aleatoric_entropy for part in parts]).mean(0),
        )
        for name in parts[0]
    }


def write(path: Path, predictions: dict[str, StoredPrediction]) -> None:
    """Store predictions by the name of their set in one `.npz`, which replaces a former one at once."""
    arrays: dict[str, np.ndarray] = {}
    for name, prediction in predictions.items():
        arrays[f"{name}/probs"] = prediction.class_probs.numpy()
        arrays[f"{name}/aleatoric_entropy"] = prediction.aleatoric_entropy.numpy()
    records.write_arrays(path, **arrays)


def read(path: Path) -> dict[str, StoredPrediction]:
    """What `write` stored."""
    with np.load(path, allow_pickle=False) as stored:
        names = dict.fromkeys(key.rpartition("/")[0] for key in stored)
        return {
            name: StoredPrediction(
                torch.from_numpy(stored[f"{name}/probs"]), torch.from_numpy(stored[f"{name}/aleatoric_entropy"])
            )
            for name in names
        }
