"""Means in units of the prior: the same distribution, and steps of an optimizer that count in the prior's scale."""

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, priors
from bayesify.baselines import VOGN
from bayesify.posteriors import MeanField


def make(units: str, prior: priors.Prior | None = None) -> bayesify.BayesianNetwork:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    posterior = MeanField(init_std=0.1, units=units)  # type: ignore[arg-type]
    return bayesify.bayesianize(net, posterior, likelihood=likelihoods.Gaussian(0.1), prior=prior)


@pytest.mark.parametrize("prior", [priors.Neal(), priors.Gaussian(0.3), priors.Scale(), priors.SpatialInverseWishart()])
def test_draws_moments_and_divergences_are_the_same(prior: priors.Prior) -> None:
    own, other = make("prior", prior), make("weight", prior)
    draws, others = (bnn.draw(3, generator=torch.Generator().manual_seed(1)) for bnn in (own, other))
    for name, value in others.weights.items():
        torch.testing.assert_close(draws.weights[name], value)
        torch.testing.assert_close(own.posterior.mean()[name], other.posterior.mean()[name])
        torch.testing.assert_close(own.posterior.variance()[name], other.posterior.variance()[name])
    torch.testing.assert_close(draws.kl, others.kl)


def test_a_step_of_adam_is_the_rate_times_the_priors_standard_deviation() -> None:
    x, y = torch.randn(4, 2, 4, 4), torch.randn(4, 2)
    bnn = make("prior")
    before = {name: value.detach().clone() for name, value in bnn.posterior.mean().items()}
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-3)
    (-bnn.elbo(x, y, num_data=4)).backward()
    optimizer.step()
    for name, value in bnn.posterior.mean().items():
        steps = (value - before[name]).detach().abs()
        inputs = 18 if name.startswith("0") else 12
        std = 8 * inputs**-0.5  # the default prior
        torch.testing.assert_close(steps, torch.full_like(steps, 1e-3 * std), rtol=1e-2, atol=1e-7)


def test_it_is_pruned_stored_and_set_to_the_prior_alike(tmp_path: object) -> None:
    own, other = make("prior"), make("weight")
    for bnn in (own, other):
        bayesify.prune(bnn, 0.4)
    for name, value in other.posterior.mean().items():
        torch.testing.assert_close(own.posterior.mean()[name], value)
    bayesify.save(own, f"{tmp_path}/model.safetensors")
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    back = bayesify.load(f"{tmp_path}/model.safetensors", net)
    assert back.posterior.units == "prior"  # type: ignore[attr-defined]
    for name, value in own.posterior.mean().items():
        torch.testing.assert_close(back.posterior.mean()[name], value, rtol=0, atol=0)  # type: ignore[attr-defined]
    plain = make("prior")
    plain.set_to_prior()
    assert float(plain.kl().detach()) == pytest.approx(0.0, abs=1e-3)


def test_other_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MeanField: units='std'; give 'weight' or 'prior'"):
        MeanField(units="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"VOGN: units='prior' is not supported; use MeanField\(units='weight'\)"):
        VOGN(make("prior"), num_data=4)
