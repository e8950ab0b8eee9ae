"""Pruning of trained posteriors."""

from __future__ import annotations

import copy
from typing import Annotated

from bayesify.arguments.checks import Range, checked
from bayesify.network import BayesianNetwork


@checked
def prune(bnn: BayesianNetwork, keep: Annotated[float, Range(above=0, most=1)]) -> BayesianNetwork:
    """Keep a fraction of a posterior's parameters and set the others to 0, in place (Ritter et al. 2021, section 4.3).

    `InducingWeights` keeps the largest entries of each Z. `MeanField` keeps the mean and the standard deviation of the
    weights with the largest |mean| / std in the whole network. Pruned entries stay 0. The kept entries become new,
    shorter parameters. Further training changes only these parameters. It needs a new optimizer, which `fit` creates.
    `count_parameters` counts only kept entries. `save` writes the kept entries and, with one bit per original entry,
    their positions.

    Args:
        bnn: A network whose posteriors are all `MeanField` or `InducingWeights`.
        keep: Fraction to keep, relative to the number of entries before any pruning.

    Returns:
        `bnn`.

    Raises:
        ValueError: If `keep` is not in (0, 1], if it exceeds the fraction that is left, or if a posterior
            cannot be pruned. In these cases nothing has changed.
    """
    parts = bnn.posteriors
    for part in parts:
        copy.deepcopy(part).prune(keep)
    for part in parts:
        part.prune(keep)
    return bnn
