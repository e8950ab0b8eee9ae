"""Training to the maximum a posteriori while the evidence chooses the prior precision of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from bayesify.arguments.checks import Count, Memory, Positive, Seed, checked
from bayesify.conversion import bayesianize
from bayesify.laplace.covariances import from_curvature
from bayesify.laplace.laplace import Laplace
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.posteriors.point import Point
from bayesify.priors import Prior
from bayesify.training.batches import BatchReader
from bayesify.training.fitting import fit
from bayesify.weights.catalog import Weight, catalog, group_layers

NUM_FIXED_POINT_STEPS = 5
"""Number of updates of the precisions after each new curvature."""
PRECISION_RANGE = 1e-4, 1e8
"""Smallest and largest precision. The precision of a layer that the data do not need would otherwise grow forever."""
MIN_NOISE_SHARE = 0.05
"""Lower bound on the denominator of the noise estimate, as a share of N O. The denominator is N O minus the effective
parameters."""


class LayerwiseGaussian(Prior):
    r"""$p(w) = \mathcal{N}(0, 1 / \delta_w)$ with a precision for each weight, which may change between calls of `fit`.

    Args:
        precisions: $\delta$ by weight name. The prior refers to this mapping and does not copy it.
    """

    name = "layerwise_gaussian"

    def __init__(self, precisions: Mapping[str, float]) -> None:
        super().__init__()
        self.precisions = precisions

    def std_of(self, weight: Weight) -> float:
        """The inverse square root of the weight's precision."""
        return float(self.precisions[weight.name] ** -0.5)


@checked
def fit_with_evidence(
    net: nn.Module,
    likelihood: Likelihood | str | Mapping[str, Any],
    loader: Iterable[Any],
    *,
    epochs: Count,
    every: Count = 10,
    covariance: Literal["full", "kronecker", "diagonal"] = "kronecker",
    learning_rate: Positive = 1e-2,
    seed: Seed = 0,
    memory: Memory | str = "1GiB",
    read_batch: BatchReader | None = None,
    progress: bool = False,
) -> Laplace:
    r"""Train a network and meanwhile choose one prior precision per layer by the Laplace evidence, without validation data.

    Every few epochs, a Laplace approximation around the current weights gives the evidence. The precisions maximize it:

    $$ \delta_l = \frac{\gamma_l}{\|w_l\|^2}, \qquad \gamma_l = P_l - \delta_l \operatorname{tr} \Sigma_{ll} $$

    for the $P_l$ weights of layer l (MacKay 1992; Immer et al. 2021, "Scalable marginal likelihood estimation for model selection
    in deep learning", which ascends the gradient of the same evidence). If no noise variance was given, the variance is
    $\mathrm{SSE} / (N O - \sum_l \gamma_l)$. Training is `bayesify.fit` with `posteriors.Point` and Adam. The learning rate
    falls to 0 in the last epochs. The precision of a layer starts at the layer's number of inputs, as in `priors.Neal()`.

    Args:
        net: The network, which is not changed. The trained network is `laplace.network`.
        likelihood: The likelihood p(y | outputs), or its name.
        loader: Iterable of batches as for `bayesify.fit`, without random augmentation.
        epochs: Number of training passes over the data. Each curvature takes one more pass.
        every: Number of epochs between two updates of the precisions.
        covariance: Structure of the Laplace approximation; see `Laplace`.
        learning_rate: Learning rate of Adam.
        seed: Seed of the training run.
        memory: Memory budget of the Laplace approximation.
        read_batch: See `bayesify.fit`.
        progress: Whether to show progress.

    Returns:
        The fitted posterior around the trained network, with the precisions of the last epochs (`laplace.prior_precision`).
    """
    weights = catalog(net).trainable
    precisions = {name: float(weight.fan_in or 1) for name, weight in weights.items()}
    bnn = bayesianize(net, Point(), likelihood=likelihood, prior=LayerwiseGaussian(precisions))
    finds_noise = isinstance(bnn.likelihood, Gaussian) and not bnn.likelihood.is_settled
    told: dict[str, Any] = {"read_batch": read_batch, "progress": progress}
    for start in range(0, epochs, every):
        last, count = start + every >= epochs, min(every, epochs - start)
        rate = {"learning_rate": learning_rate, "scheduler": None if last else "constant"}
        fit(bnn, loader, epochs=count, seed=seed + start, **rate, **told)  # type: ignore[arg-type]
        assert bnn.likelihood is not None
        around = bnn.mean_network().eval()
        laplace = Laplace(around, bnn.likelihood, "all", covariance, dict(precisions), memory=memory).fit(
            loader, **told
        )
        if not last:
            noise = maximize_evidence(laplace, precisions)
            if finds_noise and isinstance(bnn.likelihood, Gaussian):
                bnn.likelihood.set_noise(noise)
    return laplace


@torch.no_grad()
def maximize_evidence(laplace: Laplace, precisions: dict[str, float]) -> float:
    """Update the precisions of all layers, in place, to increase the evidence. The curvature comes from a fitted
    approximation.

    Returns:
        A variance of Gaussian noise that increases the evidence.
    """
    subset, posterior = laplace.fitted()
    structure, curvature = laplace.covariance, posterior.tensors()
    layers = group_layers(subset.weights[name] for name in subset.names)
    effective = 0.0
    for _ in range(NUM_FIXED_POINT_STEPS):
        parts = [torch.full((subset.count(name),), precisions[name]) for name in subset.names]
        prior = torch.cat(parts).to(posterior.prior)
        variances = subset.split(from_curvature(structure, subset, curvature, prior).variances())
        effective = 0.0
        for layer in layers:
            names = [weight.name for weight in layer.weights]
            size, spread = sum(map(subset.count, names)), sum(float(variances[name].sum()) for name in names)
            norm = sum(float(laplace.values[name].double().square().sum()) for name in names)
            gamma = max(size - precisions[names[0]] * spread, 0.0)
            found = min(max(gamma / max(norm, 1e-30), PRECISION_RANGE[0]), PRECISION_RANGE[1])
            precisions.update(dict.fromkeys(names, found))
            effective += gamma
    count = laplace.data.total_weight * laplace.outputs_per_example
    return max(laplace.data.squared_error, 1e-30) / max(count - effective, MIN_NOISE_SHARE * count)
