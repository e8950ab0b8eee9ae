"""Counts of normal numbers in the tails."""

import numpy as np
from scipy import stats


def check_tails(found: np.ndarray, sigmas: tuple[float, ...], share: float = 1.0) -> None:
    """Assert that counts in both tails fit a Poisson distribution. A correct stream fails once in 10^6 comparisons.

    Args:
        found: Normal numbers.
        sigmas: Thresholds beyond which numbers are counted.
        share: Probability of the event by which the numbers were selected. All numbers beyond the lowest sigma satisfy it.
    """
    for sigma in sigmas:
        expected = stats.norm.sf(sigma) / share * found.size
        for count in ((found > sigma).sum(), (found < -sigma).sum()):
            assert stats.poisson.ppf(1e-6, expected) <= count <= stats.poisson.isf(1e-6, expected), sigma
