"""Training of a stack of networks by the paper's schedule."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import History, fit
from bayesify.training import ModelStack, StackedBatches, Steps, Update
from bayesify_papers.shared.small_products import small_products


@dataclass(frozen=True)
class Recipe:
    r"""The schedule of appendix D.1: Adam with the learning rate $\lambda_0 (1 + \gamma t)^{-p}$ at step t.

    Args:
        fixed_noise_steps: Number of steps before the noise variance is learned.
        steps: Number of steps with a learned noise variance.
        batch: Number of examples per step; all examples if there are fewer.
        learning_rate: Initial learning rate $\lambda_0$.
        decay: Decay rate $\gamma$.
        power: Exponent p.
        noise_rate: Factor on the learning rate of the noise variance; a third in the authors' code.

    Raises:
        ValueError: If a count is negative, if there is no step, or if the learning rate is not positive.
    """

    fixed_noise_steps: int = 500
    steps: int = 50_000
    batch: int = 64
    learning_rate: float = 1e-3
    decay: float = 5e-4
    power: float = 0.3
    noise_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.fixed_noise_steps < 0 or self.steps < 0 or self.total < 1 or self.batch < 1:
            raise ValueError(f"Recipe: {self}; give at least one step and one example per batch")
        if not self.learning_rate > 0:
            raise ValueError(f"Recipe: learning_rate={self.learning_rate}; give a positive number")

    @property
    def total(self) -> int:
        """Total number of steps."""
        return self.fixed_noise_steps + self.steps

    def factor(self, step: int) -> float:
        """Factor on the learning rate at a step, counted from 0."""
        return float((1 + self.decay * step) ** -self.power)


class _Following(Update):
    """A recipe in `fit`. It keeps noise variances fixed for the first steps and counts processor seconds.

    It acts after epochs only, so that steps on a GPU can be captured.

    Args:
        recipe: Recipe, which has the number of first steps.
        noises: Parameters of the noise variances.
        per_epoch: Number of steps in an epoch. It must divide the number of first steps.
    """

    def __init__(self, recipe: Recipe, noises: Sequence[nn.Parameter], per_epoch: int) -> None:
        self.recipe, self.noises, self.per_epoch, self.since = recipe, noises, per_epoch, time.process_time()
        self.load_state_dict({"steps": 0})

    def identity(self) -> dict[str, Any]:
        """See `Update`."""
        return {"recipe": asdict(self.recipe)}

    def after_epoch(self) -> dict[str, float]:
        """See `Update`."""
        self.load_state_dict({"steps": self.steps + self.per_epoch})
        before, self.since = self.since, time.process_time()
        return {"processor_seconds": self.since - before}

    def state_dict(self) -> dict[str, Any]:
        """See `Update`."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Update`."""
        self.steps = int(state["steps"])
        for noise in self.noises:
            noise.requires_grad_(self.steps >= self.recipe.fixed_noise_steps)


def train(
    stack: ModelStack,
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    checkpoint: Path | None = None,
    *,
    seed: int = 0,
    every: int = 1000,
    report: Callable[[int, float], None] = lambda step, seconds: None,
) -> float:
    """Train a stack in place by `fit`, from a checkpoint if there is one.

    Args:
        stack: Stack of networks. Each sees batches of its own data.
        x: Inputs, [R, N, inputs].
        y: Targets [R, N, O], or labels [R, N].
        checkpoint: File to resume from and to write. The caller removes it when the result is stored.
        seed: Seed of batches and noise.
        every: Largest number of steps between checkpoints; a divisor of the recipe's steps.
        report: Function called with step and seconds at each checkpoint.

    Returns:
        Processor seconds, including those before an interruption.
    """
    num_data, steps = x.shape[1], math.gcd(recipe.total, recipe.fixed_noise_steps, every)
    noises = [value for name, value in stack.named_parameters() if name.endswith("raw_noise")]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weights = [value for value in parameters if all(value is not noise for noise in noises)]
        groups: list[dict[str, Any]] = [{"params": weights}]
        if noises:
            groups.append({"params": noises, "lr": recipe.noise_rate * recipe.learning_rate})
        # `fit` divides the objective by N; dividing Adam's epsilon by N too gives the step of the whole objective
        return torch.optim.Adam(groups, lr=recipe.learning_rate, eps=1e-8 / num_data, fused=True)

    def seconds(history: History) -> float:
        return float(sum(history.column("processor_seconds")))

    with small_products():
        history = fit(
            stack,
            StackedBatches(x, y, recipe.batch, steps),
            epochs=recipe.total // steps,
            num_data=num_data,
            optimizer=optimizer,
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, recipe.factor),
            steps=Steps(scheduler="step"),
            update=_Following(recipe, noises, steps),
            checkpoint=checkpoint,
            callbacks=[lambda _, history: report(len(history) * steps, seconds(history))],
            seed=seed,
            progress=False,
        )
    stack.unstack()
    return seconds(history)
