"""Corruptions of images at the five severities of CIFAR-10-C (Hendrycks & Dietterich 2019), computed with numpy only."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bayesify.arguments.checks import Seed, checked
from bayesify.datasets.images import check_images, to_bytes

SEVERITIES: dict[str, tuple[float, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
}
"""The constant of each corruption at severities 1 to 5: the noise's standard deviation (`gaussian_noise`), the number of photons at
full brightness (`shot_noise`), the share of changed entries (`impulse_noise`), the width in pixels (`gaussian_blur`), the factor
(`contrast`), and the addend (`brightness`). These are six of the nineteen published kinds."""


@checked
def corrupt(images: np.ndarray, kind: str, severity: int, *, seed: Seed = 0) -> np.ndarray:
    """Corrupted copies of images.

    Args:
        images: uint8 images with one channel or three channels (red, green, blue): [N, C, H, W].
        kind: Key of `SEVERITIES`.
        severity: Severity from 1 to 5.
        seed: Seed of the noise.

    Returns:
        Corrupted images, uint8, of the same shape.

    Raises:
        ValueError: If the kind or the severity is unknown, or if the images are not uint8 [N, C, H, W].
    """
    if kind not in SEVERITIES:
        raise ValueError(f"corrupt: kind={kind!r}; give one of {', '.join(SEVERITIES)}")
    if severity not in range(1, 6):
        raise ValueError(f"corrupt: severity={severity}; give an integer from 1 to 5")
    check_images("corrupt", images)
    amount = SEVERITIES[kind][severity - 1]
    return to_bytes(_FUNCTIONS[kind](images / 255.0, amount, np.random.default_rng(seed)))


def _impulse_noise(x: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Set some entries to black or to white, with equal probability and independently for each entry."""
    hit, salt = generator.random(x.shape) < share, generator.random(x.shape) < 0.5
    return np.where(hit, salt.astype(x.dtype), x)


def _gaussian_blur(x: np.ndarray, width: float, generator: np.random.Generator) -> np.ndarray:
    """Blur rows, then columns, with a kernel of four standard deviations to each side. Outside, the image's border is repeated."""
    reach = int(4 * width + 0.5)
    kernel = np.array([math.exp(-0.5 * (offset / width) ** 2) for offset in range(-reach, reach + 1)])
    kernel /= kernel.sum()
    for axis in (2, 3):
        padding = [(reach, reach) if index == axis else (0, 0) for index in range(4)]
        windows = sliding_window_view(np.pad(x, padding, mode="edge"), len(kernel), axis)
        x = sum(weight * windows[..., place] for place, weight in enumerate(kernel))
    return x


def _contrast(x: np.ndarray, factor: float, generator: np.random.Generator) -> np.ndarray:
    mean: np.ndarray = x.mean((2, 3), keepdims=True)
    return np.asarray((x - mean) * factor + mean)


def _brightness(x: np.ndarray, addend: float, generator: np.random.Generator) -> np.ndarray:
    """Raise the HSV value and keep hue and saturation: all channels of a pixel are scaled by one factor. Black becomes gray."""
    value: np.ndarray = x.max(1, keepdims=True)
    brighter = np.clip(value + addend, 0.0, 1.0)
    return np.where(value > 0, x * (brighter / np.where(value > 0, value, 1.0)), brighter)


_FUNCTIONS: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": lambda x, std, generator: x + std * generator.standard_normal(x.shape),
    "shot_noise": lambda x, photons, generator: generator.poisson(x * photons) / photons,
    "impulse_noise": _impulse_noise,
    "gaussian_blur": _gaussian_blur,
    "contrast": _contrast,
    "brightness": _brightness,
}
