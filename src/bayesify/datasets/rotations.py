"""Rotated images."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from bayesify.arguments.checks import checked
from bayesify.datasets.images import check_images, to_bytes

IMAGES_PER_CHUNK = 1000
"""Number of images that are rotated at a time."""


@checked
def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate images counterclockwise about their center, with black pixels beyond the border.

    Multiples of 90 degrees are exact; other angles use bilinear interpolation.

    Args:
        images: Images, uint8, [N, C, H, H].
        degrees: Angle, any number.

    Returns:
        Rotated images, uint8, of the same shape.

    Raises:
        ValueError: If the images are not uint8 [N, C, H, H], or if the angle is not finite.
    """
    check_images("rotate", images, square=True)
    if degrees % 90 == 0:
        return np.ascontiguousarray(np.rot90(images, int(degrees // 90) % 4, axes=(2, 3)))
    angle = math.radians(degrees % 360)
    turn = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    grid = F.affine_grid(torch.tensor([turn], dtype=torch.float64), [1, *images.shape[1:]], align_corners=True)
    turned = np.empty_like(images)
    for start in range(0, len(images), IMAGES_PER_CHUNK):
        part = torch.from_numpy(images[start : start + IMAGES_PER_CHUNK] / 255.0)
        mixed = F.grid_sample(part, grid.expand(len(part), -1, -1, -1), align_corners=True)
        turned[start : start + IMAGES_PER_CHUNK] = to_bytes(mixed.numpy())
    return turned
