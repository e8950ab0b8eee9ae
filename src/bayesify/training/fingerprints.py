"""Fingerprint of a few rows of data. It shows whether a continued run was given other data of the same size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.running.generators import own_generators
from bayesify.training.random_streams import loader_generators_kept, seeded_globals

FINGERPRINT_ROWS = 8
"""Number of rows in the fingerprint, including the first and the last row."""


def data_fingerprint(loader: Any) -> list[str]:
    """A short hash of each of a few rows of the data behind a loader.

    Rows are entries of a dataset or of a list of batches. If the data cannot be indexed, the first batch is the only
    row. The global generators and the loader's generators are restored. The fingerprint is empty if two readings
    differ, for example because random transforms have their own generators.
    """
    rows: Any = loader if isinstance(loader, Sequence) else getattr(loader, "dataset", None)
    indexed = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")

    def look(place: int) -> Any:
        return rows[place] if indexed else next(iter(loader))

    try:
        places = _places(len(rows)) if indexed else [0]
        first, second = ([_seen(loader, look, place) for place in places] for _ in range(2))
    except Exception:  # training will report problems of the data, with epoch and batch
        return []
    return first if first == second else []


def are_other_data(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether two comparable fingerprints differ in at least half of the rows. Fewer differences are taken for
    corrections of the data."""
    known = len(before) == len(now) > 0
    return known and 2 * sum(map(str.__ne__, before, now)) >= len(now)


def _places(count: int) -> list[int]:
    return sorted({round(place * (count - 1) / (FINGERPRINT_ROWS - 1)) for place in range(FINGERPRINT_ROWS)})


def _seen(loader: Any, look: Callable[[int], Any], place: int) -> str:
    with loader_generators_kept(loader), own_generators(), seeded_globals(0):
        torch.manual_seed(0)
        found = look(place)
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(found):
        digest.update(_bytes(leaf))
    return digest.hexdigest()[:16]


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous()
        content: bytes = leaf.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + content
    if isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "tobytes"):
        return bytes(leaf.tobytes())
    return repr(leaf).encode() if isinstance(leaf, (bool, int, float, str, bytes)) else type(leaf).__name__.encode()
