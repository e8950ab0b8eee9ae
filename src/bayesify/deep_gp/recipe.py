"""How `deep_gp` trains on a problem, for the demonstration and comparisons."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.deep_gp.model import DeepGP
from bayesify.likelihoods import Likelihood
from bayesify.priors import Prior
from bayesify.running.generators import own_generators
from bayesify.training.batches import parse_batch


def fit_deep_gp(
    net: nn.Module,
    likelihood: Likelihood,
    loader: Any,
    *,
    prior: Prior,
    num_data: int,
    epochs: int,
    seed: int,
    depth: int = 2,
    num_inducing: int = 30,
    inducing: Literal["global", "local"] = "global",
    learning_rate: float = 0.02,
) -> DeepGP:
    """A deep Gaussian process in place of the network, whose outputs are counted; see `bayesify.registry.Recipe`."""
    with own_generators():  # a loader that shuffles does not move the caller's generator
        batches = [parse_batch(item) for item in loader]
        with torch.no_grad():
            output: Tensor = net(batches[0].x[:2])
    model = DeepGP(
        torch.cat([batch.x for batch in batches]),
        torch.cat([batch.y for batch in batches]),
        depth=depth,
        num_outputs=output.shape[-1],
        num_inducing=num_inducing,
        inducing=inducing,
        likelihood=likelihood,
        seed=seed,
    )
    model.fit(loader, epochs=epochs, num_data=num_data, learning_rate=learning_rate, seed=seed, progress=False)
    return model
