"""Corruptions against what they are defined to be: scipy, Pillow, or loops over pixels."""

from __future__ import annotations

import colorsys
import io
import math
import sys

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter, map_coordinates, zoom

from bayesify.datasets.corruptions import COLOR_KINDS, SEVERITIES, corrupt

SHADES = 1 / 255
"""One level of a pixel. Rounding changes a pixel by half a level."""

FIXED_KINDS = (
    "gaussian_blur",
    "contrast",
    "brightness",
    "defocus_blur",
    "zoom_blur",
    "saturate",
    "jpeg_compression",
    "pixelate",
)
"""Kinds without random numbers."""


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
    picture = (
        np.array([[50, 0, 200], [100, 0, 200], [25, 0, 0]], dtype=np.uint8)
        .T.reshape(3, 3, 1, 1)
        .repeat(4, 2)
        .repeat(4, 3)
    )
    bright = corrupt(picture, "brightness", 5)[:, :, 0, 0].astype(float)
    value = np.array([100, 0, 200]) + 0.3 * 255
    assert np.abs(bright[0] - np.array([50, 100, 25]) * value[0] / 100).max() <= 0.5 + 1e-9
    assert np.abs(bright[1] - value[1]).max() <= 0.5 + 1e-9
    assert np.array_equal(bright[2], [255, 255, 0])


def photographs(count: int = 3, height: int = 32, width: int = 32) -> np.ndarray:
    """Smooth colored images with some noise."""
    generator = np.random.default_rng(1)
    waves = np.sin(np.arange(height)[:, None] / 5 + np.arange(width) / 7 + 3 * generator.random((count, 3, 1, 1)))
    return (127.5 + 100 * waves + 20 * generator.random(waves.shape)).clip(0, 255).astype(np.uint8)


def assert_close(corrupted: np.ndarray, expected: np.ndarray, levels: float = 0.5) -> None:
    """Compare with unrounded pixels from 0 to 1."""
    assert np.abs(corrupted / 255.0 - expected.clip(0, 1)).max() <= levels * SHADES + 1e-9


@pytest.mark.parametrize("severity", [1, 5])
def test_speckle_noise_is_proportional_to_the_pixel(severity):
    """n = 38400 entries: the standard error of a variance v is v sqrt(2 / n)."""
    n, std = 200 * 3 * 64, SEVERITIES["speckle_noise"][severity - 1]
    for level in (60, 120):
        expected = (std * level / 255) ** 2
        noisy = corrupt(gray(level), "speckle_noise", severity) / 255.0
        assert abs(noisy.var() - expected - SHADES**2 / 12) < 5 * expected * np.sqrt(2 / n)


@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_defocus_blur_is_a_smoothed_disk(severity):
    radius, width = SEVERITIES["defocus_blur"][severity - 1]
    side = np.arange(-8, 9)
    disk = np.hypot(side, side[:, None]) <= radius
    gauss = np.exp(-(np.hypot([-1, 0, 1], [[-1], [0], [1]]) ** 2) / (2 * width**2))
    kernel = convolve(disk / disk.sum(), gauss / gauss.sum(), mode="constant")
    pictures = photographs()
    expected = np.stack([[convolve(one / 255.0, kernel, mode="mirror") for one in image] for image in pictures])
    assert_close(corrupt(pictures, "defocus_blur", severity), expected)


@pytest.mark.parametrize("severity", [1, 4])
def test_glass_blur_moves_colors_by_its_reach(severity):
    """Red is the row and green the column, so that each pixel shows where its color comes from. The blur is negligible at
    severity 1. n = 50 * 27 * 27 pixels, a binomial count of each of four directions: 5 standard errors.
    """
    rows, columns = np.meshgrid(np.arange(30), np.arange(30), indexing="ij")
    places = np.stack([8 * rows, 8 * columns, 0 * rows]).astype(np.uint8)[None].repeat(50, 0)
    found = corrupt(places, "glass_blur", severity).astype(float) / 8
    moves = np.round(np.stack([rows - found[:, 0], columns - found[:, 1]], 1))[:, :, 2:-1, 2:-1]
    passes = SEVERITIES["glass_blur"][severity - 1][2]
    assert moves.min() == 0
    assert moves.max() == passes
    if severity == 1:
        n = moves[:, 0].size
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = ((moves[:, 0] == down) & (moves[:, 1] == right)).mean()
            assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)


def moved(image: np.ndarray, radius: int, width: float, degrees: float) -> np.ndarray:
    """Motion of one channel [H, W], pixel by pixel."""
    steps = range(2 * radius + 1)
    weights = [math.exp(-(step**2) / (2 * width**2)) for step in steps]
    result = np.zeros(image.shape)
    for row, column in np.ndindex(image.shape):
        for step, weight in zip(steps, weights, strict=True):
            down = math.ceil(step * math.sin(math.radians(degrees)) - 0.5)
            right = math.ceil(step * math.cos(math.radians(degrees)) - 0.5)
            source = min(max(row + down, 0), image.shape[0] - 1), min(max(column + right, 0), image.shape[1] - 1)
            result[row, column] += weight / sum(weights) * image[source]
    return result


def test_motion_blur_averages_along_a_line():
    pictures = photographs(2, 14, 12)
    angles = np.random.default_rng(3).uniform(-45, 45, 2)
    expected = [
        [moved(one / 255.0, 9, 2.5, angle) for one in image] for image, angle in zip(pictures, angles, strict=True)
    ]
    assert_close(corrupt(pictures, "motion_blur", 5, seed=3), np.array(expected))


def enlarged(image: np.ndarray, factor: float) -> np.ndarray:
    """The middle of one channel [H, H], enlarged by scipy."""
    side = len(image)
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    large = zoom(image[top : top + crop, top : top + crop], factor, order=1)
    top = (len(large) - side) // 2
    return large[top : top + side, top : top + side]


@pytest.mark.parametrize("severity", [1, 5])
def test_zoom_blur_averages_scipys_zooms(severity):
    pictures = photographs()
    factors = np.arange(1, SEVERITIES["zoom_blur"][severity - 1], 0.01)
    expected = [
        [np.mean([one, *(enlarged(one, factor) for factor in factors)], 0) for one in image]
        for image in pictures / 255.0
    ]
    assert_close(corrupt(pictures, "zoom_blur", severity), np.array(expected))


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_snow_adds_flakes_to_a_whitened_image(severity):
    mean, std, factor, threshold, radius, width, share = SEVERITIES["snow"][severity - 1]
    pictures, generator = photographs(2), np.random.default_rng(4)
    flakes = generator.normal(mean, std, (2, 1, 32, 32))[:, 0]
    angles = generator.uniform(-135, -45, 2)
    expected = []
    for image, flake, angle in zip(pictures / 255.0, flakes, angles, strict=True):
        layer = enlarged(flake, factor)
        layer = moved(np.where(layer >= threshold, layer, 0).clip(0, 1), radius, width, angle)
        bright = 1.5 * (0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]) + 0.5
        expected.append(share * image + (1 - share) * np.maximum(image, bright) + layer + np.rot90(layer, 2))
    assert_close(corrupt(pictures, "snow", severity, seed=4), np.array(expected))


def landscape(side: int, decay: float, generator: np.random.Generator) -> np.ndarray:
    """The diamond-square algorithm of one map, point by point."""
    heights, step, rough = np.zeros((side, side)), side, 1.0
    while step >= 2:
        half, count = step // 2, side // step
        for offsets, neighbors in (
            ((half, half), [(-half, -half), (-half, half), (half, -half), (half, half)]),
            ((0, half), [(0, -half), (0, half), (-half, 0), (half, 0)]),
            ((half, 0), [(0, -half), (0, half), (-half, 0), (half, 0)]),
        ):
            noise = rough * generator.uniform(-rough, rough, (1, count, count))[0]
            for row, column in np.ndindex(count, count):
                place = row * step + offsets[0], column * step + offsets[1]
                around = [heights[(place[0] + down) % side, (place[1] + right) % side] for down, right in neighbors]
                heights[place] = np.mean(around) + noise[row, column]
        step, rough = half, rough / decay
    return (heights - heights.min()) / np.ptp(heights)


@pytest.mark.parametrize("size", [(16, 16), (13, 9)])
def test_fog_is_a_diamond_square_landscape(size):
    (strength, decay), picture = SEVERITIES["fog"][3], photographs(1, *size)
    fog = strength * landscape(16, decay, np.random.default_rng(5))[: size[0], : size[1]]
    most = picture.max() / 255
    assert_close(corrupt(picture, "fog", 4, seed=5), (picture / 255 + fog) * most / (most + strength))


def test_every_image_has_its_own_random_numbers():
    pictures = photographs(1).repeat(2, 0)
    for kind in set(SEVERITIES) - set(FIXED_KINDS):
        first, second = corrupt(pictures, kind, 4)
        assert not np.array_equal(first, second), kind


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_saturation_of_the_standard_library(severity):
    factor, addend = SEVERITIES["saturate"][severity - 1]
    pictures = photographs(1, 6, 6)
    pictures[0, :, 0, 0], pictures[0, :, 0, 1], pictures[0, :, 1, 0] = 90, 0, (200, 200, 0)
    expected = np.empty(pictures.shape)
    for row, column in np.ndindex(6, 6):
        hue, saturation, value = colorsys.rgb_to_hsv(*pictures[0, :, row, column] / 255.0)
        new = min(max(saturation * factor + addend, 0), 1)
        expected[0, :, row, column] = colorsys.hsv_to_rgb(hue, new, value)
    assert_close(corrupt(pictures, "saturate", severity), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_files_of_pillow(channels):
    pictures = photographs()[:, :channels]
    for given, found in zip(pictures, corrupt(pictures, "jpeg_compression", 5), strict=True):
        file = io.BytesIO()
        Image.fromarray(given.transpose(1, 2, 0).squeeze()).save(file, "JPEG", quality=40)
        assert np.array_equal(np.array(Image.open(file)).reshape(32, 32, channels).transpose(2, 0, 1), found)


@pytest.mark.parametrize("size", [(32, 32), (28, 28), (13, 20)])
def test_pixels_are_those_of_pillows_box_filter(size):
    """Pillow rounds after each of its four passes: up to two levels."""
    picture = photographs(1, *size)
    for severity, factor in enumerate(SEVERITIES["pixelate"], 1):
        image = Image.fromarray(picture[0].transpose(1, 2, 0))
        small = image.resize((int(size[1] * factor), int(size[0] * factor)), Image.Resampling.BOX)
        expected = np.array(small.resize(image.size, Image.Resampling.BOX)).transpose(2, 0, 1)[None] / 255
        assert_close(corrupt(picture, "pixelate", severity), expected, levels=2)


@pytest.mark.parametrize("severity", [1, 2, 5])
def test_elastic_transform_of_scipy(severity):
    strength, width, reach = (32 * share for share in SEVERITIES["elastic_transform"][severity - 1])
    picture, generator = photographs(1), np.random.default_rng(6)
    corners = np.array([[26, 26], [26, 6], [6, 6]])  # (column, row)
    new = corners + generator.uniform(-reach, reach, (1, 3, 2))[0]
    forth = np.linalg.lstsq(np.c_[corners, np.ones(3)], new, rcond=None)[0]  # [column, row, 1] -> new place
    places = np.stack(np.meshgrid(np.arange(32), np.arange(32)), -1).reshape(-1, 2)
    back = np.linalg.solve(forth[:2].T, (places - forth[2]).T)
    affine = [map_coordinates(one / 255, back[::-1], order=1, mode="mirror").reshape(32, 32) for one in picture[0]]
    right, down = (
        strength * gaussian_filter(one[0], width, truncate=3, mode="reflect")
        for one in generator.uniform(-1, 1, (2, 1, 32, 32))
    )
    rows, columns = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    expected = [map_coordinates(one, [rows + down, columns + right], order=1, mode="reflect") for one in affine]
    assert_close(corrupt(picture, "elastic_transform", severity, seed=6), np.array([expected]))


@pytest.mark.parametrize("kind", SEVERITIES)
def test_every_kind_takes_any_size_and_repeats_by_seed(kind):
    for shape in ((2, 1, 16, 16), (2, 3, 11, 20), (0, 3, 8, 8), (1, 3, 4, 4), (2, 1, 5, 40)):
        if kind in COLOR_KINDS and shape[1] == 1:
            continue
        pictures = np.resize(photographs(2, 20, 20), shape)
        before = pictures.copy()
        for severity in range(1, 6):
            found = corrupt(pictures, kind, severity, seed=4)
            assert found.shape == shape
            assert found.dtype == np.uint8
            assert np.array_equal(found, corrupt(pictures, kind, severity, seed=4))
            assert np.array_equal(pictures, before)
            assert pictures.size < 400 or not np.array_equal(found, pictures)
        if pictures.size >= 400:
            assert np.array_equal(found, corrupt(pictures, kind, 5, seed=5)) == (kind in FIXED_KINDS)


UNORDERED_KINDS = {"glass_blur", "motion_blur", "snow", "saturate", "elastic_transform"}
"""Kinds whose published constants do not move an image further with every severity."""


@pytest.mark.parametrize("kind", sorted(set(SEVERITIES) - UNORDERED_KINDS))
def test_severities_are_ordered(kind):
    pictures = photographs(50)
    distances = [np.abs(corrupt(pictures, kind, severity).astype(float) - pictures).mean() for severity in range(1, 6)]
    assert distances == sorted(distances)


def test_errors_name_what_is_known(pictures):
    with pytest.raises(ValueError, match="gaussian_noise"):
        corrupt(pictures, "frost", 1)
    with pytest.raises(ValueError, match="1 to 5"):
        corrupt(pictures, "contrast", 0)
    with pytest.raises(ValueError, match="uint8"):
        corrupt(pictures / 255.0, "contrast", 1)
    with pytest.raises(ValueError, match="three channels"):
        corrupt(pictures[:, :1], "saturate", 1)
    for kind in SEVERITIES:
        with pytest.raises(ValueError, match="channels"):
            corrupt(pictures[:, :2], kind, 1)
        with pytest.raises(ValueError, match="3 x 10 pixels; give at least 4 x 4"):
            corrupt(pictures[:, :, :3], kind, 1)


def test_jpeg_compression_names_the_package_that_is_missing(pictures, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        corrupt(pictures, "jpeg_compression", 1)
