"""Members that hold out: models that are each trained without some of the rows, and stopped where they predict these best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.conversion import bayesianize
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, Point
from bayesify.training.batches import StackedBatch
from bayesify.training.fitting import fit
from bayesify.training.stack import ModelStack


def make_folds(num_rows: int, num_folds: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Which fold each row belongs to, [N]: of equal size up to one row, at random.

    Args:
        num_rows: N.
        num_folds: K, at most N.
        seed: Of the order.
        groups: Codes [N], such as classes, of which every fold gets its share.
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    if groups is not None:
        order = order[np.argsort(groups[order], kind="stable")]
    folds = np.empty(num_rows, dtype=np.int64)
    folds[order] = np.arange(num_rows) % num_folds
    return folds


def train_held_out(
    models: Sequence[BayesianNetwork],
    x: Tensor,
    y: Tensor,
    held: np.ndarray,
    *,
    weights: Tensor | None = None,
    batch_size: int = 256,
    max_steps: int = 1000,
    check_every: int = 20,
    patience: int = 10,
    learning_rate: float = 2e-3,
    seed: int = 0,
    progress: bool = False,
) -> np.ndarray:
    r"""Train R models at once by `fit`, each on the rows that it does not hold out, in place.

    The objective of each is $\sum_n \omega_n \log p(y_n | f(x_n)) + \log p(w)$ over its own rows, in batches. Every so many steps
    each model's log-likelihood of the rows that it holds out is compared with its best so far; training ends where none has
    become better for some time, and each model goes back to the weights of its own best.

    Args:
        models: All alike, see `ModelStack`.
        x: Inputs, [N, D].
        y: Targets of each model, [R, N, ...].
        held: True for the rows that a model does not see, [R, N].
        weights: How many examples each row stands for, [N].
        batch_size: Rows of each model in a step, at most.
        max_steps: Of the optimizer.
        check_every: Steps between two looks at the rows held out.
        patience: Looks without a better one after which training ends.
        learning_rate: Of Adam, at the first step; it falls to a twentieth as half a cosine.
        seed: Of batches and dropout.
        progress: Whether to show a progress bar.

    Returns:
        The step at which each model was best, [R].
    """
    omega = torch.ones(len(x), dtype=x.dtype) if weights is None else weights.to(x.dtype)
    batches = _Batches(x, y, omega, ~held, batch_size, check_every)
    outside = _padded(x, y, omega, held)
    stack = ModelStack(models)
    best = torch.full((len(models),), -torch.inf, dtype=x.dtype)
    states = {name: value.detach().clone() for name, value in stack.named_parameters()}
    steps = np.zeros(len(models), dtype=np.int64)
    looks = since = 0

    def look(*_: object) -> bool:
        nonlocal looks, since
        looks += 1
        stack.eval()
        with torch.no_grad():
            score = stack.terms(outside, num_data=len(outside), num_draws=1)[0].mean(1)  # [R]
            better = score > best
            best[better] = score[better]
            for name, value in stack.named_parameters():
                states[name][better] = value[better]
        stack.train()
        steps[better.numpy()] = looks * check_every
        since = 0 if bool(better.any()) else since + 1
        return since >= patience

    total = -(-max_steps // check_every)
    stack.train()
    fit(
        stack,
        batches,
        epochs=total,
        num_data=batches.num_data,
        kl_weight=batches.num_data / batches.num_examples,
        num_draws=1,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=learning_rate, betas=(0.9, 0.99)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, total, eta_min=learning_rate / 20
        ),
        callbacks=[look],
        seed=seed,
        progress=progress,
    )
    with torch.no_grad():
        for name, value in stack.named_parameters():
            value.copy_(states[name])
    stack.eval()
    stack.unstack()
    return steps


def join_members(net: torch.nn.Module, models: Sequence[BayesianNetwork]) -> BayesianNetwork:
    """Networks at point estimates as the members of one network under `Ensemble`.

    Args:
        net: The network that they were made from.
        models: Under `Point`; what their likelihoods have learned is averaged.
    """
    first = models[0]
    joined = bayesianize(net, Ensemble(len(models)), likelihood=first.likelihood, prior=first.prior)
    ensemble, members = joined.posterior, [model.posterior.mean() for model in models]
    assert isinstance(ensemble, Ensemble)
    with torch.no_grad():
        for name, value in ensemble.value.items():
            value.copy_(torch.stack([member[name] for member in members]))
        for name, value in joined.named_parameters():
            if name.startswith("likelihood."):
                value.copy_(torch.stack([model.get_parameter(name) for model in models]).mean(0))
    return joined.eval()


class _Batches:
    """Batches of R models, each from its own rows, in a new order each time; `steps` of them are an epoch."""

    def __init__(self, x: Tensor, y: Tensor, weights: Tensor, used: np.ndarray, size: int, steps: int) -> None:
        self._x, self._y, self._weights, self._steps = x, y, weights, steps
        self._rows = [torch.from_numpy(np.flatnonzero(part)) for part in used]
        self._size = min(size, *(len(rows) for rows in self._rows))
        self.num_data = self._size * steps
        means = [float(weights[rows].mean()) for rows in self._rows]
        self._scale = torch.tensor([1 / mean for mean in means], dtype=x.dtype)
        self.num_examples = float(np.mean([mean * len(rows) for mean, rows in zip(means, self._rows, strict=True)]))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[StackedBatch]:
        index = torch.stack([self._order(rows) for rows in self._rows])  # [R, steps * size]
        models = torch.arange(len(index)).unsqueeze(1)
        for part in index.split(self._size, dim=1):
            weights = self._weights[part] * self._scale.unsqueeze(
                1
            )  # of mean 1, so that the data term is a mean over rows
            yield StackedBatch(self._x[part], self._y[models, part], weights)

    def _order(self, rows: Tensor) -> Tensor:
        whole = -(-self.num_data // len(rows))
        return torch.cat([rows[torch.randperm(len(rows))] for _ in range(whole)])[: self.num_data]


def _padded(x: Tensor, y: Tensor, weights: Tensor, held: np.ndarray) -> StackedBatch:
    """The rows that each model holds out; where it has fewer than others, rows of weight 0 follow."""
    parts = [np.flatnonzero(part) for part in held]
    most = max(len(part) for part in parts)
    index = torch.from_numpy(np.stack([np.resize(part, most) for part in parts]))
    counts = torch.tensor([len(part) for part in parts]).unsqueeze(1)
    real = torch.arange(most).unsqueeze(0) < counts
    models = torch.arange(len(parts)).unsqueeze(1)
    return StackedBatch(x[index], y[models, index], weights[index] * real)


def point_members(nets: Sequence[torch.nn.Module], likelihoods: Sequence[Any], prior: Any) -> list[BayesianNetwork]:
    """Networks at point estimates, before training."""
    return [
        bayesianize(net, Point(), likelihood=likelihood, prior=prior)
        for net, likelihood in zip(nets, likelihoods, strict=True)
    ]
