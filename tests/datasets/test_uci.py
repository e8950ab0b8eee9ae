"""UCI tables: what is read, how it is split, and what the downloads must be."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bayesify.datasets import uci, uci_sources

DATA = os.environ.get("BAYESIFY_DATA")
needs_data = pytest.mark.skipif(
    not DATA or not (Path(DATA) / "uci").is_dir(), reason="BAYESIFY_DATA names no data folder"
)


def arrays(rows: int = 30, inputs: int = 3, splits: int = 2) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    made = {"X": generator.normal(size=(rows, inputs)), "y": generator.normal(size=(rows, 1))}
    for k in range(splits):
        order = generator.permutation(rows).astype(np.int32)
        made[f"train_{k}"], made[f"test_{k}"] = order[3:], order[:3]
    for d in range(inputs):
        order = np.argsort(made["X"][:, d]).astype(np.int32)
        made[f"gap_train_{d}"], made[f"gap_test_{d}"] = np.r_[order[:10], order[20:]], order[10:20]
    return made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci_classification").mkdir()
    np.savez(tmp_path / "uci" / "wine-quality-red.npz", **arrays())
    np.savez(tmp_path / "uci" / "yacht.npz", X=np.zeros((4, 2)), y=np.zeros((4, 1)))
    np.savez(tmp_path / "uci" / "energy.npz", X=np.zeros((4, 2)), y=np.zeros((3, 1)))
    labels = np.arange(40, dtype=np.uint8) % 2
    np.savez(tmp_path / "uci_classification" / "eeg.npz", X=np.random.default_rng(1).normal(size=(40, 2)), y=labels)
    return tmp_path


def test_regression(folder):
    stored, table = arrays(), uci.load("wine", folder)
    assert (table.name, table.task, table.num_classes) == ("wine", "regression", 0)
    assert np.array_equal(table.X, stored["X"])
    assert table.y.shape == (30, 1)
    assert (len(table.splits), len(table.gap_splits)) == (2, 3)
    assert np.array_equal(table.splits[1].train, stored["train_1"])
    assert np.array_equal(table.gap_splits[2].test, stored["gap_test_2"])
    assert uci.load("wine-quality-red", folder).name == "wine"


def test_validation_rows_come_from_the_training_rows(folder):
    split = uci.load("wine", folder).splits[0]
    made = split.with_validation(0.15, seed=3)
    assert len(made.validation) == round(0.15 * 27)
    assert sorted((*made.train, *made.validation)) == sorted(split.train)
    assert np.array_equal(made.test, split.test)
    assert np.array_equal(made.validation, split.with_validation(0.15, seed=3).validation)
    assert not np.array_equal(made.validation, split.with_validation(0.15, seed=4).validation)
    with pytest.raises(ValueError, match="share=0"):
        split.with_validation(0.0)


def test_classification_splits_do_not_depend_on_the_order_of_rows(folder):
    table = uci.load("eeg", folder)
    assert (table.task, table.num_classes, table.y.dtype) == ("classification", 2, np.int64)
    assert [len(split.test) for split in table.splits] == [4] * 20
    order = np.random.default_rng(5).permutation(40)
    again = uci.seeded_splits(table.X[order], table.y[order])
    for mine, other in zip(table.splits, again, strict=True):
        assert sorted((*mine.train, *mine.test)) == list(range(40))
        assert np.array_equal(table.X[mine.test], table.X[order][other.test])
    assert not np.array_equal(table.splits[0].test, table.splits[1].test)


def test_errors(folder):
    with pytest.raises(ValueError, match="give one of boston"):
        uci.load("iris", folder)
    with pytest.raises(FileNotFoundError, match=r"concrete\.npz"):
        uci.load("concrete", folder)
    with pytest.raises(ValueError, match="no arrays train_0"):
        uci.load("yacht", folder)
    with pytest.raises(ValueError, match="does not hold an array X"):
        uci.load("energy", folder)


def test_archive_text():
    letter = uci_sources.read_classification("letter", "T," + ",".join("2" * 16) + "\nA," + ",".join("7" * 16) + "\n")
    assert letter["y"].tolist() == [19, 0]
    assert letter["X"][1].tolist() == [7.0] * 16
    eeg = uci_sources.read_classification("eeg", "@RELATION x\n@DATA\n" + "4329.23," * 14 + "1\n")
    assert (eeg["y"].tolist(), eeg["X"].shape) == ([1], (1, 14))
    magic = uci_sources.read_classification("magic", "1.5," * 10 + "h\n" + "2.5," * 10 + "g\n")
    assert magic["y"].tolist() == [1, 0]
    with pytest.raises(ValueError, match="row 0 of magic has 3"):
        uci_sources.read_classification("magic", "1,2,g\n")
    with pytest.raises(ValueError, match=r"should have the shape \[19020, 10\]"):
        uci_sources.verify("magic", magic)
    with pytest.raises(ValueError, match="has the label 'x'; it should be one of g, h"):
        uci_sources.read_classification("magic", "1.5," * 10 + "x\n")


def test_regression_is_downloaded_once_and_verified(tmp_path, monkeypatch):
    """The files of both homes, laid out as there, become the arrays of our layout."""
    stored, home = arrays(), tmp_path / "home"
    for base, prefix, count in (("standard", "", 2), ("gap", "gap_", 3)):
        place = home / base / "yacht" / "data"
        place.mkdir(parents=True)
        for k in range(count):
            for part in ("train", "test"):
                np.savetxt(place / f"index_{part}_{k}.txt", stored[f"{prefix}{part}_{k}"])
    place = home / "standard" / "yacht" / "data"
    np.savetxt(place / "data.txt", np.column_stack((stored["y"], stored["X"])))
    np.savetxt(place / "index_features.txt", [1, 2, 3])
    np.savetxt(place / "index_target.txt", [0])
    np.savetxt(place / "n_splits.txt", [2])
    monkeypatch.setattr(uci_sources, "STANDARD_URL", (home / "standard").as_uri())
    monkeypatch.setattr(uci_sources, "GAP_URL", (home / "gap").as_uri())
    monkeypatch.setenv("BAYESIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    with pytest.raises(ValueError, match="a wrong checksum"):
        uci.load("yacht")
    assert not (tmp_path / "cache" / "uci" / "yacht.npz").exists()
    monkeypatch.setitem(uci_sources.REGRESSION_SHA256, "yacht", uci_sources.digest_all(stored))
    table = uci.load("yacht")
    assert np.array_equal(table.X, stored["X"])
    assert np.array_equal(table.gap_splits[1].train, stored["gap_train_1"])
    assert not (tmp_path / "cache" / "downloads" / "yacht").exists()
    monkeypatch.setattr(uci_sources, "STANDARD_URL", "file:///nowhere")
    assert np.array_equal(uci.load("yacht").y, stored["y"])


@needs_data
@pytest.mark.parametrize("name", ["yacht", "wine", "kin8nm"])
def test_the_published_files(name):
    """Sizes, the known checksums, and splits that partition the rows."""
    table = uci.load(name)
    assert len(table.splits) == 20
    assert len(table.gap_splits) == table.X.shape[1]
    for split in (*table.splits, *table.gap_splits):
        assert np.array_equal(np.sort(np.r_[split.train, split.test]), np.arange(len(table.X)))


@needs_data
@pytest.mark.parametrize("name", uci.CLASSIFICATION)
def test_the_published_classifications(name, tmp_path, monkeypatch):
    """They pass in any order of rows; one value or one label that is not theirs is noticed."""
    assert uci.load(name).task == "classification"
    with np.load(Path(str(DATA)) / "uci_classification" / f"{name}.npz") as stored:
        X, y = stored["X"], stored["y"]
    order = np.random.default_rng(0).permutation(len(X))
    uci_sources.verify(name, {"X": X[order], "y": y[order]})
    swapped, shifted = y.copy(), X.copy()
    other = int(np.argmax(y != y[0]))
    swapped[[0, other]] = y[[other, 0]]  # the counts of the classes stay
    shifted[3, 2] += 0.01
    for arrays in ({"X": X, "y": swapped}, {"X": shifted, "y": y}):
        with pytest.raises(ValueError, match="a wrong checksum"):
            uci_sources.verify(name, arrays)
    place = tmp_path / "uci_classification"
    place.mkdir()
    np.savez(place / f"{name}.npz", X=X, y=swapped)
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{name}\.npz: .*a wrong checksum"):
        uci.load(name)


@pytest.mark.parametrize("page", ["<html>please sign in</html>", "4329.23," * 13 + "7,1\n"])
def test_a_page_in_place_of_the_data_is_not_kept(tmp_path, monkeypatch, page):
    home = tmp_path / "00264"
    home.mkdir()
    (home / "EEG Eye State.arff").write_text(page)
    monkeypatch.setattr(uci_sources, "ARCHIVE_URL", tmp_path.as_uri())
    monkeypatch.setenv("BAYESIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    with pytest.raises(ValueError, match=r"uci: .*the download was removed"):
        uci.load("eeg")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
