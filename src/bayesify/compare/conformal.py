r"""Split-conformal recalibration: intervals and sets that hold the truth as often as they say, whatever the model.

Of n calibration rows that the model has not seen, each gets a score, large where the model was wrong; the threshold for a level
is the $\lceil (n + 1) \cdot \text{level} \rceil$-th smallest score (Vovk et al. 2005). A new row from the same distribution then
has a score of at most that with a probability between level and level + 1 / (n + 1).
"""

from __future__ import annotations

import math

import numpy as np


def threshold(scores: np.ndarray, level: float) -> float:
    r"""The score that a new row stays below with probability `level`; infinite if there are too few calibration rows.

    A level needs n with $\lceil (n + 1) \cdot \text{level} \rceil \le n$: 9 rows for 0.9, 19 for 0.95.

    Args:
        scores: Of the calibration rows, [n].
        level: Strictly between 0 and 1.
    """
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else math.inf


def interval_factor(y: np.ndarray, mean: np.ndarray, std: np.ndarray, level: float) -> float:
    r"""q of the interval mean ± q std: the threshold of $|y - \mu| / \sigma$ (Lei et al. 2018, locally weighted).

    Args:
        y: Targets of the calibration rows, [n].
        mean: Their predictions, [n].
        std: Their predictive standard deviations, [n].
        level: Strictly between 0 and 1.
    """
    return threshold(np.abs(y - mean) / std, level)


def probability_bound(probs: np.ndarray, labels: np.ndarray, level: float) -> float:
    """Classes with at least this probability form the set: one less the threshold of 1 - p(label) (Sadinle et al. 2019).

    Args:
        probs: Of the calibration rows, [n, C].
        labels: Their classes, [n].
        level: Strictly between 0 and 1.

    Returns:
        The bound; minus infinity, so that every class is in, if there are too few rows.
    """
    return 1.0 - threshold(1.0 - probs[np.arange(len(labels)), labels], level)


def bounded_sets(probs: np.ndarray, bound: float) -> np.ndarray:
    """Which classes have at least a probability, the most probable one always: [N, C] truth values.

    Args:
        probs: [N, C].
        bound: From `probability_bound`.
    """
    sets: np.ndarray = probs >= bound
    sets[np.arange(len(probs)), probs.argmax(1)] = True
    return sets


def credible_sets(probs: np.ndarray, level: float) -> np.ndarray:
    """The fewest classes whose probabilities add up to a level: [N, C] truth values.

    Args:
        probs: [N, C].
        level: Strictly between 0 and 1.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, 1)
    before = np.cumsum(ranked, axis=1) - ranked
    sets = np.empty(probs.shape, bool)
    np.put_along_axis(sets, order, before < level - 1e-12, 1)
    return sets
