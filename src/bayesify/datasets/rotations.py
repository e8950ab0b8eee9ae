"""Rotated images."""

from __future__ import annotations

import math

import numpy as np

from bayesify.arguments.checks import checked
from bayesify.datasets.images import check_images, to_bytes

IMAGES_PER_CHUNK = 1000
"""Number of images that are rotated at a time."""


@checked
def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate images counterclockwise about their center, bilinearly, black beyond the border; exact at multiples of 90 degrees.

    Args:
        images: Images, uint8, [N, C, H, H].
        degrees: Angle, any number.

    Returns:
        Rotated images, uint8, of the same shape.

    Raises:
        ValueError: If the images are not uint8 [N, C, H, H], or the angle is not finite.
    """
    check_images("rotate", images, square=True)
    if degrees % 90 == 0:
        return np.ascontiguousarray(np.rot90(images, int(degrees // 90) % 4, axes=(2, 3)))
    corners = _corners(images.shape[2], math.radians(degrees % 360))
    turned = np.empty_like(images)
    for start in range(0, len(images), IMAGES_PER_CHUNK):
        pieces = images[start : start + IMAGES_PER_CHUNK].reshape(-1, images.shape[1], images.shape[2] ** 2)
        mixed = sum(weight * pieces[..., place] for place, weight in corners)
        turned[start : start + IMAGES_PER_CHUNK] = to_bytes(mixed / 255.0).reshape(-1, *images.shape[1:])
    return turned


def _corners(side: int, angle: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Index and weight, [H * H], of each of the four input pixels around the source point of each output pixel."""
    middle = (side - 1) / 2
    down, across = np.meshgrid(np.arange(side) - middle, np.arange(side) - middle, indexing="ij")
    row = math.cos(angle) * down + math.sin(angle) * across + middle
    column = -math.sin(angle) * down + math.cos(angle) * across + middle
    top, left = np.floor(row).astype(int), np.floor(column).astype(int)
    corners = []
    for below in (0, 1):
        for right in (0, 1):
            r, c = top + below, left + right
            weight = (1 - np.abs(row - r)) * (1 - np.abs(column - c))
            inside = (r >= 0) & (r < side) & (c >= 0) & (c < side)
            place = np.where(inside, r * side + c, 0)
            corners.append((place.reshape(-1), np.where(inside, weight, 0.0).astype(np.float32).reshape(-1)))
    return corners
