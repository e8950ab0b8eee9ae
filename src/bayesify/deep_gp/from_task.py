"""A deep Gaussian process fitted to a training task."""

from typing import Literal

import torch

from bayesify.arguments.checks import Count, checked
from bayesify.deep_gp.model import DeepGP
from bayesify.training.task import TrainingTask


@checked
def fit_deep_gp(
    task: TrainingTask,
    *,
    depth: Count = 2,
    num_inducing: Count = 30,
    inducing: Literal["global", "local"] = "global",
    learning_rate: float = 0.02,
    num_draws: Count = 4,
) -> DeepGP:
    """Train a deep Gaussian process instead of the task's network, with the same number of outputs."""
    model = make_deep_gp(task, depth=depth, num_inducing=num_inducing, inducing=inducing)
    model.fit(
        task.loader,
        epochs=task.epochs,
        learning_rate=learning_rate,
        seed=task.seed,
        num_data=task.num_data,
        num_draws=num_draws,
        progress=False,
    )
    return model


def make_deep_gp(
    task: TrainingTask, *, depth: int = 2, num_inducing: int = 30, inducing: Literal["global", "local"] = "global"
) -> DeepGP:
    """The deep Gaussian process that `fit_deep_gp` trains."""
    batches = task.batches()
    with torch.no_grad():
        num_outputs = task.net(batches[0].x[:2]).shape[-1]
    return DeepGP(
        torch.cat([batch.x for batch in batches]),
        torch.cat([batch.y for batch in batches]),
        depth=depth,
        num_outputs=num_outputs,
        num_inducing=num_inducing,
        inducing=inducing,
        likelihood=task.likelihood,
        seed=task.seed,
    )
