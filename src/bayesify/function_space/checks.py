"""What can be said against the arguments of a `FunctionSpaceVI` before anything is computed."""

from __future__ import annotations

import torch
from torch import nn

from bayesify.network import BayesianNetwork
from bayesify.posteriors import KTied, MeanField
from bayesify.weights.catalog import owner_of

INDEPENDENT_POSTERIORS = (MeanField, KTied)
"""Posteriors whose weights are independent Gaussians, as assumption 1 of the paper asks."""


def check_network(bnn: BayesianNetwork) -> None:
    """Raise `ValueError` for a posterior other than independent Gaussian weights, or a prior that draws its scale."""
    for part in bnn.posteriors:
        if not isinstance(part, INDEPENDENT_POSTERIORS):
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


def default_memory(device: torch.device) -> int:
    """Bytes that linearization may take where nobody says: an eighth of a GPU's memory, 1 GiB on a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 8 if device.type == "cuda" else 2**30
