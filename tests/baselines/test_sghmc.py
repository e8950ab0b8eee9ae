"""Cyclical SGHMC against the exact posterior of Bayesian linear regression."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, priors
from bayesify.baselines import sghmc
from bayesify.baselines.sghmc import CyclicalSGHMC
from bayesify.datasets import toy


def linear(data: toy.Linear) -> bayesify.BayesianNetwork:
    net = nn.Linear(data.x.shape[1], 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(data.posterior.mean)
    likelihood = likelihoods.Gaussian(noise=data.noise, learn=False)
    return bayesify.bayesianize(net, "point", likelihood=likelihood, prior=priors.Gaussian(data.prior_std))


def test_chains_end_at_the_exact_posterior() -> None:
    """2,000 chains in one tensor, after a cycle: within 5 standard errors of the posterior, and 8 % for finite steps."""
    data, chains = toy.linear(num_data=12, num_features=3, noise=0.5), 2000
    exact = data.posterior
    precision = torch.linalg.inv(exact.covariance)
    torch.manual_seed(0)
    weights = exact.mean.expand(chains, 3).clone().requires_grad_()
    rate = 0.4 * 12 / float(torch.linalg.eigvalsh(precision).max())
    chain = CyclicalSGHMC(
        [{"params": [weights], "scale": 1.0}], rate, friction=0.1, num_data=12, cycle_steps=400, explore=0.2
    )
    for _ in range(400):
        weights.grad = (weights.detach() - exact.mean) @ precision / 12
        chain.step()
    found = weights.detach()
    variances = exact.covariance.diagonal()
    assert ((found.mean(0) - exact.mean).abs() < 5 * (variances / chains).sqrt()).all()
    spread = (variances[:, None] * variances + exact.covariance.square()).sqrt() / chains**0.5
    assert ((found.mT.cov() - exact.covariance).abs() < 5 * spread + 0.08 * variances.max()).all()


def test_draws_of_a_network_are_as_wide_as_the_posterior() -> None:
    """A chain of 400 correlated steps in minibatches: within a factor 3 in standard deviation; a wrong N would be a factor 5."""
    data = toy.linear(num_data=24, num_features=3, noise=0.5)
    loader = [(data.x[:12], data.y[:12]), (data.x[12:], data.y[12:])]
    bnn = linear(data)
    found = sghmc(bnn, loader, 200, num_draws=200, progress=False, seed=0)
    weights, exact = found.draws.weights["weight"][:, 0].double(), data.posterior
    ratio = weights.std(0) / exact.covariance.diagonal().sqrt()
    assert bool(((ratio > 1 / 3) & (ratio < 3)).all())
    assert torch.equal(bnn.posterior.mean()["weight"][0], exact.mean.float())


def test_an_interrupted_run_continues_to_the_same_draws(tmp_path: Path) -> None:
    data = toy.linear(num_data=8)
    loader = [(data.x[:4], data.y[:4]), (data.x[4:], data.y[4:])]
    options = {"num_draws": 6, "cycles": 2, "seed": 1, "progress": False}
    whole = sghmc(linear(data), loader, 10, **options)
    assert len(whole.draws) == 6

    def stop(_: object, history: list[object]) -> None:
        if len(history) == 7:
            raise InterruptedError

    path = tmp_path / "run.safetensors"
    with pytest.raises(InterruptedError):
        sghmc(linear(data), loader, 10, checkpoint=path, callbacks=[stop], **options)
    rest = sghmc(linear(data), loader, 10, checkpoint=path, **options)
    assert torch.equal(whole.draws.weights["weight"], rest.draws.weights["weight"])


def test_what_cannot_be_sampled_is_refused_with_a_remedy() -> None:
    data = toy.linear(num_data=4, num_features=2)
    wide = bayesify.bayesianize(nn.Linear(2, 1), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(
        TypeError, match=r"sghmc: the posterior is not Point; make the network with posteriors.Point\(\)"
    ):
        sghmc(wide, [(data.x, data.y)], 1)
    normed = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    point = bayesify.bayesianize(normed, "point", likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(ValueError, match="sghmc: the network has BatchNorm"):
        sghmc(point, [(data.x, data.y)], 1)
