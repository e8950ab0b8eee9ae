"""What can be said against the arguments of a `FunctionSpaceVI` before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bayesify.function_space.priors import FunctionPrior
from bayesify.network import BayesianNetwork
from bayesify.posteriors import KTied, MeanField
from bayesify.weights.catalog import owner_of

INDEPENDENT = (MeanField, KTied)
"""Posteriors whose weights are independent Gaussians, as assumption 1 of the paper asks."""

COVARIANCES = ("diagonal", "full", "joint")


def check_network(bnn: Any) -> None:
    """Raise for what is not a network under independent Gaussian weights.

    Raises:
        TypeError: If it is no `BayesianNetwork`.
        ValueError: If a posterior is of the wrong type, or the prior draws its scale.
    """
    if not isinstance(bnn, BayesianNetwork):
        raise TypeError(
            f"FunctionSpaceVI: bnn is {type(bnn).__name__}; make a BayesianNetwork with bayesianize(net, MeanField())"
        )
    for part in bnn.posteriors:
        if not isinstance(part, INDEPENDENT):
            raise ValueError(
                f"FunctionSpaceVI: {type(part).__name__} is not a posterior of independent Gaussian weights with means and "
                "variances; use MeanField or KTied"
            )
    if not bnn.prior.typical().fixed:
        raise ValueError(
            "FunctionSpaceVI: the weights' prior draws its scale, or is around a network; use a fixed one around 0, such as Neal()"
        )


def check_trainable(bnn: BayesianNetwork) -> None:
    """Raise for a layer under the posterior that torch cannot differentiate twice."""
    for name in bnn.weights:
        if isinstance(owner_of(bnn.network, name)[0], nn.EmbeddingBag):
            raise ValueError(
                f"FunctionSpaceVI: {name} belongs to an EmbeddingBag, which torch cannot differentiate twice; use nn.Embedding and "
                "a sum over words, or leave it out of the posterior"
            )


def check_choices(covariance: str, layers: str, jitter: Any, context: Any, prior: Any) -> None:
    """Raise for options that are unknown or of the wrong type.

    Raises:
        TypeError: If the context or the prior is something else.
        ValueError: If a name is unknown or the jitter not a share.
    """
    for key, value, known in (("covariance", covariance, COVARIANCES), ("layers", layers, ("all", "last"))):
        if value not in known:
            raise ValueError(f"FunctionSpaceVI: {key}={value!r}; give one of {', '.join(map(repr, known))}")
    if jitter is not None and not 0 <= jitter < 1:
        raise ValueError(f"FunctionSpaceVI: jitter={jitter}; give a share of the variance, from 0 to 1")
    if context is not None and not callable(getattr(context, "draw", None)):
        raise TypeError(
            f"FunctionSpaceVI: context is {type(context).__name__}; give a Context such as Box(low, high, n) or "
            "DatasetContext(loader, n)"
        )
    if prior is not None and not isinstance(prior, FunctionPrior):
        raise TypeError(
            f"FunctionSpaceVI: prior is {type(prior).__name__}; give a FunctionPrior such as GaussianProcess(kernel), or "
            "prior_mean and prior_variance"
        )


def default_memory(device: torch.device) -> int:
    """Bytes that linearization may take where nobody says: an eighth of a GPU's memory, 1 GiB on a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 8 if device.type == "cuda" else 2**30
