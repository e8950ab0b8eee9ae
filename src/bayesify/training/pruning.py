"""Pruning: fewer numbers in a posterior that is already trained."""

from __future__ import annotations

import copy
from typing import Annotated

from bayesify.arguments.checks import Range, checked
from bayesify.network import BayesianNetwork


@checked
def prune(bnn: BayesianNetwork, keep: Annotated[float, Range(above=0, most=1)]) -> BayesianNetwork:
    """Keep a fraction of the numbers of a posterior and forget the others, in place (Ritter et al. 2021, section 4.3).

    `InducingWeights` keeps the largest entries of each Z, `MeanField` the weights with the largest |mean| / std of the whole
    network, mean and standard deviation both. What is forgotten is 0 for good: the kept entries are new, shorter
    parameters, so training goes on among them alone (make a new optimizer; `fit` does), `count_parameters` counts
    them alone, and `save` writes them with one bit per entry for their places.

    Args:
        bnn: A network whose posteriors are all `MeanField` or `InducingWeights`.
        keep: Fraction to keep, of all entries before any pruning.

    Returns:
        `bnn`.

    Raises:
        ValueError: If `keep` is not above 0 and at most 1, more than is left, or a posterior cannot be pruned; nothing is
            changed then.
    """
    parts = bnn.posteriors
    for part in parts:
        copy.deepcopy(part).prune(keep)
    for part in parts:
        part.prune(keep)
    return bnn
