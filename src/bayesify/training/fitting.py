"""`fit`: the training of anything that is `Trainable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from bayesify.arguments.checks import Count, CountOrZero, DataCount, Device, NonNegative, Positive, Seed, Share, checked
from bayesify.network import BayesianNetwork, adopt
from bayesify.predictor import Trainable
from bayesify.storage import tensor_files
from bayesify.training.arguments import (
    Checkpointing,
    Devices,
    Steps,
    Update,
    Validation,
    check_model,
    check_precision,
)
from bayesify.training.average import Average
from bayesify.training.batches import BatchReader, check_num_data, check_repeatable, count_examples, min_examples
from bayesify.training.checkpoints import Checkpoint, model_state, set_model_state
from bayesify.training.distributed import FabricProcesses, Processes, count_nodes, make_fabric
from bayesify.training.history import History
from bayesify.training.loop import TrainingLoop
from bayesify.training.noise import LearnedNoise
from bayesify.training.optimizers import make_optimizer, make_scheduler
from bayesify.training.schedules import KLSchedule
from bayesify.training.state import Callback, Run, Settings
from bayesify.training.validation import validated
from bayesify.weights.batch_statistics import KeptStatistics

Parameters = Iterable[nn.Parameter]


@checked
def fit(
    model: Trainable,
    train_loader: Iterable[Any],
    *,
    epochs: CountOrZero,
    learning_rate: Positive = 1e-3,
    optimizer: torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    validation: Iterable[Any] | Validation | None = None,
    patience: Count | None = None,
    num_draws: Count | None = None,
    device: Device | Devices | None = None,
    checkpoint: str | Path | Checkpointing | None = None,
    seed: Seed | None = None,
    progress: bool = True,
    num_data: DataCount | None = None,
    map_epochs: CountOrZero = 0,
    kl_weight: NonNegative = 1.0,
    kl_schedule: Callable[[float], float] | None = None,
    precision: Literal["float32", "bf16"] | str = "float32",
    callbacks: Sequence[Callback] = (),
    read_batch: BatchReader | None = None,
    steps: Steps = Steps(),  # noqa: B008 (frozen)
    update: Update | None = None,
    average: Share | Average | None = None,
) -> History:
    r"""Train a model by its evidence lower bound, in place.

    Each step minimizes the negative bound per example,

    $$ -\frac1B \sum_b \frac1S \sum_s \omega_b \log p(y_b | f_s(x_b)) + \frac{\beta(t)}{N} \mathrm{KL}(q \| p), $$

    so that learning rates carry over between datasets of different size. A MAP phase, if asked for, comes first: the posterior
    mean is trained by `bnn.map_objective`, with the same optimizer, and everything else stays where it starts.

    The same seed gives the same result bit for bit on the same machine. A run that was interrupted or killed and is called
    again with the same arguments and `checkpoint` path continues to the result of an undisturbed one. Random numbers
    of the run (shuffling, dropout of the network, draws) come from streams of its own; torch's, NumPy's and Python's global
    generators are left as they were. Random transforms in persistent workers cannot be set back within a run; they are the
    caller's to keep the same.

    Ctrl-C lets the present step finish and writes the checkpoint before `KeyboardInterrupt` is raised; pressed twice it
    interrupts at once. An error in a later batch leaves the model as the steps before it made it, and says how many they were;
    so does a step whose gradients are not finite, which is not taken (`Steps(skip_not_finite=True)` goes on after it).
    On a GPU such a step is reported at most 64 steps later, and none of those is taken either; optimizers without a fused form
    report it at once.

    Most calls need the first group of arguments; those under "Other" are for data and trainings out of the ordinary.

    Args:
        model: A `BayesianNetwork` with a likelihood, or another `Trainable`. It comes back in the mode (train or eval) in which it
            was given.
        train_loader: Iterable of batches that starts again each epoch: pairs (inputs, targets), triples with example weights,
            dicts or dataclasses; see `bayesify.training.batches.parse_batch`.
        epochs: Passes over the data in the variational phase; 0 where only a MAP phase is wanted.
        learning_rate: Learning rate of the default optimizer.
        optimizer: An instance, or a function from parameters to one; Adam by default. On a GPU a plain SGD, Adam or AdamW takes its
            fused form for the time of the run, with the same steps up to rounding; `foreach=True` leaves it as it is.
        scheduler: Of the learning rate: an instance on the same optimizer, or a function from optimizer to one. By default the rate
            of the default optimizer falls to 0 as half a cosine over the variational phase, step by step, which left the
            suite of defaults 0.02 nats better after three epochs; `"constant"` leaves it where it is, as it is for other
            optimizers. A finished run that is continued to more epochs goes on with the rate that it would have there.
        validation: Batches for the validation NLL of each epoch; a `Validation` sets the number of its draws.
        patience: Stop after this many epochs without a better validation NLL, and go back to the best one. Epochs count once
            the MAP phase is over and the KL schedule has reached 1.
        num_draws: S, draws per step; what the posterior recommends by default.
        device: Where to train; the model is moved there. Where it is by default. `Devices` are several processes.
        checkpoint: File in which the run is stored after each epoch, and from which it is continued; a `Checkpointing` stores it
            more often, or starts again.
        seed: Of everything random, an integer; taken from torch's global generator by default.
        progress: Whether to show a progress bar on the terminal, or a line now and then where there is none, and at the end
            what is amiss.

    Other Args:
        num_data: N, the number of examples; by default the length of the loader's dataset, or a count in one pass. Under
            augmentation N counts the original examples. A larger number is allowed and makes the KL count less.
        map_epochs: Epochs of the MAP phase.
        kl_weight: Constant factor on the KL (and on `-log p` in the MAP phase); below 1 it tempers the posterior.
        kl_schedule: Factor on the KL as a function of the variational epochs that have passed; see `KLSchedule`.
        precision: `"bf16"` runs the network under autocast; parameters, draws and log-densities stay in float32.
        callbacks: Functions of model and history, called after each epoch; one that returns `True` ends the training.
        read_batch: A function from what the loader yields to inputs and targets.
        steps: Accumulated batches, clipped gradients, when the scheduler steps, and whether steps on a GPU are captured.
        update: A method's own part in the steps, such as that of `baselines.VOGN`.
        average: Decay per step of an exponential average of the parameters, such as 0.999; an `Average` begins later, or is a plain
            mean. The average takes the place of the parameters at the end and for validation, with batch statistics of its own,
            which cost a pass over the training data each time. Callbacks, and a run that ends with an error, have the parameters
            themselves.

    Returns:
        One entry per epoch; see `History`. Its `findings` say what is amiss, each with a remedy: a training that has not converged,
        scales that never moved, a KL that dwarfs the data term, predictions worse than the starting network's.

    Raises:
        ValueError: If an argument is out of range, the loader is empty, inputs, targets or gradients are not valid (with epoch and
            batch), or
            the checkpoint is damaged or of another run.
        TypeError: If a model, batch, seed or optimizer is none.
        OSError: If the checkpoint cannot be read or written.
        ImportError: If `Devices` need Lightning Fabric and it is not installed.
        KeyboardInterrupt: After Ctrl-C.
    """
    average = Average(average) if isinstance(average, int | float) else average
    check_model(model, map_epochs, steps.draws_in_turn, average is not None)
    check_precision(precision)
    if epochs + map_epochs == 0:
        raise ValueError("fit: epochs=0 and map_epochs=0; give at least one epoch")
    if patience is not None and validation is None:
        raise ValueError(f"fit: patience={patience} needs a validation loader; pass validation=")
    if validation is not None:
        validated(model)
        validation = validation if isinstance(validation, Validation) else Validation(validation)
    if checkpoint is not None and not isinstance(checkpoint, Checkpointing):
        checkpoint = Checkpointing(checkpoint)
    check_repeatable(train_loader)
    check_num_data(num_data, min_examples(train_loader))
    settings = Settings(
        num_data=count_examples(train_loader, read_batch) if num_data is None else num_data,
        epochs=epochs,
        map_epochs=map_epochs,
        kl_weight=float(kl_weight),
        kl_schedule=kl_schedule or KLSchedule(),
        num_draws=num_draws or model.training_draws,
        accumulate=steps.accumulate,
        clip_norm=steps.clip_norm,
        precision=precision,
        patience=patience,
        validation_draws=validation.num_draws if validation is not None else Validation.num_draws,
        step_scheduler=steps.scheduler,
        falling_rate=scheduler is None and optimizer is None,
        skip_not_finite=steps.skip_not_finite,
        average=average,
    )
    stored = _stored(checkpoint)
    if seed is None:
        seed = int(stored.settings["seed"] if stored is not None else torch.randint(2**63 - 1, ()))
    run = Run(
        settings, seed, validation, read_batch, checkpoint, callbacks, progress, num_data is not None,
        update or Update(), steps.capture, steps.draws_in_turn, optimizer is None and update is None,
    )  # fmt: skip
    if stored is not None and isinstance(model.module, BayesianNetwork):
        adopt(model.module, stored.model)

    def train(processes: Processes) -> History:
        if device is not None or processes.count > 1:
            model.module.to(processes.device(None if devices.kind is None else torch.device(devices.kind)))
        with LearnedNoise(model, settings.total_epochs).without_gradient():
            made = None if run.update.takes_steps else make_optimizer(optimizer, model.module, learning_rate)
            scheduled = make_scheduler(None if scheduler == "constant" else scheduler, made)
            plan = replace(run, seed=processes.agree(seed))
            return TrainingLoop(model, train_loader, made, scheduled, plan, processes).run(stored)

    devices = device if isinstance(device, Devices) else Devices(1, None if device is None else str(device))
    if devices.count == 1 and count_nodes() == 1:
        return train(Processes())
    return _train_together(model.module, train, make_fabric(devices, unused=map_epochs > 0), devices.launch)


def _stored(checkpoint: Checkpointing | None) -> Checkpoint | None:
    """The run to continue, if there is one."""
    if checkpoint is None or not checkpoint.resume or not Path(checkpoint.path).exists():
        return None
    return Checkpoint.read(Path(checkpoint.path))


def _train_together(module: nn.Module, train: Callable[[Processes], History], fabric: Any, launch: str) -> History:
    def work(fabric: Any) -> tuple[History, bytes | None]:
        history = train(FabricProcesses(fabric))
        own = launch == "script"  # processes of the script hold the trained network themselves
        kept = module.kept_statistics if isinstance(module, BayesianNetwork) else None
        state = {"model": model_state(module), "kept": None if kept is None else kept.state()}
        return history, None if own else tensor_files.to_bytes(state)

    try:
        history, state = fabric.launch(work)
    except ProcessRaisedException as error:
        if "Autograd-and-Fork" not in str(error):
            raise
        raise RuntimeError(
            "fit: Devices(launch='fork'): torch sees a GPU and a backward pass has run in this process, after which forked "
            "processes cannot train; call it before anything else is trained, start Python with CUDA_VISIBLE_DEVICES= "
            "(empty), or use launch='script'"
        ) from None
    if state is not None:
        trained = tensor_files.from_bytes(state)
        set_model_state(module, trained["model"])
        if isinstance(module, BayesianNetwork) and trained["kept"] is not None:
            module.kept_statistics = KeptStatistics.restore(trained["kept"], module.network)
    found: History = history
    return found
