"""Training of stacked networks and their scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.training import ModelStack, StackedBatch
from bayesify_papers.shared.small_products import small_products

WARM_UP = 3
"""Steps on CUDA before one is recorded."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter."""


def elbo(
    stack: ModelStack,
    x: Tensor,
    y: Tensor,
    num_data: int,
    num_draws: int = 1,
    kl_weight: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The bound of each model, [R], from batches [R, B, ...]."""
    data, kl = stack.terms(StackedBatch(x, y), num_data=num_data, num_draws=num_draws, generator=generator)
    return (data - kl_weight * kl).mean(-1)


@dataclass(frozen=True)
class Schedule:
    """Adam with a learning rate that falls to 0 along half a cosine; the KL's factor rises to 1 in a straight line first.

    Args:
        steps: In all.
        learning_rate: At the start.
        batch: Examples a step; all of them where there are no more.
        draws: A step.
        warmup: Share of the steps in which the factor on the KL rises.
        first_weight: That factor at the first step.
        clip: Bound on each network's gradient, by its norm, of the bound per example.
    """

    steps: int = 5000
    learning_rate: float = 1e-2
    batch: int = 256
    draws: int = 1
    warmup: float = 0.2
    first_weight: float = 0.1
    clip: float = 10.0

    def rate(self, step: int) -> float:
        """Learning rate at a step, counted from 0."""
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * step / self.steps))

    def kl_weight(self, step: int) -> float:
        """Factor on the KL at a step."""
        if step >= self.warmup * self.steps:
            return 1.0
        return self.first_weight + (1 - self.first_weight) * step / (self.warmup * self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a training was.

    Args:
        seconds: How long it took.
        skipped_steps: Of each model, those it did not take since its gradient was not finite, [R].
    """

    seconds: float
    skipped_steps: list[int]

    def facts(self) -> dict[str, Any]:
        """For a file of results."""
        return {"seconds": round(self.seconds, 1), "skipped_steps": self.skipped_steps}


def train(
    stack: ModelStack,
    x: Tensor,
    y: Tensor,
    schedule: Schedule,
    seed: int = 0,
    report: Callable[[int, Tensor, float], None] = lambda step, bound, seconds: None,
    every: int = 500,
) -> Outcome:
    """Train all models of a stack, each on its own data.

    A model whose gradient is not finite at a step stays where it is, and so do its moments in Adam. On CUDA the step is recorded
    once and played back, since calls would cost many times the arithmetic.

    Args:
        stack: Changed in place.
        x: Inputs, [R, N, inputs].
        y: Targets, [R, N, outputs].
        schedule: How.
        seed: Of batches and noise.
        report: Called every so many steps with the step, the bounds [R] of that batch and the seconds.
        every: See `report`.

    Returns:
        Seconds and skipped steps.
    """
    start = time.perf_counter()
    update = _Update(stack, x, y, schedule, torch.Generator(device=x.device).manual_seed(seed))
    with small_products():
        for step in range(schedule.steps):
            bound = update(step)
            if (step + 1) % every == 0:
                report(step + 1, bound, time.perf_counter() - start)
    return Outcome(time.perf_counter() - start, update.skipped.tolist())


class _Update:
    """One step of the training of a stack; see `train`."""

    def __init__(self, stack: ModelStack, x: Tensor, y: Tensor, schedule: Schedule, generator: torch.Generator) -> None:
        self.stack, self.x, self.y, self.schedule, self.generator = stack, x, y, schedule, generator
        self.parameters = [parameter for parameter in stack.parameters() if parameter.requires_grad]
        self.rate = torch.tensor(schedule.learning_rate, device=x.device)
        self.kl_weight = torch.ones((), device=x.device)
        rate = self.rate if x.is_cuda else schedule.learning_rate
        self.optimizer = torch.optim.Adam(self.parameters, lr=rate, capturable=x.is_cuda)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.bound = torch.empty(0)
        self.skipped = torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def __call__(self, step: int) -> Tensor:
        """Make a step, counted from 0; the bound of each model on its batch, [R]."""
        self.rate.fill_(self.schedule.rate(step))
        self.kl_weight.fill_(self.schedule.kl_weight(step))
        if not self.x.is_cuda:
            self.optimizer.param_groups[0]["lr"] = self.schedule.rate(step)
            self.compute()
        elif step < WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.compute()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                self.graph.register_generator_state(self.generator)
                with torch.cuda.graph(self.graph):
                    self.compute()
            self.graph.replay()
        return self.bound

    def compute(self) -> None:
        """Draw batches, and descend."""
        x, y, size, num_data = self.x, self.y, self.schedule.batch, self.x.shape[1]
        if size < num_data:
            rows = torch.rand(len(x), num_data, generator=self.generator, device=x.device)
            rows = rows.topk(size, dim=1).indices[..., None]
            x = x.gather(1, rows.expand(-1, -1, x.shape[-1]))
            y = y.gather(1, rows.expand(-1, -1, y.shape[-1]))
        bound = elbo(self.stack, x, y, num_data, self.schedule.draws, self.kl_weight, self.generator)
        self.optimizer.zero_grad()
        (-bound.sum() / num_data).backward()
        finite = _clip(self.parameters, self.schedule.clip)
        if x.is_cuda or not bool(finite.all()):
            self.skipped += ~finite
            kept = [(held, held.clone()) for held in self._state()]
            self.optimizer.step()
            for held, before in kept:
                held.copy_(torch.where(finite.view(-1, *[1] * (held.ndim - 1)), held, before))
        else:
            self.optimizer.step()
        self.bound = bound.detach()

    def _state(self) -> list[Tensor]:
        """Parameters and moments, [R, ...] each; no moment before the first step, after which those of no gradient are 0."""
        moments = [self.optimizer.state[parameter].get(key) for parameter in self.parameters for key in MOMENTS]
        return [*(parameter.detach() for parameter in self.parameters), *(held for held in moments if held is not None)]


def _clip(parameters: Sequence[Tensor], largest: float) -> Tensor:
    """Bound the norm of each model's gradient, in place; one that is not finite becomes 0. Which ones are finite, [R]."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.stack([grad.flatten(1).square().sum(1) if grad.ndim > 1 else grad.square() for grad in grads])
    norm = squares.sum(0).sqrt()  # [R]
    factor = torch.where(norm.isfinite(), (largest / norm.clamp_min(1e-30)).clamp_max(1.0), 0.0)
    for grad in grads:
        grad.nan_to_num_(0.0, 0.0, 0.0).mul_(factor.to(grad).view(-1, *[1] * (grad.ndim - 1)))
    return norm.isfinite()


def bounds(stack: ModelStack, x: Tensor, y: Tensor, num_draws: int = 100, seed: int = 0) -> Tensor:
    """The bound of each model on all its data, [R], from so many draws of the weights."""
    return bound_parts(stack, x, y, num_draws, seed).mean(0)


@torch.no_grad()
def bound_parts(stack: ModelStack, x: Tensor, y: Tensor, num_draws: int, seed: int = 0) -> Tensor:
    """The bound of each model from ten draws at a time, [num_draws / 10, R]."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    with small_products():
        parts = [elbo(stack, x, y, x.shape[1], 10, 1.0, generator) for _ in range(max(1, num_draws // 10))]
    return torch.stack(parts)
