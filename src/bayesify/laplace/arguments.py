"""What is wrong with a choice of weights and covariance, found before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from bayesify.configuration import make_likelihood
from bayesify.laplace.subset import Subset
from bayesify.likelihoods import Likelihood
from bayesify.running.memory import in_words
from bayesify.weights.catalog import Weight, group_layers

Structure = Literal["full", "diagonal", "kronecker"]


def check_choices(covariance: str, marginal: bool, curvature: str, num_samples: int | None) -> None:
    """Raise `ValueError` for choices that exclude each other."""
    if marginal and covariance != "full":
        raise ValueError(f"Laplace: marginal=True with covariance={covariance!r}; a marginal covariance is full")
    if num_samples is not None and curvature == "empirical":
        raise ValueError("Laplace: num_samples with curvature='empirical', which has one vector already; leave it out")


def curved_likelihood(likelihood: Any, curvature: str) -> Likelihood:
    """The likelihood from any form that `Laplace` accepts; `TypeError` if it has not the curvature that is asked for."""
    made = make_likelihood(likelihood)
    assert made is not None
    if curvature == "ggn" and made.no_curvature is not None:
        raise TypeError(f"Laplace: {made.no_curvature}")
    return made


def full_bytes(size: int, dtype: torch.dtype) -> int:
    """Memory that a full covariance over `size` weights takes: the curvature, its factor and one copy."""
    return 3 * size * size * torch.finfo(dtype).bits // 8


def largest_size(memory: int, dtype: torch.dtype) -> int:
    """The largest subset whose full covariance fits into a budget of bytes."""
    return math.isqrt(memory * 8 // (3 * torch.finfo(dtype).bits))


def check_budget(covariance: str, size: int, weights: Mapping[str, Weight], dtype: torch.dtype, memory: int) -> None:
    """Raise `ValueError` if a covariance over `size` of a network's weights does not fit into a budget of bytes."""
    if covariance == "full" and full_bytes(size, dtype) > memory:
        largest = largest_size(memory, dtype)
        raise ValueError(
            f"Laplace: a full covariance over {size:,} weights takes {in_words(full_bytes(size, dtype))} (the matrix, its factor "
            f"and a copy), more than memory={in_words(memory)}; choose at most {largest:,} weights, such as "
            f"subset=bayesify.subnetwork.largest_variance({largest}), give more memory=, or covariance='diagonal'"
        )
    if covariance == "kronecker" and size == sum(weight.numel for weight in weights.values()):
        layers = [layer for layer in group_layers(weights.values()) if layer.weights[0].kind == "matrix"]
        entries = sum(layer.rows**2 + layer.cols**2 for layer in layers)
        needed = 2 * entries * torch.finfo(dtype).bits // 8  # factors and their eigenvectors
        if needed > memory:
            raise ValueError(
                f"Laplace: the Kronecker factors of {len(layers)} layers take {in_words(needed)}, more than "
                f"memory={in_words(memory)}; give more memory=, covariance='diagonal', or a subset of the layers"
            )


def check_whole(subset: Subset, everything: Subset) -> None:
    """Raise `ValueError` if only some entries of a weight are chosen, which have no Kronecker factors."""
    for name in subset.names:
        if subset.count(name) < everything.count(name):
            raise ValueError(
                f"Laplace: covariance='kronecker' needs whole weights, but only {subset.count(name)} of "
                f"{subset.weights[name].numel} entries of {name} are chosen; use 'full', or a subset by names"
            )
