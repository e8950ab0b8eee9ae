"""How `function_space` trains on a problem, for the demonstration and comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.conversion import bayesianize
from bayesify.function_space.contexts import Box
from bayesify.function_space.variational import DEFAULT_VARIANCE, FunctionSpaceVI
from bayesify.posteriors.mean_field import MeanField
from bayesify.running.generators import own_generators
from bayesify.running.inputs import as_inputs
from bayesify.training.batches import parse_batch
from bayesify.training.task import TrainingTask


def fit_function_space(
    problem: TrainingTask,
    *,
    prior_variance: float = DEFAULT_VARIANCE,
    points: int = 20,
    widths: float = 1.0,
    learning_rate: float = 0.1,
    init_std: float = 0.02,
) -> FunctionSpaceVI:
    """Context inputs in a box around the training inputs, wider by `widths` on every side; see `training.task.TrainingTask`.

    The learning rate falls as half a cosine: without, a rate of 0.01 left yacht and concrete underfitted (RMSE 5.4 and 7.1 on the
    first split; 1.2 and 6.1 so) and a larger one too noisy at the end.
    """
    posterior = MeanField(init_std=init_std)
    bnn = bayesianize(problem.net, posterior, likelihood=problem.likelihood, prior=problem.prior)
    model = FunctionSpaceVI(bnn, 0.0, prior_variance, box_around(problem.loader, widths, points))
    options: dict[str, Any] = {"num_data": problem.num_data, "seed": problem.seed, "progress": False}
    model.fit(problem.loader, epochs=problem.epochs, learning_rate=learning_rate, **options)
    return model


def box_around(loader: Any, widths: float, n: int) -> Box:
    """The box around all inputs of a loader, wider by a multiple of their range on every side."""
    low: Tensor | None = None
    high: Tensor | None = None
    with own_generators():  # a loader that shuffles does not move the caller's generator
        for item in loader:
            args, kwargs = as_inputs(parse_batch(item).x)
            x = next(iter((*args, *kwargs.values()))).detach()
            low = x.amin(0) if low is None else torch.minimum(low, x.amin(0))
            high = x.amax(0) if high is None else torch.maximum(high, x.amax(0))
    if low is None or high is None:
        raise ValueError("function_space: the loader yields no batches; give one with data")
    return Box.around(torch.stack((low, high)), widths, n)
