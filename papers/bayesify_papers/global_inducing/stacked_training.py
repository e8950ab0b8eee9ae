"""Training and scores of stacked networks."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify import History, fit
from bayesify.training import ModelStack, StackedBatch, StackedBatches, Steps
from bayesify_papers.shared.small_products import small_products


@dataclass(frozen=True)
class Schedule:
    """Adam with a learning rate that falls to 0 along half a cosine. The factor on the KL first rises linearly to 1.

    Args:
        steps: Total number of steps.
        learning_rate: Initial learning rate.
        batch: Number of examples per step; all examples if there are fewer.
        draws: Number of draws per step.
        warmup: Share of the steps during which the factor on the KL rises.
        first_weight: Factor on the KL at the first step.
        clip: Largest norm of each network's gradient of the bound per example.
    """

    steps: int = 5000
    learning_rate: float = 1e-2
    batch: int = 256
    draws: int = 1
    warmup: float = 0.2
    first_weight: float = 0.1
    clip: float = 10.0

    def kl_weight(self, step: float) -> float:
        """Factor on the KL at a step."""
        if step >= self.warmup * self.steps:
            return 1.0
        return self.first_weight + (1 - self.first_weight) * step / (self.warmup * self.steps)


@dataclass(frozen=True)
class Outcome:
    """Facts of a training run.

    Args:
        seconds: Seconds of training.
        skipped_steps: Number of steps that each model skipped because its gradient was not finite, [R].
    """

    seconds: float
    skipped_steps: list[int]

    def facts(self) -> dict[str, Any]:
        """Facts for a results file."""
        return {"seconds": round(self.seconds, 1), "skipped_steps": self.skipped_steps}


def train(
    stack: ModelStack, x: Tensor, y: Tensor, schedule: Schedule, seed: int = 0, *, label: str = "", every: int = 500
) -> Outcome:
    """Train all models of a stack by `fit`, each on its own data.

    If a model's gradient is not finite, the model and its moments in Adam skip the step.

    Args:
        stack: Stack of models; changed in place.
        x: Inputs, [R, N, inputs].
        y: Targets, [R, N, outputs].
        seed: Seed of batches and noise.
        label: Name of the training run in progress lines; without a label none are printed.
        every: Largest number of steps between progress lines; a divisor of the schedule's steps.

    Returns:
        Seconds and skipped steps.
    """
    start, num_data, steps = time.perf_counter(), x.shape[1], math.gcd(schedule.steps, every)

    def report(_: ModelStack, history: History) -> None:
        step, bound = len(history) * steps, history[-1]["elbo"] / num_data
        passed = time.perf_counter() - start
        if label:
            print(f"{label}: step {step}, bound {bound:.3f} per example, {passed:.0f} s", flush=True)

    with small_products():
        history = fit(
            stack,
            StackedBatches(x, y, schedule.batch, steps),
            epochs=schedule.steps // steps,
            num_data=num_data,
            learning_rate=schedule.learning_rate,
            kl_schedule=lambda epoch: schedule.kl_weight(epoch * steps),
            num_draws=schedule.draws,
            steps=Steps(clip_norm=schedule.clip, skip_not_finite=True),
            callbacks=[report],
            seed=seed,
            progress=False,
        )
    skipped = torch.tensor(history.column("skipped_steps")).sum(0)
    return Outcome(time.perf_counter() - start, skipped.tolist())


def bounds(stack: ModelStack, x: Tensor, y: Tensor, num_draws: int = 100, seed: int = 0) -> Tensor:
    """The bound of each model on all its data, [R], from a number of draws of the weights."""
    return bound_parts(stack, x, y, num_draws, seed).mean(0)


@torch.no_grad()
def bound_parts(stack: ModelStack, x: Tensor, y: Tensor, num_draws: int, seed: int = 0) -> Tensor:
    """The bound of each model from ten draws at a time, [num_draws / 10, R]."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    parts = []
    with small_products():
        for _ in range(max(1, num_draws // 10)):
            data, kl = stack.terms(StackedBatch(x, y), num_data=x.shape[1], num_draws=10, generator=generator)
            parts.append((data - kl).mean(-1))
    return torch.stack(parts)
