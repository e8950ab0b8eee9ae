"""A training step: objective, gradients, guard and optimizer."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.draws import Draws
from bayesify.maths.autograd_functions import sum_of_pieces
from bayesify.network import BayesianNetwork
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.running.inputs_and_outputs import as_inputs, explain_shape_error
from bayesify.training.arguments import Run
from bayesify.training.average import RunningAverage
from bayesify.training.captured_step import CapturedSteps, GraphOptimizer, why_not
from bayesify.training.checkpoints import check_optimizer_state
from bayesify.training.distributed import Processes
from bayesify.training.guard import STEPS_BETWEEN_CHECKS, Guard, NotFiniteError
from bayesify.training.random_streams import derive_seed
from bayesify.training.schedules import falling, match_layout

Part = tuple[Batch, int, int]
"""This process's part of a batch, the number of examples in the part, and the number in the whole batch."""


class Objective(nn.Module):
    """Module whose forward pass computes both terms of the objective. DistributedDataParallel can wrap such a module."""

    def __init__(self, model: Trainable, num_data: int, num_draws: int, in_turn: bool = False) -> None:
        super().__init__()
        self.model, self.module = model, model.module
        self.num_data, self.num_draws, self.in_turn = num_data, num_draws, in_turn

    def forward(self, phase: Phase, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The data term and the KL in nats, both averaged over draws: scalars, or [R] for R models."""
        num_data, num_draws = self.num_data, self.num_draws
        if self.in_turn and phase == "variational":
            return _terms_in_turn(self.model, batch, num_data, num_draws, generator)
        data, kl = self.model.terms(batch, phase=phase, num_data=num_data, num_draws=num_draws, generator=generator)
        return data.mean(-1), kl.mean(-1)


def _terms_in_turn(
    bnn: Trainable, batch: Batch, num_data: int, num_draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Both terms of a network's objective, averaged over draws. A draw's gradient is taken before the next draw runs."""
    assert isinstance(bnn, BayesianNetwork)
    draws = bnn.draw(num_draws, generator=generator, num_data=num_data).materialize()
    names, kl = list(draws.weights), draws.kl.detach()
    shared = [*bnn.network.parameters(), *bnn.require_likelihood("fit").parameters()]

    def of_draw(index: int, given: Sequence[Tensor]) -> Tensor:
        part = slice(index, index + 1)
        weights = {name: weight[part] for name, weight in zip(names, given, strict=False)}
        own = Draws(draws.runner, weights, kl[part], draws.buffers and draws.buffers[part])
        return bnn.terms_of(own, batch.x, batch.y, num_data=num_data, example_weights=batch.weights)[0].sum()

    trained = [parameter for parameter in shared if parameter.requires_grad]
    data = sum_of_pieces(of_draw, list(range(num_draws)), *draws.weights.values(), *trained)
    return data / num_draws, draws.kl.mean()


class Sums:
    """Sums over an epoch. The sums are on the device and are updated in place, so no step waits for the device.

    The order of the sums is: weighted NLL over examples, KL, bound, number of steps, example weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.values = torch.zeros(5, dtype=self.dtype, device=device)

    def add(self, *values: Tensor | float) -> None:
        """Add five values: scalars, or [R] for R models."""
        largest = max((value.shape for value in values if isinstance(value, Tensor)), key=len, default=torch.Size())
        if len(largest) >= self.values.ndim:
            self.values = self.values.view(5, *[1] * len(largest)).repeat(1, *largest)
        for total, value in zip(self.values, values, strict=True):
            total.add_(value)

    def set(self, values: list[Any]) -> None:
        """Set the sums. A number in place of a list applies to all R models, and an empty list sets all sums to 0."""
        if not values:
            self.values.zero_()
            return
        rows = torch.broadcast_tensors(*(torch.tensor(value, dtype=self.dtype) for value in values))
        self.values = torch.stack(rows).to(self.values.device)


class BatchError(Exception):
    """Error in one of the batches of a step. The step has changed nothing."""

    def __init__(self, batch: int, error: Exception, taken: int) -> None:
        super().__init__(str(error))
        self.batch, self.error, self.taken = batch, error, taken


class Step:
    """Takes the steps of a run in one process, with gradients of the objective and an optimizer."""

    def __init__(
        self,
        model: Trainable,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        run: Run,
        processes: Processes,
    ) -> None:
        settings = run.settings
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.settings, self.processes, self.update = settings, processes, run.update
        self._parameters = list(model.module.parameters())
        self.device = self._parameters[0].device
        # All processes share one draw of the weights, so that their parts of a batch add up to the whole batch. Noise per
        # example must differ between processes.
        apart = processes.rank if model.noise_per_example else 0
        self.generator = torch.Generator(self.device).manual_seed(derive_seed(run.seed, "draws", apart))
        objective = Objective(model, settings.num_data, settings.num_draws, settings.steps.draws_in_turn)
        self.objective = processes.wrap(objective)
        self.taken, self._seen = 0, 0
        self.sums = Sums(self.device)
        choice, groups = settings.average, [] if optimizer is None else optimizer.param_groups
        self.average = None if choice is None else RunningAverage(model.module, choice, self.sums.dtype)
        self._highest = [float(group["lr"]) for group in groups if settings.falling_rate]
        acts = run.update.acts_in_steps
        self._refusal = why_not(self.device, processes.count, settings.steps.accumulate, acts, optimizer, model.module)
        self._graph_optimizer: GraphOptimizer | None = None
        if optimizer is not None and not self._refusal:
            self._graph_optimizer = GraphOptimizer(optimizer, self.device)
        skips = (model.num_models or 1) if settings.steps.skip_not_finite else None
        self._guard = Guard(model.module, optimizer, skips)
        self._captured = CapturedSteps(self._run, model.module, self.generator)
        if not settings.steps.capture:
            self._captured.reason = "Steps(capture=False)"
        self._kl_weight = torch.zeros((), device=self.device)
        self._number = torch.zeros((), dtype=torch.int64, device=self.device)
        self._earlier: dict[int, Any] = {}

    def __call__(self, phase: Phase, window: list[Part], kl_weight: float, share: float, first: int) -> None:
        """Take one step from a window of batches whose gradients are summed.

        `share` is the fraction of the run that is finished, and `first` is the number of the window's first batch in its epoch.
        Raises `BatchError` if a batch is not valid or its gradients are not finite. In this case, the step has changed neither
        the model nor the optimizer. An error that the scheduler raises after the step is also a `BatchError`, but the step counts
        as taken.
        """
        batch, size, settings = first, sum(whole for _, _, whole in window), self.settings
        for group, highest in zip(self.optimizer.param_groups if self.optimizer else (), self._highest, strict=False):
            group["lr"] = highest * falling(share * settings.total_epochs, settings.map_epochs, settings.epochs)
        if self.average is not None:
            begun = share >= self.average.choice.start
            self.average.prepare(begun and (phase == "variational" or settings.epochs == 0))
        nll: Any = 0.0
        kl: Any = 0.0
        try:
            if self._graph_optimizer is not None:
                self._on_device(self._graph_optimizer, phase, window[0][0], kl_weight, first)
            elif self.update.takes_steps:
                nll = size * self.update.take_step(window[0][0].to(self.device), generator=self.generator, share=share)
            else:
                draws = self.generator.get_state()
                self._guard.begin()
                self._zero_grad()
                for batch, part in enumerate(window, first):
                    if batch > first and not self.model.noise_per_example:
                        self.generator.set_state(draws)  # the whole step uses one draw of the weights
                    last = batch + 1 == first + len(window)
                    data, penalty = self._backward(phase, part, size, kl_weight, last)
                    nll, kl = nll - data, kl + penalty
                    if last or self.processes.count == 1:
                        norm = self._guard.check(batch)
                self._before_scheduler(first)
                self._clip_and_step(norm)
        except Exception as error:
            self._guard.restore()
            plain = ValueError(str(error)) if isinstance(error, NotFiniteError) else error
            raise BatchError(batch, plain, self.taken) from error
        if self._graph_optimizer is None:
            part_of_all = 1 / self.processes.count
            bound = -nll / size * settings.num_data - kl_weight * part_of_all * kl
            weight = sum(self._weight(part) for part, own, _ in window if own)
            self._add_up(nll, part_of_all * kl, bound, part_of_all, weight)
            if self.average is not None:
                self.average.add(self._guard.taken)
            self._guard.end()
        self.taken += 1
        self._seen = first + len(window) - 1
        if self.scheduler is not None and settings.steps.scheduler == "step":
            try:
                self.scheduler.step()
            except Exception as error:
                raise BatchError(batch, error, self.taken) from error
        if self.taken % STEPS_BETWEEN_CHECKS == 0 or self.update.acts_in_steps:
            self.check()
        self.update.after_step()

    def _on_device(self, optimizer: GraphOptimizer, phase: Phase, batch: Batch, kl_weight: float, number: int) -> None:
        """Take a step on a GPU, as a CUDA graph if there is one. All values that vary between steps are in tensors."""
        self._kl_weight.fill_(kl_weight)
        self._number.fill_(number)
        self._before_scheduler(number)
        self._captured(phase, batch, optimizer.options())

    def _run(self, phase: Phase, batch: Batch) -> None:
        """Take a step from one batch without waiting for the device. The step can therefore be captured."""
        num_data, dtype = self.settings.num_data, self.sums.dtype
        self._guard.begin()
        self._zero_grad()
        with self.autocast():
            data, kl = self.objective(phase, batch, self.generator)
        ((self._kl_weight * kl - data) / num_data).sum().backward()
        self._clip_and_step(self._guard.check(self._number))
        if self.average is not None:
            self.average.add(self._guard.taken)
        data, kl = data.detach().to(dtype), kl.detach().to(dtype)
        self._add_up(-data / num_data * len(batch), kl, data - self._kl_weight * kl, 1.0, self._weight(batch))
        self._guard.end()

    def _add_up(self, *values: Tensor | float) -> None:
        """Add a step to the epoch's sums, for the models that took it."""
        if self.settings.steps.skip_not_finite:
            finite = self._guard.finite if self.model.num_models is not None else self._guard.finite[0]
            values = tuple(torch.where(finite, value, 0.0) for value in values)
        self.sums.add(*values)

    def _weight(self, batch: Batch) -> Tensor | float:
        """Total example weight of a batch: a number, or [R] for R models."""
        return float(len(batch)) if batch.weights is None else batch.weights.to(self.sums.values).sum(-1)

    def _zero_grad(self) -> None:
        for parameter in self._parameters:  # includes parameters outside the optimizer
            parameter.grad = None

    def _backward(self, phase: Phase, part: Part, size: int, kl_weight: float, last: bool) -> tuple[Tensor, Tensor]:
        """Add a batch's gradients. Return its mean log-likelihood times its number of examples, and its share of the KL."""
        batch, own, whole = part
        with nullcontext() if last else self.processes.without_sync(self.objective):
            try:
                with self.autocast():
                    data, kl = self.objective(phase, batch.to(self.device), self.generator)
            except (RuntimeError, TypeError, IndexError) as error:
                explained = explain_shape_error(error, *as_inputs(batch.x))
                if explained is error:
                    raise
                raise explained from error
            share, num_data = own * self.processes.count / size, self.settings.num_data
            # Gradients of (kl_weight * whole / size * kl - share * data).sum() / num_data, whose value is not needed.
            slopes = (data, -share / num_data), (kl, kl_weight * (whole / size) / num_data)
            used = [entry for entry in slopes if entry[0].requires_grad] or slopes[:1]
            torch.autograd.backward([term for term, _ in used], [torch.full_like(*entry) for entry in used])
        dtype = self.sums.dtype
        return data.detach().to(dtype) / self.settings.num_data * own, kl.detach().to(dtype) * (whole / size)

    def _clip_and_step(self, norm: Tensor) -> None:
        if self.settings.steps.clip_norm is not None:
            self.model.clip_gradients(self.settings.steps.clip_norm, norm)
        self._guard.step()

    def _before_scheduler(self, batch: int) -> None:
        """Save the scheduler's state before this step, in case the step turns out not to be finite."""
        if self.scheduler is not None and self.settings.steps.scheduler == "step" and self._guard.deferred:
            self._earlier[batch] = copy.deepcopy(self.scheduler.state_dict()), self._options()

    def _options(self) -> list[dict[str, Any]]:
        assert self.optimizer is not None
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        found: list[dict[str, Any]] = pytree.tree_map_only(Tensor, torch.clone, groups)
        return found

    def check(self) -> None:
        """Wait for the device, and check whether all steps so far were finite. Raises `BatchError` if a step was not
        finite. In this case, the run is restored to its state before the step that was not finite."""
        try:
            self._guard.read()
        except NotFiniteError as error:
            before = [batch for batch in self._earlier if batch <= error.batch]
            if before:
                state, options = self._earlier[before[-1]]
                self.scheduler.load_state_dict(state)
                for group, earlier in zip(self.optimizer.param_groups, options, strict=True):  # type: ignore[union-attr]
                    group.update(earlier)
            behind = -(-(self._seen - error.batch + 1) // self.settings.steps.accumulate)
            raise BatchError(error.batch, ValueError(str(error)), self.taken - behind) from error
        self._earlier.clear()

    def begin(self) -> None:
        """Begin an epoch: store the current buffers."""
        self._guard.keep_buffers()
        if self._graph_optimizer is not None:
            self._captured.begin()

    def end(self) -> str:
        """End the run, and undo the changes to the optimizer. Return the reason why steps were not captured, or an empty text."""
        if self._graph_optimizer is not None:
            self._graph_optimizer.end()
        return (
            self._refusal or self._captured.reason or ("" if self._captured.replayed else "too few steps of one kind")
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast context of the network."""
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=self._graph_optimizer is None)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State that steps change, except the module and the generators."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        if optimizer is not None and self._graph_optimizer is not None:
            optimizer = self._graph_optimizer.plain(optimizer)
        return {
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "update": self.update.state_dict(),
        } | ({} if self.average is None else {"average": self.average.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        if self.optimizer is not None:
            check_optimizer_state(self.optimizer, state["optimizer"])
            self.optimizer.load_state_dict(state["optimizer"])
            match_layout(self.optimizer)
            if self._graph_optimizer is not None:
                self._graph_optimizer.begin()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            vars(self.optimizer)["_opt_called"] = True  # otherwise the scheduler warns of a missing optimizer step
        self.update.load_state_dict(state["update"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self._guard.keep_buffers()
