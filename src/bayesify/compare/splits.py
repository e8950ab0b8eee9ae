"""Splits of a table's rows into training, calibration and test rows. Rows are split at random, in whole groups, or by time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesify.tables.errors import InputError
from bayesify.training.random_streams import derive_seed

MIN_ROWS = 20
"""Minimum number of rows of a comparison."""
MAX_SMALL_ROWS = 2000
"""With fewer rows than this, a fifth of the rows is used for testing, otherwise a tenth."""
CALIBRATION_SHARE = 0.12
"""Share of the non-test rows that is used for calibration."""
MIN_CALIBRATION_ROWS = 3
MIN_GROUPS = 5
"""Minimum number of different groups: one for testing, one for calibration, and the others for training."""


@dataclass(frozen=True)
class Parts:
    """Row indices of one split; no row is in two parts."""

    fit: np.ndarray  # rows to train on
    calibration: np.ndarray  # rows on which intervals are recalibrated; they are not used for anything else
    test: np.ndarray  # rows on which methods are scored


def thinned(count: int, most: int, seed: int) -> np.ndarray:
    """Sorted indices of up to `most` randomly chosen rows."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


def count_folds(rows: int) -> int:
    """Number of folds in one repetition, which is also the number of blocks for splits by time."""
    return 5 if rows < MAX_SMALL_ROWS else 10


def make_parts(
    values: np.ndarray,
    index: int,
    seed: int,
    classes: bool,
    standard: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    groups: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> Parts:
    """One split, which depends on the seed but not on the number of splits.

    With K folds in each repetition, split number K r + k uses fold k of repetition r as its test rows. No two folds of a
    repetition have a test row in common. The rows are put in random order, in which the calibration rows follow the test rows.
    Class shares are nearly the same in all parts. If the data set defines its own splits (`standard`), their test rows are used.
    If `groups` [N] is given, all rows of a group are in the same part. With `times` [N], the later half of the rows is cut into K
    blocks. Split k tests on block k, calibrates on the rows just before block k, and trains on all earlier rows.
    """
    if len(values) < MIN_ROWS:
        raise InputError(f"only {len(values)} rows have a target; a comparison needs at least {MIN_ROWS} rows")
    if times is not None:
        return _by_time(times, index)
    repetition = index if standard else index // count_folds(len(values))
    generator = np.random.default_rng(derive_seed(seed, "split", repetition))
    if standard:
        rest, test = standard[index]
        return _calibrated(rest[_dealt(values[rest], generator, classes)], test)
    if groups is not None:
        return _by_group(values, groups, index, generator, classes)
    order = _dealt(values, generator, classes)
    folds = count_folds(len(order))
    start, end = ((index % folds + step) * len(order) // folds for step in (0, 1))
    return _calibrated(np.concatenate((order[end:], order[:start])), order[start:end])


def _calibrated(order: np.ndarray, test: np.ndarray, sizes: np.ndarray | None = None) -> Parts:
    """Parts of a split with calibration rows from the start of `order`; they end where a group ends if group `sizes` are given."""
    cut = max(MIN_CALIBRATION_ROWS, round(CALIBRATION_SHARE * len(order)))
    if sizes is not None:
        ends = np.cumsum(sizes)
        cut = int(ends[min(int(np.searchsorted(ends, cut)), len(ends) - 2)])
    return Parts(*(np.sort(part) for part in (order[cut:], order[:cut], test)))


def _by_group(
    values: np.ndarray, groups: np.ndarray, index: int, generator: np.random.Generator, classes: bool
) -> Parts:
    """A split of whole groups in random order. Folds have about equally many rows or, with large groups, equally many groups."""
    _, first, number, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    if len(first) < MIN_GROUPS:
        raise InputError(
            f"there are only {len(first)} different groups of rows; splits need at least {MIN_GROUPS} groups"
        )
    order = _dealt(values[first], generator, classes)
    folds = min(count_folds(len(values)), len(first))
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    fold = (middle * folds / len(values)).astype(int)
    if len(np.unique(fold)) < folds or np.bincount(fold).max() > len(order) - 2:
        fold = np.arange(len(order)) * folds // len(order)
    chosen = index % folds
    turned = np.concatenate((order[fold > chosen], order[fold < chosen]))
    by_rank = np.argsort(number, kind="stable")
    starts = np.cumsum(sizes) - sizes

    def rows(some: np.ndarray) -> np.ndarray:
        return np.concatenate([by_rank[starts[one] : starts[one] + sizes[one]] for one in some])

    return _calibrated(rows(turned), rows(order[fold == chosen]), sizes[turned])


def _by_time(times: np.ndarray, index: int) -> Parts:
    order = np.argsort(times, kind="stable")
    blocks = count_folds(len(order))
    if index >= blocks:
        raise InputError(
            f"split {index + 1}: only {blocks} splits by time are possible, one per block of the later half of the rows; "
            f"give --splits {blocks} or fewer"
        )
    cuts = [len(order) // 2 + block * (len(order) - len(order) // 2) // blocks for block in range(blocks + 1)]
    # Rows with the same time stay together if there are enough different times.
    whole = [int(np.searchsorted(times[order], times[order[cut]])) for cut in cuts[:-1]] + [len(order)]
    if len(set(whole)) == len(whole) and whole[0] > 4 * MIN_CALIBRATION_ROWS:
        cuts = whole
    before, test = order[: cuts[index]], order[cuts[index] : cuts[index + 1]]
    cut = len(before) - max(MIN_CALIBRATION_ROWS, round(CALIBRATION_SHARE * len(before)))
    return Parts(*(np.sort(part) for part in (before[:cut], before[cut:], test)))


def _dealt(values: np.ndarray, generator: np.random.Generator, classes: bool) -> np.ndarray:
    """Row indices in random order. If the targets are classes, all long sections of the result have about the same class shares."""
    if not classes:
        return generator.permutation(len(values))
    place = np.empty(len(values))
    for label in np.unique(values):
        rows = np.flatnonzero(values == label)
        place[generator.permutation(rows)] = (np.arange(len(rows)) + generator.random(len(rows))) / len(rows)
    return np.argsort(place, kind="stable")
