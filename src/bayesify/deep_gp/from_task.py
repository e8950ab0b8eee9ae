"""How `deep_gp` trains on a problem, for the demonstration and comparisons."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.deep_gp.model import DeepGP
from bayesify.running.generators import own_generators
from bayesify.training.batches import parse_batch
from bayesify.training.task import TrainingTask


def fit_deep_gp(
    problem: TrainingTask,
    *,
    depth: int = 2,
    num_inducing: int = 30,
    inducing: Literal["global", "local"] = "global",
    learning_rate: float = 0.02,
    num_draws: int = 4,
) -> DeepGP:
    """A deep Gaussian process in place of the network, whose outputs are counted; see `training.task.TrainingTask`."""
    model = make_deep_gp(problem, depth=depth, num_inducing=num_inducing, inducing=inducing)
    shares: dict[str, Any] = {"num_data": problem.num_data, "num_draws": num_draws, "seed": problem.seed}
    model.fit(problem.loader, epochs=problem.epochs, learning_rate=learning_rate, progress=False, **shares)
    return model


def make_deep_gp(
    problem: TrainingTask, *, depth: int = 2, num_inducing: int = 30, inducing: Literal["global", "local"] = "global"
) -> DeepGP:
    """What `fit_deep_gp` trains."""
    with own_generators():  # a loader that shuffles does not move the caller's generator
        batches = [parse_batch(item) for item in problem.loader]
        with torch.no_grad():
            output: Tensor = problem.net(batches[0].x[:2])
    return DeepGP(
        torch.cat([batch.x for batch in batches]),
        torch.cat([batch.y for batch in batches]),
        depth=depth,
        num_outputs=output.shape[-1],
        num_inducing=num_inducing,
        inducing=inducing,
        likelihood=problem.likelihood,
        seed=problem.seed,
    )
