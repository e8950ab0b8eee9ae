"""Groups of less common arguments of `fit` with their checks, and the settings and current position of a run."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, Device, Positive, Range, checked
from bayesify.network import BayesianNetwork
from bayesify.predictor import Batch, Trainable
from bayesify.training.average import Average
from bayesify.training.batches import BatchReader, batch_size, check_repeatable, count_batches
from bayesify.training.history import History


@checked
@dataclass(frozen=True)
class Steps:
    """Settings that decide how batches become optimizer steps.

    Args:
        accumulate: Number of batches whose gradients make one step. All these batches use the same draw of the weights, so the step
            equals a step from one large batch.
        clip_norm: Upper bound on the norm of the gradient.
        scheduler: Whether the learning rate scheduler steps after each `"epoch"` or after each optimizer `"step"`.
        skip_not_finite: Whether to skip a step with a non-finite gradient instead of raising an error. In a
            `ModelStack`, only the models with a non-finite gradient skip the step; their parameters, buffers and
            optimizer state do not change. The history counts skipped steps.
        capture: Whether steps on a GPU run as CUDA graphs if possible. The results are the same as without graphs, but the host
            waits less.
        draws_in_turn: Whether to compute the gradient of each draw before the next draw runs. Only the activations of one draw
            are then in memory. The objective is the same, but small networks train more slowly. With `draws_in_turn=True`, noise
            is drawn for weights, never for the outputs of layers.

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
    """File and interval of a run's checkpoints.

    Args:
        path: Path of the checkpoint file.
        every: Number of steps between checkpoints, for long epochs. By default a checkpoint is written after each
            epoch.
        resume: Whether to continue the run that the file stores, if the file exists; `False` starts again and overwrites the
            file.

    Raises:
        ValueError: If the path is a folder, if its parent folder does not exist, or if `every` is below 1.
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
            raise ValueError(f"fit: checkpoint={str(path)!r}: the folder {path.parent} does not exist; create it first")


@checked
@dataclass(frozen=True)
class Devices:
    """Processes that train together through Lightning Fabric. Each process has its own device and gets a part of every
    batch.

    With the same seed, several processes give the result of one process up to rounding.

    Args:
        count: Number of processes. If torchrun started the run on several machines, `count` is the number of processes per
            machine.
        kind: Kind of device, such as `"cpu"` or `"cuda"`; by default CUDA if available.
        launch: How processes start. `"script"` runs the calling script again in each further process; it also uses
            processes that torchrun started. `"fork"` starts processes for this call only and returns their result.
            `"fork"` does not work on Windows or after CUDA was used. If torch sees a GPU, `"fork"` also fails after
            this process has trained anything.

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
        loader: Batches of validation data.
        num_draws: Number of draws. The draws use the same random numbers in each epoch.

    Raises:
        TypeError: If the loader can be iterated only once.
        ValueError: If the loader is empty, or if `num_draws` is below 1.
    """

    loader: Iterable[Any]
    num_draws: Count = 16

    def __post_init__(self) -> None:
        check_repeatable(self.loader)
        if count_batches(self.loader) == 0:
            raise ValueError(
                "fit: the validation loader yields no examples; give a loader with data, or leave validation= out"
            )


class Update:
    """Hooks through which a training method acts during `fit`; the base class does nothing.

    Attributes:
        takes_steps: Whether `fit` calls `take_step` instead of computing gradients and taking an optimizer step.
    """

    takes_steps: ClassVar[bool] = False

    @property
    def acts_in_steps(self) -> bool:
        """Whether the method takes its own steps or acts after each step. Steps of such a method cannot run as CUDA graphs."""
        return self.takes_steps or type(self).after_step is not Update.after_step

    def take_step(self, batch: Batch, *, generator: torch.Generator, share: float) -> float:
        """Take a step from one batch.

        Args:
            batch: Batch on the model's device.
            generator: Source of randomness.
            share: Share of the run that is done, from 0 to 1.

        Returns:
            Negative log-likelihood per example.

        Raises:
            ValueError: If a number is not finite. In this case, the step has changed nothing.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after each step."""

    def after_epoch(self) -> dict[str, float]:
        """Called after each epoch; returns additional columns of the history."""
        return {}

    def identity(self) -> dict[str, Any]:
        """The method's settings as plain data; a continued run must have the same settings as the interrupted run."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that steps change outside the module, as nested data with tensors, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


def check_model(model: Trainable, map_epochs: int, draws_in_turn: bool, averages: bool = False) -> None:
    """Raise `ValueError` if a model cannot be trained, or lacks a requested feature."""
    model.check_ready()
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise ValueError("fit: no parameter of the network is trainable; set requires_grad=True on some of them")
    if map_epochs and "map" not in model.phases:
        raise ValueError(f"fit: {type(model).__name__} has no MAP phase; use map_epochs=0")
    if draws_in_turn and not isinstance(model, BayesianNetwork):
        raise ValueError(
            f"fit: {type(model).__name__} has no draws to take in turn; leave out Steps(draws_in_turn=True)"
        )
    if averages and model.num_models is not None:
        raise ValueError(
            f"fit: average= works for a single model, but {type(model).__name__} has {model.num_models} models; leave "
            "out average=, or train the models one by one"
        )


def check_precision(precision: str) -> None:
    """Raise `ValueError` for any precision other than float32 and bf16."""
    if precision not in ("float32", "bf16"):
        why = " (float16 is not supported, because log-densities overflow in it)" if "16" in precision else ""
        raise ValueError(f"fit: precision={precision!r}; give 'float32' or 'bf16'{why}")


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
    precision: str
    patience: int | None
    validation_draws: int
    steps: Steps = Steps()
    falling_rate: bool = False
    average: Average | None = None

    @property
    def total_epochs(self) -> int:
        """Number of epochs of both phases."""
        return self.map_epochs + self.epochs


@dataclass(frozen=True)
class Run:
    """Options of a run, except the network, data, optimizer and scheduler; see `fit`."""

    settings: Settings
    seed: int
    validation: Validation | None = None
    reader: BatchReader | None = None
    checkpoint: Checkpointing | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    num_data_given: bool = False  # whether the caller gave the number of examples, which the first epoch then checks
    update: Update = field(default_factory=Update)
    rescales: bool = False  # see `LearnedNoise`


@checked
@dataclass
class Position:
    """Position within a run."""

    epoch: Natural = 0  # number of finished epochs
    batches: Natural = 0  # number of finished batches in the current epoch
    examples: Natural = 0  # number of examples in these batches
    seconds: float = 0.0  # time spent on these batches
    steps: Natural = 0  # number of all finished steps; set for a checkpoint
    sums: Any = None  # sums of the epoch, as in `Sums`; set for a checkpoint
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

    Unknown entries are left out. The batch size is unknown if the loader has none, and the optimizer's initial learning rates are
    unknown if a scheduler has already changed them.
    """
    plain = {key: value for key, value in vars(settings).items() if key not in ("epochs", "steps")}
    plain |= {key: getattr(settings.steps, key) for key in ("accumulate", "clip_norm", "skip_not_finite")}
    plain["step_scheduler"] = settings.steps.scheduler
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
