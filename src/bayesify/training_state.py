"""What decides a training run, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, apart from network, data, optimizer and scheduler; see `fit`."""

    num_data: int
    epochs: int
    map_epochs: int
    kl_weight: float
    kl_schedule: Callable[[float], float]
    num_draws: int
    accumulate: int
    clip_norm: float | None
    precision: str
    patience: int | None
    validation_draws: int
    step_scheduler: str


@dataclass
class Position:
    """Where a run is.

    Args:
        epoch: Epochs that are done.
        batches: Batches of the present epoch that are done.
        examples: Their examples.
        sums: Over these batches: NLL times examples, KL, bound, windows (one per optimizer step).
        seconds: Time spent on them.
        kl_weight: The last weight of the KL.
        best: Validation NLL of the best epoch so far, `None` before there is one.
        waited: Epochs since then.
        stopped: Whether the run is over before its last epoch.
    """

    epoch: int = 0
    batches: int = 0
    examples: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    seconds: float = 0.0
    kl_weight: float = 0.0
    best: float | None = None
    waited: int = 0
    stopped: bool = False

    def close_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self.batches = self.examples = 0
        self.sums, self.seconds = [0.0] * 4, 0.0
