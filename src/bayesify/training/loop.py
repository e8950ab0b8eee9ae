"""The training loop: epochs, steps and checkpoints."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.maths.value_checks import find_not_finite
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.running.generators import generator_states, own_generators
from bayesify.running.modes import modes_kept
from bayesify.running.progress import ProgressBar
from bayesify.storage.atomic import remove_leftovers
from bayesify.training.arguments import Position, Run, Validation, describe
from bayesify.training.batch_statistics import following_layers, keep_trained_draws, refresh_statistics
from bayesify.training.batches import as_resident, check_num_data, count_batches, min_examples, parse_batch
from bayesify.training.checkpoints import Checkpoint, altered, data_fingerprint, model_state, set_model_state
from bayesify.training.distributed import Processes
from bayesify.training.history import History
from bayesify.training.noise import LearnedNoise, narrow_start
from bayesify.training.random_streams import (
    derive_seed,
    iterate_seeded,
    loader_generators,
    loader_generators_kept,
    seeded_globals,
    set_network_state,
)
from bayesify.training.rules import Score
from bayesify.training.step import BatchError, Part, Step
from bayesify.training.validation import Totals, validate, validated
from bayesify.training.watch import Watch
from bayesify.weights.module_state import forget_graphs


class TrainingLoop:
    """One run of `fit` in one process. The optimizer is `None` if an `Update` takes the steps itself."""

    def __init__(
        self,
        model: Trainable,
        loader: Iterable[Any],
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        run: Run,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.loader, self.plan, self.settings = model, loader, run, run.settings
        self.processes = processes or Processes()
        self.path = None if run.checkpoint is None else Path(run.checkpoint.path)
        self.history = History()
        self.position = Position()
        self.best_state: dict[str, Any] | None = None
        self.shuffles = loader_generators(loader)
        self.shuffle_states = [generator.get_state() for generator in self.shuffles]
        identity = model.config() | run.update.identity()
        self.description = describe(identity, loader, optimizer, scheduler, run.settings) | {
            "seed": run.seed,
            "processes": self.processes.count,
            "generators of the loader": len(self.shuffles),
        }
        self.noise = LearnedNoise(model, run.settings.total_epochs, run.rescales)
        self.step = Step(model, optimizer, scheduler, run, self.processes)
        self.device = self.step.device
        self.data = data_fingerprint(loader) if run.checkpoint is not None else []

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, resumed: Checkpoint | None = None) -> History:
        """Train to the last epoch, from the beginning or from a checkpoint; see `fit` for the errors."""
        if self.path is not None and self.processes.rank == 0:
            remove_leftovers(self.path)
        with ExitStack() as stack:
            stack.callback(self.step.end)
            if resumed is not None and self.path is not None:
                epochs = self.settings.total_epochs
                resumed.check_fits(self.path, self.description, self.data, self.model.module, epochs)
            stack.enter_context(own_generators([self.device]))
            if not self.model.keeps_mode:
                stack.enter_context(modes_kept(self.model.module.modules()))
                self.model.module.train()
            torch.manual_seed(derive_seed(self.plan.seed, "network", self.processes.rank))
            self.batches = count_batches(self.loader)
            self.watch = Watch(self.model, self.settings, self.batches, self.device)
            if resumed is not None:
                self._restore(resumed)
            show = self.plan.progress and self.processes.rank == 0
            self.bar = stack.enter_context(ProgressBar(show, self.settings.total_epochs, self.batches))
            self.interrupt = stack.enter_context(delayed_interrupt())
            if self.plan.rescales and resumed is None:
                narrow_start(self.model, self._first_batches, self.device)
            self.noise.begin(self._first_batches, self.device)
            if resumed is None and self.processes.rank == 0:
                self.watch.begin(self._validate_start if self.plan.validation is not None else None)
            resident = self.processes.count == 1 and self.plan.reader is None
            self.source = as_resident(self.loader, self.device) if resident else self.loader
            try:
                while self.position.epoch < self.settings.total_epochs and not self.position.stopped:
                    self._epoch()
            finally:
                reason = self.step.end()
                if self.device.type == "cuda":
                    words = f"steps were not captured: {reason}" if reason else "steps were captured"
                    self.history.notes["capture"] = words
                forget_graphs(self.model.module)
            if self.best_state is not None:
                set_model_state(self.model.module, self.best_state)
            elif self.step.average is not None and not self.step.average.is_empty:
                self.step.average.put_in()
                self._refresh_statistics()
            if self.position.epoch < self.settings.total_epochs:
                self.noise.finish(self._final_batches, self.device, self.settings.num_data, stopped=True)
            bnn = self.model.module
            if isinstance(bnn, BayesianNetwork) and bnn.training and following_layers(bnn):
                trained = self.settings.total_epochs * self.settings.num_data
                seed = derive_seed(self.plan.seed, "kept draws")
                with self.step.autocast():
                    keep_trained_draws(bnn, self.loader, trained, seed, self.plan.reader)
            if self.processes.rank == 0:
                position, autocast = self.position, self.step.autocast()
                self.watch.new_rows_ratio = self.noise.new_rows_ratio
                found = self.watch.findings(self.history, position.kl_weight, position.stopped, autocast)
                self.history.findings = found
                self.bar.tell(found)
        for parameter in self.model.module.parameters():
            parameter.grad = None
        return self.history

    def _final_batches(self, count: int) -> list[Batch]:
        """Like `_first_batches`. A continued run reads the same batches as an uninterrupted run."""
        return self._first_batches(count, iterate_seeded(self.loader, derive_seed(self.plan.seed, "noise data")))

    def _first_batches(self, count: int, items: Iterable[Any] | None = None) -> list[Batch]:
        """The first batches with positive weights, until they have `count` examples. The loader's random state is restored."""
        found: list[Batch] = []
        with loader_generators_kept(self.loader), seeded_globals(self.plan.seed), torch.random.fork_rng(devices=()):
            for item in self.loader if items is None else items:
                batch = parse_batch(item, self.plan.reader)
                if float(batch.counts.sum()) > 0:
                    found.append(batch)
                if sum(map(len, found)) >= count:
                    break
        return found

    def _epoch(self) -> None:
        position, epoch = self.position, self.position.epoch
        phase: Phase = "map" if epoch < self.settings.map_epochs else "variational"
        seed = derive_seed(self.plan.seed, "data", epoch)
        if position.batches == 0:
            self.shuffle_states = [generator.get_state() for generator in self.shuffles]
        self.step.begin()
        for owner in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        start = time.perf_counter() - position.seconds
        with seeded_globals(seed):
            parts = self.processes.batches(self.source, partial(iterate_seeded, seed=seed), self.plan.reader)
            for _ in range(position.batches):
                if next(parts, None) is None:
                    raise ValueError(
                        f"fit: the checkpoint is at batch {position.batches} of epoch {epoch + 1}, but the loader has fewer "
                        "batches; give the loader of the interrupted run"
                    )
            for window in self._windows(parts):
                self._step(phase, window)
                position.seconds = time.perf_counter() - start
                self.bar.step(epoch + 1, position.batches, self._running_means)
                every = self.plan.checkpoint.every if self.plan.checkpoint is not None else None
                self._pause(due=every is not None and self.step.taken % every == 0)
            if position.batches == 0:
                raise ValueError(
                    f"fit: the loader yields no batches in epoch {epoch + 1}; give a loader with data that can be iterated "
                    "once per epoch (drop_last=True drops an incomplete batch)"
                )
            if epoch == 0 and self.plan.num_data_given:
                check_num_data(self.settings.num_data, min_examples(self.loader, position.examples))
            self._check_finite()
            row = self._row(phase) | self.plan.update.after_epoch()
            last = epoch + 1 == self.settings.total_epochs
            self.noise.after_epoch(row["nll"], epoch + 1, last)
            average = self.step.average if last or self.plan.validation is not None else None
            with nullcontext() if average is None else average.in_place(self._refresh_statistics):
                if last:
                    self.noise.finish(self._final_batches, self.device, self.settings.num_data, stopped=False)
                if self.plan.validation is not None:
                    row |= self._validate(self.plan.validation)
                self._keep_best(phase, row)
        row["seconds"] = time.perf_counter() - start
        self._close_epoch(row)

    def _windows(self, parts: Iterator[Part]) -> Iterator[list[Part]]:
        """Groups of batches whose gradients are summed for one step."""
        while True:
            window: list[Part] = []
            try:
                for part in parts:
                    window.append(part)
                    if len(window) == self.settings.steps.accumulate:
                        break
            except Exception as error:
                _raise(self._located(error, self.position.batches + len(window) + 1), error)
            if not window:
                return
            yield window

    def _step(self, phase: Phase, window: list[Part]) -> None:
        settings, position = self.settings, self.position
        kl_weight = settings.kl_weight
        if phase == "variational":
            part = position.batches / self.batches if self.batches else position.examples / settings.num_data
            kl_weight *= settings.kl_schedule(position.epoch - settings.map_epochs + min(1.0, part))
        share = (position.epoch + (position.batches / self.batches if self.batches else 0)) / settings.total_epochs
        last = position.epoch + 1 == settings.total_epochs
        self.watch.before_step(phase, [batch for batch, _, _ in window], last)
        with self._telling():
            self.step(phase, window, kl_weight, share, position.batches + 1)
        examples = sum(whole for _, _, whole in window)
        self.watch.trace.step(self.step.sums.values[:4], examples)
        position.batches += len(window)
        position.examples += examples
        position.kl_weight = kl_weight

    def _running_means(self) -> tuple[float, float]:
        nll, kl, _, trained = _means(self.step.sums.values.tolist())
        return _mean(nll, trained), _mean(kl, trained)

    def _check_finite(self) -> None:
        """Raise an error if a step had non-finite gradients or produced a non-finite parameter."""
        with self._telling():
            self.step.check()
        name = find_not_finite(self.model.module.named_parameters())
        if name is not None:
            raise ValueError(
                f"fit: epoch {self.position.epoch + 1}: a step made {name} infinite or NaN although its gradients were finite; "
                "lower the learning rate, or clip gradients with Steps(clip_norm=1.0)"
            )

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Context in which the message of an error is extended; see `_located`."""
        try:
            yield
        except BatchError as failure:
            _raise(self._located(failure.error, failure.batch, failure.taken), failure.error)

    def _located(self, error: Exception, batch: int | None, taken: int | None = None) -> Exception:
        """An error of the same type whose message names the batch, and says that the model contains all earlier steps."""
        taken = self.step.taken if taken is None else taken
        kept = f"; the network keeps the steps taken before this error: {taken}" if taken else ""
        where = f"fit: epoch {self.position.epoch + 1}, batch {batch}: " if batch is not None else ""
        reason = str(error)
        if "Expected to have finished reduction" in reason:
            reason = "the network does not use all of its parameters; freeze the rest with requires_grad_(False)"
        try:
            return type(error)(f"{where}{reason}{kept}")
        except Exception:  # some constructors, such as that of UnicodeDecodeError, need more than a message
            error.add_note(f"{where}{reason}{kept}")
            return error

    # -- the end of an epoch ---------------------------------------------------------------------------------------

    def _row(self, phase: str) -> dict[str, Any]:
        sums = [self.processes.total(value) for value in self.step.sums.values.tolist()]
        nll, kl, bound, trained = _means(sums)
        row = {"epoch": self.position.epoch + 1, "phase": phase, "nll": _mean(nll, trained)}
        if self.step.optimizer is None:
            return row
        row |= {"kl": _mean(kl, trained), "kl_weight": self.position.kl_weight, "elbo": _mean(bound, trained)}
        if nll.ndim:
            row["nll_by_model"] = np.where(trained, nll, np.inf).tolist()
            row["elbo_by_model"] = np.where(trained, bound, -np.inf).tolist()
        if self.settings.steps.skip_not_finite:
            steps = -(-self.position.batches // self.settings.steps.accumulate)
            row["skipped_steps"] = np.rint(steps - np.array(sums[3])).astype(int).tolist()
        return row | {"learning_rate": float(self.step.optimizer.param_groups[0]["lr"])}

    def _validate(self, validation: Validation) -> dict[str, float]:
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.plan.seed, "validation draws"))
        options: dict[str, Any] = {"num_draws": validation.num_draws, "generator": generator}
        predictor = validated(self.model)
        try:
            totals = self._scores(lambda x: predictor.predict(x, **options), validation)
        except (ValueError, TypeError) as error:
            _raise(self._located(error, None), error)
        self.watch.after_validation(totals)
        return {f"validation_{key}": value for key, value in totals.means().items()}

    def _scores(self, predict: Callable[[Any], Predictive], validation: Validation, *, together: bool = True) -> Totals:
        """Scores on validation data. With `together=False`, this process does not wait for other processes."""
        batches = iterate_seeded(validation.loader, derive_seed(self.plan.seed, "validation data"))

        def interruptible() -> Iterator[Any]:
            for batch in batches:
                if together:
                    self._pause()
                yield batch

        with self.step.autocast():
            return validate(predict, interruptible(), self.device, self.plan.reader)

    def _validate_start(self, predict: Callable[[Any], Predictive]) -> Score:
        """Scores of the starting network on validation data. The loader's random state is restored."""
        assert self.plan.validation is not None
        with loader_generators_kept(self.plan.validation.loader), seeded_globals(self.plan.seed):
            return self._scores(predict, self.plan.validation, together=self.processes.count == 1).score()

    def _refresh_statistics(self) -> None:
        """Recompute the batch statistics from all training data. Random states are restored."""
        seed, settings = derive_seed(self.plan.seed, "batch statistics"), self.settings
        generator = torch.Generator(self.device).manual_seed(seed)
        kept = loader_generators_kept(self.loader)
        with kept, own_generators([self.device]), seeded_globals(seed), self.step.autocast():
            items = iterate_seeded(self.source, seed)
            batches = (parse_batch(item, self.plan.reader).to(self.device) for item in items)
            refresh_statistics(self.model, batches, num_data=settings.num_data, generator=generator)

    def _keep_best(self, phase: str, row: dict[str, Any]) -> None:
        """Store the model's state if its validation NLL is the best so far. Otherwise stop when the patience is exhausted."""
        settings, position = self.settings, self.position
        warm = phase == "variational" and settings.kl_schedule(position.epoch + 1 - settings.map_epochs) >= 1.0
        if settings.patience is None or not warm:
            return
        if position.best is None or row["validation_nll"] < position.best:
            position.best, position.waited = row["validation_nll"], 0
            self.best_state = pytree.tree_map_only(Tensor, torch.clone, model_state(self.model.module))
        else:
            position.waited += 1
            position.stopped = position.waited >= settings.patience

    def _close_epoch(self, row: dict[str, Any]) -> None:
        settings, position, scheduler = self.settings, self.position, self.step.scheduler
        self.history.append(row)
        if scheduler is not None and settings.steps.scheduler == "epoch":
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(row.get("validation_nll", row["nll"]))
            else:
                scheduler.step()
        position.close_epoch()
        self.noise.replaced = {}
        self.watch.close_epoch(self.step.sums.values[:4])
        self.step.sums.set([])
        for callback in self.plan.callbacks:
            if callback(self.model, self.history) is True:
                position.stopped = True
        position.stopped = self.processes.any(position.stopped)
        self.bar.epoch(row)
        last = position.stopped or position.epoch == settings.total_epochs
        self._pause(due=last or self.plan.checkpoint is None or self.plan.checkpoint.every is None)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _pause(self, due: bool = False) -> None:
        """Write a checkpoint if one is due or if Ctrl-C was pressed. After Ctrl-C, stop."""
        interrupted = self.processes.any(self.interrupt.is_set())
        if self.path is not None and (due or interrupted):
            self._check_finite()
            self._save(self.path)
        if interrupted:
            where = (
                f"; it is stored in {self.path}, so call fit again with the same arguments to continue"
                if self.path is not None
                else ""
            )
            raise KeyboardInterrupt(f"fit: the run was interrupted in epoch {self.position.epoch + 1}{where}")

    def _save(self, path: Path) -> None:
        sums = [self.processes.total(value) for value in self.step.sums.values.tolist()]
        draws = self.processes.gather(self.step.generator.get_state())
        network = self.processes.gather(torch.cat([*generator_states(self.device).values()]))
        average, states = self.step.average, self.shuffle_states
        if not self.position.batches:
            states = [generator.get_state() for generator in self.shuffles]
        if self.processes.rank == 0:
            Checkpoint(
                settings=self.description,
                data=self.data,
                position=asdict(replace(self.position, sums=sums, steps=self.step.taken)),
                history=list(self.history),
                model=model_state(self.model.module) | self.noise.replaced | (average.replaced if average else {}),
                best=self.best_state,
                steps=self.step.state_dict(),
                draws=draws,
                network=network,
                observed=self.watch.state(),
                shuffles=states,
            ).write(path)
        self.processes.barrier()

    def _restore(self, stored: Checkpoint) -> None:
        """Continue from a checkpoint. If the checkpoint was altered, raise an error and leave the model unchanged."""
        before = pytree.tree_map_only(Tensor, torch.clone, model_state(self.model.module))
        rank = self.processes.rank
        try:
            with altered(self.path):
                self.description, self.data = stored.settings, stored.data or self.data
                self.position = stored.place()
                self.step.taken = self.position.steps
                self.step.sums.set(self.position.sums if rank == 0 else [])
                self.history = History(stored.history)
                self.watch.load(stored.observed, self.step.sums.values)
                set_model_state(self.model.module, stored.model)
                self.best_state = stored.best
                self.step.load_state_dict(stored.steps)
                self.step.generator.set_state(stored.draws[rank])
                set_network_state(stored.network[rank], self.device)
                self.shuffle_states = stored.shuffles
                for generator, state in zip(self.shuffles, stored.shuffles, strict=True):
                    generator.set_state(state)
        except ValueError:
            set_model_state(self.model.module, before)
            raise


@contextmanager
def delayed_interrupt() -> Iterator[threading.Event]:
    """Delay the first Ctrl-C so that a loop can finish its step and save. The first Ctrl-C only sets the event that the context
    yields. A second Ctrl-C interrupts at once.

    The SIGINT handler is replaced only in the main thread, and only if it is a Python function.
    """
    requested = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if in_main_thread else None
    if not callable(previous):
        yield requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            signal.signal(signal.SIGINT, previous)
            previous(number, frame)
        requested.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, previous)


def _raise(error: Exception, cause: Exception) -> NoReturn:
    raise error from (cause if error is not cause else cause.__cause__)


def _means(sums: list[Any]) -> tuple[np.ndarray, ...]:
    """Four values: the mean NLL over weighted examples, the mean KL over steps, the mean bound over steps, and whether a step was
    taken. Each is a scalar, or [R] for R models."""
    nll, kl, bound, steps, weight = map(np.array, sums)
    with np.errstate(invalid="ignore"):  # 0 / 0 if no step was taken
        return nll / weight, kl / steps, bound / steps, steps > 0


def _mean(values: np.ndarray, trained: np.ndarray) -> float:
    """Mean over models that took a step; NaN if none did."""
    return float(values[trained].mean()) if trained.any() else math.nan
