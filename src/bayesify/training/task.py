"""The training task, which is the input of every method that is not a posterior, and the training of the task's network to the
maximum a posteriori."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bayesify.conversion import bayesianize
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors.point import Point
from bayesify.predictor import Batch, Trainable
from bayesify.priors import Prior
from bayesify.running.generators import own_generators
from bayesify.training.batches import parse_batch
from bayesify.training.fitting import fit


@dataclass(frozen=True)
class TrainingTask:
    """Input of a method that is not a posterior of a network.

    A method's `fit` is a function that takes a task and options of the method and returns a `Predictor`. The function
    copies the network instead of changing it, and starts at the network's weights. If a method needs a trained network, its `fit`
    trains the network. All methods therefore get the same task.

    Args:
        net: The untrained network.
        likelihood: Likelihood p(y | outputs).
        loader: Batches (inputs, targets); the estimators give (inputs, targets, example weights). The loader can be iterated once
            per epoch. `training.fitting.fit` takes both forms; your own loop can read either form with `x, y, *weights = batch`.
        prior: Prior p(weights), not yet bound to a network.
        num_data: Number N of examples in the dataset.
        epochs: Number of passes over the data. A method with several phases divides the passes among the phases.
        seed: Seed of all randomness.
        point: The network at the maximum a posteriori, if it is already known.
    """

    net: nn.Module
    likelihood: Likelihood
    loader: Iterable[Any]
    prior: Prior
    num_data: int
    epochs: int
    seed: int
    point: BayesianNetwork[Any] | None = None

    def batches(self) -> list[Batch]:
        """All batches of the loader, without examples of weight 0. The caller's global generators stay unchanged."""
        with own_generators():
            found = [parse_batch(item).weighed() for item in self.loader]
        return [batch for batch in found if len(batch)]


def train_point(task: TrainingTask) -> BayesianNetwork:
    """Train a network to the maximum a posteriori by Adam. The result is a Bayesian network with one draw.

    Laplace, SWAG and the estimators start from the resulting network. The learning rate is constant in the first half of the
    epochs and then decays. If the rate decays from the start, a few hundred steps underfit (on two clusters of a cosine, the NLL
    of Laplace was -0.04 instead of -0.65). If the rate does not decay, training in batches gives noisy weights (on kin8nm, the
    RMSE was 0.086 instead of 0.082).
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
