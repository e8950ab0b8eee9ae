"""Corruptions of images at the five severities of CIFAR-10-C (Hendrycks & Dietterich 2019)."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

from bayesify.arguments.checks import Seed, checked
from bayesify.datasets.images import check_images, to_bytes

SEVERITIES: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": (1.06, 1.11, 1.16, 1.21, 1.26),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
}
"""The constants of each corruption at severities 1 to 5, with pixels from 0 to 1:

| kind | constants |
| --- | --- |
| `gaussian_noise`, `speckle_noise` | standard deviation of the noise, or its ratio to the pixel |
| `shot_noise` | number of photons at full brightness |
| `impulse_noise` | share of changed entries |
| `gaussian_blur` | standard deviation in pixels |
| `defocus_blur` | radius of the disk, standard deviation of the Gaussian that smooths the disk |
| `glass_blur` | standard deviation of the blur before and after the displacement, its reach, its passes |
| `motion_blur` | radius, standard deviation of the weights along the path |
| `zoom_blur` | end of the range of zooms |
| `snow` | mean and standard deviation of the flakes, zoom, threshold, radius and width of their motion, share of the image |
| `fog` | strength, root of the factor by which the roughness falls from scale to scale |
| `contrast` | factor |
| `brightness` | addend |
| `saturate` | factor, addend |
| `jpeg_compression` | quality |
| `pixelate` | factor of the resolution |
| `elastic_transform` | strength and smoothness of the displacements, reach of the affine map, as shares of the image's height |

These are seventeen of the nineteen published kinds. `frost` is missing because it needs photographs of frost. `spatter` is missing
because it needs the edge detector and the distance transform of OpenCV."""

COLOR_KINDS = frozenset({"saturate"})
"""Kinds that need images with three channels."""
MIN_SIDE = 4
"""Smallest height and width of an image. Blurs and shifts need neighbors."""


@checked
def corrupt(images: np.ndarray, kind: str, severity: int, *, seed: Seed = 0) -> np.ndarray:
    """Corrupted copies of images.

    Random numbers depend on the seed and the number of images, but not on the severity. Severities whose constants hardly differ
    therefore give the same images (1 and 2 of `glass_blur`, 3 and 4 of `motion_blur`). Use other seeds to make them differ.

    Args:
        images: uint8 images with one channel or three channels (red, green, blue), at least 4 x 4 pixels: [N, C, H, W].
        kind: Key of `SEVERITIES`.
        severity: Severity from 1 to 5.
        seed: Seed of the noise.

    Returns:
        Corrupted images, uint8, of the same shape.

    Raises:
        ValueError: If the kind or the severity is unknown, if the images are not uint8 [N, C, H, W], if they are too small, or if
            they have another number of channels than the kind needs.
        ImportError: If `jpeg_compression` is asked for and Pillow is missing.
    """
    if kind not in SEVERITIES:
        raise ValueError(f"corrupt: kind={kind!r}; give one of {', '.join(SEVERITIES)}")
    if severity not in range(1, 6):
        raise ValueError(f"corrupt: severity={severity}; give an integer from 1 to 5")
    check_images("corrupt", images)
    channels, *sides = images.shape[1:]
    if channels not in ((3,) if kind in COLOR_KINDS else (1, 3)):
        needed = "three channels" if kind in COLOR_KINDS else "one or three channels"
        raise ValueError(f"corrupt: {kind} of images with {channels} channels; give images with {needed}")
    if min(sides) < MIN_SIDE:
        raise ValueError(f"corrupt: images of {sides[0]} x {sides[1]} pixels; give at least {MIN_SIDE} x {MIN_SIDE}")
    amount = SEVERITIES[kind][severity - 1]
    return to_bytes(_FUNCTIONS[kind](images / 255.0, amount, np.random.default_rng(seed)))


def _impulse_noise(x: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Set some entries to black or to white, with equal probability and independently for each entry."""
    hit, salt = generator.random(x.shape) < share, generator.random(x.shape) < 0.5
    return np.where(hit, salt.astype(x.dtype), x)


def _gaussian_blur(
    x: np.ndarray, width: float, reach: float = 4.0, border: Literal["edge", "symmetric"] = "edge"
) -> np.ndarray:
    """Blur rows, then columns, with a kernel of `reach` standard deviations to each side.

    Args:
        x: Images, [..., H, W].
        width: Standard deviation in pixels.
        reach: Reach of the kernel, in standard deviations.
        border: How `numpy.pad` continues the images.
    """
    taps = int(reach * width + 0.5)
    if not taps:
        return x
    kernel = np.array([math.exp(-0.5 * (offset / width) ** 2) for offset in range(-taps, taps + 1)])
    kernel /= kernel.sum()
    for axis in (x.ndim - 2, x.ndim - 1):
        padding = [(taps, taps) if index == axis else (0, 0) for index in range(x.ndim)]
        windows = sliding_window_view(np.pad(x, padding, mode=border), len(kernel), axis)
        x = sum(weight * windows[..., place] for place, weight in enumerate(kernel))
    return x


def _defocus_blur(x: np.ndarray, amount: tuple[float, float], generator: np.random.Generator) -> np.ndarray:
    """Blur with a disk whose edge is smoothed by a Gaussian of three taps. The image is mirrored at its outermost pixels."""
    radius, width = amount
    reach = math.ceil(radius) + 1
    place = np.arange(-reach, reach + 1)
    disk = (place**2 + place[:, None] ** 2 <= radius**2).astype(float)
    taps = np.exp(-0.5 * (np.arange(-1, 2) / width) ** 2)
    taps /= taps.sum()
    for axis in (0, 1):  # the outermost entries of the disk are 0
        disk = sum(tap * np.roll(disk, shift, axis) for tap, shift in zip(taps, (-1, 0, 1), strict=True))
    pixels = np.pad(x, ((0, 0), (0, 0), (reach, reach), (reach, reach)), mode="reflect")
    height, breadth = x.shape[2:]
    blurred = sum(
        disk[row, column] * pixels[:, :, row : row + height, column : column + breadth]
        for row, column in np.argwhere(disk)
    )
    return np.asarray(blurred / disk.sum())


def _glass_blur(x: np.ndarray, amount: tuple[float, int, int], generator: np.random.Generator) -> np.ndarray:
    """Let every pixel take the color of a random neighbor, between two blurs.

    The published code means to swap two pixels. It copies one of them instead, because it assigns views of one array.
    """
    width, reach, passes = amount
    x = _gaussian_blur(x, width).copy()
    rows, columns, every = *x.shape[2:], np.arange(len(x))
    for _ in range(passes):
        for row in range(rows - reach, reach, -1):
            for column in range(columns - reach, reach, -1):
                down, right = generator.integers(-reach, reach, (2, len(x)))
                x[:, :, row, column] = x[every, :, row + down, column + right]
    return _gaussian_blur(x, width)


def _move(x: np.ndarray, radius: int, width: float, degrees: np.ndarray) -> np.ndarray:
    """Average each pixel with the pixels after it along a line, with the weights of half a Gaussian. The border is repeated.

    Args:
        x: Images, [N, C, H, W].
        radius: Half the number of pixels along the line.
        width: Standard deviation of the weights in pixels.
        degrees: Angle of the line for each image, clockwise from the right, [N].
    """
    steps, angle = np.arange(2 * radius + 1), np.radians(degrees)[:, None]
    weights = np.exp(-0.5 * (steps / width) ** 2)
    weights /= weights.sum()
    right = np.ceil(np.cos(angle) * steps - 0.5).astype(int)  # [N, steps]
    down = np.ceil(np.sin(angle) * steps - 0.5).astype(int)
    height, breadth = x.shape[2:]
    moved, every = np.zeros(x.shape), np.arange(len(x))[:, None, None]
    for step, weight in enumerate(weights):
        rows = np.clip(np.arange(height) + down[:, step, None], 0, height - 1)[:, :, None]
        columns = np.clip(np.arange(breadth) + right[:, step, None], 0, breadth - 1)[:, None, :]
        moved += weight * np.moveaxis(x[every, :, rows, columns], 3, 1)  # indexing puts the channels last
    return moved


def _motion_blur(x: np.ndarray, amount: tuple[int, float], generator: np.random.Generator) -> np.ndarray:
    """Move every image in a random direction, at most 45 degrees from the right."""
    return _move(x, *amount, generator.uniform(-45, 45, len(x)))


def _zoom(x: np.ndarray, factor: float) -> np.ndarray:
    """Enlarge the middle of images to their former size, with bilinear interpolation."""
    sides = x.shape[2:]
    crops = [math.ceil(side / factor) for side in sides]
    top, left = ((side - crop) // 2 for side, crop in zip(sides, crops, strict=True))
    middle = torch.from_numpy(np.ascontiguousarray(x[:, :, top : top + crops[0], left : left + crops[1]]))
    sizes = [round(crop * factor) for crop in crops]
    large = F.interpolate(middle, size=sizes, mode="bilinear", align_corners=True).numpy()
    top, left = ((size - side) // 2 for size, side in zip(sizes, sides, strict=True))
    return np.asarray(large[:, :, top : top + sides[0], left : left + sides[1]])


def _zoom_blur(x: np.ndarray, largest: float, generator: np.random.Generator) -> np.ndarray:
    """Average an image and its enlargements, in steps of 1 %."""
    factors = np.arange(1, largest, 0.01)
    return np.asarray((x + sum(_zoom(x, factor) for factor in factors)) / (len(factors) + 1))


def _luminance(x: np.ndarray) -> np.ndarray:
    """Gray images with the brightness of color images, [N, 1, H, W]."""
    return x if x.shape[1] == 1 else np.tensordot([0.299, 0.587, 0.114], x, (0, 1))[:, None]


def _snow(x: np.ndarray, amount: tuple[Any, ...], generator: np.random.Generator) -> np.ndarray:
    """Whiten images, then add flakes that fall in a random direction, and the same flakes turned by 180 degrees."""
    mean, std, zoom, threshold, radius, width, share = amount
    flakes = _zoom(generator.normal(mean, std, (len(x), 1, *x.shape[2:])), zoom)
    flakes = np.where(flakes < threshold, 0.0, flakes).clip(0.0, 1.0)
    flakes = _move(flakes, radius, width, generator.uniform(-135, -45, len(x)))
    white = np.maximum(x, 1.5 * _luminance(x) + 0.5)
    return np.asarray(share * x + (1 - share) * white + flakes + flakes[:, :, ::-1, ::-1])


def _plasma(count: int, side: int, decay: float, generator: np.random.Generator) -> np.ndarray:
    """Random landscapes with heights from 0 to 1 by the diamond-square algorithm, periodic at the border: [count, side, side].

    Args:
        count: Number of landscapes.
        side: Side of a landscape in pixels, a power of two.
        decay: Root of the factor by which the roughness falls when the scale is halved.
        generator: Source of the random numbers.
    """
    heights, step, rough = np.zeros((count, side, side)), side, 1.0

    def settled(sums: np.ndarray) -> np.ndarray:
        """Means of four neighbors plus noise."""
        return np.asarray(sums / 4 + rough * generator.uniform(-rough, rough, sums.shape))

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        across, down = corners + np.roll(corners, -1, 2), corners + np.roll(corners, -1, 1)
        centers = heights[:, half::step, half::step] = settled(across + np.roll(across, -1, 1))
        heights[:, ::step, half::step] = settled(across + centers + np.roll(centers, 1, 1))
        heights[:, half::step, ::step] = settled(down + centers + np.roll(centers, 1, 2))
        step, rough = half, rough / decay
    heights -= heights.min((1, 2), keepdims=True)
    return np.asarray(heights / heights.max((1, 2), keepdims=True))


def _fog(x: np.ndarray, amount: tuple[float, float], generator: np.random.Generator) -> np.ndarray:
    """Add a random landscape as fog, then scale each image back to its former maximum."""
    strength, decay = amount
    side = 1 << (max(2, *x.shape[2:]) - 1).bit_length()
    fog = strength * _plasma(len(x), side, decay, generator)[:, None, : x.shape[2], : x.shape[3]]
    brightest = x.max((1, 2, 3), keepdims=True)
    return np.asarray((x + fog) * brightest / (brightest + strength))


def _contrast(x: np.ndarray, factor: float, generator: np.random.Generator) -> np.ndarray:
    mean: np.ndarray = x.mean((2, 3), keepdims=True)
    return np.asarray((x - mean) * factor + mean)


def _brightness(x: np.ndarray, addend: float, generator: np.random.Generator) -> np.ndarray:
    """Raise the HSV value and keep hue and saturation: all channels of a pixel are scaled by one factor. Black becomes gray."""
    value: np.ndarray = x.max(1, keepdims=True)
    brighter = np.clip(value + addend, 0.0, 1.0)
    return np.where(value > 0, x * (brighter / np.where(value > 0, value, 1.0)), brighter)


def _saturate(x: np.ndarray, amount: tuple[float, float], generator: np.random.Generator) -> np.ndarray:
    """Change the HSV saturation and keep hue and value. The hue of gray pixels is red."""
    factor, addend = amount
    value, least = x.max(1, keepdims=True), x.min(1, keepdims=True)
    gray = value == least
    saturation = np.where(gray, 0.0, (value - least) / np.where(value > 0, value, 1.0))
    wanted = np.clip(saturation * factor + addend, 0.0, 1.0)
    # the distance of each channel from the value, as a share of the distance of the lowest channel
    share = np.where(gray, np.array([0.0, 1.0, 1.0])[:, None, None], (value - x) / np.where(gray, 1.0, value - least))
    return np.asarray(value * (1 - wanted * share))


def _jpeg_compression(x: np.ndarray, quality: int, generator: np.random.Generator) -> np.ndarray:
    """Write images as JPEG files and read them again."""
    try:
        pillow = import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(
            "corrupt: Pillow, which jpeg_compression needs, is not installed; pip install pillow"
        ) from error
    read = np.empty(x.shape)
    for place, pixels in enumerate(np.moveaxis(to_bytes(x), 1, 3)):
        file = io.BytesIO()
        pillow.fromarray(pixels if len(x[0]) == 3 else pixels[:, :, 0]).save(file, "JPEG", quality=quality)
        read[place] = np.moveaxis(np.asarray(pillow.open(file)).reshape(pixels.shape), 2, 0) / 255.0
    return read


def _box(given: int, made: int) -> np.ndarray:
    """The matrix of Pillow's box filter, [made, given]: a new pixel is the mean of the old pixels whose centers it covers."""
    scale = given / made
    distance = (np.arange(given) + 0.5 - (np.arange(made)[:, None] + 0.5) * scale) / max(scale, 1.0)
    covered = ((distance > -0.5) & (distance <= 0.5)).astype(float)
    return np.asarray(covered / covered.sum(1, keepdims=True))


def _pixelate(x: np.ndarray, factor: float, generator: np.random.Generator) -> np.ndarray:
    """Shrink images and enlarge them again."""
    rows, columns = (_box(int(factor * side), side) @ _box(side, int(factor * side)) for side in x.shape[2:])
    return np.asarray(rows @ x @ columns.T)


def _elastic_transform(x: np.ndarray, amount: tuple[float, float, float], generator: np.random.Generator) -> np.ndarray:
    """Apply a random affine map, then displace pixels by smooth noise. Beyond its border, an image is mirrored."""
    side = x.shape[2]
    strength, width, reach = (side * share for share in amount)
    square = side // 3 * np.array([[1, 1], [1, -1], [-1, -1]])  # three corners around the middle, (column, row)
    corners = np.array([x.shape[3] // 2, side // 2]) + square
    moved = corners + generator.uniform(-reach, reach, (len(x), 3, 2))
    ones = np.ones((len(x), 3, 1))
    back = np.linalg.solve(np.concatenate([moved, ones], 2), np.broadcast_to(corners, moved.shape).astype(float))
    columns, rows = np.meshgrid(np.arange(x.shape[3]), np.arange(side))  # [H, W]
    pixels = np.stack([columns, rows], 2).astype(float)
    x = _sample(x, pixels @ back[:, None, :2] + back[:, None, None, 2], edges=False)
    noise = generator.uniform(-1, 1, (2, len(x), *x.shape[2:]))
    shift = strength * _gaussian_blur(noise, width, reach=3.0, border="symmetric")
    return _sample(x, pixels + np.moveaxis(shift, 0, 3), edges=True)


def _sample(x: np.ndarray, places: np.ndarray, edges: bool) -> np.ndarray:
    """Images at other places, by bilinear interpolation.

    Args:
        x: Images, [N, C, H, W].
        places: Column and row for each new pixel, [N, H, W, 2].
        edges: Whether images are mirrored at the edges of the outermost pixels. Otherwise they are mirrored at the centers.
    """
    size = np.array([x.shape[3], x.shape[2]])
    grid = (2 * places + 1) / size - 1 if edges else 2 * places / (size - 1) - 1
    both = torch.from_numpy(x), torch.from_numpy(grid)
    return F.grid_sample(*both, padding_mode="reflection", align_corners=not edges).numpy()


_FUNCTIONS: dict[str, Callable[[np.ndarray, Any, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": lambda x, std, generator: x + std * generator.standard_normal(x.shape),
    "shot_noise": lambda x, photons, generator: generator.poisson(x * photons) / photons,
    "impulse_noise": _impulse_noise,
    "gaussian_blur": lambda x, width, generator: _gaussian_blur(x, width),
    "contrast": _contrast,
    "brightness": _brightness,
    "speckle_noise": lambda x, std, generator: x + x * std * generator.standard_normal(x.shape),
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "fog": _fog,
    "saturate": _saturate,
    "jpeg_compression": _jpeg_compression,
    "pixelate": _pixelate,
    "elastic_transform": _elastic_transform,
}
