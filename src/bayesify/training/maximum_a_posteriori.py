"""Training to the maximum a posteriori, from which Laplace, SWAG and the estimators start."""

from __future__ import annotations

from typing import Any

from bayesify.conversion import bayesianize
from bayesify.network import BayesianNetwork
from bayesify.posteriors.point import Point
from bayesify.predictor import Trainable
from bayesify.training.fitting import fit
from bayesify.training.task import TrainingTask


def train_point(task: TrainingTask) -> BayesianNetwork:
    """Train a network to the maximum a posteriori by Adam. The result is a Bayesian network with one draw.

    The learning rate is constant in the first half and then decays. With decay from the start, a few hundred steps
    underfit: on two clusters of a cosine, the NLL of Laplace after 240 steps was -0.04 with this decay and -0.65 with a
    constant rate. Without decay, training in batches gives noisy weights: on kin8nm, the RMSE was 0.086 without decay
    and 0.082 with it.
    """
    if task.point is not None:
        return task.point
    bnn = bayesianize(task.net, Point(), likelihood=task.likelihood, prior=task.prior)
    search_point(bnn, task.loader, num_data=task.num_data, epochs=task.epochs, seed=task.seed)
    return bnn


def search_point(model: Trainable, loader: Any, *, num_data: int, epochs: int, seed: int) -> None:
    """Train a network with the posterior `Point`, or a `ModelStack` of such networks, in place; see `train_point`."""
    half = epochs // 2  # both halves have the same objective; the first half has a constant rate
    fit(
        model, loader, map_epochs=half, epochs=epochs - half, learning_rate=0.05,
        num_data=num_data, seed=seed, progress=False,
    )  # fmt: skip
