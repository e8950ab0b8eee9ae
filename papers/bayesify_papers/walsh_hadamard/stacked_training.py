"""Training of a stack of networks by the paper's schedule, with checkpoints to go on from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayesify.maths.noise import standard_normal
from bayesify_papers.shared.small_products import small_products
from bayesify_papers.walsh_hadamard.stacked import Stack

CHUNK = 100
"""Steps whose noise and batches are drawn at once; a checkpoint lies between two chunks."""


@dataclass(frozen=True)
class Recipe:
    r"""The schedule of appendix D.1: Adam with the learning rate $\lambda_0 (1 + \gamma t)^{-p}$ at step t.

    Args:
        fixed_noise_steps: Steps before the noise variance is learned.
        steps: Steps after that.
        batch: Examples in a step, at most as many as there are.
        learning_rate: $\lambda_0$.
        decay: $\gamma$.
        power: p.
        noise_rate: Factor on the learning rate of the noise variance; a third in the authors' code.

    Raises:
        ValueError: If a count is negative, there is no step, or the learning rate is not positive.
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
            raise ValueError(f"Recipe: {self}; give at least one step and one example a batch")
        if not self.learning_rate > 0:
            raise ValueError(f"Recipe: learning_rate={self.learning_rate}; give a positive number")

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.fixed_noise_steps + self.steps

    def rate(self, step: int) -> float:
        """Learning rate at a step, counted from 0."""
        return self.learning_rate * (1 + self.decay * step) ** -self.power


class Trainer:
    """Trains a stack; every network sees batches of its own data, each example once before any a second time.

    Args:
        stack: Changed in place.
        x: Inputs, [R, N, inputs].
        y: Targets [R, N, O], or labels [R, N].
        recipe: Schedule.
        seed: Of batches and noise.
    """

    def __init__(self, stack: Stack, x: Tensor, y: Tensor, recipe: Recipe, seed: int = 0) -> None:
        self.stack, self.recipe, self.step = stack, recipe, 0
        self.num_data, self.batch = x.shape[1], min(recipe.batch, x.shape[1])
        self.x, self.y = x.reshape(-1, x.shape[-1]), y.reshape(len(stack) * self.num_data, *y.shape[2:])
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = torch.empty(len(stack), 0, dtype=torch.int64)
        self.offsets = (torch.arange(len(stack)) * self.num_data).unsqueeze(-1)
        weights = [value for key, value in stack.parameters.items() if key != "raw_noise"]
        noise = [value for key, value in stack.parameters.items() if key == "raw_noise"]
        self.optimizer = torch.optim.Adam([{"params": part} for part in (weights, noise) if part], fused=True)

    def run(self, until: int) -> None:
        """Train to a step, a multiple of `CHUNK` or the last one."""
        while self.step < min(until, self.recipe.total):
            count = min(CHUNK, self.recipe.total - self.step)
            rows = self._rows(count)
            for index, noise in enumerate(self._noise(count)):
                self.update(rows[index], noise)
            self._check()

    def _check(self) -> None:
        """Raise before what is not finite is stored: a checkpoint lies between two chunks."""
        for key, value in self.stack.parameters.items():
            finite = value.detach().flatten(1).isfinite().all(1) if value.ndim > 1 else value.detach().isfinite()
            if not bool(finite.all()):
                wrong = (~finite).nonzero().flatten().tolist()
                raise ValueError(
                    f"Trainer: {key} of networks {wrong} is not finite after step {self.step}; lower learning_rate"
                )

    def update(self, rows: Tensor, noise: Tensor) -> None:
        """One step.

        Args:
            rows: Row numbers of all batches in the flattened data, [R * B].
            noise: [R, `noise_size`].
        """
        count = len(self.stack)
        x = self.x.index_select(0, rows).view(count, self.batch, -1)
        y = self.y.index_select(0, rows).view(count, self.batch, *self.y.shape[1:])
        self.optimizer.zero_grad()
        (-self.stack.bound(x, y, noise, self.num_data)).backward()
        if self.step < self.recipe.fixed_noise_steps and "raw_noise" in self.stack.parameters:
            self.stack.parameters["raw_noise"].grad = None
        for group, factor in zip(self.optimizer.param_groups, (1.0, self.recipe.noise_rate), strict=False):
            group["lr"] = factor * self.recipe.rate(self.step)
        self.optimizer.step()
        self.step += 1

    def _rows(self, count: int) -> Tensor:
        """Rows of the next steps, [count, R * B], from an endless row of permutations of each network's data."""
        needed = count * self.batch
        while self.queue.shape[1] < needed:
            orders = [torch.randperm(self.num_data, generator=self.generator) for _ in range(len(self.stack))]
            self.queue = torch.cat([self.queue, torch.stack(orders)], dim=1)
        taken, self.queue = self.queue[:, :needed] + self.offsets, self.queue[:, needed:].clone()
        return taken.view(len(self.stack), count, self.batch).transpose(0, 1).reshape(count, -1)

    def _noise(self, count: int) -> Iterator[Tensor]:
        shape = (len(self.stack), self.stack.noise_size)
        like = self.stack.parameters["mean"]
        at_once = max(1, min(count, 2**22 // max(1, math.prod(shape))))
        for start in range(0, count, at_once):
            size = (min(at_once, count - start), *shape)
            if self.stack.uniform:
                yield from torch.rand(size, dtype=like.dtype, generator=self.generator)
            else:
                yield from standard_normal(math.prod(size), like, self.generator).view(size)

    # -- going on --------------------------------------------------------------------------------------------------

    def save(self, path: Path, seconds: float) -> None:
        """Write a checkpoint, replacing the file at once."""
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "parameters": self.stack.parameters,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "queue": self.queue,
            "seconds": seconds,
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        partial.replace(path)

    @torch.no_grad()
    def load(self, path: Path) -> float:
        """Go on from a checkpoint.

        Returns:
            Seconds that were spent until then.

        Raises:
            ValueError: If it was written under another recipe.
        """
        state = torch.load(path, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{path} is a checkpoint of another recipe; choose another folder or remove it")
        for key, value in self.stack.parameters.items():
            value.copy_(state["parameters"][key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.queue = state["step"], state["queue"]
        self.generator.set_state(state["generator"])
        return float(state["seconds"])


def train(
    trainer: Trainer,
    checkpoint: Path | None = None,
    *,
    every: int = 1000,
    report: Callable[[int, float], None] = lambda step, seconds: None,
) -> float:
    """Train to the end, from a checkpoint where there is one.

    Args:
        trainer: What to train; its stack's networks hold the result.
        checkpoint: File to go on from and to keep; removed by the caller when the result is stored.
        every: Steps between checkpoints, rounded up to `CHUNK`.
        report: Called with step and seconds at each.

    Returns:
        Processor seconds, those before an interruption included.
    """
    before = trainer.load(checkpoint) if checkpoint is not None and checkpoint.is_file() else 0.0
    start = time.process_time()
    every = -(-every // CHUNK) * CHUNK
    with small_products():
        while trainer.step < trainer.recipe.total:
            trainer.run((trainer.step // every + 1) * every)
            seconds = before + time.process_time() - start
            if checkpoint is not None:
                trainer.save(checkpoint, seconds)
            report(trainer.step, seconds)
    trainer.stack.hand_back()
    return before + time.process_time() - start
