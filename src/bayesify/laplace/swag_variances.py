"""Variances of SGD's iterates around a trained network, by which a subnetwork can be chosen."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.baselines.swag import SWAG
from bayesify.training.batches import BatchReader

if TYPE_CHECKING:
    from bayesify.laplace.laplace import Laplace


def swag_variances(
    laplace: Laplace, loader: Iterable[Any], read_batch: BatchReader | None, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Variance of each trainable weight over the epochs of `SWAG.fit` from the trained network, which stays as it is."""
    net = copy.deepcopy(laplace.network)
    for name in laplace.weights:
        net.get_parameter(name).requires_grad_(True)
    with torch.enable_grad():
        swag = SWAG(net, copy.deepcopy(laplace.likelihood), rank=0, output=laplace.output)
        return swag.fit(loader, read_batch=read_batch, **options).variance()
