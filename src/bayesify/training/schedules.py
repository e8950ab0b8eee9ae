"""How much of the KL the objective counts as training goes on."""

from __future__ import annotations

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
