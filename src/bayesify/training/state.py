"""What decides a training run, and where it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.training.arguments import Checkpointing, Update, Validation
from bayesify.training.average import Average
from bayesify.training.batches import BatchReader, batch_size
from bayesify.training.history import History

Callback = Callable[[Any, History], Any]
"""A function of model and history, called after each epoch; one that returns `True` ends the training."""

MAX_NUMBERS_IN_DESCRIPTION = 64
"""A description holds all numbers of a tensor with at most this many, and a hash of larger ones."""


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
    falling_rate: bool = False
    skip_not_finite: bool = False
    average: Average | None = None

    @property
    def total_epochs(self) -> int:
        """Those of both phases."""
        return self.map_epochs + self.epochs


@dataclass(frozen=True)
class Run:
    """What a run is asked for besides network, data, optimizer and scheduler; see `fit` and `Steps`.

    `num_data_given`: the number of examples is the caller's, to be compared with those of the first epoch. `rescales`: see
    `LearnedNoise`.
    """

    settings: Settings
    seed: int
    validation: Validation | None = None
    reader: BatchReader | None = None
    checkpoint: Checkpointing | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    num_data_given: bool = False
    update: Update = field(default_factory=Update)
    capture: bool = True
    draws_in_turn: bool = False
    rescales: bool = False

    @property
    def path(self) -> Path | None:
        """The file of the checkpoint."""
        return None if self.checkpoint is None else Path(self.checkpoint.path)


@dataclass
class Position:
    """Where a run is.

    Args:
        epoch: Epochs that are done.
        batches: Batches of the present epoch that are done.
        examples: Their examples.
        seconds: Time spent on them.
        kl_weight: The last weight of the KL.
        best: Validation NLL of the best epoch so far, `None` before there is one.
        waited: Epochs since then.
        stopped: Whether the run is over before its last epoch.
    """

    epoch: int = 0
    batches: int = 0
    examples: int = 0
    seconds: float = 0.0
    kl_weight: float = 0.0
    best: float | None = None
    waited: int = 0
    stopped: bool = False

    def close_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self.batches = self.examples = 0
        self.seconds = 0.0


def describe(
    identity: Mapping[str, Any],
    loader: Any,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    settings: Settings,
) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that continues it, as plain data, taken before the first step.

    Entries that cannot be told are left out: the batch size of a loader that has none, and what a scheduler that has stepped
    already made of the optimizer's learning rates.
    """
    plain = {key: getattr(settings, key) for key in Settings.__dataclass_fields__ if key != "epochs"}
    plain["kl_schedule"] = describe_schedule(settings.kl_schedule)
    plain["average"] = None if settings.average is None else repr(settings.average)
    plain |= dict(_flatten(identity))
    if optimizer is not None:
        plain |= {"optimizer": type(optimizer).__name__, "scheduler": type(scheduler).__name__}
        plain["parameters of the optimizer"] = [len(group["params"]) for group in optimizer.param_groups]
        if not getattr(scheduler, "last_epoch", 0) > 0:
            plain |= _rates(optimizer)
    size = batch_size(loader)
    return plain | ({"batch_size": size} if size is not None else {})


def describe_schedule(schedule: Callable[[float], float]) -> str:
    """A schedule in words that are the same in every process: its repr, or its name if it is a function."""
    return getattr(schedule, "__qualname__", None) or repr(schedule)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested plain data under dotted names; what is not plain is its type's name."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flatten(entry, f"{name}.{key}" if name else str(key))
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= MAX_NUMBERS_IN_DESCRIPTION else _digest(value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _digest(value: Tensor) -> str:
    """Shape and a few digits of a hash: a checkpoint's description is no place for a network's weights."""
    content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def _rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rate, momentum and decay of each group of parameters, as they were given."""
    rates: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index + 1}" if index else ""
        given = {"learning_rate": group.get("initial_lr", group.get("lr"))}
        given |= {key: group[key] for key in ("betas", "momentum", "weight_decay") if key in group}
        rates |= {f"{key}{where}": _plain(value) for key, value in given.items()}
    return rates
