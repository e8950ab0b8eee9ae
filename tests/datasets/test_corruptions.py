"""Corruptions against what they are defined to be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from bayesify.datasets.corruptions import SEVERITIES, corrupt


def gray(level: int, count: int = 200, channels: int = 3) -> np.ndarray:
    return np.full((count, channels, 8, 8), level, dtype=np.uint8)


@pytest.fixture
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 3, 12, 10), dtype=np.uint8)


@pytest.mark.parametrize("severity", [1, 5])
def test_noise_has_the_variance_it_says(severity):
    """n = 38400 entries: the standard error of a variance v is v sqrt(2 / n), of Gaussian and nearly so of shot noise."""
    index, n = severity - 1, 200 * 3 * 64
    std = SEVERITIES["gaussian_noise"][index]
    for kind, expected in (
        ("gaussian_noise", std**2),
        ("shot_noise", (128 / 255) / SEVERITIES["shot_noise"][index]),
    ):
        noisy = corrupt(gray(128), kind, severity) / 255.0
        rounding = 1 / 255**2 / 12
        assert abs(noisy.var() - expected - rounding) < 5 * expected * np.sqrt(2 / n)
        assert abs(noisy.mean() - 128 / 255) < 5 * np.sqrt(expected / n) + 0.5 / 255


def test_impulses_hit_the_share_that_they_say():
    """n = 38400 entries, a binomial count: 5 standard errors."""
    n, share = 200 * 3 * 64, SEVERITIES["impulse_noise"][4]
    hit = corrupt(gray(100), "impulse_noise", 5)
    for level in (0, 255):
        p = share / 2
        assert abs((hit == level).mean() - p) < 5 * np.sqrt(p * (1 - p) / n)
    assert set(np.unique(hit)) == {0, 100, 255}


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_blur_is_scipys(pictures, severity):
    width = SEVERITIES["gaussian_blur"][severity - 1]
    expected = gaussian_filter(pictures / 255.0, (0, 0, width, width), mode="nearest", truncate=4)
    assert np.abs(corrupt(pictures, "gaussian_blur", severity) / 255.0 - expected).max() <= 0.5 / 255 + 1e-9


def test_contrast_shrinks_around_each_channels_mean(pictures):
    mean = pictures.mean((2, 3), keepdims=True)
    expected = (pictures - mean) * 0.4 + mean
    assert np.abs(corrupt(pictures, "contrast", 3) - expected).max() <= 0.5 + 1e-9


def test_brightness_keeps_hue_and_saturation():
    picture = np.array([[50, 0, 200], [100, 0, 200], [25, 0, 0]], dtype=np.uint8).T.reshape(3, 3, 1, 1).copy()
    bright = corrupt(picture, "brightness", 5)[:, :, 0, 0].astype(float)
    value = np.array([100, 0, 200]) + 0.3 * 255
    assert np.abs(bright[0] - np.array([50, 100, 25]) * value[0] / 100).max() <= 0.5 + 1e-9
    assert np.abs(bright[1] - value[1]).max() <= 0.5 + 1e-9
    assert np.array_equal(bright[2], [255, 255, 0])


@pytest.mark.parametrize("kind", SEVERITIES)
def test_severities_are_ordered_and_repeat_by_seed(kind):
    smooth = (127.5 + 100 * np.sin(np.arange(16 * 16) / 7)).astype(np.uint8).reshape(1, 1, 16, 16).repeat(50, 0)
    distances = [np.abs(corrupt(smooth, kind, severity).astype(float) - smooth).mean() for severity in range(1, 6)]
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert np.array_equal(corrupt(smooth, kind, 3, seed=4), corrupt(smooth, kind, 3, seed=4))


def test_errors_name_what_is_known(pictures):
    with pytest.raises(ValueError, match="gaussian_noise"):
        corrupt(pictures, "fog", 1)
    with pytest.raises(ValueError, match="1 to 5"):
        corrupt(pictures, "contrast", 0)
    with pytest.raises(ValueError, match="uint8"):
        corrupt(pictures / 255.0, "contrast", 1)
