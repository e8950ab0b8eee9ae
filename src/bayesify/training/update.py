"""A method's own part in training by `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from bayesify.predictor import Batch


class Update:
    """A method's own part in training by `fit`; the base has none.

    Attributes:
        takes_steps: Whether `take_step` stands in place of gradients and optimizer.
    """

    takes_steps: ClassVar[bool] = False

    def take_step(self, batch: Batch, *, generator: torch.Generator, share: float) -> float:
        """A step from one batch.

        Args:
            batch: On the model's device.
            generator: Source of randomness.
            share: How much of the run is done, from 0 to 1.

        Returns:
            Negative log-likelihood per example.

        Raises:
            ValueError: If numbers are not finite; nothing is changed then.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after each step."""

    def after_epoch(self) -> dict[str, float]:
        """Called after each epoch; further columns of the history."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Choices as plain data, which a run that is continued must have in common with the interrupted one."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the steps change besides the module, as nested data with tensors, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
