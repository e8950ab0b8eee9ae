"""One training run of one system on images. A job, which is plain data, becomes stored predictions and scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesify import KLSchedule, bayesianize, fit
from bayesify.datasets import images
from bayesify.function_space import Box, Context, DatasetContext, FunctionSpaceVI, Mixture, NoisyContext
from bayesify.likelihoods import Categorical
from bayesify.posteriors import MeanField, Point, Posterior
from bayesify.predictor import Trainable
from bayesify.priors import Gaussian, Prior
from bayesify_papers.function_space.networks import convolutional_network
from bayesify_papers.shared.batches import MemoryBatches, mirror_and_shift
from bayesify_papers.shared.image_problems import ImageProblem, Trained, falling_late, problem
from bayesify_papers.shared.scores import separation
from bayesify_papers.shared.sources import NOISE, SYNTHETIC, Source, like, unit_pixels

OUTSIDE_SETS = {"fashion_mnist": ("mnist",), "cifar10": ("svhn", "fashion_mnist"), SYNTHETIC: (NOISE,)}
"""Out-of-distribution sets by training set: the paper's set, then its replacement if it is not available."""

PRIOR_NAMES = ("standard", "neal", "default", "decay")
"""Priors of the weights: the paper's standard normal; Neal's, whose variance falls with a layer's inputs; the library's default;
and `WEIGHT_DECAY`, the prior of the paper's deterministic networks."""

WEIGHT_DECAY = 0.1
r"""Weight decay $\lambda$ of the paper's deterministic networks, as the prior N(0, 1 / $\lambda$): half of $\lambda$ times the
squared weights is added to the NLL of all training images. The paper does not say which loss it adds the decay to."""

JITTER_STD = 0.3
"""Standard deviation of the noise on training images that serve as context. Pixels range from 0 to 1."""


@dataclass(frozen=True)
class Training:
    """One network to train and to score.

    Args:
        system: `"fsvi"`, `"mfvi"` or `"map"`.
        seed: Seed of all random numbers.
        context: `"notmnist"`, `"noise"`, `"train"` (training images under noise), `"outlines"` (edges of training images),
            `"blends"` (means of two training images), or several contexts joined by `+`, which share the points.
        points: Number of context inputs per step.
        prior_variance: Prior variance of function values.
        epochs: Number of passes over the data.
        batch: Number of examples per step.
        learning_rate: Learning rate of Adam. It falls to a tenth after two thirds of the epochs.
        init_std: Initial standard deviations of the weights.
        draws: Number of draws of a prediction.
        widths: Numbers of channels of the convolutions.
        prior: Prior of the weights, a name of `PRIOR_NAMES`.
        kl_free: Share of the epochs in which mean-field inference trains without the KL.
        patience: Number of epochs that mean-field inference continues without a better NLL on a held-out tenth of the training
            images. It then returns to the best epoch. With 0 it does not stop early.
        augment: Whether to mirror and shift training images at random, as is usual for photographs.
        precision: Floating-point precision of the network in training.
        dataset: A key of `OUTSIDE_SETS`.
        outside: Out-of-distribution images; by default the paper's.
        folder: Folder of the files; by default the environment variable `BAYESIFY_DATA`.
        validation: Number of training images that are held out and scored instead of the test images.
        device: Device for training.
        file: Path of the predictions without suffix, relative to the run's folder. If it is empty, they are not stored.
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
    prior: str = "standard"
    kl_free: float = 0.25
    patience: int = 0
    augment: bool = False
    precision: Literal["float32", "bf16"] = "float32"
    dataset: str = "fashion_mnist"
    outside: str = ""
    folder: str | None = None
    validation: int = 0
    device: str = "cpu"
    file: str = ""

    @property
    def source(self) -> Source:
        """The images of the job."""
        outside = self.outside or OUTSIDE_SETS[self.dataset][0]
        return Source(self.dataset, self.folder, validation=self.validation, outside=(outside,))


def outlines(x: Tensor) -> Tensor:
    """Outlines of images [B, C, H, W]: differences between neighboring pixels, scaled to a maximum of 1 in each image."""
    across, down = torch.zeros_like(x), torch.zeros_like(x)
    across[..., 1:-1] = x[..., 2:] - x[..., :-2]
    down[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    edges = (across.square() + down.square()).sqrt()
    return edges / edges.amax((1, 2, 3), keepdim=True).clamp_min(1e-6)


def make_context(job: Training, x: Tensor) -> Context:
    """The context of a job. The parts of a mixture share its points.

    Raises:
        ValueError: If a part is unknown, or there are fewer points than parts.
    """
    names = job.context.split("+")
    if job.points < len(names):
        raise ValueError(f"context {job.context!r} has {job.points} points; give at least {len(names)}, one per part")
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
            parts.append(DatasetContext(unit_pixels(pictures, x.device), count))
        else:
            raise ValueError(
                f"unknown context {name!r}; choose notmnist, noise, train, outlines, blends, or several joined by +"
            )
    return parts[0] if len(parts) == 1 else Mixture(*parts)


def train(job: Training, given: ImageProblem) -> Trained:
    """The trained network of a job, and its training history."""
    x, y = given.x, given.y
    posterior: Posterior = Point() if job.system == "map" else MeanField(init_std=job.init_std)
    named: dict[str, Prior | None] = {"default": None, "decay": Gaussian(WEIGHT_DECAY**-0.5)}
    prior = named.get(job.prior, job.prior)
    stopping: dict[str, Any] = {}
    if job.patience and job.system == "mfvi":
        count = len(x) // 10
        held = list(zip(x[-count:].split(job.batch), y[-count:].split(job.batch), strict=True))
        x, y, stopping = x[:-count], y[:-count], {"validation": held, "patience": job.patience}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        net = convolutional_network(x.shape[1], x.shape[2], given.num_classes, job.widths)
        bnn = bayesianize(net, posterior, likelihood=Categorical(), prior=prior).to(job.device)
    model: Trainable = bnn
    if job.system == "fsvi":
        model = FunctionSpaceVI(bnn, 0.0, job.prior_variance, make_context(job, x))
    history = fit(
        model,
        MemoryBatches(x, y, min(job.batch, len(x)), mirror_and_shift if job.augment else None),
        num_data=len(x),
        epochs=job.epochs,
        learning_rate=job.learning_rate,
        scheduler=falling_late(job.epochs),
        kl_schedule=KLSchedule(job.epochs * job.kl_free if job.system == "mfvi" else 0.0),
        num_draws=1,
        precision=job.precision,
        seed=job.seed,
        progress=False,
        **stopping,
    )
    return bnn.eval(), history


def classify(job: Training, folder: Path) -> dict[str, Any]:
    """Train, write the predictions, and return scores and seconds of training."""
    given = problem(job.source, job.device, unit=True)
    path = folder / f"{job.file}.npz" if job.file else None
    draws = 1 if job.system == "map" else job.draws
    scores, made, _ = given.run(lambda: train(job, given), draws, job.seed, path)
    return {**scores, **separation(made)}
