"""Standardization by training data alone, and rotations against scipy."""

from __future__ import annotations

import numpy as np
import pytest

from bayesify.datasets import Standardization
from bayesify.datasets.rotations import rotate


def test_columns_have_mean_0_and_variance_1():
    train = np.random.default_rng(0).normal(5.0, 3.0, (50, 4))
    train[:, 2] = 0.1  # its mean is not 0.1 to the last digit
    scale = Standardization.of(train)
    made = scale(train)
    assert np.allclose(made.mean(0), 0, atol=1e-12)
    assert np.allclose(made.std(0), [1, 1, 0, 1], atol=1e-12)
    assert np.allclose(scale.undo(made), train)
    test = np.full((1, 4), 7.0)
    assert np.allclose(scale(test), (test - train.mean(0)) / np.where(np.arange(4) == 2, 1, train.std(0)))


def test_channels_of_bytes_in_pieces():
    train = np.random.default_rng(0).integers(0, 256, (3000, 2, 40, 40), dtype=np.uint8)
    scale = Standardization.of(train, (0, 2, 3))
    assert scale.mean.shape == (1, 2, 1, 1)
    assert np.allclose(scale.mean.ravel(), train.mean((0, 2, 3)))
    assert np.allclose(scale.std.ravel(), train.std((0, 2, 3)))


def test_standardization_errors():
    with pytest.raises(ValueError, match="are empty"):
        Standardization.of(np.empty((0, 3)))
    with pytest.raises(ValueError, match="not finite"):
        Standardization.of(np.array([[1.0], [np.nan]]))
    with pytest.raises(ValueError, match="the axes must include 0"):
        Standardization.of(np.ones((3, 2)), (1,))


@pytest.fixture
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (1003, 2, 9, 9), dtype=np.uint8)


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3, 4, 5])
def test_quarter_turns_are_exact(pictures, quarters):
    assert np.array_equal(rotate(pictures, 90 * quarters), np.rot90(pictures, quarters % 4, axes=(2, 3)))


@pytest.mark.parametrize("degrees", [15, 60, 135, -30])
@pytest.mark.parametrize("side", [8, 9])
def test_other_angles_are_bilinear(pictures, degrees, side):
    ndimage = pytest.importorskip("scipy.ndimage")
    small = pictures[..., :side, :side]
    wanted = ndimage.rotate(small.astype(float), degrees, axes=(2, 3), order=1, reshape=False, mode="grid-constant")
    # half a gray level of rounding, and float32 weights
    assert np.abs(rotate(small, degrees) - wanted).max() <= 0.5 + 1e-3


def test_the_direction_is_that_of_quarter_turns(pictures):
    near = rotate(pictures, 89.9999).astype(int)
    assert np.abs(near - np.rot90(pictures, 1, axes=(2, 3))).max() <= 1


def test_rotation_errors(pictures):
    with pytest.raises(ValueError, match="give uint8"):
        rotate(pictures.astype(float), 10)
    with pytest.raises(ValueError, match="give uint8"):
        rotate(pictures[..., :5], 10)
    with pytest.raises(ValueError, match="finite"):
        rotate(pictures, float("nan"))
