"""UCI data: regressions with the standard splits and the gap splits, and classifications with random splits."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np

from bayesify.arguments.checks import Count, Seed, checked
from bayesify.datasets import uci_sources
from bayesify.datasets.download import SOURCES, obtain

REGRESSION: dict[str, str] = {name: entry["file"] for name, entry in SOURCES["regression"].items()}
"""Short names of the regressions, and their files in the folder `uci`; `load` accepts both."""
CLASSIFICATION = tuple(SOURCES["classification"])
"""Names of the classifications, which are also their files in the folder `uci_classification`."""


@dataclass(frozen=True)
class Split:
    """Rows for training and rows for testing.

    Args:
        train: Indices of the training rows, int64.
        test: Indices of the test rows, int64.
        validation: Indices of rows set aside from the training rows, int64; empty by default.
    """

    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @checked
    def with_validation(self, share: float = 0.15, seed: Seed = 0) -> Self:
        """A split in which a random share of the training rows becomes validation rows.

        Raises:
            ValueError: If no row would be left for training, or if no row would be set aside.
        """
        count = round(share * len(self.train))
        if not 0 < count < len(self.train):
            remedy = "give a share that sets some rows aside, but not all"
            raise ValueError(f"Split: share={share} sets {count} of {len(self.train)} rows aside; {remedy}")
        order = np.random.default_rng(seed).permutation(len(self.train))
        return replace(self, train=self.train[np.sort(order[count:])], validation=self.train[np.sort(order[:count])])


@dataclass(frozen=True)
class Table:
    """A data set without any scaling.

    Args:
        name: Short name of the data set.
        task: `"regression"` or `"classification"`.
        X: Inputs, [N, D], float64.
        y: Targets, [N, 1], float64; or labels starting at 0, [N], int64.
        splits: Standard splits.
        gap_splits: One split per input. The rows are sorted by this input, and the middle third of them is used for testing
            (Foong et al. 2019). Empty for classification.
    """

    name: str
    task: Literal["regression", "classification"]
    X: np.ndarray
    y: np.ndarray
    splits: tuple[Split, ...]
    gap_splits: tuple[Split, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a regression."""
        return 0 if self.task == "regression" else int(self.y.max()) + 1


@checked
def load(name: str, folder: str | Path | None = None, *, download: bool = True) -> Table:
    """Read a UCI data set.

    If `folder` is given, only this folder is searched. Otherwise, the folder that `BAYESIFY_DATA` names and the cache
    (`BAYESIFY_CACHE`, or the user's cache folder) are searched. If neither has the set, it is downloaded and kept in the cache.
    Files in `folder` are not verified; all other files are verified by the sha256 of all values.

    Regressions have two kinds of splits: the 20 splits of Hernández-Lobato & Adams (2015) into 90 % and 10 % of the rows (5
    splits for protein), and the gap splits of Foong et al. (2019). Classifications have no generally accepted splits: see
    `seeded_splits`.

    Args:
        name: An entry of `CLASSIFICATION`, a key of `REGRESSION`, or the file name that belongs to such a key.
        folder: Folder that holds the folders `uci` and `uci_classification`. If it is given, nothing is downloaded.
        download: Whether to download a set that is in none of the searched folders.

    Raises:
        ValueError: If the name is unknown, or if the file does not hold the expected data.
        FileNotFoundError: If the set is in none of the folders and cannot be downloaded.
    """
    short = {file: key for key, file in REGRESSION.items()}.get(name, name)
    if short in CLASSIFICATION:
        arrays = _read(f"uci_classification/{short}.npz", short, folder, download)
        labels = arrays["y"].astype(np.int64).reshape(-1)
        return Table(short, "classification", arrays["X"], labels, seeded_splits(arrays["X"], labels))
    if short not in REGRESSION:
        raise ValueError(f"uci: name={name!r}; give one of {', '.join((*REGRESSION, *CLASSIFICATION))}")
    arrays = _read(f"uci/{REGRESSION[short]}.npz", short, folder, download)
    standard, gap = _splits(arrays, ""), _splits(arrays, "gap_")
    if not standard:
        raise ValueError(f"uci: the file has no arrays train_0 and test_0; this is not the file of {short}")
    return Table(short, "regression", arrays["X"], arrays["y"].reshape(-1, 1), standard, gap)


def _read(file: str, name: str, folder: str | Path | None, download: bool) -> dict[str, np.ndarray]:
    stem = Path(file).stem
    make = partial(uci_sources.download, stem) if download else None
    path, arrays = obtain("uci", file, folder, make, partial(uci_sources.verify, stem))
    if not {"X", "y"} <= set(arrays) or arrays["X"].ndim != 2 or len(arrays["X"]) != len(arrays["y"]):
        raise ValueError(
            f"uci: {path} does not hold an array X [N, D] and an array y with N rows; this is not the file of {name}"
        )
    return arrays


def _splits(arrays: dict[str, np.ndarray], prefix: str) -> tuple[Split, ...]:
    made: list[Split] = []
    while {f"{prefix}train_{len(made)}", f"{prefix}test_{len(made)}"} <= arrays.keys():
        made.append(Split(*(arrays[f"{prefix}{part}_{len(made)}"].astype(np.int64) for part in ("train", "test"))))
    return tuple(made)


@checked
def seeded_splits(
    X: np.ndarray, y: np.ndarray, count: Count = 20, test_share: float = 0.1, seed: Seed = 0
) -> tuple[Split, ...]:
    """Random splits that depend only on the values, not on the order of the rows.

    Rows are sorted by their values before the split, so that copies of a data set in different orders are split alike.

    Args:
        X: Inputs, [N, D].
        y: Targets, [N] or [N, 1].
        count: Number of splits; split k uses `seed + k`.
        test_share: Share of rows for testing.
        seed: Seed of the first split.

    Raises:
        ValueError: If a split would leave no row for training or testing.
    """
    if len(X) != len(y):
        raise ValueError(f"seeded_splits: X has {len(X)} rows, but y has {len(y)}; give one target for each row")
    num_test = round(test_share * len(X))
    if not 0 < num_test < len(X):
        raise ValueError(
            f"seeded_splits: test_share={test_share} of {len(X)} rows leaves no row for training or for testing; give "
            "another share"
        )
    order = uci_sources.sorted_rows(X, y)
    made = []
    for index in range(count):
        dealt = order[np.random.default_rng(seed + index).permutation(len(X))]
        made.append(Split(dealt[num_test:], dealt[:num_test]))
    return tuple(made)
