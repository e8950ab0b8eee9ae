"""Split conformal prediction of classes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import CountOrZero, NonNegative, checked
from bayesify.conformal.thresholds import Rule, as_targets, listed, rank_of
from bayesify.predictive.classification import ClassificationPredictive

SetScore = Literal["probability", "adaptive"]
"""How wrong a prediction of a class was; see `Sets`."""
NUM_TURNS, MIN_PROBABILITY = 4096.0, 1e-30
"""Constants of `row_numbers`: how often the number goes around as log-probabilities change by 1, and where they end."""


class Sets(Rule):
    r"""Sets of classes that hold the truth with the probability they say, whatever the model (split conformal prediction).

    Each class c of a row has a score; a set holds the classes whose score is at most the `threshold` of the calibration rows'
    labels' scores.

    - `probability`: $1 - p_c$, the smallest sets on average (Sadinle et al. 2019).
    - `adaptive`: $\sum_{j: p_j > p_c} p_j + u\,p_c + \lambda \max(0, r_c - k)$ with $r_c$ the class's rank from 1 and u uniform
      between 0 and 1: larger sets for harder rows (Romano et al. 2020, APS; with $\lambda > 0$ Angelopoulos et al. 2021, RAPS).
      Without `randomized` u = 1, and coverage is above the level.

    The number u of a row is a function of the seed and of the row's probabilities, the same for calibration rows and new rows; see
    `row_numbers`. So a row has the same set in any batch, in any thread and at any time.

    **Guarantee.** As for `Intervals`: at least the level on average over exchangeable calibration and new rows, at most level +
    1 / (n + 1) where scores have no ties (`adaptive` randomized) and `empty` is allowed; with `groups` within each group. Groups
    by label are no groups, as a new row's is not known. Too few rows for a level make sets of all classes. The lower bound holds
    for every seed, because a score is a fixed function of a row and its label. Rows with equal probabilities have the same u,
    and so the same set: where many rows are alike, as with a constant classifier, scores have ties and coverage lies above the
    level. It then varies with the seed and the calibration rows, never below the level on average over calibration rows.

    Args:
        score: See above.
        regularization: $\lambda$.
        free: k, ranks that are not penalized.
        randomized: Whether u is random.
        empty: Whether a set may be empty; otherwise the most probable class is always in.
        seed: Seed of u.
    """

    @checked
    def __init__(
        self,
        score: SetScore = "adaptive",
        *,
        regularization: NonNegative = 0.0,
        free: CountOrZero = 1,
        randomized: bool = True,
        empty: bool = False,
        seed: CountOrZero = 0,
    ) -> None:
        self.score, self.regularization, self.free = score, regularization, free
        self.randomized, self.empty, self.seed = randomized, empty, seed

    @checked
    def fit(self, prediction: Any, y: Any, *, groups: Sequence[Hashable] | Tensor | None = None) -> Self:
        """Take in calibration rows.

        Args:
            prediction: What `predict` says of them, or probabilities [n, C].
            y: Their labels, [n].
            groups: One value per row.

        Returns:
            Itself.

        Raises:
            ValueError: If labels or groups do not fit.
            TypeError: If the prediction is none of classes.
        """
        probs, labels = class_probs(prediction), as_targets(y)
        if labels.shape != probs.shape[:1] or not bool(((labels >= 0) & (labels < probs.shape[1])).all()):
            raise ValueError(
                f"conformal.Sets: labels of shape {tuple(labels.shape)} for {len(probs)} rows and {probs.shape[1]} classes; give "
                "one label per row, from 0 on"
            )
        scores = self._scores(probs)
        chosen = scores.gather(1, labels.long().to(scores.device).unsqueeze(1)).squeeze(1)
        self.scores, self.groups = chosen, listed(groups, len(chosen))
        return self

    @checked
    def sets(self, prediction: Any, level: float = 0.9, *, groups: Sequence[Hashable] | Tensor | None = None) -> Tensor:
        """Which classes are in the set of each new row: truth values [B, C].

        Args:
            prediction: As for `fit`.
            level: Strictly between 0 and 1.
            groups: One value per row, where `fit` had them.

        Raises:
            ValueError: If nothing was fitted, the level is not strictly between 0 and 1, or groups do not fit.
        """
        probs = class_probs(prediction)
        q = self.thresholds(level, listed(groups, len(probs)))
        found = self._scores(probs) <= q.unsqueeze(1)
        if not self.empty:
            found[torch.arange(len(probs)), probs.argmax(1)] = True
        return found

    def _scores(self, probs: Tensor) -> Tensor:
        """Of every class of every row, [n, C]."""
        if self.score == "probability":
            return 1 - probs
        ranked, order = probs.sort(dim=1, descending=True, stable=True)
        u = row_numbers(probs, self.seed) if self.randomized else probs.new_ones(1)
        rank = torch.arange(1, probs.shape[1] + 1, dtype=probs.dtype, device=probs.device)
        scores = (
            ranked.cumsum(1) - (1 - u.unsqueeze(1)) * ranked + self.regularization * (rank - self.free).clamp_min(0)
        )
        return torch.empty_like(scores).scatter_(1, order, scores)


def row_numbers(probs: Tensor, seed: int) -> Tensor:
    r"""A number between 0 and 1 for each row, from the seed and the row's probabilities: [n].

    The fractional part of $\frac{2^{12}}{\sqrt C} \sum_c a_c \log p_c$ with weights $a_c$ between -1 and 1 drawn by the seed.
    Rows whose log-probabilities differ by 1e-3 have unrelated numbers. A hash of the bits would do as well but for rounding:
    the same row gets probabilities that differ by 1e-7 in batches of different sizes, and this number then moves by 1e-3 at most.

    Args:
        probs: [n, C].
        seed: Seed of the weights.
    """
    count = probs.shape[1]
    weights = 2 * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=probs.dtype) - 1
    turns = NUM_TURNS / math.sqrt(count) * weights.to(probs.device)
    return (probs.clamp_min(MIN_PROBABILITY).log() * turns).sum(1).remainder(1)


def class_probs(prediction: Any, name: str = "prediction") -> Tensor:
    """Probabilities [n, C] in float64, of a prediction or an array.

    Raises:
        TypeError: If it is neither, or its rows have several labels.
        ValueError: If an array holds no probabilities.
    """
    if isinstance(prediction, ClassificationPredictive):
        probs = prediction.class_probs.double()
    elif isinstance(prediction, Tensor) or hasattr(prediction, "__array__"):
        probs = torch.as_tensor(prediction).double()
        if probs.ndim != 2 or not bool((probs >= 0).all() & ((probs.sum(1) - 1).abs() < 1e-3).all()):
            raise ValueError(
                f"conformal: {name} is an array {list(probs.shape)}; give probabilities [n, C] that sum to 1"
            )
    else:
        raise TypeError(
            f"conformal.Sets: {type(prediction).__name__} is no prediction of classes; give what predict(x) returns"
        )
    if probs.ndim == 3 and probs.shape[1] == 1:
        probs = probs.squeeze(1)
    if probs.ndim != 2:
        raise TypeError(
            f"conformal.Sets: probabilities {list(probs.shape)} of several labels per row; give one label per row"
        )
    return probs


@checked
def credible_sets(probs: Tensor, level: float) -> Tensor:
    """The fewest classes whose probabilities add up to a level, as the model itself has it: truth values [n, C].

    Args:
        probs: [n, C].
        level: Strictly between 0 and 1.

    Raises:
        ValueError: If they are no probabilities, or the level is not strictly between 0 and 1.
    """
    rank_of(level, 1)
    probs = class_probs(probs, "probs")
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    before = ranked.cumsum(1) - ranked
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, before < level - 1e-12)
