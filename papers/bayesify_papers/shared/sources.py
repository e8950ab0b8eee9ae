"""Which images an experiment trains and tests on, as plain data that a worker process can be given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import corruptions, images

SYNTHETIC = "synthetic"
"""The name of tiny images made from a seed, for trials that take seconds."""

NOISE = "noise"
"""The name of random pixels, as images from another set."""


@dataclass(frozen=True)
class Source:
    """Training images, and the images that a trained network is scored on.

    With `validation` those are the last training images, which then take no part in training, and the test images are
    never read into a score.

    Args:
        dataset: A name of `datasets.images`, or `SYNTHETIC`.
        folder: Where the files are; default: what `BAYESIFY_DATA` names.
        num_train: Only this many training images, the first ones.
        validation: How many of those are held out at the end.
        outside: Other sets of images, or `NOISE`, that are predicted too; a small or gray one gets a border and the channels.
        corrupted_images: How many of the scored images are corrupted, the first ones.
        severities: How strongly.

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

    def __post_init__(self) -> None:
        if self.validation < 0:
            raise ValueError(f"validation={self.validation}; give the number of training images to hold out, or 0")

    def images(self) -> images.Images:
        """Training images, and in place of the test images those that are scored.

        Raises:
            ValueError: If no training image is left.
        """
        return _images(self)

    def scored(self) -> dict[str, np.ndarray]:
        """All sets of images that are predicted, uint8, by name: `test`, `ood/...` and `corrupted/...`."""
        return _scored(self)


@lru_cache(maxsize=2)
def _images(source: Source) -> images.Images:
    if source.dataset == SYNTHETIC:
        return hold_out(images.synthetic().first(source.num_train), source.validation)
    return hold_out(images.load(source.dataset, source.folder).first(source.num_train), source.validation)


@lru_cache(maxsize=2)
def _scored(source: Source) -> dict[str, np.ndarray]:
    pictures = source.images().test_images
    sets = {"test": pictures}
    for name in source.outside:
        if name == NOISE:
            sets[f"ood/{name}"] = noise(pictures)
        else:
            sets[f"ood/{name}"] = like(images.load(name, source.folder).test_images, pictures)
    return sets | corrupted(pictures[: source.corrupted_images], source.severities)


def available(names: Sequence[str], folder: str | None) -> dict[str, np.ndarray]:
    """The test images of those sets that can be had, by name; what is left out is printed."""
    found: dict[str, np.ndarray] = {}
    for name in names:
        try:
            found[name] = images.load(name, folder).test_images
        except (FileNotFoundError, ImportError) as missing:
            print(f"{name} is left out: {missing}", flush=True)
    return found


def hold_out(data: images.Images, count: int) -> images.Images:
    """A set whose last training images take the place of its test images; unchanged for a count of 0.

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
    """Random pixels in the shape of some images, the same in every run."""
    return np.random.default_rng(0).integers(0, 256, pictures.shape, dtype=np.uint8)


def corrupted(pictures: np.ndarray, severities: Sequence[int]) -> dict[str, np.ndarray]:
    """Every corruption at every severity, by `corrupted/kind-severity`; the noise is the same in every run."""
    if not len(pictures):
        return {}
    return {
        f"corrupted/{kind}-{severity}": corruptions.corrupt(pictures, kind, severity, seed=0)
        for kind in corruptions.SEVERITIES
        for severity in severities
    }


def like(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Pictures with the channels and the size of others: gray is repeated, a smaller picture gets a black border.

    Raises:
        ValueError: If they are larger.
    """
    channels, side = reference.shape[1], reference.shape[2]
    if pictures.shape[1] != channels:
        pictures = np.repeat(pictures[:, :1], channels, axis=1)
    missing = side - pictures.shape[2]
    if missing < 0:
        raise ValueError(f"images of {pictures.shape[2]} pixels do not fit into {side}; give smaller ones")
    border = (missing // 2, missing - missing // 2)
    return np.pad(pictures, ((0, 0), (0, 0), border, border))


class Normalization:
    """Images as float32, shifted and scaled so that a set of them has mean 0 and variance 1 in every channel.

    Args:
        reference: That set, uint8, [N, C, H, W]; of a large one, some ten thousand images.
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
    """Labels as torch wants them, [N]."""
    return torch.from_numpy(labels.astype(np.int64))
