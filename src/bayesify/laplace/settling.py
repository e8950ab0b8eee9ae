"""The default precision of the prior over one layer of a trained classifier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from bayesify.laplace.covariances import EIGEN_LIMIT
from bayesify.laplace.curvature import sum_over_processes
from bayesify.laplace.prior_precision import stands_alone
from bayesify.laplace.tuning import evidences, scores_on
from bayesify.training.batches import BatchReader, first_batches, total_count

if TYPE_CHECKING:
    from bayesify.laplace.laplace import Laplace

FACTORS = tuple(10.0 ** (power / 8) for power in range(-24, 1))
"""Factors on the default precision to choose from, ascending to 1."""
MOST_RISE = 0.005
"""Nats by which the mean negative log predictive density of training rows may exceed the network's own."""
ROWS = 2000
"""Training rows that this is measured on."""
CERTAIN = 1e12
"""A factor under which the weights do not vary."""


def is_one_layer(laplace: Laplace) -> bool:
    """Whether the posterior is a dense Gaussian over one linear map of several, or weights of it."""
    subset = laplace.subset
    whole = laplace.covariance == "full" and not laplace.marginal
    return subset is not None and whole and stands_alone(laplace.weights, subset.names)


def settle_precision(laplace: Laplace, loader: Iterable[Any], read_batch: BatchReader | None = None) -> None:
    """Lower the default precision as far as the evidence asks, and no further than training rows bear.

    A layer's features have a scale of their own, which their number does not tell and the evidence does. But where there are few
    rows for the weights, it asks for a prior so wide that the Gaussian reaches far beyond where the log-likelihood is quadratic:
    predictions then are less sure than the network even of the rows that it was trained on. So the precision is the smallest one,
    from that of the evidence up to the default, with at most `MOST_RISE` nats of such a loss. It stays as it is but for classes and
    one layer of at most `EIGEN_LIMIT` weights.
    """
    subset, _ = laplace.fitted()
    if subset.size > EIGEN_LIMIT or laplace.likelihood.task != "classification" or not is_one_layer(laplace):
        return
    evidence = evidences(laplace, 1.0)(list(FACTORS))
    wanted = list(FACTORS[max(range(len(FACTORS)), key=evidence.__getitem__) :])
    batches = first_batches(loader, ROWS, read_batch)
    score = scores_on(laplace, batches, 1.0, generator=torch.Generator().manual_seed(0))
    count = total_count(batches)
    sums = [count, *(count * value for value in score([*wanted, CERTAIN]))]
    found = sum_over_processes(torch.tensor(sums, dtype=torch.float64))
    losses = ((found[-1] - found[1:-1]) / found[0]).tolist()
    chosen = next((factor for factor, loss in zip(wanted, losses, strict=True) if loss <= MOST_RISE), FACTORS[-1])
    laplace.set_prior_factor(chosen)
