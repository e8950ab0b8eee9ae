"""Image sets from a folder: what is read, and what is said where it is not there."""

from __future__ import annotations

import numpy as np
import pytest

from bayesify.datasets import image_sources, images


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 6), ("test", 4)):
        arrays[f"{part}_images"] = generator.integers(0, 256, (count, 5, 5), dtype=np.uint8)
        arrays[f"{part}_labels"] = generator.integers(0, 3, count, dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", **arrays)
    np.savez(tmp_path / "notmnist_test10k.npz", **{key: arrays[key] for key in ("test_images", "test_labels")})
    np.savez(tmp_path / "cifar10.npz", wrong=arrays["test_labels"])
    return tmp_path, arrays


def test_gray_images_get_a_channel(folder):
    path, arrays = folder
    data = images.load("mnist", path)
    assert data.train_images.shape == (6, 1, 5, 5)
    assert np.array_equal(data.train_images[:, 0], arrays["train_images"])
    assert np.array_equal(data.test_labels, arrays["test_labels"])


def test_the_folder_comes_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("BAYESIFY_DATA", str(folder[0]))
    with pytest.raises(ValueError, match=r"notmnist_test10k\.npz: .*should have 10000 images"):
        images.load("notmnist")
    monkeypatch.setattr(image_sources, "verify", lambda name, arrays: None)
    assert len(images.load("notmnist").test_images) == 4
    assert len(images.load("notmnist").train_images) == 0


def test_first_cuts_each_part(folder):
    data = images.load("mnist", folder[0]).first(2)
    assert (len(data.train_images), len(data.train_labels), len(data.test_images)) == (2, 2, 4)


def test_errors_say_what_to_set(folder):
    with pytest.raises(FileNotFoundError, match=r"fashion_mnist\.npz"):
        images.load("fashion_mnist", folder[0])
    with pytest.raises(ValueError, match="give one of mnist"):
        images.load("imagenet", folder[0])
    with pytest.raises(ValueError, match="no test_images"):
        images.load("cifar10", folder[0])


def test_synthetic_images_differ_by_class_and_repeat_by_seed():
    first, again, other = (images.synthetic(40, 20, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.train_images, again.train_images)
    assert not np.array_equal(first.train_images, other.train_images)
    clean = images.synthetic(10, 10, noise_std=0.0)
    assert len(np.unique(clean.train_images.reshape(10, -1), axis=0)) == 10
    assert np.array_equal(clean.train_images, clean.test_images)
