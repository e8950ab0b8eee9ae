"""Paired tests over repeated splits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """How far one method's scores lie above another's on the same splits.

    Args:
        mean: Of the differences.
        error: Its standard error, corrected for splits that share rows.
        p: Probability of a difference as large as this or larger if there were none; NaN for a single split.
    """

    mean: float
    error: float
    p: float


def paired_difference(first: Sequence[float], second: Sequence[float], test_share: float) -> Difference:
    r"""The corrected resampled t-test (Nadeau & Bengio 2003).

    $$ t = \frac{\bar d}{\sqrt{(\frac1J + \rho) s^2}}, \qquad \rho = n_\text{test} / n_\text{train} $$

    with J - 1 degrees of freedom, for the differences $d_j$ of J splits. Without $\rho$ the test takes splits for independent,
    though they train on nearly the same rows, and finds differences where there are none.

    Args:
        first: Scores of one method, one per split.
        second: Scores of the other on the same splits.
        test_share: $\rho$.

    Raises:
        ValueError: If the numbers of splits differ or are zero.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired_difference: {len(first)} and {len(second)} splits; give the same splits for both")
    differences = np.subtract(first, second)
    count, mean = len(differences), float(differences.mean())
    if count == 1:
        return Difference(mean, math.nan, math.nan)
    error = math.sqrt((1 / count + test_share) * float(differences.var(ddof=1)))
    if error == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    from scipy.stats import t

    return Difference(mean, error, float(2 * t.sf(abs(mean) / error, count - 1)))


def adjusted(values: Mapping[str, float]) -> dict[str, float]:
    r"""p-values adjusted for their number, $\min_{j \ge i} p_{(j)} m / j$ (Benjamini & Hochberg 1995); NaN stays NaN.

    Of all differences that are called clear because the adjusted value lies below 0.05, at most 5 % are expected not to be there.

    Args:
        values: p-values by name.
    """
    known = sorted(((value, name) for name, value in values.items() if not math.isnan(value)), reverse=True)
    result = dict(values)
    lowest = 1.0
    for position, (value, name) in enumerate(known):
        lowest = min(lowest, value * len(known) / (len(known) - position))
        result[name] = lowest
    return result
