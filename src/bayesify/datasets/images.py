"""Image classification sets, read from a folder or downloaded."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bayesify.arguments.checks import Count, NonNegative, Seed, checked
from bayesify.datasets import image_sources
from bayesify.datasets.download import obtain

FILES: dict[str, str] = {name: entry["file"] for name, entry in image_sources.KNOWN_IMAGES.items()}
"""File of each set, with the uint8 arrays `train_images`, `train_labels`, `test_images` and `test_labels`."""


@dataclass(frozen=True)
class Images:
    """Images and their labels, all uint8. The training part is empty if a set has no training images.

    Args:
        name: Name of the set.
        train_images: Training images, [N, C, H, W].
        train_labels: Training labels, [N].
        test_images: Test images, [T, C, H, W].
        test_labels: Test labels, [T].
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            if images.ndim != 4 or images.dtype != np.uint8 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"{self.name}: {part}_images are {images.dtype}{list(images.shape)}, and the labels have shape "
                    f"{list(labels.shape)}; give uint8 [N, C, H, W] with one label per image"
                )

    @checked
    def first(self, num_train: Count | None = None, num_test: Count | None = None) -> "Images":
        """The set with only the first images of each part. If no number is given for a part, all its images are used."""
        train = self.train_images[:num_train], self.train_labels[:num_train]
        return Images(self.name, *train, self.test_images[:num_test], self.test_labels[:num_test])


@checked
def load(name: str, folder: str | Path | None = None, *, download: bool = True) -> Images:
    """Read a set of images.

    If `folder` is given, only this folder is searched. Otherwise, the folder that `BAYESIFY_DATA` names and the cache
    (`BAYESIFY_CACHE`, or the user's cache folder) are searched. If neither has the set, it is downloaded from its public source
    and kept in the cache. Files in `folder` are not verified; all other files are verified. The verification compares the sha256
    of all values, if the correct sha256 is known.

    Args:
        name: `"mnist"`, `"fashion_mnist"`, `"notmnist"` (10,000 test images only), `"cifar10"`, `"cifar100"` (the 100 fine
            labels) or `"svhn"` (cropped digits, without the extra part).
        folder: Folder that holds the files listed in `FILES`. If it is given, nothing is downloaded.
        download: Whether to download a set that is in none of the searched folders.

    Raises:
        ValueError: If the name is unknown, or if the file does not hold the expected data.
        FileNotFoundError: If the set is in none of the folders and cannot be downloaded.
        ImportError: If SVHN must be downloaded but scipy, which reads its files, is missing.
    """
    if name not in FILES:
        raise ValueError(f"images: name={name!r}; give one of {', '.join(FILES)}")
    make = partial(image_sources.download, name) if download else None
    path, stored = obtain("images", FILES[name], folder, make, partial(image_sources.verify, name))
    for key in ("test_images", "test_labels", *(["train_labels"] if "train_images" in stored else [])):
        if key not in stored:
            raise ValueError(f"images: {path} holds {', '.join(stored)} but no {key}; this is not the file of {name}")
    images, labels = _with_channels(stored["test_images"]), stored["test_labels"]
    if "train_images" not in stored:
        return Images(name, images[:0], labels[:0], images, labels)
    return Images(name, _with_channels(stored["train_images"]), stored["train_labels"], images, labels)


def check_images(owner: str, images: np.ndarray, square: bool = False) -> None:
    """Raise `ValueError` unless the array holds uint8 images [N, C, H, W], or [N, C, H, H] if `square` is true."""
    if images.ndim != 4 or images.dtype != np.uint8 or (square and images.shape[2] != images.shape[3]):
        wanted = "[N, C, H, H]" if square else "[N, C, H, W]"
        raise ValueError(f"{owner}: images are {images.dtype}{list(images.shape)}; give uint8 {wanted}")


def _with_channels(images: np.ndarray) -> np.ndarray:
    return images[:, None] if images.ndim == 3 else images


@checked
def synthetic(
    num_train: Count = 400,
    num_test: Count = 200,
    *,
    side: Count = 12,
    num_classes: Count = 10,
    noise_std: NonNegative = 0.25,
    seed: Seed = 0,
) -> Images:
    """Synthetic images: one smooth pattern per class with Gaussian noise.

    Args:
        num_train: Number of training images N.
        num_test: Number of test images T.
        side: Height and width of the images.
        num_classes: Number of classes; labels cycle through them.
        noise_std: Standard deviation of the noise, as a share of the range between black and white.
        seed: Seed of the noise; the patterns are always the same.
    """
    waves = np.random.default_rng(0).uniform(0.3, 1.5, (num_classes, 4))
    up, across = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    patterns = np.stack([0.5 + 0.5 * np.sin(a * up + b * across + 4 * c) * np.cos(d * up) for a, b, c, d in waves])
    generator = np.random.default_rng(seed)

    def make(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = (np.arange(count) % num_classes).astype(np.uint8)
        noisy = patterns[labels] + noise_std * generator.standard_normal((count, side, side))
        return to_bytes(noisy)[:, None], labels

    return Images("synthetic", *make(num_train), *make(num_test))


def to_bytes(images: np.ndarray) -> np.ndarray:
    """Images in [0, 1] as uint8; values outside this range are clipped."""
    return np.asarray(np.round(255 * np.clip(images, 0.0, 1.0)), np.uint8)
