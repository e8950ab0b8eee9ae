"""Images that an experiment trains and tests on, described by plain data that can be sent to a worker process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import corruptions, images

SYNTHETIC = "synthetic"
"""Name of tiny synthetic images for quick runs."""

NOISE = "noise"
"""Name of random pixels, which serve as out-of-distribution images."""

COMPARED_KINDS = ("gaussian_noise", "shot_noise", "impulse_noise", "gaussian_blur", "contrast", "brightness")
"""Kinds of corruption that every stored run has. Means over kinds are compared over these kinds only."""


@dataclass(frozen=True)
class Source:
    """Training images, and the images that a trained network is scored on.

    With `validation`, the scored images are the last training images. They then take no part in training, and the test images
    do not affect any score.

    Args:
        dataset: Name of a set in `datasets.images`, or `SYNTHETIC`.
        folder: Folder of the files; by default the environment variable `BAYESIFY_DATA`.
        num_train: Number of training images to use, from the first; all by default.
        validation: Number of images to hold out at the end of these.
        outside: Out-of-distribution sets to predict: other sets of images, or `NOISE`. Small images get a border, gray images
            more channels.
        corrupted_images: Number of scored images to corrupt, from the first.
        severities: Severities of the corruptions.
        kinds: Kinds of the corruptions, keys of `corruptions.SEVERITIES`.

    Raises:
        ValueError: If `validation` is negative.
    """

    dataset: str = "fashion_mnist"
    folder: str | None = None
    num_train: int | None = None
    validation: int = 0
    outside: tuple[str, ...] = ()
    corrupted_images: int = 0
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    kinds: tuple[str, ...] = COMPARED_KINDS

    def __post_init__(self) -> None:
        if self.validation < 0:
            raise ValueError(f"validation={self.validation}; give the number of training images to hold out, or 0")

    @property
    def settings(self) -> dict[str, Any]:
        """The choice of images, for the record of a run."""
        scored = {"outside": self.outside, "kinds": self.kinds, "corrupted_images": self.corrupted_images}
        return {"dataset": self.dataset, "num_train": self.num_train, "validation": self.validation, "scored": scored}

    def images(self) -> images.Images:
        """Training images, with the scored images as test images.

        Raises:
            ValueError: If no training image is left.
        """
        return _images(self)

    def outside_images(self) -> dict[str, np.ndarray]:
        """Out-of-distribution images by the name of their set, uint8, with the size and the channels of the scored images."""
        return _outside(self)

    def scored(self) -> dict[str, np.ndarray]:
        """All sets of images to predict, uint8, by name: `test`, `ood/...` and `corrupted/...`."""
        return _scored(self)


@lru_cache(maxsize=2)
def _images(source: Source) -> images.Images:
    if source.dataset == SYNTHETIC:
        return hold_out(images.synthetic().first(source.num_train), source.validation)
    return hold_out(images.load(source.dataset, source.folder).first(source.num_train), source.validation)


@lru_cache(maxsize=2)
def _scored(source: Source) -> dict[str, np.ndarray]:
    pictures = source.images().test_images
    sets = {"test": pictures} | {f"ood/{name}": found for name, found in source.outside_images().items()}
    return sets | corrupted(pictures[: source.corrupted_images], source.kinds, source.severities)


@lru_cache(maxsize=2)
def _outside(source: Source) -> dict[str, np.ndarray]:
    pictures = source.images().test_images

    def load(name: str) -> np.ndarray:
        return noise(pictures) if name == NOISE else like(images.load(name, source.folder).test_images, pictures)

    return {name: load(name) for name in source.outside}


def available(names: Sequence[str], folder: str | None) -> dict[str, np.ndarray]:
    """Test images of the available sets by name. The names of missing sets are printed."""
    found: dict[str, np.ndarray] = {}
    for name in names:
        try:
            found[name] = images.load(name, folder).test_images
        except (FileNotFoundError, ImportError) as missing:
            print(f"{name} is left out: {missing}", flush=True)
    return found


def hold_out(data: images.Images, count: int) -> images.Images:
    """A set whose last training images replace its test images; unchanged for a count of 0.

    Raises:
        ValueError: If no training image is left.
    """
    if count >= len(data.train_images):
        raise ValueError(f"validation={count} of {len(data.train_images)} training images; hold out fewer")
    if not count:
        return data
    return replace(
        data,
        train_images=data.train_images[:-count],
        train_labels=data.train_labels[:-count],
        test_images=data.train_images[-count:],
        test_labels=data.train_labels[-count:],
    )


def noise(pictures: np.ndarray) -> np.ndarray:
    """Images of random pixels, with the shape of the given images. Every run gives the same pixels."""
    return np.random.default_rng(0).integers(0, 256, pictures.shape, dtype=np.uint8)


def corrupted(pictures: np.ndarray, kinds: Sequence[str], severities: Sequence[int]) -> dict[str, np.ndarray]:
    """Images under each corruption and severity by `corrupted/kind-severity`. Runs with as many images have the same noise."""
    if not len(pictures):
        return {}
    return {
        f"corrupted/{kind}-{severity}": corruptions.corrupt(pictures, kind, severity, seed=0)
        for kind in kinds
        for severity in severities
    }


def like(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Images with the channels and the size of reference images. Gray is repeated; smaller images get a black border.

    Raises:
        ValueError: If the images are larger than the reference.
    """
    channels, side = reference.shape[1], reference.shape[2]
    if pictures.shape[1] != channels:
        pictures = np.repeat(pictures[:, :1], channels, axis=1)
    missing = side - pictures.shape[2]
    if missing < 0:
        raise ValueError(
            f"images of {pictures.shape[2]} pixels do not fit into images of {side} pixels; give smaller images"
        )
    border = (missing // 2, missing - missing // 2)
    return np.pad(pictures, ((0, 0), (0, 0), border, border))


class Normalization:
    """Images as float32, shifted and scaled so that every channel of a reference set has mean 0 and variance 1.

    Args:
        reference: Reference set, uint8, [N, C, H, W]. Of a large set, about ten thousand images are used.
    """

    def __init__(self, reference: np.ndarray) -> None:
        values = reference.astype(np.float64) if reference.size < 1e7 else reference[:: len(reference) // 10_000]
        axes = (0, 2, 3)
        self.mean = torch.tensor(values.mean(axes), dtype=torch.float32).reshape(1, -1, 1, 1)
        self.std = torch.tensor(values.std(axes), dtype=torch.float32).clamp_min(1.0).reshape(1, -1, 1, 1)

    def __call__(self, pictures: np.ndarray, device: torch.device) -> Tensor:
        """uint8 [B, C, H, W] -> float32 of the same shape, on a device."""
        moved = torch.from_numpy(np.ascontiguousarray(pictures)).to(device).float()
        return (moved - self.mean.to(device)) / self.std.to(device)


def unit_pixels(pictures: np.ndarray, device: torch.device | str) -> Tensor:
    """Images as numbers from 0 to 1, [B, C, H, W]."""
    return torch.from_numpy(pictures).to(device).float() / 255


def as_labels(labels: np.ndarray) -> Tensor:
    """Labels as a tensor of 64-bit integers, [N]."""
    return torch.from_numpy(labels.astype(np.int64))
