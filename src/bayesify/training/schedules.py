"""What changes as training goes on: the share of the KL that the objective counts, and the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayesify.arguments.checks import NonNegative, checked


@checked
@dataclass(frozen=True)
class KLSchedule:
    r"""A factor on the KL that is zero, then grows linearly, then is one.

    $$ \beta(t) = \min\bigl(1, \max(0, (t - \text{zero\_epochs}) / \text{linear\_epochs})\bigr) $$

    with $t$ the epochs of the variational phase that have passed, a fraction within an epoch. `fit` takes any function
    of $t$ in its place.

    Args:
        zero_epochs: Epochs without any KL.
        linear_epochs: Epochs over which it grows; 0 switches it on at once.

    Raises:
        ValueError: If a length is negative or not finite.
    """

    zero_epochs: NonNegative = 0.0
    linear_epochs: NonNegative = 0.0

    @checked
    def __call__(self, epoch: NonNegative) -> float:
        """The factor after `epoch` epochs."""
        passed = epoch - self.zero_epochs
        if self.linear_epochs == 0:
            return 1.0 if passed >= 0 else 0.0
        return min(1.0, max(0.0, passed / self.linear_epochs))


def cosine(share: float) -> float:
    """A learning rate's factor that falls from 1 to 0 as half a cosine, with the share of the run that is done."""
    return 0.5 * (1 + math.cos(math.pi * share))


def falling(epoch: float, map_epochs: int, epochs: int) -> float:
    """The factor on the learning rate by default: 1 in a MAP phase, then half a cosine to 0 at the end of the run.

    `epoch` is how many of both phases are done, a fraction within one; without a variational phase the rate falls in the MAP phase.
    """
    if epochs == 0:
        return cosine(epoch / map_epochs)
    return cosine(max(0.0, epoch - map_epochs) / epochs)
