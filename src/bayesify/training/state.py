"""Settings and current position of a training run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Range, checked
from bayesify.training.arguments import Checkpointing, Update, Validation
from bayesify.training.average import Average
from bayesify.training.batches import BatchReader, batch_size
from bayesify.training.history import History

Callback = Callable[[Any, History], Any]
"""A function that is called with model and history after each epoch. If it returns `True`, training ends."""

Natural = Annotated[int, Range(least=0)]

MAX_NUMBERS_IN_DESCRIPTION = 64
"""A description has the values of tensors with at most this many numbers, and the shapes and hashes of larger tensors."""


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result of a run, except the network, data, optimizer and scheduler; see `fit`."""

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
        """Number of epochs of both phases."""
        return self.map_epochs + self.epochs


@dataclass(frozen=True)
class Run:
    """Options of a run, except the network, data, optimizer and scheduler; see `fit` and `Steps`.

    `num_data_given` says whether the caller gave the number of examples. If so, the first epoch checks this number. For
    `rescales` see `LearnedNoise`.
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
        """Path of the checkpoint."""
        return None if self.checkpoint is None else Path(self.checkpoint.path)


@checked
@dataclass
class Position:
    """Position within a run."""

    epoch: Natural = 0  # number of finished epochs
    batches: Natural = 0  # number of finished batches in the current epoch
    examples: Natural = 0  # number of examples in these batches
    seconds: float = 0.0  # time spent on these batches
    kl_weight: float = 0.0  # weight of the KL in the last step
    best: Any = None  # validation NLL of the best epoch so far, which may be infinite
    waited: Natural = 0  # number of epochs since the best epoch
    stopped: bool = False  # whether the run ended before its last epoch

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
    """Description of a run as plain data, made before the first step. A checkpoint can be continued only by a run with
    an equal description.

    Unknown entries are left out. These are the batch size if the loader has none, and the optimizer's initial learning
    rates if a scheduler has already changed them.
    """
    plain = {key: getattr(settings, key) for key in Settings.__dataclass_fields__ if key != "epochs"}
    plain["kl_schedule"] = describe_schedule(settings.kl_schedule)
    plain["average"] = None if settings.average is None else repr(settings.average)
    plain |= dict(_flatten(identity))
    if optimizer is not None:
        plain |= {"optimizer": type(optimizer).__name__, "scheduler": type(scheduler).__name__}
        plain["parameters of the optimizer"] = [len(group["params"]) for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups if not getattr(scheduler, "last_epoch", 0) > 0 else []):
            rates = {"learning_rate": group.get("initial_lr", group.get("lr"))}
            rates |= {key: group[key] for key in ("betas", "momentum", "weight_decay") if key in group}
            where = f" of group {index + 1}" if index else ""
            plain |= {f"{key}{where}": _plain(value) for key, value in rates.items()}
    size = batch_size(loader)
    return plain | ({"batch_size": size} if size is not None else {})


def describe_schedule(schedule: Callable[[float], float]) -> str:
    """A schedule as text that is the same in every process: its repr, or its name if it is a function."""
    return getattr(schedule, "__qualname__", None) or repr(schedule)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested plain data under dotted names; other values are replaced by the name of their type."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flatten(entry, f"{name}.{key}" if name else str(key))
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() > MAX_NUMBERS_IN_DESCRIPTION:
        content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
