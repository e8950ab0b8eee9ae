"""`fit`: trains any `Trainable`."""

import io
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
from bayesify.training.arguments import (
    Callback,
    Checkpointing,
    Devices,
    Run,
    Settings,
    Steps,
    Update,
    Validation,
    check_model,
    check_precision,
)
from bayesify.training.average import Average
from bayesify.training.batches import BatchReader, check_num_data, check_repeatable, count_examples, min_examples
from bayesify.training.checkpoints import Checkpoint, model_state, set_model_state
from bayesify.training.distributed import Processes, count_nodes, make_fabric
from bayesify.training.history import History
from bayesify.training.loop import TrainingLoop
from bayesify.training.noise import LearnedNoise
from bayesify.training.schedules import KLSchedule, make_optimizer, make_scheduler
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
    r"""Train a model by maximizing its evidence lower bound, in place.

    Each step minimizes the negative bound per example,

    $$ -\frac1B \sum_b \frac1S \sum_s \omega_b \log p(y_b | f_s(x_b)) + \frac{\beta(t)}{N} \mathrm{KL}(q \| p), $$

    so that the same learning rates suit datasets of different sizes. With `map_epochs`, a MAP phase comes first. The MAP phase
    trains the posterior mean with `bnn.map_objective` and the same optimizer, and leaves everything else at its initial value.

    The same seed gives the same result bit for bit on the same machine. To continue a run that was interrupted or killed, call
    `fit` again with the same arguments and the same `checkpoint` path; the result is the same as without the interruption. The
    run draws its random numbers (shuffling, dropout, draws of weights) from its own streams. The run leaves the global generators
    of torch, NumPy and Python as they were. Random transforms in persistent workers are outside the control of `fit`, so the
    caller must make them reproducible.

    After Ctrl-C, the current step finishes and the checkpoint is written before `KeyboardInterrupt` is raised. A second Ctrl-C
    interrupts at once. If a batch raises an error, the model keeps the parameters that the last step before this batch produced.
    The error says how many steps were taken. A step with non-finite gradients is not taken, and an error is raised. With
    `Steps(skip_not_finite=True)`, training continues instead. On a GPU with a fused optimizer, the error for non-finite gradients
    may come up to 64 steps late, and the steps in between are not taken. With other optimizers the error comes at once.

    Most calls need only the first group of arguments. The arguments under "Other" are for unusual data and training runs.

    Args:
        model: A `BayesianNetwork` with a likelihood, or another `Trainable`. Its mode (train or eval) is the same after the call.
        train_loader: Iterable of batches, which can be iterated once per epoch. A batch is a pair (inputs, targets), a triple
            with example weights, a dict or a dataclass; see `bayesify.training.batches.parse_batch`.
        epochs: Number of passes over the data in the variational phase; 0 for a MAP phase only.
        learning_rate: Learning rate of the default optimizer.
        optimizer: An optimizer, or a function that makes an optimizer from parameters; Adam by default. On a GPU, a plain SGD,
            Adam or AdamW runs in its fused form during the call, with the same steps up to rounding. To keep the plain form,
            create the optimizer with `foreach=True`.
        scheduler: Learning rate scheduler of the same optimizer, or a function that makes a scheduler from an
            optimizer. By default, the rate of the default optimizer falls to 0 as half a cosine over the variational
            phase, step by step. On the benchmark of the default settings, three epochs with this schedule were 0.02 nats better
            than three epochs with a constant rate. `"constant"` keeps the rate unchanged; this is the default if you pass your
            own optimizer. If you continue a finished run for more epochs, the rate follows the schedule of the new length.
        validation: Batches for the validation NLL of each epoch. A `Validation` also sets the number of draws.
        patience: Number of consecutive epochs without a better validation NLL after which training stops. The model then returns to
            the best epoch. Epochs of the MAP phase, and epochs in which the KL schedule is below 1, do not count.
        num_draws: Number of draws S per step; by default the number that the posterior recommends.
        device: Device to train on; the model is moved to it. By default the model stays on its device. `Devices` trains
            in several processes.
        checkpoint: File in which the run is stored after each epoch, and from which `fit` continues the run. Pass a
            `Checkpointing` to store the run more often or to start again.
        seed: Integer seed of all randomness. By default it is drawn from torch's global generator.
        progress: Whether to show a progress bar and print the findings at the end. If there is no terminal, a line is
            printed now and then.

    Other Args:
        num_data: Number N of examples; by default the length of the loader's dataset, or a count in one pass. If
            the data are augmented, N counts the original examples. A larger N is allowed and gives the KL less weight.
        map_epochs: Number of epochs of the MAP phase.
        kl_weight: Constant factor on the KL (and on `-log p` in the MAP phase); a value below 1 tempers the posterior.
        kl_schedule: Function that gives a factor on the KL from the number of variational epochs so far; see
            `KLSchedule`.
        precision: `"bf16"` runs the network under autocast; parameters, draws and log-densities stay in float32.
        callbacks: Functions that are called with model and history after each epoch. If a function returns `True`,
            training ends.
        read_batch: Function that converts an item of the loader to inputs and targets.
        steps: Settings of the steps: gradient accumulation, clipping, when the scheduler steps, and CUDA graphs.
        update: Actions of a particular method in each step, for example of `baselines.VOGN`.
        average: Decay per step of an exponential average of the parameters, such as 0.999. Pass an `Average` to start averaging
            after a part of the run, or to take a plain mean. The average replaces the parameters for validation and at the end.
            Each replacement in a network with BatchNorm needs a pass over the training data, for the statistics of the average.
            Callbacks see the unaveraged parameters. A run that ends with an error leaves the unaveraged parameters in the model.

    Returns:
        One entry per epoch; see `History`. The history's `findings` list problems, each with a remedy: training has not
        converged, the posterior's scales did not change, the KL dwarfs the data term, or predictions are worse than those of the
        starting network.

    Raises:
        ValueError: If an argument is out of range; if the loader is empty; if inputs, targets or gradients are invalid
            (the message gives epoch and batch); or if the checkpoint is damaged or belongs to another run.
        TypeError: If the model, a batch, the seed or the optimizer has the wrong type.
        OSError: If the checkpoint cannot be read or written.
        ImportError: If `Devices` needs Lightning Fabric, which is not installed.
        KeyboardInterrupt: After Ctrl-C.
    """
    average = Average(average) if isinstance(average, int | float) else average
    check_model(model, map_epochs, steps.draws_in_turn, average is not None)
    check_precision(precision)
    if epochs + map_epochs == 0:
        raise ValueError("fit: epochs=0 and map_epochs=0; give at least one epoch")
    if patience is not None and validation is None:
        raise ValueError(f"fit: patience={patience} needs validation data; pass validation= with a loader")
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
        precision=precision,
        patience=patience,
        validation_draws=validation.num_draws if validation is not None else Validation.num_draws,
        steps=steps,
        falling_rate=scheduler is None and optimizer is None,
        average=average,
    )
    resumes = checkpoint is not None and checkpoint.resume and Path(checkpoint.path).exists()
    stored = Checkpoint.read(Path(checkpoint.path)) if checkpoint is not None and resumes else None
    if seed is None:
        seed = int(stored.settings["seed"] if stored is not None else torch.randint(2**63 - 1, ()))
    run = Run(
        settings, seed, validation, read_batch, checkpoint, callbacks, progress, num_data is not None,
        update or Update(), optimizer is None and update is None,
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


def _train_together(module: nn.Module, train: Callable[[Processes], History], fabric: Any, launch: str) -> History:
    def work(fabric: Any) -> tuple[History, bytes | None]:
        history = train(Processes(fabric))
        if launch == "script":  # each process already holds the trained network
            return history, None
        kept = module.kept_statistics if isinstance(module, BayesianNetwork) else None
        state = io.BytesIO()
        torch.save({"model": model_state(module), "kept": None if kept is None else kept.state()}, state)
        return history, state.getvalue()

    try:
        history, state = fabric.launch(work)
    except ProcessRaisedException as error:
        if "Autograd-and-Fork" not in str(error):
            raise
        raise RuntimeError(
            "fit: Devices(launch='fork'): torch sees a GPU and this process has already run a backward pass, so forked processes "
            "cannot train; call fit before training anything else, start Python with CUDA_VISIBLE_DEVICES= (empty), or use "
            "launch='script'"
        ) from None
    if state is not None:
        trained = torch.load(io.BytesIO(state), map_location="cpu")
        set_model_state(module, trained["model"])
        if isinstance(module, BayesianNetwork) and trained["kept"] is not None:
            module.kept_statistics = KeptStatistics.restore(trained["kept"], module.network)
    found: History = history
    return found
