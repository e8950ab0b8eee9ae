"""Schedules of a training run: the factor on the KL, and the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayesify.arguments.checks import NonNegative, checked


@checked
@dataclass(frozen=True)
class KLSchedule:
    r"""Factor on the KL that is 0, then grows linearly, then is 1.

    $$ \beta(t) = \min\bigl(1, \max(0, (t - \text{zero\_epochs}) / \text{linear\_epochs})\bigr) $$

    where $t$ is the number of epochs of the variational phase so far, including fractions. `fit` accepts any other function of
    $t$ instead.

    Args:
        zero_epochs: Number of epochs without the KL.
        linear_epochs: Number of epochs over which the factor grows; 0 switches the KL on at once.

    Raises:
        ValueError: If a length is negative or not finite.
    """

    zero_epochs: NonNegative = 0.0
    linear_epochs: NonNegative = 0.0

    @checked
    def __call__(self, epoch: NonNegative) -> float:
        """Factor after `epoch` epochs."""
        passed = epoch - self.zero_epochs
        if self.linear_epochs == 0:
            return 1.0 if passed >= 0 else 0.0
        return min(1.0, max(0.0, passed / self.linear_epochs))


def cosine(share: float) -> float:
    """Factor on a learning rate. It falls from 1 to 0 as half a cosine; `share` is the share of the run that is done."""
    return 0.5 * (1 + math.cos(math.pi * share))


def falling(epoch: float, map_epochs: int, epochs: int) -> float:
    """Default factor on the learning rate: 1 in a MAP phase, then half a cosine that reaches 0 at the end of the run.

    `epoch` is the number of epochs of both phases so far, including fractions. If there is no variational phase, the
    rate falls in the MAP phase.
    """
    if epochs == 0:
        return cosine(epoch / map_epochs)
    return cosine(max(0.0, epoch - map_epochs) / epochs)
