"""Early stopping with held-out rows: each model trains without some rows and stops at the step that predicts these rows best."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.running.modes import torch_threads
from bayesify.running.progress import TimeLeft
from bayesify.training.batches import StackedBatch, StackedBatches
from bayesify.training.fitting import fit
from bayesify.training.stack import ModelStack


def make_folds(num_rows: int, num_folds: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Fold of each row, [N], among K random folds of nearly equal size. Groups in `groups` [N] are spread evenly over them."""
    order = np.random.default_rng(seed).permutation(num_rows)
    if groups is not None:
        order = order[np.argsort(groups[order], kind="stable")]
    folds = np.empty(num_rows, dtype=np.int64)
    folds[order] = np.arange(num_rows) % num_folds
    return folds


PATIENCE_SHARE = 0.75
"""If the best check comes early, the patience is this share of the number of checks up to the best check."""


@checked
@dataclass(frozen=True)
class StoppedSteps:
    """Training by Adam that stops when the predictions of held-out rows no longer improve."""

    batch_size: Count = 256  # maximum number of rows of each network in a step
    max_steps: Count = 3000
    check_every: Count = 20  # number of steps between two checks on the held-out rows
    patience: Count = 15  # number of checks without an improvement after which training ends; fewer after an early best
    early_patience: Count = 8  # minimum number of checks without an improvement, unless `patience` is smaller
    learning_rate: Positive = 5e-3  # of the first step; it falls to a twentieth as half a cosine

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Adam over the parameters."""
        return torch.optim.Adam(parameters, lr=self.learning_rate, betas=(0.9, 0.99), fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Schedule of the falling learning rate. It takes one step per check."""
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.looks, eta_min=self.learning_rate / 20)

    @property
    def looks(self) -> int:
        """Maximum number of checks."""
        return -(-self.max_steps // self.check_every)

    def has_ended(self, looks: int, last: int) -> bool:
        """Whether training ends after `looks` checks, if check number `last` was the last improvement."""
        return looks - last >= min(self.patience, max(self.early_patience, math.ceil(PATIENCE_SHARE * last)))


def train_held_out(
    members: ModelStack,  # their weights are point estimates
    x: Tensor,  # [N, D]
    y: Tensor,  # targets of each network, [R, N, ...]
    held: np.ndarray,  # True for rows that a network holds out, [R, N]
    steps: StoppedSteps = StoppedSteps(),
    *,
    weights: Tensor | None = None,  # number of examples that each row represents, [N]
    seed: int = 0,  # seed of batches and dropout
    progress: str = "",  # label of the display of the steps and the time left; empty for no display
    halves: bool = False,
    factors: Tensor | None = None,  # factors of the inputs of each network, [R, D]
) -> tuple[np.ndarray, Tensor | None]:
    r"""Train R networks together and in place with `fit`. Each network trains on the rows that it does not hold out.

    The objective of each network is $\sum_n \omega_n \log p(y_n | f(x_n)) + \log p(w)$ over its own rows, in batches. Each check
    compares a network's `Likelihood.held_out_score` on its held-out rows with its best score so far. Training ends when no
    network has improved for some time. Each network then returns to the weights of its own best check.

    With `factors`, each network trains on its own multiple of the inputs. At the end, its first layer, which must be linear, is
    multiplied by the factors, so that the network takes plain inputs.

    The result contains the best steps, [R]. If `halves` is true, it also contains predictions for held-out rows, [R, N, outputs],
    and 0 for training rows. Each half of a network's held-out rows is then predicted at the step that is best for the other half.
    With few rows, the score of a half at its own best step would be too optimistic.
    """
    omega = torch.ones(len(x), dtype=x.dtype) if weights is None else weights.to(x.dtype)
    batches, num_examples = _batches(x, y, omega, held, steps)
    outside = _scaled(_padded(x, y, omega, held), factors)
    assert outside.weights is not None
    best, judged = _Best(members, outside.weights), _Halves(outside.weights, held) if halves else None

    def look(*_: object) -> bool:
        members.eval()
        with torch.no_grad():
            outputs = members(outside.x)
            scores = members.held_out_scores(outputs, outside.y)  # [R, B]
            best.look(scores)
            if judged is not None:
                judged.look(scores, outputs)
        members.train()
        shown.tell(progress, steps.check_every * best.looks, steps.check_every * steps.looks)
        return steps.has_ended(best.looks, best.last)

    members.train()
    num_data = batches.size * batches.steps
    # More threads slow down such small products, by up to a factor of ten if other programs are running.
    with torch_threads(1), TimeLeft("steps", bound=True, show=bool(progress)) as shown:
        fit(
            members, batches, epochs=steps.looks, num_data=num_data, kl_weight=num_data / num_examples, num_draws=1,
            optimizer=steps.optimizer, scheduler=steps.scheduler, callbacks=[look], seed=seed, progress=False,
            read_batch=partial(_scaled, factors=factors),
        )  # fmt: skip
    best.restore()
    if factors is not None:
        with torch.no_grad():
            next(members.parameters()).mul_(factors.unsqueeze(1))  # weight of the first layer, [R, H, D]
    return steps.check_every * best.at, None if judged is None else judged.of_rows()


def _batches(
    x: Tensor, y: Tensor, omega: Tensor, held: np.ndarray, steps: StoppedSteps
) -> tuple[StackedBatches, float]:
    """Batches of each network's training rows, with weights of mean 1, and the number of examples that the rows represent."""
    used = [torch.from_numpy(np.flatnonzero(~part)) for part in held]
    means = [float(omega[rows].mean()) for rows in used]
    num_examples = float(np.mean([mean * len(rows) for mean, rows in zip(means, used, strict=True)]))
    scaled = omega * torch.tensor([1 / mean for mean in means], dtype=x.dtype).unsqueeze(1)  # [R, N]
    rows = x.expand(len(y), *x.shape)
    return StackedBatches(rows, y, steps.batch_size, steps.check_every, scaled, used), num_examples


def _scaled(batch: StackedBatch, factors: Tensor | None) -> StackedBatch:
    """The batch with its inputs [R, B, D] times the factors [R, D]."""
    return batch if factors is None else StackedBatch(batch.x * factors.unsqueeze(1), batch.y, batch.weights)


class _Best:
    """Weights of each network at the check at which it predicted its held-out rows best."""

    def __init__(self, members: ModelStack, weights: Tensor) -> None:
        self._members, self._weights = members, weights
        self._scores = torch.full((len(members),), -torch.inf, dtype=weights.dtype)
        self._states = {name: value.detach().clone() for name, value in members.named_parameters()}
        self.looks = self.last = 0  # number of checks so far, and the last check at which any network improved
        self.at = np.zeros(len(members), dtype=np.int64)  # best check of each network

    def look(self, scores: Tensor) -> None:
        """Store the weights of the networks that improved. `scores` [R, B] has the score of each held-out row of each network."""
        self.looks += 1
        scores = (scores * self._weights).mean(1)
        better = scores > self._scores
        if not bool(better.any()):
            return
        self.last = self.looks
        self._scores[better] = scores[better]
        self.at[better.numpy()] = self.looks
        for name, value in self._members.named_parameters():
            if name.startswith("likelihoods."):  # shared by several networks
                self._states[name].copy_(value)
            else:
                self._states[name][better] = value[better]

    @torch.no_grad()
    def restore(self) -> None:
        """Give each network the weights of its best check, in evaluation mode."""
        for name, value in self._members.eval().named_parameters():
            value.copy_(self._states[name])


class _Halves:
    """Outputs for each half of the held-out rows, computed at the step that is best for the other half."""

    def __init__(self, weights: Tensor, held: np.ndarray) -> None:
        self._held, self._weights = torch.from_numpy(held), weights
        first = torch.arange(weights.shape[1]) % 2 == 0
        self._parts = [(first, ~first), (~first, first)]
        self._best = torch.full((2, len(held)), -torch.inf, dtype=weights.dtype)
        self._outputs: Tensor | None = None

    def look(self, scores: Tensor, outputs: Tensor) -> None:
        """For each half, store the outputs [R, B, O] of the networks whose score on the other half improved. `scores` [R, B]
        has the score of each held-out row of each network."""
        kept = outputs.clone() if self._outputs is None else self._outputs
        for best, (scored, told) in zip(self._best, self._parts, strict=True):
            score = (scores * self._weights * scored).mean(1)
            better = score > best
            best[better] = score[better]
            kept = torch.where((better.unsqueeze(1) & told).unsqueeze(-1), outputs, kept)
        self._outputs = kept

    def of_rows(self) -> Tensor:
        """Outputs of each network for the rows that it holds out, [R, N, outputs]; 0 for its training rows."""
        assert self._outputs is not None
        found = self._outputs.new_zeros(*self._held.shape, self._outputs.shape[-1])
        for row, own, outputs in zip(found, self._held, self._outputs, strict=True):
            row[own] = outputs[: int(own.sum())]
        return found


def _padded(x: Tensor, y: Tensor, weights: Tensor, held: np.ndarray) -> StackedBatch:
    """Held-out rows of each model. Rows of weight 0 are added until all models have the same number of rows."""
    parts = [np.flatnonzero(part) for part in held]
    most = max(len(part) for part in parts)
    index = torch.from_numpy(np.stack([np.resize(part, most) for part in parts]))
    counts = torch.tensor([len(part) for part in parts]).unsqueeze(1)
    real = torch.arange(most).unsqueeze(0) < counts
    models = torch.arange(len(parts)).unsqueeze(1)
    return StackedBatch(x[index], y[models, index], weights[index] * real)
