"""The No-U-Turn sampler against the exact posterior of Bayesian linear regression."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.datasets import toy

pytest.importorskip("pyro")

from bayesify.baselines.nuts import nuts


def linear(data: toy.Linear, prior=None) -> bayesify.BayesianNetwork:
    net = nn.Linear(data.x.shape[1], 1, bias=False)
    likelihood = likelihoods.Gaussian(noise=data.noise, learn=False)
    return bayesify.bayesianize(
        net, posteriors.MeanField(), likelihood=likelihood, prior=prior or priors.Gaussian(data.prior_std)
    )


def test_mean_and_covariance_are_the_exact_ones():
    """Of a Gaussian target the chain's draws are close to independent: n = 140 counts as 60, with 5 standard errors."""
    data = toy.linear(num_data=8, num_features=3, noise=0.5)
    draws = nuts(linear(data), data.x, data.y, num_draws=140, num_warmup=60, seed=0)
    weights = draws.weights["weight"][:, 0].double()  # [S, D]
    exact, effective = data.posterior, 60
    std = exact.covariance.diagonal().sqrt()
    assert ((weights.mean(0) - exact.mean).abs() < 5 * std / effective**0.5).all()
    variances = std.square()
    spread = (variances[:, None] * variances + exact.covariance.square()).sqrt() / effective**0.5
    assert ((weights.mT.cov() - exact.covariance).abs() < 5 * spread).all()
    assert bool(spread[0, 0] * 5 < variances[0])  # the test can fail


def test_draws_are_functions_and_repeat_by_seed():
    data = toy.linear(num_data=8)
    bnn, options = linear(data), {"num_draws": 6, "num_warmup": 5, "thin": 2}
    before = torch.get_rng_state()
    first, again = (nuts(bnn, data.x, data.y, seed=3, **options) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.weights["weight"], again.weights["weight"])
    assert first(data.x).shape == (6, 8, 1)
    assert torch.allclose(first(data.x)[2], data.x @ first.weights["weight"][2].mT)
    assert first.kl.isnan().all()


def test_bad_counts():
    data = toy.linear(num_data=4)
    with pytest.raises(ValueError, match="num_draws=0; give an integer of at least 1"):
        nuts(linear(data), data.x, data.y, num_draws=0)


def test_what_cannot_be_sampled_is_refused_with_a_remedy():
    data = toy.linear(num_data=4, num_features=2, noise=0.5)
    with pytest.raises(TypeError, match="nuts: bnn=Linear; give a BayesianNetwork"):
        nuts(nn.Linear(2, 1), data.x, data.y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs hold nan"):
        nuts(linear(data), data.x.clone().fill_(float("nan")), data.y)
    with pytest.raises(ValueError, match="targets are not finite; remove the rows with these targets"):
        nuts(linear(data), data.x, data.y.clone().fill_(float("inf")))
