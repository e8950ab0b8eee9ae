"""Laplace for a training task: train to the maximum a posteriori, and then fit a posterior around it."""

from typing import Any

from torch import nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.laplace.covariances import largest_size
from bayesify.laplace.laplace import Laplace
from bayesify.laplace.subnetwork import largest_variance
from bayesify.likelihoods import Likelihood
from bayesify.priors import Prior
from bayesify.running.memory import parse_bytes
from bayesify.training.task import TrainingTask, train_point
from bayesify.weights.catalog import catalog


def fit_laplace(task: TrainingTask, *, subset: Any = "all", memory: int | str = "1GiB") -> Laplace:
    """A Laplace posterior over the weights in `subset`, by default all weights. The covariance is full, or Kronecker-factored if
    a full covariance over all weights is too large."""
    trained = train_point(task)
    around, likelihood = trained.mean_network().eval(), trained.likelihood or task.likelihood
    return laplace_around(around, likelihood, task.loader, prior=task.prior, subset=subset, memory=memory)


@checked
def fit_subnetwork(task: TrainingTask, *, size: Count | Positive = 0.3, memory: int | str = "1GiB") -> Laplace:
    """A Laplace posterior with a full covariance over the weights that have the largest variances.

    By default, 30 % of the weights are chosen, but at most 2,000.
    """
    total = sum(parameter.numel() for parameter in task.net.parameters() if parameter.requires_grad)
    number = round(size * total) if isinstance(size, float) else size
    return fit_laplace(task, subset=largest_variance(max(1, min(number, total, 2000))), memory=memory)


def laplace_around(
    net: nn.Module,
    likelihood: Likelihood,
    loader: Any,
    *,
    prior: Prior,
    subset: Any = "all",
    memory: int | str = "1GiB",
    most: int | None = None,
) -> Laplace:
    """The Laplace posterior around a trained network that is in evaluation mode. The function binds `prior` to the network.

    If there are more than `most` weights, the covariance over all weights is Kronecker-factored. By default, `most` is
    the largest number of weights whose full covariance fits into memory.
    """
    weights = catalog(net).trainable
    total = sum(weight.numel for weight in weights.values())
    largest = largest_size(parse_bytes(memory), next(net.parameters()).dtype)
    fits = subset != "all" or total <= (largest if most is None else most)
    stds = prior.bind(weights).draw(1).std
    precisions = {name: float(std) ** -2 for name, std in stds.items()}
    laplace = Laplace(net, likelihood, subset, "full" if fits else "kronecker", precisions, memory=memory)
    return laplace.fit(loader)
