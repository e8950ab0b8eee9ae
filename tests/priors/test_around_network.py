"""The prior around a trained network: its KL, its refusals, its storage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors, priors

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def network(posterior: posteriors.Posterior, prior: priors.Prior) -> tuple[nn.Module, bayesify.BayesianNetwork]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return net, bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical(), prior=prior)


def exact_kl(net: nn.Module, bnn: bayesify.BayesianNetwork, scale: float) -> float:
    """Of Gaussians with the posterior's moments to those around the network's weights, entry by entry."""
    total = 0.0
    for name, mean in bnn.posterior.mean().items():
        sigma = scale / math.sqrt(3 if name.startswith("0") else 4)
        variance = bnn.posterior.variance()[name]
        terms = (variance + (mean - net.get_parameter(name)).square()) / sigma**2 - 1 - (variance / sigma**2).log()
        total += 0.5 * terms.sum().item()
    return total


@pytest.mark.parametrize("make", [posteriors.MeanField, posteriors.KTied])
def test_kl_is_to_gaussians_around_the_weights(make: type[posteriors.Posterior]) -> None:
    net, bnn = network(make(), priors.AroundNetwork(scale=0.5))
    assert bnn.kl().item() == pytest.approx(exact_kl(net, bnn, 0.5), rel=1e-9)
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert bnn.kl().item() == pytest.approx(exact_kl(net, bnn, 0.5), rel=1e-9)
    assert bnn.draw(2).kl[0].item() == pytest.approx(exact_kl(net, bnn, 0.5), rel=1e-9)


def test_a_map_fit_stays_at_the_network() -> None:
    """Without data the mode of the prior is the network; Neal's is 0."""
    _, bnn = network(posteriors.Point(), priors.AroundNetwork())
    gradients = torch.autograd.grad(bnn.kl(), list(bnn.posterior.parameters()))
    assert all(not gradient.any() for gradient in gradients)
    for posterior in (posteriors.RankOne(), posteriors.Dropout(), posteriors.Ensemble(2)):
        assert math.isfinite(network(posterior, priors.AroundNetwork())[1].kl().item())


@pytest.mark.parametrize("posterior", [posteriors.InducingWeights(), posteriors.WalshHadamard()])
def test_families_that_are_built_on_the_prior_refuse(posterior: posteriors.Posterior) -> None:
    with pytest.raises(ValueError, match="needs a prior with mean 0"):
        network(posterior, priors.AroundNetwork())


def test_stored_and_made_again(tmp_path: Path) -> None:
    _, bnn = network(posteriors.MeanField(), priors.AroundNetwork(2.0))
    bayesify.fit(bnn, [(X.double(), torch.tensor([0, 1, 0, 1, 0, 1]))], epochs=2, progress=False)
    bayesify.save(bnn, tmp_path / "model.safetensors")
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loaded = bayesify.load(tmp_path / "model.safetensors", other)
    assert loaded.kl().item() == bnn.kl().item()
    assert loaded.config() == bnn.config()
    with pytest.raises(ValueError, match="cannot be set to a prior"):
        bnn.set_to_prior()
    with pytest.raises(ValueError, match="centered on a network"):
        bayesify.baselines.VOGN(bnn, num_data=6)
