"""Causes of scores that look too good: columns that reveal the target, copies of rows, and rows that are ordered by time."""

from collections.abc import Mapping, Sequence

import numpy as np

from bayesify.tables.columns import DAYS, Features
from bayesify.tables.targets import Task

MAX_COPY_DISTANCE = 1e-3
"""Near-copies differ in each number by at most this many standard deviations."""
MIN_COPIES_RATIO = 5.0
"""Near-copies count as copies if the number of pairs exceeds the number expected by chance by this factor."""
GIVEAWAY_SHARE = 0.99
"""A column is reported if it alone predicts at least this share of the target's variance or of the labels."""
MAX_JUDGED_ROWS = 2000
"""Maximum number of rows from which columns are judged."""
MAX_TRIED_COLUMNS, MAX_NAMED_COLUMNS = 50, 3
"""Maximum number of columns that are tried, the most correlated with the target, and maximum number that are reported."""


def find_copies(features: Features) -> np.ndarray | None:
    r"""The number of each row's group, [N]; copies and near-copies have the same number. `None` if there are no copies.

    Two rows are near-copies if no number differs by more than `MAX_COPY_DISTANCE` standard deviations and no category differs.
    In a table with few or coarse columns, some rows are equal by chance. Equal rows therefore count as copies only if the
    number of equal pairs is far above $\binom N2 \prod_c P_c$, where $P_c$ is the share of pairs that are equal in column c.
    """
    scaled = _comparable(features)
    distinct, number, counts = np.unique(scaled, axis=0, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    same = float((counts * (counts - 1.0)).sum()) / 2
    chance = _pairs_by_chance(scaled)
    found, groups = same, np.arange(len(distinct))
    if MIN_COPIES_RATIO * chance < len(scaled):  # otherwise too many rows are near-copies by chance
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components
        from scipy.spatial import cKDTree

        pairs = cKDTree(distinct).query_pairs(MAX_COPY_DISTANCE, p=np.inf, output_type="ndarray")
        found += float((counts[pairs[:, 0]] * counts[pairs[:, 1]]).sum())
        shape = (len(distinct), len(distinct))
        _, groups = connected_components(coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape), False)
    return groups[number].astype(np.int64) if found > MIN_COPIES_RATIO * chance else None


def _comparable(features: Features) -> np.ndarray:
    """All columns in units of their standard deviations, [N, columns]; missing cells are far from numbers."""
    numbers = features.numbers
    if not numbers.size:
        return features.codes.astype(np.float64)
    spread = np.nanstd(numbers, axis=0)
    scaled = np.where(np.isnan(numbers), 1e6, numbers / np.where((spread > 0) & np.isfinite(spread), spread, 1.0))
    return np.column_stack((scaled, features.codes.astype(np.float64)))


def _pairs_by_chance(scaled: np.ndarray) -> float:
    """Expected number of pairs of near-copies if the columns were independent."""
    rows = len(scaled)
    pairs = rows * (rows - 1) / 2
    expected = pairs
    for column in scaled.T:
        ordered = np.sort(column)
        near = np.searchsorted(ordered, ordered + MAX_COPY_DISTANCE, side="right") - np.arange(rows) - 1
        expected *= near.sum() / pairs if pairs else 0.0
    return float(expected)


def find_giveaways(features: Features, values: np.ndarray, task: Task, seed: int) -> list[tuple[str, float]]:
    """Columns that alone predict the target almost without error, each with the share of the target that it explains.

    For each column, a small tree is trained on half of the rows and predicts the other half. In a regression, the share is the
    explained part of the variance. In a classification, the share is 1 - e / e0, where e is the number of errors of the tree and
    e0 is the number of errors if the most frequent class is always predicted.
    """
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = np.random.default_rng(seed).permutation(len(values))[:MAX_JUDGED_ROWS]
    learn, check = rows[::2], rows[1::2]
    if task == "regression":
        values = values / np.abs(values).max()
    make = DecisionTreeRegressor if task == "regression" else DecisionTreeClassifier
    found = []
    named = dict(zip(features.number_names, features.numbers.T, strict=True))
    named |= dict(zip(features.code_names, features.codes.T.astype(np.float64), strict=True))
    for name in strongest({name: [column] for name, column in named.items()}, values, MAX_TRIED_COLUMNS):
        column = named[name]
        filled = np.where(np.isnan(column), -1e12, column)[:, None]
        # A small tree approximates a straight line poorly, so a linear fit is tried too.
        guess = make(min_samples_leaf=3, random_state=0).fit(filled[learn], values[learn]).predict(filled[check])
        share = _explained(values[check], guess, task)
        if task == "regression":
            share = max(share, _explained(values[check], _linear(column, values, learn, check), task))
        if share >= GIVEAWAY_SHARE:
            found.append((name, share))
    return sorted(found, key=lambda entry: -entry[1])


def strongest(columns: Mapping[str, Sequence[np.ndarray]], values: np.ndarray, most: int) -> list[str]:
    """Names of the columns that correlate most strongly with the targets [N]; `most` limits the number of names.

    A column that was split into parts, such as a date, has several arrays of numbers, each [N].
    """
    if len(columns) <= most:
        return list(columns)
    centered = values - values.mean()

    def strength(name: str) -> float:
        best = 0.0
        for column in columns[name]:
            filled = np.nan_to_num(column - np.nanmean(column)) if not np.isnan(column).all() else np.zeros(len(column))
            norm = float(np.linalg.norm(filled)) * float(np.linalg.norm(centered))
            best = max(best, abs(float(filled @ centered)) / norm if norm > 0 else 0.0)
        return best

    return sorted(columns, key=strength, reverse=True)[:most]


def _linear(column: np.ndarray, values: np.ndarray, learn: np.ndarray, check: np.ndarray) -> np.ndarray:
    known = learn[~np.isnan(column[learn])]
    if len(known) < 2 or np.ptp(column[known]) == 0:
        return np.full(len(check), values[learn].mean())
    slope, offset = np.polyfit(column[known], values[known], 1)
    return np.asarray(np.where(np.isnan(column[check]), values[learn].mean(), slope * column[check] + offset))


def _explained(values: np.ndarray, guess: np.ndarray, task: Task) -> float:
    if task == "regression":
        total = float(np.square(values - values.mean()).sum())
        return 1 - float(np.square(values - guess).sum()) / total if total > 0 else 0.0
    _, counts = np.unique(values, return_counts=True)
    others = len(values) - counts.max()
    return 1 - float((values != guess).sum()) / others if others > 0 else 0.0


def describe(
    features: Features, values: np.ndarray, task: Task, copies: np.ndarray | None, *, target: str, seed: int
) -> list[str]:
    """Warnings about the scores, as sentences. `copies` are the groups from `find_copies`."""
    notes = []
    if copies is not None:
        notes.append(
            f"{len(copies) - len(np.unique(copies)):,} of {len(copies):,} rows are copies or near-copies of other rows. All "
            "copies of a row stay on the same side of every split; otherwise a model would be tested on rows that it has seen."
        )
    for name, share in find_giveaways(features, values, task, seed)[:MAX_NAMED_COLUMNS]:
        words = "the variation" if task == "regression" else "the labels beyond the most frequent one"
        notes.append(
            f"Column {name!r} alone predicts {100 * share:.1f} % of {words} of {target}. If the column is computed from "
            f"{target}, or is known only after {target}, every score below is worthless; leave the column out with "
            f"--ignore {name}."
        )
    if (columns := features.num_columns) > len(values):
        notes.append(
            f"There are {columns:,} columns for {len(values):,} rows, so most patterns that networks and trees find are "
            "due to chance. Trust a score only if it is clearly better than the score of the constant guess, and leave "
            "out irrelevant columns."
        )
    return notes


def time_hint(features: Features) -> list[str]:
    """A hint that names the first date column by which the rows are ordered."""
    for name, column in zip(features.number_names, features.numbers.T, strict=True):
        known = column[~np.isnan(column)]
        if not name.endswith(DAYS) or len(known) < len(column) or len(np.unique(known)) < 0.5 * len(known):
            continue
        steps = np.diff(known)
        if max((steps >= 0).mean(), (steps <= 0).mean()) > 0.95:
            date = name.removesuffix(DAYS)
            return [
                f"The rows are in the order of {date!r} but were split at random. If you will predict later rows from "
                f"earlier ones, expect worse scores; use --time {date} to measure them."
            ]
    return []
