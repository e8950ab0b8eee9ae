"""Conversion of texts with many levels to numbers: each level becomes the mean target of its rows.

`weights` [N] contains the number of examples that each row stands for, and `codes` [N] its level, or -1 for an empty cell.
"""

import numpy as np

NUM_CROSS_FOLDS = 5
"""Number of parts of the training rows. The rows of each part use the means over the other parts."""
MAX_ENCODED_CLASSES = 10
"""Maximum number of classes whose shares become inputs; the most frequent classes are used."""


def normal_scores(y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    r"""Normal scores $\Phi^{-1}((r - \frac12) / N)$ of targets with ranks r, shifted to mean 0 in each column: [N, O].

    Equal targets all get the middle of their ranks. The scores do not change under a monotonic transform of the target, and no
    outlier dominates their mean.
    """
    import torch  # imported only here, because the import is slow

    share, found = weights / weights.sum(), np.empty(y.shape)
    for index, column in enumerate(y.T):
        _, place = np.unique(column, return_inverse=True)
        each = np.bincount(place.reshape(-1), weights=share)
        middle = torch.from_numpy(np.cumsum(each) - 0.5 * each)
        found[:, index] = torch.special.ndtri(middle).numpy()[place.reshape(-1)]
    return np.asarray(found - share @ found)


def class_scores(y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Indicator of each row's class minus the class's share of all rows: [N, K]. For two classes, K is 1."""
    classes, place = np.unique(y, return_inverse=True)
    share = np.bincount(place.reshape(-1), weights=weights) / weights.sum()
    frequent = np.sort(np.argsort(-share, kind="stable")[: 1 if len(classes) == 2 else MAX_ENCODED_CLASSES])
    return np.asarray((place.reshape(-1, 1) == frequent) - share[frequent])


def level_means(codes: np.ndarray, scores: np.ndarray, weights: np.ndarray, num_levels: int) -> np.ndarray:
    r"""The mean score of each level, then of empty cells, [num_levels + 1, K]; means of few rows are shrunk toward 0.

    $$ \frac{\sum_n \omega_n s_n}{\sum_n \omega_n + \sigma^2 / \tau^2} $$

    This is the best linear prediction of a random intercept (Robinson 1991, sec. 2). The variances $\sigma^2$ within levels and
    $\tau^2$ between levels come from the analysis of variance (Searle et al. 1992, sec. 3.6). The scores s [N, K] have mean 0. A
    level without rows has the mean 0.
    """
    place = codes % (num_levels + 1)
    counts = np.bincount(place, weights=weights, minlength=num_levels + 1)
    sums = np.column_stack([np.bincount(place, weights * one, num_levels + 1) for one in scores.T])
    used, total = counts > 0, counts.sum()
    means = np.where(used[:, None], sums / np.where(used, counts, 1.0)[:, None], 0.0)
    num_used, overall = used.sum(), sums.sum(0) / total
    within = weights @ np.square(scores - means[place]) / max(total - num_used, 1.0)
    between = counts @ np.square(means - overall) - (num_used - 1) * within
    between = np.maximum(between / max(total - np.square(counts).sum() / total, 1e-12), 0.0)
    return np.asarray(counts[:, None] * between / np.maximum(counts[:, None] * between + within, 1e-300) * means)


def cross_fitted(codes: np.ndarray, scores: np.ndarray, weights: np.ndarray, num_levels: int) -> np.ndarray:
    """Mean score of each row's level over the rows of other folds: [N, K]. Each row is therefore treated like a new row.

    If the means included the row's own target, a network would trust them too much (Micci-Barreca 2001). scikit-learn's
    `TargetEncoder` uses the same cross-fitting.
    """
    folds = np.random.default_rng(0).permutation(len(codes)) % NUM_CROSS_FOLDS
    found = np.zeros(scores.shape)
    for fold in range(NUM_CROSS_FOLDS):
        own, other = folds == fold, folds != fold
        if own.any() and other.any():
            found[own] = level_means(codes[other], scores[other], weights[other], num_levels)[codes[own]]
    return found
