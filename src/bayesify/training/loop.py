"""The loop behind `fit`: epochs, steps, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bayesify.network import BayesianNetwork
from bayesify.training.batches import Batch, BatchReader, check_num_data, count_batches, min_examples
from bayesify.training.checkpoints import Checkpoint, model_state, set_model_state
from bayesify.training.distributed import Processes
from bayesify.training.history import History
from bayesify.training.interrupts import DelayedInterrupt
from bayesify.training.progress import ProgressBar
from bayesify.training.random_streams import (
    DataStream,
    derive_seed,
    loader_generators,
    network_state,
    seeded_globals,
    set_network_state,
)
from bayesify.training.state import Position, Settings, describe
from bayesify.training.validation import validate

Callback = Callable[[BayesianNetwork, History], Any]


class TrainingObjective(Protocol):
    """What `fit` can maximize in place of the evidence lower bound of the weights."""

    keeps_mode: bool
    """Whether the network trains in the mode (train or eval) in which it was given, instead of in training mode."""

    def terms(
        self,
        x: Any,
        y: Tensor,
        *,
        num_data: int,
        num_draws: int = 1,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Data term and penalty in nats over the whole dataset, as `BayesianNetwork.elbo_terms` gives them."""

    def config(self) -> dict[str, Any]:
        """Its choices as plain data, which a run that is continued must have in common with the interrupted one."""


class Objective(nn.Module):
    """The two terms of the objective as a forward pass, so that DistributedDataParallel sees it."""

    def __init__(
        self, bnn: BayesianNetwork, num_data: int, num_draws: int, chosen: TrainingObjective | None = None
    ) -> None:
        super().__init__()
        self.bnn, self.chosen = bnn, chosen
        self.num_data, self.num_draws = num_data, num_draws

    def forward(self, phase: str, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Data term and KL, in nats, each a scalar."""
        if phase == "map":
            data, kl = self.bnn.map_terms(batch.x, batch.y, num_data=self.num_data, example_weights=batch.weights)
        else:
            terms = self.bnn.elbo_terms if self.chosen is None else self.chosen.terms
            data, kl = terms(
                batch.x,
                batch.y,
                num_data=self.num_data,
                num_draws=self.num_draws,
                example_weights=batch.weights,
                generator=generator,
            )
        return data.mean(), kl.mean()


class TrainingLoop:
    """One run of `fit` in one process.

    Args:
        bnn: The network, on its device.
        loader: Training batches.
        optimizer: Over the network's parameters.
        scheduler: Of the learning rate, or `None`.
        settings: See `Settings`.
        seed: Of everything random in the run.
        validation: Validation batches, or `None`.
        reader: See `parse_batch`.
        processes: The processes that train together.
        checkpoint: Where to store the run, or `None`.
        checkpoint_every: Steps between checkpoints; one per epoch if `None`.
        callbacks: Called after each epoch.
        progress: Whether to show a progress bar.
        num_data_given: Whether the number of examples is the caller's, to be compared with those of the first epoch.
        objective: What to maximize in place of the evidence lower bound, or `None`.
    """

    def __init__(
        self,
        bnn: BayesianNetwork,
        loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        settings: Settings,
        *,
        seed: int,
        validation: Iterable[Any] | None = None,
        reader: BatchReader | None = None,
        processes: Processes | None = None,
        checkpoint: Path | None = None,
        checkpoint_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
        num_data_given: bool = False,
        objective: TrainingObjective | None = None,
    ) -> None:
        self.bnn, self.loader, self.optimizer, self.scheduler = bnn, loader, optimizer, scheduler
        self.settings, self.seed = settings, seed
        self.validation, self.reader = validation, reader
        self.processes = processes or Processes()
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        self.callbacks, self.show_progress, self.num_data_given = callbacks, progress, num_data_given
        self.device = next(bnn.parameters()).device
        self.history = History()
        self.position = Position()
        self.best_state: dict[str, Any] | None = None
        self.steps = 0
        # One draw of the weights for all processes makes their parts of a batch add up to the whole batch; noise of each
        # example's own must differ between them.
        self.local = any(getattr(posterior, "local_reparameterization", False) for posterior in bnn.posteriors)
        apart = self.processes.rank if self.local else 0
        self.generator = torch.Generator(self.device).manual_seed(derive_seed(seed, "draws", apart))
        self.shuffles = loader_generators(loader)
        self.shuffle_states = [generator.get_state() for generator in self.shuffles]
        self.objective = self.processes.wrap(Objective(bnn, settings.num_data, settings.num_draws, objective))
        self.keeps_mode = objective is not None and objective.keeps_mode
        self.description = describe(bnn, loader, optimizer, scheduler, settings, objective) | {
            "seed": seed,
            "processes": self.processes.count,
            "generators of the loader": len(self.shuffles),
        }

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, resumed: Checkpoint | None = None) -> History:
        """Train to the last epoch, or from a checkpoint to the last epoch.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the step is done and the checkpoint written.
            ValueError: If a batch or the objective is not valid, with epoch and batch.
        """
        with ExitStack() as stack:
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            if not self.keeps_mode:
                stack.enter_context(_training_mode(self.bnn))
            torch.manual_seed(derive_seed(self.seed, "network", self.processes.rank))
            if resumed is not None:
                self._restore(resumed)
            total = self.settings.map_epochs + self.settings.epochs
            show = self.show_progress and self.processes.rank == 0
            self.bar = stack.enter_context(ProgressBar(show, total, count_batches(self.loader)))
            self.interrupt = stack.enter_context(DelayedInterrupt())
            while self.position.epoch < total and not self.position.stopped:
                self._epoch()
        self.optimizer.zero_grad(set_to_none=True)
        if self.best_state is not None:
            set_model_state(self.bnn, self.best_state)
        return self.history

    def _epoch(self) -> None:
        position, epoch = self.position, self.position.epoch
        phase = "map" if epoch < self.settings.map_epochs else "variational"
        seed = derive_seed(self.seed, "data", epoch)
        if position.batches == 0:
            self.shuffle_states = [generator.get_state() for generator in self.shuffles]
        for owner in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        start = time.perf_counter() - position.seconds
        with seeded_globals(seed):
            parts = self.processes.batches(self.loader, DataStream(seed).iterate, self.reader)
            for _ in range(position.batches):
                if next(parts, None) is None:
                    raise ValueError(
                        f"fit: the checkpoint is at batch {position.batches} of epoch {epoch + 1}, where the loader "
                        "has fewer; give the loader of the interrupted run"
                    )
            for window in self._windows(parts):
                self._step(phase, window)
                position.seconds = time.perf_counter() - start
                self.bar.step(epoch + 1, position.batches, position.sums[0] / position.examples, self._mean(1))
                every = self.checkpoint_every
                self._pause(due=every is not None and self.steps % every == 0)
            if position.batches == 0:
                raise ValueError(
                    f"fit: the loader yields no batches in epoch {epoch + 1}; give one with data that starts anew each "
                    "epoch (drop_last drops a batch that is not full)"
                )
            if epoch == 0 and self.num_data_given:
                check_num_data(self.settings.num_data, min_examples(self.loader, position.examples))
            row = self._row(phase)
            if self.validation is not None:
                row |= self._validate()
        row["seconds"] = time.perf_counter() - start
        self._close_epoch(phase, row)

    def _windows(self, parts: Iterator[tuple[Batch, int, int]]) -> Iterator[list[tuple[Batch, int, int]]]:
        """Groups of batches whose gradients are added up for one step."""
        while True:
            window: list[tuple[Batch, int, int]] = []
            try:
                for part in parts:
                    window.append(part)
                    if len(window) == self.settings.accumulate:
                        break
            except (ValueError, TypeError) as error:
                raise type(error)(f"{self._where(len(window))}: {error}{self._kept()}") from error
            if not window:
                return
            yield window

    def _step(self, phase: str, window: list[tuple[Batch, int, int]]) -> None:
        settings, position = self.settings, self.position
        kl_weight = settings.kl_weight
        if phase == "variational":
            passed = position.epoch - settings.map_epochs + min(1.0, position.examples / settings.num_data)
            kl_weight *= settings.kl_schedule(passed)
        size = sum(whole for _, _, whole in window)
        draws = self.generator.get_state()
        buffers = {name: buffer.clone() for name, buffer in self.bnn.named_buffers()} if self.steps == 0 else {}
        self.optimizer.zero_grad(set_to_none=True)
        nll = kl_sum = 0.0
        for index, (batch, own, whole) in enumerate(window):
            if index and not self.local:
                self.generator.set_state(draws)  # one draw of the weights for the whole step
            apart = self.processes.without_sync(self.objective) if index + 1 < len(window) else nullcontext()
            try:
                with apart:
                    with self._autocast():
                        data, kl = self.objective(phase, batch.to(self.device), self.generator)
                    share = own * self.processes.count / size
                    loss = -(share * data - kl_weight * (whole / size) * kl) / settings.num_data
                    loss.backward()
            except (ValueError, RuntimeError) as error:
                with torch.no_grad():
                    for name, value in buffers.items():
                        self.bnn.get_buffer(name).copy_(value)
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                reason = str(error)
                if "Expected to have finished reduction" in reason:
                    reason = (
                        "the network does not use all of its parameters; freeze the rest with requires_grad_(False)"
                    )
                raise kind(f"{self._where(index)}: {reason}{self._kept()}") from error
            nll -= float(data.detach()) / settings.num_data * own
            kl_sum += float(kl.detach()) * whole / size
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.bnn.parameters(), settings.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None and settings.step_scheduler == "step":
            self.scheduler.step()
        self.steps += 1
        position.batches += len(window)
        position.examples += size
        position.kl_weight = kl_weight
        part = 1 / self.processes.count
        bound = -nll / size * settings.num_data - kl_weight * kl_sum * part
        added = (nll, kl_sum * part, bound, part)
        position.sums = [summed + value for summed, value in zip(position.sums, added, strict=True)]

    def _mean(self, index: int) -> float:
        return self.position.sums[index] / self.position.sums[3]

    def _where(self, index: int) -> str:
        return f"fit: epoch {self.position.epoch + 1}, batch {self.position.batches + index + 1}"

    def _kept(self) -> str:
        return f"; steps taken before it: {self.steps}, and the network keeps them" if self.steps else ""

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    # -- the end of an epoch ---------------------------------------------------------------------------------------

    def _row(self, phase: str) -> dict[str, Any]:
        nll, kl, bound, steps = self.processes.total(self.position.sums)
        return {
            "epoch": self.position.epoch + 1,
            "phase": phase,
            "nll": nll / self.position.examples,
            "kl": kl / steps,
            "kl_weight": self.position.kl_weight,
            "elbo": bound / steps,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _validate(self) -> dict[str, float]:
        assert self.validation is not None
        batches = DataStream(derive_seed(self.seed, "validation data")).iterate(self.validation)
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, "validation draws"))

        def interruptible() -> Iterator[Any]:
            for batch in batches:
                self._pause()
                yield batch

        try:
            with self._autocast():
                scores = validate(
                    self.bnn, interruptible(), self.settings.validation_draws, self.device, generator, self.reader
                )
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error}{self._kept()}") from error
        return {f"validation_{key}": value for key, value in scores.items()}

    def _close_epoch(self, phase: str, row: dict[str, Any]) -> None:
        settings, position = self.settings, self.position
        self.history.append(row)
        if self.scheduler is not None and settings.step_scheduler == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(row.get("validation_nll", row["nll"]))
            else:
                self.scheduler.step()
        position.close_epoch()
        warm = phase == "variational" and settings.kl_schedule(position.epoch - settings.map_epochs) >= 1.0
        if settings.patience is not None and warm:
            if position.best is None or row["validation_nll"] < position.best:
                position.best, position.waited = row["validation_nll"], 0
                self.best_state = _cloned(model_state(self.bnn))
            else:
                position.waited += 1
                position.stopped = position.waited >= settings.patience
        for callback in self.callbacks:
            if callback(self.bnn, self.history) is True:
                position.stopped = True
        position.stopped = self.processes.any(position.stopped)
        self.bar.epoch(row)
        last = position.stopped or position.epoch == settings.map_epochs + settings.epochs
        self._pause(due=last or self.checkpoint_every is None)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _pause(self, due: bool = False) -> None:
        """Write a checkpoint if one is due or Ctrl-C was pressed, and stop in the second case."""
        interrupted = self.processes.any(self.interrupt.requested)
        if self.checkpoint is not None and (due or interrupted):
            self._save(self.checkpoint)
        if interrupted:
            where = f"; the run is stored in {self.checkpoint}" if self.checkpoint is not None else ""
            raise KeyboardInterrupt(f"fit: stopped at epoch {self.position.epoch + 1}{where}")

    def _save(self, path: Path) -> None:
        sums = self.processes.total(self.position.sums)
        draws = self.processes.gather(self.generator.get_state())
        network = self.processes.gather(network_state(self.device))
        if self.processes.rank == 0:
            Checkpoint(
                settings=self.description,
                position=asdict(self.position) | {"sums": sums, "steps": self.steps},
                history=list(self.history),
                model=model_state(self.bnn),
                best=self.best_state,
                optimizer=self.optimizer.state_dict(),
                scheduler=self.scheduler.state_dict() if self.scheduler is not None else None,
                draws=draws,
                network=network,
                shuffles=self.shuffle_states
                if self.position.batches
                else [generator.get_state() for generator in self.shuffles],
            ).write(path)
        self.processes.barrier()

    def _restore(self, stored: Checkpoint) -> None:
        self.description = stored.settings
        position = dict(stored.position)
        self.steps = position.pop("steps")
        self.position = Position(**position)
        if self.processes.rank:
            self.position.sums = [0.0] * 4
        self.history = History(stored.history)
        set_model_state(self.bnn, stored.model)
        self.best_state = stored.best
        self.optimizer.load_state_dict(stored.optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(stored.scheduler)
            vars(self.optimizer)["_opt_called"] = True  # else the scheduler warns that no step came before its own
        self.generator.set_state(stored.draws[self.processes.rank])
        set_network_state(stored.network[self.processes.rank], self.device)
        self.shuffle_states = stored.shuffles
        for generator, state in zip(self.shuffles, stored.shuffles, strict=True):
            generator.set_state(state)


@contextmanager
def _training_mode(bnn: BayesianNetwork) -> Iterator[None]:
    modes = [(module, module.training) for module in bnn.modules()]
    bnn.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
