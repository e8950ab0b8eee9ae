"""Training to the maximum a posteriori while the evidence chooses the prior precision of each layer."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from bayesify.arguments.checks import Count, Memory, Positive, Seed, checked
from bayesify.configuration import make_likelihood
from bayesify.conversion import bayesianize
from bayesify.laplace.covariances import from_curvature
from bayesify.laplace.curvature import Structure
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
MIN_EFFECTIVE_SHARE = 1e-5
"""A layer keeps its precision if the data determine at most this share of its weights. Float32 rounding errors of the
share are smaller. The update would otherwise set the precision of a layer without curvature to the lower bound."""
MIN_NOISE_SHARE = 0.05
"""Lower bound on the denominator of the noise estimate, as a share of N O. The denominator is N O minus the effective
parameters."""


class LayerwiseGaussian(Prior):
    r"""Gaussian prior $p(w) = \mathcal{N}(0, 1 / \delta_w)$ with one precision per weight tensor. The precisions may
    change between calls of `fit`."""

    name = "layerwise_gaussian"

    def __init__(self, precisions: Mapping[str, float]) -> None:
        super().__init__()
        self.precisions = precisions  # by weight name; not copied

    def std_of(self, weight: Weight) -> float:
        return float(self.precisions[weight.name] ** -0.5)


class EvidenceTraining:
    """A network in training (`bnn`); the evidence updates its noise variance and its prior precisions, which are stored by weight
    name.

    The variance of Gaussian noise stays fixed if the user gave it or if it was trained before.
    """

    def __init__(
        self, net: nn.Module, likelihood: Likelihood | str | Mapping[str, Any], covariance: Structure, memory: int | str
    ) -> None:
        self.precisions = {name: float(weight.fan_in or 1) for name, weight in catalog(net).trainable.items()}
        self.covariance, self.memory = covariance, memory
        made = make_likelihood(likelihood)
        self.given: Likelihood | None = None
        if isinstance(made, Gaussian) and made.is_settled:
            self.given, made = made, Gaussian(made.noise.detach(), learn=False)
        self.bnn = bayesianize(net, Point(), likelihood=made, prior=LayerwiseGaussian(self.precisions))

    def approximation(self) -> Laplace:
        """An unfitted Laplace approximation around the current weights."""
        likelihood = self.given or self.bnn.likelihood
        assert likelihood is not None
        around = self.bnn.mean_network().eval()
        return Laplace(around, likelihood, "all", self.covariance, dict(self.precisions), memory=self.memory)

    def update(self, laplace: Laplace) -> None:
        """Set new precisions that increase the evidence of a fitted approximation. Also set a new noise variance,
        unless the user gave one."""
        noise = maximize_evidence(laplace, self.precisions)
        if self.given is None and isinstance(self.bnn.likelihood, Gaussian):
            self.bnn.likelihood.set_noise(noise)


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

    Every few epochs, a Laplace approximation around the current weights gives the evidence. The precisions are then
    updated to maximize this evidence:

    $$ \delta_l = \frac{\gamma_l}{\|w_l\|^2}, \qquad \gamma_l = P_l - \delta_l \operatorname{tr} \Sigma_{ll} $$

    Here $P_l$ is the number of weights of layer l. The update is from MacKay (1992); Immer et al. (2021, "Scalable marginal
    likelihood estimation for model selection in deep learning") ascend the gradient of the same evidence instead. The precision
    of a layer starts at the layer's number of inputs, as in `priors.Neal()`. A layer without curvature ($\gamma_l = 0$) keeps its
    precision, because the data say nothing about its weights.

    A noise variance that you pass stays fixed. If you pass no noise variance, each update of the precisions also sets it to
    $\mathrm{SSE} / (N O - \sum_l \gamma_l)$; until the next update, training adapts it to the residuals as `bayesify.fit` does.
    Training is `bayesify.fit` with `posteriors.Point` and Adam. The learning rate falls to 0 in the last epochs.

    Args:
        net: The network, which is not changed. The trained network is `laplace.network`.
        likelihood: The likelihood p(y | outputs), or its name.
        loader: Iterable of batches as for `bayesify.fit`, without random augmentation.
        epochs: Number of training passes over the data. Each Laplace approximation takes one more pass over the data.
        every: Number of epochs between two updates of the precisions. There is no update after the last epoch. As an exception,
            if `epochs` is at most `every`, the only update comes after the last epoch.
        covariance: Structure of the Laplace approximation; see `Laplace`.
        learning_rate: Learning rate of Adam.
        seed: Seed of the training run.
        memory: Memory budget of the Laplace approximation.
        read_batch: See `bayesify.fit`.
        progress: Whether to show progress.

    Returns:
        The fitted posterior around the trained network, with the precisions of the last update (`laplace.prior_precision`).
    """
    told: dict[str, Any] = {"read_batch": read_batch, "progress": progress}
    training = EvidenceTraining(net, likelihood, covariance, memory)
    for start in range(0, epochs, every):
        last, count = start + every >= epochs, min(every, epochs - start)
        rate = {"learning_rate": learning_rate, "scheduler": None if last else "constant"}
        fit(training.bnn, loader, epochs=count, seed=seed + start, **rate, **told)  # type: ignore[arg-type]
        laplace = training.approximation().fit(loader, **told)
        if not last:
            training.update(laplace)
    if epochs <= every:  # without this update, the evidence would have no effect
        training.update(laplace)
        laplace = training.approximation().fit(loader, **told)
    return laplace


@torch.no_grad()
def maximize_evidence(laplace: Laplace, precisions: dict[str, float]) -> float:
    """Update the precisions of all layers, in place, to increase the evidence of a fitted approximation.

    The result is a variance of Gaussian noise that increases the evidence.
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
            size, spread = sum(map(subset.count, names)), sum(float(variances[name].double().sum()) for name in names)
            norm = sum(float(laplace.values[name].double().square().sum()) for name in names)
            gamma = size - precisions[names[0]] * spread
            if gamma <= MIN_EFFECTIVE_SHARE * size:
                continue
            found = min(max(gamma / max(norm, 1e-30), PRECISION_RANGE[0]), PRECISION_RANGE[1])
            precisions.update(dict.fromkeys(names, found))
            effective += gamma
    count = laplace.data.total_weight * laplace.outputs_per_example
    return max(laplace.data.squared_error, 1e-30) / max(count - effective, MIN_NOISE_SHARE * count)
