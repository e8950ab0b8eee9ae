"""Sets of classes by split conformal prediction."""

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import CountOrZero, NonNegative, checked
from bayesify.conformal.thresholds import Groups, Rule, as_targets, listed, rank_of
from bayesify.predictive.classification import ClassificationPredictive

SetScore = Literal["probability", "adaptive"]
"""Score of a class: how wrong the prediction is if this class is the label; see `Sets`."""
NUM_TURNS, MIN_PROBABILITY = 4096.0, 1e-30
"""Constants of `row_numbers`: how often the number wraps around as log-probabilities change by 1, and the smallest probability."""


class Sets(Rule):
    r"""Sets of classes with guaranteed coverage for any model (split conformal prediction).

    Each class c of a row has a score. The `threshold` comes from the scores of the calibration rows' labels. A set contains the
    classes whose score is at most the threshold.

    - `probability`: $1 - p_c$. It gives the smallest sets on average (Sadinle et al. 2019).
    - `adaptive`: $\sum_{j: p_j > p_c} p_j + u\,p_c + \lambda \max(0, r_c - k)$ with the class's rank $r_c$, counted from 1, and u
      uniform between 0 and 1. Harder rows get larger sets (Romano et al. 2020, APS; with $\lambda > 0$ Angelopoulos et al.
      2021, RAPS). If `randomized` is false, u = 1 and coverage is above the level.

    For calibration rows as well as new rows, the number u depends only on the seed and on the row's probabilities; see
    `row_numbers`. A row therefore has the same set in any batch, in any thread and at any time.

    **Guarantee.** If calibration rows and new rows are exchangeable, coverage is on average at least the level. Coverage is at
    most level + 1 / (n + 1) if `empty` is true and scores have no ties (as for `adaptive` with `randomized`). With `groups`, both
    bounds hold within each group. Labels cannot be groups, because a new row's label is unknown. If there are too few rows for a
    level, sets contain all classes.

    The lower bound holds for every seed, because a score is a fixed function of a row and its label. Rows with equal probabilities
    have the same u and the same set. If many rows are alike, as with a constant classifier, scores have ties and coverage lies
    above the level. Coverage then varies with the seed and the calibration rows. Averaged over calibration rows, coverage is never
    below the level.

    Args:
        score: Score of a class: `"probability"` or `"adaptive"`, as defined in the list above.
        regularization: Weight $\lambda$ of the rank penalty.
        free: Number k of ranks without penalty.
        randomized: Whether u is random; otherwise u = 1.
        empty: Whether a set may be empty. Otherwise every set contains the most probable class.
        seed: Seed from which the number u of each row is computed.
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
    def fit(self, prediction: Any, y: Any, *, groups: Groups = None) -> Self:
        """Calibrate on rows that the model was not trained on.

        Args:
            prediction: The result of `predict` for the calibration rows, or probabilities [n, C].
            y: Labels of the calibration rows, [n].
            groups: Group of each row, for coverage within each group.

        Raises:
            ValueError: If the labels or groups do not fit the prediction.
            TypeError: If the prediction is not a prediction of classes.
        """
        probs, labels = class_probs(prediction), as_targets(y)
        if labels.shape != probs.shape[:1] or not bool(((labels >= 0) & (labels < probs.shape[1])).all()):
            raise ValueError(
                f"conformal.Sets: labels have shape {tuple(labels.shape)} for {len(probs)} rows and "
                f"{probs.shape[1]} classes; give one label per row, an integer from 0 to {probs.shape[1] - 1}"
            )
        scores = self._scores(probs)
        chosen = scores.gather(1, labels.long().to(scores.device).unsqueeze(1)).squeeze(1)
        self.scores, self.groups = chosen, listed(groups, len(chosen))
        return self

    @checked
    def sets(self, prediction: Any, level: float = 0.9, *, groups: Groups = None) -> Tensor:
        """Whether each class is in each new row's set, as booleans [B, C].

        Args:
            prediction: Prediction of the new rows, in the form that `fit` takes.
            level: Coverage level, strictly between 0 and 1.
            groups: Group of each row, if `fit` was given groups.

        Raises:
            ValueError: If `fit` was not called, if the level is not strictly between 0 and 1, or if groups do not fit.
        """
        probs = class_probs(prediction)
        q = self.thresholds(level, listed(groups, len(probs)))
        found = self._scores(probs) <= q.unsqueeze(1)
        if not self.empty:
            found[torch.arange(len(probs)), probs.argmax(1)] = True
        return found

    def _scores(self, probs: Tensor) -> Tensor:
        if self.score == "probability":
            return 1 - probs
        ranked, order = probs.sort(dim=1, descending=True, stable=True)
        u = row_numbers(probs, self.seed) if self.randomized else probs.new_ones(1)
        rank = torch.arange(1, probs.shape[1] + 1, dtype=probs.dtype, device=probs.device)
        penalty = self.regularization * (rank - self.free).clamp_min(0)
        scores = ranked.cumsum(1) - (1 - u.unsqueeze(1)) * ranked + penalty
        return torch.empty_like(scores).scatter_(1, order, scores)


def row_numbers(probs: Tensor, seed: int) -> Tensor:
    r"""One number between 0 and 1 per row, [n], computed from the seed and the row's probabilities.

    The number is the fractional part of $\frac{2^{12}}{\sqrt C} \sum_c a_c \log p_c$, with weights $a_c$ between -1 and 1 drawn
    with the seed. Rows whose log-probabilities differ by 1e-3 have unrelated numbers. The number is not a hash of the
    probabilities' bits, because rounding would change a hash: in batches of different sizes, the probabilities of the same row
    differ by 1e-7. A difference of 1e-7 changes the number by at most 1e-3.
    """
    count = probs.shape[1]
    weights = 2 * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=probs.dtype) - 1
    turns = NUM_TURNS / math.sqrt(count) * weights.to(probs.device)
    return (probs.clamp_min(MIN_PROBABILITY).log() * turns).sum(1).remainder(1)


def class_probs(prediction: Any, name: str = "prediction") -> Tensor:
    """Class probabilities [n, C] in float64, from a prediction or an array."""
    if isinstance(prediction, ClassificationPredictive):
        probs = prediction.class_probs.double()
    elif isinstance(prediction, Tensor) or hasattr(prediction, "__array__"):
        probs = torch.as_tensor(prediction).double()
        if probs.ndim != 2 or not bool((probs >= 0).all() & ((probs.sum(1) - 1).abs() < 1e-3).all()):
            raise ValueError(
                f"conformal: {name} has shape {list(probs.shape)}; give probabilities [n, C] whose rows sum to 1"
            )
    else:
        raise TypeError(
            f"conformal.Sets: {type(prediction).__name__} is not a prediction of classes; give the result of predict(x)"
        )
    if probs.ndim == 3 and probs.shape[1] == 1:
        probs = probs.squeeze(1)
    if probs.ndim != 2:
        found = f"probabilities of shape {list(probs.shape)} have several labels per row"
        raise TypeError(f"conformal.Sets: {found}; give one label per row")
    return probs


@checked
def credible_sets(probs: Tensor, level: float) -> Tensor:
    """The model's own, uncalibrated sets: the fewest classes whose probabilities add up to the level, as booleans [n, C].

    Args:
        probs: Probabilities, [n, C].
        level: Probability of a set, strictly between 0 and 1.

    Raises:
        ValueError: If `probs` are not probabilities, or if the level is not strictly between 0 and 1.
    """
    rank_of(level, 1)
    probs = class_probs(probs, "probs")
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    before = ranked.cumsum(1) - ranked
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, before < level - 1e-12)
