"""Rare arguments of `fit` in groups, and what all of them may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from bayesify.arguments.checks import Count, Device, Positive, checked
from bayesify.network import BayesianNetwork
from bayesify.predictor import Batch, Trainable
from bayesify.training.batches import check_repeatable, count_batches


@checked
@dataclass(frozen=True)
class Steps:
    """How batches become steps.

    Args:
        accumulate: Batches whose gradients make one step. All of them see the same draw of the weights, so the step is that of
            one batch as large as all of them together.
        clip_norm: Upper bound on the norm of the gradient.
        scheduler: When the scheduler of the learning rate steps: after each `"epoch"` or after each optimizer `"step"`.
        skip_not_finite: Whether a step whose gradient is not finite is left out rather than an error; of several models
            (`ModelStack`) only those stay where they are, with their buffers and their moments in the optimizer, whose
            own gradient is not finite. The history counts such steps.
        capture: Whether steps on a GPU run as CUDA graphs where nothing forbids it, with the same numbers and less waiting.
        draws_in_turn: Whether the gradient of each draw is taken before the next draw runs, so that the activations of one draw are
            held at a time: the same objective with less memory, and slower for small networks. Weights are drawn whole.

    Raises:
        ValueError: If an argument is out of range.
    """

    accumulate: Count = 1
    clip_norm: Positive | None = None
    scheduler: Literal["epoch", "step"] = "epoch"
    skip_not_finite: bool = False
    capture: bool = True
    draws_in_turn: bool = False


@checked
@dataclass(frozen=True)
class Checkpointing:
    """Where and when a run is stored.

    Args:
        path: The file.
        every: Steps between checkpoints, for long epochs; after each epoch by default.
        resume: Whether to continue the run that the file holds, if there is one, or to start again and overwrite it.

    Raises:
        ValueError: If the path is a folder, or in one that does not exist, or `every` is below 1.
    """

    path: str | Path
    every: Count | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        path = Path(self.path)
        if path.is_dir():
            raise ValueError(
                f"fit: checkpoint={str(path)!r} is a folder; give the path of a file, such as run.safetensors"
            )
        if not path.parent.is_dir():
            raise ValueError(f"fit: checkpoint={str(path)!r}: the folder {path.parent} does not exist; make it first")


@checked
@dataclass(frozen=True)
class Devices:
    """Processes that train together, each on its own device and on its part of every batch, by Lightning Fabric.

    With the same seed they give the result of one process up to rounding.

    Args:
        count: How many, on each machine if torchrun started several.
        kind: Of device, such as `"cpu"` or `"cuda"`; CUDA where there is any by default.
        launch: How they start: `"script"` runs the calling script once more per process (as torchrun does, whose processes are
            recognized), `"fork"` starts them for this call only and brings the result back (not on Windows, not once CUDA was
            used, and where torch sees a GPU not once anything was trained in this process).

    Raises:
        ValueError: If an argument is out of range.
    """

    count: Count
    kind: Device | None = None
    launch: Literal["script", "fork"] = "script"


@checked
@dataclass(frozen=True)
class Validation:
    """Batches for the validation NLL of each epoch.

    Args:
        loader: The batches.
        num_draws: Draws for it, the same random ones each time.

    Raises:
        TypeError: If the loader cannot be iterated again and again.
        ValueError: If it is empty, or `num_draws` is below 1.
    """

    loader: Iterable[Any]
    num_draws: Count = 16

    def __post_init__(self) -> None:
        check_repeatable(self.loader)
        if count_batches(self.loader) == 0:
            raise ValueError("fit: the validation loader yields no examples; give one with data, or none")


class Update:
    """A method's own part in training by `fit`; the base has none.

    Attributes:
        takes_steps: Whether `take_step` stands in place of gradients and optimizer.
    """

    takes_steps: ClassVar[bool] = False

    @property
    def acts_in_steps(self) -> bool:
        """Whether it takes steps or looks at each of them, so that they cannot be captured."""
        return self.takes_steps or type(self).after_step is not Update.after_step

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


def check_model(model: Trainable, map_epochs: int, draws_in_turn: bool, averages: bool = False) -> None:
    """Raise if a model cannot be trained, or lacks what is asked for: a MAP phase, draws to take in turn, one average."""
    model.check_ready()
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise ValueError("fit: no parameter of the network is trainable; set requires_grad on some")
    if map_epochs and "map" not in model.phases:
        raise ValueError(f"fit: {type(model).__name__} has no MAP phase; use map_epochs=0")
    if draws_in_turn and not isinstance(model, BayesianNetwork):
        raise ValueError(
            f"fit: {type(model).__name__} has no draws to take in turn; leave Steps(draws_in_turn=True) out"
        )
    if averages and model.num_models is not None:
        raise ValueError(
            f"fit: average= is for one model, and {type(model).__name__} has {model.num_models}; leave it out, or train the "
            "models one by one"
        )


def check_precision(precision: str) -> None:
    """Raise `ValueError` for another precision than float32 and bf16."""
    if precision in ("float16", "fp16", "16", "half"):
        raise ValueError(
            f"fit: precision={precision!r}; log-densities overflow in float16 and CPUs have no fast float16; use 'bf16'"
        )
    if precision not in ("float32", "bf16"):
        raise ValueError(f"fit: precision={precision!r}; give 'float32' or 'bf16'")
