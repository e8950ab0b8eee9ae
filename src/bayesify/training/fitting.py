"""`fit`: training of a Bayesian network, a convenience around `bnn.elbo`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bayesify.network import BayesianNetwork
from bayesify.storage import tensor_files
from bayesify.training.batches import (
    BatchReader,
    check_num_data,
    check_repeatable,
    count_batches,
    count_examples,
    min_examples,
)
from bayesify.training.checkpoints import Checkpoint, model_state, set_model_state
from bayesify.training.distributed import FabricProcesses, Processes, count_nodes, make_fabric
from bayesify.training.history import History
from bayesify.training.loop import Callback, TrainingLoop, TrainingObjective
from bayesify.training.schedules import KLSchedule
from bayesify.training.state import Settings

Parameters = Iterable[nn.Parameter]


def fit(
    bnn: BayesianNetwork,
    train_loader: Iterable[Any],
    *,
    epochs: int,
    num_data: int | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer] | None = None,
    learning_rate: float = 1e-3,
    scheduler: Any = None,
    step_scheduler: Literal["epoch", "step"] = "epoch",
    validation: Iterable[Any] | None = None,
    validation_draws: int = 16,
    patience: int | None = None,
    map_epochs: int = 0,
    kl_schedule: Callable[[float], float] | None = None,
    kl_weight: float = 1.0,
    num_draws: int | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    device: str | torch.device | None = None,
    devices: int = 1,
    launch: Literal["script", "fork"] = "script",
    read_batch: BatchReader | None = None,
    objective: TrainingObjective | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = True,
    callbacks: Sequence[Callback] = (),
    seed: int | None = None,
    progress: bool = True,
) -> History:
    r"""Train a Bayesian network by its evidence lower bound, in place.

    Each step minimizes the negative bound per example,

    $$ -\frac1B \sum_b \frac1S \sum_s \omega_b \log p(y_b | f_s(x_b)) + \frac{\beta(t)}{N} \mathrm{KL}(q \| p), $$

    so that learning rates carry over between datasets of different size. A MAP phase, if asked for, comes first: the posterior
    mean is trained by `bnn.map_objective`, with the same optimizer, and everything else stays where it starts.

    The same seed gives the same result bit for bit on the same machine. A run that was interrupted or killed and is called
    again with the same arguments and `checkpoint` path continues to the result of an undisturbed one. Random numbers
    of the run (shuffling, dropout of the network, draws) come from streams of its own; torch's, NumPy's and Python's global
    generators are left as they were. Two things are the caller's to keep the same: a generator given to the loader itself, and
    random transforms in persistent workers, which cannot be set back within a run.

    Ctrl-C lets the present step finish and writes the checkpoint before `KeyboardInterrupt` is raised; pressed twice it
    interrupts at once. An error in a later batch leaves the network as the steps before it made it, and says how many they were.

    Args:
        bnn: The network, with a likelihood. It comes back in the mode (train or eval) in which it was given.
        train_loader: Iterable of batches that starts anew each epoch: pairs (inputs, targets), triples with example weights,
            dicts or dataclasses; see `bayesify.training.batches.parse_batch`.
        epochs: Passes over the data in the variational phase; 0 where only a MAP phase is wanted.
        num_data: N, the number of examples; the length of the loader's dataset if left out, or a count in one pass. More than
            that is allowed, for data that are augmented.
        optimizer: An instance, or a function from parameters to one; Adam if left out.
        learning_rate: Of the default optimizer.
        scheduler: Of the learning rate: an instance on the same optimizer, or a function from optimizer to one.
        step_scheduler: When it steps: after each epoch or after each optimizer step.
        validation: Batches for the validation NLL of each epoch, with the same random draws each time.
        validation_draws: Draws for it.
        patience: Stop after this many epochs without a better validation NLL, and go back to the best one. Epochs count once
            the MAP phase is over and the KL schedule has reached 1.
        map_epochs: Epochs of the MAP phase.
        kl_schedule: Factor on the KL as a function of the variational epochs that have passed; see `KLSchedule`.
        kl_weight: Constant factor on the KL (and on `-log p` in the MAP phase); below 1 it tempers the posterior.
        num_draws: S, draws per step; what the posterior recommends if left out.
        accumulate: Batches whose gradients make one step. All of them see the same draw of the weights, so the step is that of one
            batch as large as all of them together.
        clip_norm: Upper bound on the norm of the gradient.
        precision: `"bf16"` runs the network under autocast; parameters, draws and log-densities stay in float32.
        device: Where to train; the network is moved there. Left where it is if left out.
        devices: Processes that train together, each on its own device and on its part of every batch, by Lightning Fabric. With the
            same seed they give the result of one process up to rounding. So many on each machine, if torchrun started several.
        launch: How they start: `"script"` runs the calling script once more per process (as torchrun does, whose processes are
            recognized), `"fork"` starts them for this call only and brings the result back (not on Windows, and not once
            CUDA was used).
        read_batch: A function from what the loader yields to inputs and targets, for loaders of another kind.
        objective: What to maximize in the variational phase in place of the evidence lower bound; see `FunctionSpaceVI`.
        checkpoint: File in which the run is stored.
        checkpoint_every: Steps between checkpoints, for long epochs; after each epoch if left out.
        resume: Whether to continue the run that the checkpoint file holds, if there is one, or to start anew and overwrite it.
        callbacks: Functions of network and history, called after each epoch; one that returns `True` ends the training.
        seed: Of everything random; taken from torch's global generator if left out.
        progress: Whether to show a progress bar on the terminal.

    Returns:
        One entry per epoch; see `History`.

    Raises:
        ValueError: If an argument is out of range, the loader is empty, inputs or targets are not valid (with epoch and batch), or
            the checkpoint is damaged or of another run.
        TypeError: If a batch or the optimizer is of a kind that means nothing here.
        ImportError: If `devices` needs Lightning Fabric and it is not installed.
        KeyboardInterrupt: After Ctrl-C.
    """
    _check_arguments(
        bnn,
        epochs=epochs,
        map_epochs=map_epochs,
        accumulate=accumulate,
        num_draws=num_draws,
        validation_draws=validation_draws,
        devices=devices,
        patience=patience,
        checkpoint_every=checkpoint_every,
        num_data=num_data,
    )
    for key, value in (("learning_rate", learning_rate), ("clip_norm", clip_norm)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"fit: {key}={value}; give a positive number")
    if not (kl_weight >= 0 and math.isfinite(kl_weight)):
        raise ValueError(f"fit: kl_weight={kl_weight}; give a number of at least 0")
    _check_choices(precision, step_scheduler, patience, validation)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise TypeError(
            f"fit: optimizer={optimizer!r}; give an optimizer, or a function to one such as "
            "lambda parameters: torch.optim.Adam(parameters, lr=1e-3); left out, it is Adam at learning_rate"
        )
    check_repeatable(train_loader)
    place = _parse_device(device)
    if num_data is not None:
        check_num_data(num_data, min_examples(train_loader))
    settings = Settings(
        num_data=num_data if num_data is not None else count_examples(train_loader, read_batch),
        epochs=epochs,
        map_epochs=map_epochs,
        kl_weight=float(kl_weight),
        kl_schedule=kl_schedule or KLSchedule(),
        num_draws=num_draws or max(posterior.training_draws for posterior in bnn.posteriors),
        accumulate=accumulate,
        clip_norm=clip_norm,
        precision=precision,
        patience=patience,
        validation_draws=validation_draws,
        step_scheduler=step_scheduler,
    )
    path = Path(checkpoint) if checkpoint is not None else None
    if path is not None and path.is_dir():
        raise ValueError(f"fit: checkpoint={str(path)!r} is a folder; give the path of a file, such as run.safetensors")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"fit: checkpoint={str(path)!r}: the folder {path.parent} does not exist; make it first")
    stored = Checkpoint.read(path) if path is not None and resume and path.exists() else None
    if seed is None:
        seed = stored.settings["seed"] if stored is not None else int(torch.randint(2**63 - 1, ()))

    def train(processes: Processes) -> History:
        if place is not None or processes.count > 1:
            bnn.to(processes.device(place))
        made = _make_optimizer(optimizer, bnn, learning_rate)
        loop = TrainingLoop(
            bnn,
            train_loader,
            made,
            _make_scheduler(scheduler, made),
            settings,
            seed=processes.agree(seed),
            validation=validation,
            reader=read_batch,
            processes=processes,
            checkpoint=path,
            checkpoint_every=checkpoint_every,
            callbacks=callbacks,
            progress=progress,
            num_data_given=num_data is not None,
            objective=objective,
        )
        if path is not None and processes.rank == 0:
            tensor_files.remove_leftovers(path)
        if stored is not None and path is not None:
            stored.check_fits(path, loop.description, model_state(bnn), epochs + map_epochs)
        return loop.run(stored)

    if devices == 1 and count_nodes() == 1:
        return train(Processes())
    return _train_together(bnn, train, make_fabric(place, devices, launch, unused=map_epochs > 0), launch)


def _train_together(bnn: BayesianNetwork, train: Callable[[Processes], History], fabric: Any, launch: str) -> History:
    def work(fabric: Any) -> tuple[list[dict[str, Any]], bytes | None]:
        history = train(FabricProcesses(fabric))
        own = launch == "script"  # processes of the script hold the trained network themselves
        return list(history), None if own else tensor_files.to_bytes(model_state(bnn))

    rows, state = fabric.launch(work)
    if state is not None:
        set_model_state(bnn, tensor_files.from_bytes(state))
    return History(rows)


def _check_arguments(bnn: Any, **counts: int | None) -> None:
    known = isinstance(bnn, BayesianNetwork) or hasattr(bnn, "elbo_terms")  # a DeepGP has all that is asked here too
    if not known:
        raise TypeError(
            f"fit: {type(bnn).__name__} is not a BayesianNetwork; make one with bayesianize(net, posterior)"
        )
    bnn.require_likelihood("fit")
    if not any(parameter.requires_grad for parameter in bnn.parameters()):
        raise ValueError("fit: no parameter of the network is trainable; set requires_grad on some")
    for key, value in counts.items():
        least = 0 if key in ("epochs", "map_epochs") else 1
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"fit: {key}={value}; give an integer of at least {least}")
    if counts["epochs"] == 0 and counts["map_epochs"] == 0:
        raise ValueError("fit: epochs=0 and map_epochs=0; give at least one epoch")


def _check_choices(precision: str, step_scheduler: str, patience: int | None, validation: Any) -> None:
    if precision in ("float16", "fp16", "16", "half"):
        raise ValueError(
            f"fit: precision={precision!r}; log-densities overflow in float16 and CPUs have no fast float16; use 'bf16'"
        )
    if precision not in ("float32", "bf16"):
        raise ValueError(f"fit: precision={precision!r}; give 'float32' or 'bf16'")
    if step_scheduler not in ("epoch", "step"):
        raise ValueError(f"fit: step_scheduler={step_scheduler!r}; give 'epoch' or 'step'")
    if patience is not None and validation is None:
        raise ValueError(f"fit: patience={patience} needs a validation loader; pass validation=")
    if validation is not None:
        check_repeatable(validation)
        if count_batches(validation) == 0:
            raise ValueError("fit: the validation loader yields no examples; give one with data, or leave it out")


def _parse_device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"fit: device={device!r} is no device of torch; give 'cpu', 'cuda' for a GPU, or 'cuda:1' for the second one"
        ) from None


def _make_optimizer(choice: Any, bnn: BayesianNetwork, learning_rate: float) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in bnn.parameters() if parameter.requires_grad]
    if choice is None:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trainable)
        return torch.optim.Adam(trainable, lr=learning_rate, fused=fused)
    made = choice if isinstance(choice, torch.optim.Optimizer) else choice(trainable)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"fit: optimizer gives {type(made).__name__}; give a torch.optim.Optimizer or a function to one"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise ValueError(
            "fit: LBFGS evaluates the objective several times a step; write the loop around bnn.elbo for it"
        )
    known = {id(parameter) for parameter in trainable}
    if not any(id(parameter) in known for group in made.param_groups for parameter in group["params"]):
        raise ValueError(
            "fit: the optimizer holds no parameter of this network; make it from bnn.parameters(), not from net.parameters()"
        )
    return made


def _make_scheduler(choice: Any, optimizer: torch.optim.Optimizer) -> Any:
    if choice is None or not callable(choice) or hasattr(choice, "state_dict"):
        owner = getattr(choice, "optimizer", optimizer)
        if owner is not optimizer:
            raise ValueError(
                "fit: the scheduler belongs to another optimizer; pass that optimizer too, or a function from optimizer "
                "to scheduler"
            )
        return choice
    return choice(optimizer)
