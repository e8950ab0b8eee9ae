"""Training task: the input of every method that is not a posterior."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictor import Batch
from bayesify.priors import Prior
from bayesify.running.generators import own_generators
from bayesify.training.batches import parse_batch


@dataclass(frozen=True)
class TrainingTask:
    """Input of a method that is not a posterior of a network.

    A method's `fit` is a function that takes a task and options of the method and returns a `Predictor`. The function
    copies the network instead of changing it, and starts at the network's weights. If a method needs a trained network,
    its `fit` trains the network, so that all methods get the same task.

    Args:
        net: The untrained network.
        likelihood: Likelihood p(y | outputs).
        loader: Batches (inputs, targets), or (inputs, targets, example weights) from the estimators. The loader can be
            iterated once per epoch. `training.fitting.fit` takes both forms; your own loop can read either form with
            `x, y, *weights = batch`.
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
        """All batches of the loader, without examples of weight 0. The caller's global generators do not change."""
        with own_generators():
            found = [parse_batch(item).weighed() for item in self.loader]
        return [batch for batch in found if len(batch)]
