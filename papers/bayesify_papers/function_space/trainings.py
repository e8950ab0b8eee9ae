"""One training of one system on images: from a job, which is plain data, to predictions in a file and scores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify.datasets import images
from bayesify.function_space import Box, Context, DatasetContext, FunctionSpaceVI, Mixture, NoisyContext
from bayesify.likelihoods import Categorical
from bayesify.network import BayesianNetwork, bayesianize
from bayesify.posteriors import MeanField, Point, Posterior
from bayesify.priors import Standard
from bayesify.training.schedules import KLSchedule
from bayesify_papers.function_space.networks import convolutional_network
from bayesify_papers.inducing_weights import predictions
from bayesify_papers.inducing_weights.recorded import as_recordable, fit_recorded
from bayesify_papers.inducing_weights.sources import SYNTHETIC, hold_out, like
from bayesify_papers.inducing_weights.systems import MemoryBatches

OUTSIDE = {"fashion_mnist": "mnist", "cifar10": "svhn", SYNTHETIC: "noise"}
"""Where images from elsewhere come from, by training set."""

JITTER_STD = 0.3
"""Noise on training images that serve as context, pixels being 0 to 1."""


@dataclass(frozen=True)
class Training:
    """One network to train and to score.

    Args:
        system: `"fsvi"`, `"mfvi"` or `"map"`.
        seed: Of everything random.
        context: `"notmnist"`, `"noise"`, `"train"` (training images under noise), `"outlines"` (edges of training images),
            `"blends"` (means of two training images), or several joined by `+`, which share the points.
        points: Context inputs a step.
        prior_variance: Of function values.
        epochs: Passes over the data.
        batch: Examples a step.
        learning_rate: Of Adam, until it falls to a tenth after two thirds of the epochs.
        init_std: Where standard deviations of weights start.
        draws: Of a prediction.
        widths: Channels of the convolutions.
        dataset: A name of `OUTSIDE`.
        folder: Where the files are; what `BAYESIFY_DATA` names if left out.
        validation: Training images that are held out and scored in place of the test images.
        device: Where to train.
        file: Where predictions go, relative to the run's folder, without the ending; nowhere if empty.
    """

    system: str
    seed: int = 0
    context: str = ""
    points: int = 0
    prior_variance: float = 0.0
    epochs: int = 20
    batch: int = 256
    learning_rate: float = 2e-3
    init_std: float = 1e-2
    draws: int = 32
    widths: tuple[int, ...] = (32, 64, 128)
    dataset: str = "fashion_mnist"
    folder: str | None = None
    validation: int = 0
    device: str = "cpu"
    file: str = ""


@lru_cache(maxsize=1)
def load(dataset: str, folder: str | None, validation: int) -> tuple[images.Images, dict[str, np.ndarray]]:
    """Training images with those to be scored in place of the test images, and all sets that are predicted, by name."""
    data = images.synthetic() if dataset == SYNTHETIC else images.load(dataset, folder)
    data = hold_out(data, validation)
    outside = OUTSIDE[dataset]
    if outside == "noise":
        other = np.random.default_rng(0).integers(0, 256, data.test_images.shape, dtype=np.uint8)
    else:
        other = like(images.load(outside, folder).test_images, data.test_images)
    return data, {"test": data.test_images, f"ood/{outside}": other}


def pixels(pictures: np.ndarray, device: str | torch.device) -> Tensor:
    """Images as numbers from 0 to 1, [B, C, H, W]."""
    return torch.from_numpy(pictures).to(device).float() / 255


def outlines(x: Tensor) -> Tensor:
    """Drawings of images [B, C, H, W]: how far neighboring pixels differ, the largest being 1 in each image."""
    across, down = torch.zeros_like(x), torch.zeros_like(x)
    across[..., 1:-1] = x[..., 2:] - x[..., :-2]
    down[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    edges = (across.square() + down.square()).sqrt()
    return edges / edges.amax((1, 2, 3), keepdim=True).clamp_min(1e-6)


def make_context(job: Training, x: Tensor) -> Context:
    """The context that a job names; its points are shared out over the parts of a mixture.

    Raises:
        ValueError: If a part is unknown, or there are fewer points than parts.
    """
    names = job.context.split("+")
    if job.points < len(names):
        raise ValueError(f"context {job.context!r}: {job.points} points; give at least {len(names)}")
    parts: list[Context] = []
    for index, name in enumerate(names):
        count = job.points // len(names) + (index < job.points % len(names))
        if name == "noise":
            parts.append(Box(0.0, 1.0, count))
        elif name == "train":
            parts.append(NoisyContext(x, JITTER_STD, count))
        elif name == "outlines":
            parts.append(DatasetContext(outlines(x), count))
        elif name == "blends":
            parts.append(DatasetContext((x + x.roll(1, 0)) / 2, count))
        elif name == "notmnist":
            pictures = like(images.load("notmnist", job.folder).test_images, np.empty((0, *x.shape[1:]), np.uint8))
            parts.append(DatasetContext(pixels(pictures, x.device), count))
        else:
            raise ValueError(
                f"context {name!r}; known: notmnist, noise, train, outlines, blends, and several joined by +"
            )
    return parts[0] if len(parts) == 1 else Mixture(*parts)


def train(job: Training) -> tuple[BayesianNetwork, list[dict[str, Any]]]:
    """The network of a job, and what its epochs were like; weights have a standard normal prior, as in the paper."""
    data, _ = load(job.dataset, job.folder, job.validation)
    x = pixels(data.train_images, job.device)
    y = torch.from_numpy(data.train_labels.astype(np.int64)).to(job.device)
    posterior: Posterior = Point() if job.system == "map" else MeanField(init_std=job.init_std)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        net = convolutional_network(x.shape[1], x.shape[2], int(y.max()) + 1, job.widths)
        bnn = bayesianize(net, posterior, likelihood=Categorical(), prior=Standard()).to(job.device)
    terms = None
    schedule = KLSchedule() if job.system != "mfvi" else KLSchedule(job.epochs / 4)
    if job.system == "fsvi":
        terms = FunctionSpaceVI(bnn, 0.0, job.prior_variance, make_context(job, x)).objective_terms
    optimizer = torch.optim.Adam(
        [parameter for parameter in bnn.parameters() if parameter.requires_grad], lr=job.learning_rate, fused=True
    )
    history = fit_recorded(
        bnn,
        MemoryBatches(x, y, min(job.batch, len(x))),
        as_recordable(optimizer, x.device),
        num_data=len(x),
        epochs=job.epochs,
        kl_schedule=schedule,
        decay_epoch=-(-2 * job.epochs // 3),
        seed=job.seed,
        terms=terms,
    )
    return bnn.eval(), history


def classify(job: Training, folder: Path) -> dict[str, Any]:
    """Train, write the predictions, and return scores and seconds of training."""
    data, scored = load(job.dataset, job.folder, job.validation)
    start = time.perf_counter()
    network, history = train(job)
    trained = time.perf_counter()
    draws = 1 if job.system == "map" else job.draws
    made = {
        name: predictions.predict([network], pixels(pictures, job.device), draws, job.seed)
        for name, pictures in scored.items()
    }
    if job.file:
        path = folder / f"{job.file}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        predictions.write(path, made)
    labels = torch.from_numpy(data.test_labels.astype(np.int64))
    return {
        **score(made["test"], labels),
        **{f"auroc_{key}": value for key, value in separation(made).items()},
        "train_seconds": round(trained - start, 1),
        "last_epoch": history[-1],
    }


def score(prediction: predictions.StoredPrediction, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score; needs no package but torch."""
    return {
        "accuracy": float((prediction.labels == labels).double().mean()),
        "nll": float(-prediction.log_prob(labels).mean()),
        "ece": metrics.reliability(prediction, labels).ece,
        "brier": float(metrics.brier(prediction.class_probs, labels).mean()),
    }


def separation(made: dict[str, predictions.StoredPrediction]) -> dict[str, float]:
    """AUROC of images from elsewhere against test images, by entropy and by mutual information, from ranks."""
    from bayesify.metrics.ranking import uncertainties

    (outside,) = (prediction for name, prediction in made.items() if name.startswith("ood/"))
    inner, outer = uncertainties(made["test"]), uncertainties(outside)
    return {key: rank_auroc(inner[key], outer[key]) for key in ("entropy", "mutual_information")}


def rank_auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that a number outside is larger than one inside, ties counting half."""
    values, place = torch.cat((inside, outside)).double().unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(values)).double()
    ranks = counts.cumsum(0) - (counts - 1) / 2  # mean rank of each value, from 1
    total = float(ranks[place[len(inside) :]].sum())
    low = len(outside) * (len(outside) + 1) / 2
    return (total - low) / (len(inside) * len(outside))
