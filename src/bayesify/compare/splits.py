"""Repeated splits of a table's rows into four parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesify.tables.errors import InputError
from bayesify.training.random_streams import derive_seed

LEAST_ROWS = 20
"""Rows below which a comparison makes no sense."""
SMALL = 2000
"""Rows below which a fifth is for testing, and from which on a tenth."""
HELD = 0.12
"""Share of the rows that are not for testing which go to validation, and again to calibration."""
LEAST_HELD = 3


@dataclass(frozen=True)
class Parts:
    """Row numbers of one split; no row is in two parts.

    Args:
        fit: To train on.
        validation: To tune on, and to fit the temperature of the temperature-scaled baseline.
        calibration: To recalibrate intervals on; nothing else sees them.
        test: To score on.
    """

    fit: np.ndarray
    validation: np.ndarray
    calibration: np.ndarray
    test: np.ndarray


def make_parts(
    values: np.ndarray,
    index: int,
    seed: int,
    *,
    classes: bool,
    standard: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> Parts:
    """One split, the same for the same seed however many others there are.

    Classes have nearly the same shares in all parts. A standard split keeps its test rows.

    Args:
        values: Targets, [N].
        index: Number of the split.
        seed: Of all splits.
        classes: Whether the targets are classes.
        standard: Pairs of training and test rows, if the data set comes with splits.

    Raises:
        InputError: If there are too few rows.
    """
    if len(values) < LEAST_ROWS:
        raise InputError(f"{len(values)} rows with a target; a comparison needs at least {LEAST_ROWS}")
    generator = np.random.default_rng(derive_seed(seed, "split", index))
    if standard:
        rest, test = standard[index]
        order = rest[_dealt(values[rest], generator, classes)]
    else:
        order = _dealt(values, generator, classes)
        num_test = round((0.2 if len(values) < SMALL else 0.1) * len(values))
        test, order = order[:num_test], order[num_test:]
    held = max(LEAST_HELD, round(HELD * len(order)))
    parts = (order[2 * held :], order[:held], order[held : 2 * held], test)
    return Parts(*(np.sort(part) for part in parts))


def _dealt(values: np.ndarray, generator: np.random.Generator, classes: bool) -> np.ndarray:
    """Row numbers in random order; with classes, any stretch of it has about their shares of the whole."""
    if not classes:
        return generator.permutation(len(values))
    place = np.empty(len(values))
    for label in np.unique(values):
        rows = np.flatnonzero(values == label)
        place[generator.permutation(rows)] = (np.arange(len(rows)) + generator.random(len(rows))) / len(rows)
    return np.argsort(place, kind="stable")
