"""The public sources of the image sets, and the conversion of their files to the arrays that this package uses.

MNIST, Fashion-MNIST, notMNIST and CIFAR-10 are verified by the sha256 of each array; CIFAR-100 and SVHN are verified by the sha256
of the downloaded files. All sets are verified by their numbers of images and labels. CIFAR is read in its binary form, which
needs no unpickling.
"""

import gzip
import math
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bayesify.datasets.download import MAX_BYTES, SOURCES, digest, fetch

IDX_FILES = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}

KNOWN_IMAGES = SOURCES["images"]
BASE_URLS: dict[str, tuple[str, ...]] = {name: tuple(entry["homes"]) for name, entry in KNOWN_IMAGES.items()}
SET_SIZES: dict[str, tuple[int, int, int]] = {name: tuple(entry["size"]) for name, entry in KNOWN_IMAGES.items()}
ARRAY_SHA256: dict[str, dict[str, str]] = {name: entry.get("arrays", {}) for name, entry in KNOWN_IMAGES.items()}
FILE_SHA256: dict[str, str] = SOURCES["files"]
"""Facts about each set from `sources.toml`."""


def download(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The verified arrays of a downloaded set. Finished files stay in `folder`, so that an interrupted download can continue."""
    if name in ("cifar10", "cifar100"):
        arrays = _cifar(name, folder)
    elif name == "svhn":
        arrays = _svhn(folder)
    else:
        wanted = [key for key in IDX_FILES if SET_SIZES[name][0] or key.startswith("test")]
        arrays = {key: read_idx(_get(name, IDX_FILES[key], folder, key)) for key in wanted}
    verify(name, arrays)
    return arrays


def verify(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare arrays with the known facts about a set: numbers of images and classes, and checksums if there are any."""
    num_train, num_test, num_classes = SET_SIZES[name]
    for part, count in (("train", num_train), ("test", num_test)):
        if not count:
            continue
        if missing := {f"{part}_images", f"{part}_labels"} - set(arrays):
            raise ValueError(f"images: the download of {name} lacks {' and '.join(sorted(missing))}")
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if len(images) != count or labels.shape != (count,) or len(np.unique(labels)) != num_classes:
            raise ValueError(
                f"images: the {part} part of {name} has the shape {list(images.shape)} with {len(np.unique(labels))} classes; "
                f"it should have {count} images of {num_classes} classes"
            )
        if name in ("cifar10", "cifar100") and (np.bincount(labels) != count // num_classes).any():
            raise ValueError(
                f"images: the {part}_labels of {name} are unbalanced; each class should have {count // num_classes} images"
            )
    for key in ARRAY_SHA256.get(name, {}):
        _compare(name, key, arrays[key])


def _compare(name: str, key: str, array: np.ndarray) -> None:
    if digest(array) != ARRAY_SHA256[name][key]:
        raise ValueError(f"images: {key} of {name} has a wrong checksum; the source has changed or is damaged")


def _get(name: str, file: str, folder: Path, key: str | None = None) -> Path:
    """Download a file. If `key` names an array of the set, the file's array must have the checksum of that array."""
    check, homes = None if key is None else lambda path: _compare(name, key, read_idx(path)), BASE_URLS[name]
    return fetch([f"{home}/{file}" for home in homes], folder / file, sha256=FILE_SHA256.get(file), check=check)


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of a gzipped IDX file (LeCun et al. 1998), of at most the announced size and at most `MAX_BYTES`."""
    try:
        with gzip.open(path) as stream:
            start = stream.read(4)
            if len(start) < 4 or start[:3] != b"\x00\x00\x08":
                raise ValueError(f"images: {path.name} is not an IDX file whose entries are bytes")
            sizes = stream.read(4 * start[3])
            shape = np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4").tolist()
            size = math.prod(shape)
            if size > MAX_BYTES:
                raise ValueError(
                    f"images: {path.name} has {size:,} bytes when unpacked, more than the limit of {MAX_BYTES:,}"
                )
            raw = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"images: {path.name} is not a complete gzip file: {error}") from error
    if len(shape) != start[3] or len(raw) != size:
        raise ValueError(
            f"images: the size of {path.name}, {len(raw)} bytes or more, does not match the shape {shape} in its header"
        )
    return np.frombuffer(raw, np.uint8).reshape(shape).copy()


def _cifar(name: str, folder: Path) -> dict[str, np.ndarray]:
    fine = name == "cifar100"
    archive = _get(name, "cifar-100-binary.tar.gz" if fine else "cifar-10-binary.tar.gz", folder)
    parts: dict[str, Sequence[str]] = {
        "train": ["train.bin"] if fine else [f"data_batch_{index}.bin" for index in range(1, 6)],
        "test": ["test.bin"] if fine else ["test_batch.bin"],
    }
    arrays: dict[str, np.ndarray] = {}
    with tarfile.open(archive) as opened:
        members = {Path(member.name).name: member for member in opened.getmembers() if member.isfile()}
        for part, files in parts.items():
            rows = []
            for file in files:
                stream = opened.extractfile(members[file]) if file in members else None
                if stream is None:
                    raise ValueError(f"images: {archive.name} does not contain {file}")
                rows.append(_cifar_rows(stream.read(), labels=2 if fine else 1))
            arrays[f"{part}_images"], arrays[f"{part}_labels"] = map(np.concatenate, zip(*rows, strict=True))
    return arrays


def _cifar_rows(raw: bytes, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of CIFAR's binary rows: one or two labels (the fine label last), and then 3 x 32 x 32 bytes."""
    width = labels + 3 * 32 * 32
    if not raw or len(raw) % width:
        raise ValueError(f"images: a file of {len(raw)} bytes does not consist of rows of {width} bytes")
    table = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return table[:, labels:].reshape(-1, 3, 32, 32), table[:, labels - 1].copy()


def _svhn(folder: Path) -> dict[str, np.ndarray]:
    try:
        from scipy.io import loadmat
    except ImportError as missing:
        raise ImportError("images: reading the files of SVHN needs scipy; pip install scipy") from missing
    arrays: dict[str, np.ndarray] = {}
    for part in ("train", "test"):
        stored = loadmat(_get("svhn", f"{part}_32x32.mat", folder))
        arrays[f"{part}_images"] = np.ascontiguousarray(stored["X"].transpose(3, 2, 0, 1))
        labels = stored["y"].reshape(-1).astype(np.uint8)
        arrays[f"{part}_labels"] = np.where(labels == 10, 0, labels).astype(np.uint8)
    return arrays
