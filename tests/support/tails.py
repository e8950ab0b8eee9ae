"""Counts of normal numbers far out."""

import numpy as np
from scipy import stats


def check_tails(found: np.ndarray, sigmas: tuple[float, ...], share: float = 1.0) -> None:
    """Counts on either side are Poisson numbers; a sound stream fails once in 10^6 comparisons.

    Args:
        found: Normal numbers.
        sigmas: Beyond which they are counted.
        share: Probability of what the numbers were chosen by, which all beyond the lowest sigma have.
    """
    for sigma in sigmas:
        expected = stats.norm.sf(sigma) / share * found.size
        for count in ((found > sigma).sum(), (found < -sigma).sum()):
            assert stats.poisson.ppf(1e-6, expected) <= count <= stats.poisson.isf(1e-6, expected), sigma
