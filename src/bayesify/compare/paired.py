"""Paired tests over repeated splits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Difference between the scores of two methods on the same splits."""

    mean: float  # mean of the differences
    error: float  # standard error of the mean, corrected for splits that share rows
    p: float  # probability of at least this difference if the methods were equally good; NaN for a single split


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    test_share: float,
    rows: Sequence[np.ndarray] | None = None,
    num_rows: int = 0,
) -> Difference:
    r"""The corrected resampled t-test (Nadeau & Bengio 2003), which also uses the scores of single rows if they are given.

    On row i of split j, the scores differ by $d_{ij} = \delta + b_j + e_{ij}$, where $b_j$ varies with the training run and
    $e_{ij}$ with the row. Let $\sigma_e^2$ be the variance within splits, let $\sigma_b^2$ be the variance of the J means
    $\bar d_j$ minus $\sigma_e^2 / n_j$, and let N be the number of different rows. Then

    $$ t = \frac{\bar d}{\sqrt{(\frac1J + \rho) \sigma_b^2 + \sigma_e^2 / N}}, \qquad \rho = n_\text{test} / n_\text{train}, $$

    with J - 1 degrees of freedom, or N - 1 if $\sigma_b^2$ is 0. If `rows` is not given, all variance is attributed to the
    splits. Training runs share nearly all rows. Without $\rho$, the test would treat the runs as independent and find
    differences that do not exist.

    Args:
        first: Scores of one method, one per split.
        second: Scores of the other method on the same splits.
        test_share: The ratio $\rho$ of test rows to training rows.
        rows: Score differences $d_{ij}$ of single rows, as J arrays $[n_j]$, one per split.
        num_rows: Number N of different rows; several splits may test the same row.

    Raises:
        ValueError: If the two methods have different numbers of splits, or no splits.
    """
    if len(first) != len(second) or not first:
        raise ValueError(
            f"paired_difference: the methods have {len(first)} and {len(second)} splits; give scores of the "
            "same splits for both methods"
        )
    differences = np.subtract(first, second)
    count, mean = len(differences), float(differences.mean())
    if count == 1:
        return Difference(mean, math.nan, math.nan)
    between, within = float(differences.var(ddof=1)), 0.0
    if rows is not None:
        sizes = np.array([len(row) for row in rows])
        row_variance = sum(float(np.square(row - row.mean()).sum()) for row in rows) / max(1, sizes.sum() - count)
        between = max(0.0, between - row_variance * float((1 / sizes).mean()))
        within = row_variance / num_rows
    splits = (1 / count + test_share) * between
    error = math.sqrt(splits + within)
    if error == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    from scipy.stats import t

    freedom = count - 1 if splits > 0 else num_rows - 1
    return Difference(mean, error, float(2 * t.sf(abs(mean) / error, freedom)))


def adjusted(values: Mapping[str, float]) -> dict[str, float]:
    r"""The p-values adjusted for the number m of tests, $\min_{j \ge i} p_{(j)} m / j$ (Benjamini & Hochberg 1995). NaN stays NaN.

    If all differences with an adjusted p-value below 0.05 are called clear, at most 5 % of them are expected to be due to
    chance.
    """
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return dict(values)
    from scipy.stats import false_discovery_control

    return {**values, **dict(zip(known, false_discovery_control(list(known.values())).tolist(), strict=True))}
