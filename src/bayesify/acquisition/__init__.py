"""Active learning: a loop over a pool, the choice of batches by joint entropy, and scores that say which examples to label."""

from bayesify.acquisition.pool import PoolRun, at_random, by_batch_bald, by_score, label_pool
from bayesify.acquisition.scores import bald, batch_bald, epistemic, expected_improvement

__all__ = [
    "PoolRun",
    "at_random",
    "bald",
    "batch_bald",
    "by_batch_bald",
    "by_score",
    "epistemic",
    "expected_improvement",
    "label_pool",
]
