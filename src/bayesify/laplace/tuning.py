"""Searches over the prior precision on a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bayesify.predictive.findings import Finding

Score = Callable[[list[float]], list[float]]
"""Function that takes factors on the prior precisions and returns scores. The search maximizes the score."""

DEFAULT_GRID = tuple(10.0**power for power in range(-4, 5))
"""The paper's grid for images: a prior precision between 1e-4 and 1e4."""
MAX_ADDED_VALUES = 4
"""Number of values by which the default grid is extended at a time, while its best value is at an end."""
NUM_FINE_SCORES, NUM_FINE_EVIDENCES = 9, 180
"""Number of values in the second grid, around the best value of the first grid. Each further evidence costs almost nothing."""


def search_precision(score: Score, base: float, grid: Sequence[float], num_fine: int) -> tuple[float, Finding | None]:
    """The prior precision with the best score, and a `Finding` if this precision is at an end of the grid.

    `base` is the prior precision at which the factor is 1. `DEFAULT_GRID` is extended while its best value is at an end.
    Then `num_fine` values between the neighbors of the best value are tried, evenly spaced in the logarithm.
    """
    candidates = sorted(set(grid))
    scores = score([value / base for value in candidates])
    best = best_of(scores)
    for _ in range(MAX_ADDED_VALUES if tuple(grid) == DEFAULT_GRID else 0):
        if 0 < best < len(candidates) - 1:
            break
        place = 0 if best == 0 else len(candidates)
        candidates.insert(place, candidates[0] / 10 if best == 0 else 10 * candidates[-1])
        scores.insert(place, score([candidates[place] / base])[0])
        best = best_of(scores)
    chosen, finding = candidates[best], None
    if len(candidates) > 1 and best in (0, len(candidates) - 1):
        end, remedy = ("smallest", "more or other weights") if best == 0 else ("largest", "fewer weights")
        sentence = (
            f"the best prior precision, {chosen:.3g}, is the {end} value that was tried, and a better value may lie "
            "beyond it"
        )
        finding = Finding("search_at_edge", sentence, f"give a wider grid=, or {remedy}")
    if num_fine and len(candidates) > 1:
        low, high = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        finer = [low * math.exp(math.log(high / low) * (step + 1) / (num_fine + 1)) for step in range(num_fine)]
        finer_scores = score([value / base for value in finer])
        place = best_of(finer_scores)
        if finer_scores[place] > scores[best]:
            chosen = finer[place]
    return chosen, finding


def best_of(scores: Sequence[float]) -> int:
    """Index of the largest score."""
    return max(range(len(scores)), key=scores.__getitem__)
