"""Microcanonical sampling against exact posteriors, another sampler, and densities written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.baselines import Chains, microcanonical
from bayesify.baselines.microcanonical import sampler_of
from bayesify.datasets import toy
from bayesify.predictor import Batch


def linear(data: toy.Linear, members: int = 8) -> bayesify.BayesianNetwork:
    torch.manual_seed(0)
    net = nn.Linear(data.x.shape[1], 1, bias=False)
    likelihood = likelihoods.Gaussian(noise=data.noise, learn=False)
    ensemble = posteriors.Ensemble(members)
    return bayesify.bayesianize(net, ensemble, likelihood=likelihood, prior=priors.Gaussian(data.prior_std))


@pytest.mark.parametrize("adjust", [True, False])
def test_mean_and_covariance_are_the_exact_ones(adjust: bool) -> None:
    """Within 5 standard errors of as many independent draws as the chains say; without `adjust` 4 % of bias are allowed as well."""
    data = toy.linear(num_data=8, num_features=4, noise=0.5)
    chains = microcanonical(linear(data), data.x, data.y, num_draws=120, num_warmup=40, adjust=adjust, seed=0)
    told = chains.diagnostics(data.x)
    assert told.passed
    assert told.energy_error < (0.6 if adjust else 0.1)
    assert told.acceptance == (pytest.approx(0.9, abs=0.06) if adjust else 1.0)
    weights, exact = chains.draws.weights["weight"][:, 0].double(), data.posterior
    effective = min(told.effective_draws, told.log_density_effective_draws)
    std = exact.covariance.diagonal().sqrt()
    assert ((weights.mean(0) - exact.mean).abs() < 5 * std / effective**0.5).all()
    variances = std.square()
    spread = (variances[:, None] * variances + exact.covariance.square()).sqrt() / effective**0.5
    bias = 0 if adjust else 0.04 * variances.max()
    assert ((weights.mT.cov() - exact.covariance).abs() < 5 * spread + bias).all()
    assert bool(spread[0, 0] * 5 < variances[0])  # the test can fail


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.slow
def test_functions_are_those_of_the_no_u_turn_sampler() -> None:
    """Means and standard deviations of functions, within 5 standard errors of both; 100 effective draws of the other chain."""
    pytest.importorskip("pyro")
    from bayesify.baselines import nuts

    x = torch.linspace(-1, 1, 8)[:, None]
    y, asked = torch.sin(2 * x), torch.tensor([[-2.0], [0.0], [2.0]])
    torch.manual_seed(0)
    given = {"likelihood": likelihoods.Gaussian(0.25, learn=False), "prior": priors.Neal(1.5)}
    chains = microcanonical(
        bayesify.bayesianize(perceptron(), posteriors.Ensemble(8), **given), x, y, num_draws=80, num_warmup=30
    )
    ours = chains.functions(asked).flatten(0, 1)[..., 0].double()
    point = bayesify.bayesianize(perceptron(), posteriors.Point(), **given)
    theirs = nuts(point, x, y, num_draws=200, num_warmup=60, max_tree_depth=6)(asked)[..., 0].double()
    error = theirs.std(0) * (1 / 100 + 1 / chains.diagnostics(asked).effective_draws) ** 0.5
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * error).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 5 * error).all()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def categorical(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.log_softmax(-1)[torch.arange(len(y)), y]


def heteroscedastic(outputs: Tensor, y: Tensor) -> Tensor:
    return Normal(outputs[:, :1], (0.5 * outputs[:, 1:]).exp()).log_prob(y)[:, 0]


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    return Normal(outputs, 0.5).log_prob(y)[:, 0]


CASES = {
    "perceptron": (perceptron, likelihoods.Gaussian(0.25), gaussian, (1,)),
    "convolution": (convolution, likelihoods.Categorical(), categorical, (1, 3, 3)),
    "other noise": (lambda: nn.Linear(2, 2), likelihoods.HeteroscedasticGaussian(), heteroscedastic, (2,)),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_density_and_gradient_are_those_of_the_posterior(case: str, weighted: bool) -> None:
    """Written out with torch's distributions; what training maximizes has other gradients where the network says the noise."""
    make, likelihood, density, shape = CASES[case]
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(
        make().double(), posteriors.Ensemble(3), likelihood=likelihood, prior=priors.Gaussian(2.0)
    )
    x = torch.randn(5, *shape, dtype=torch.float64)
    y = torch.tensor([0, 2, 1, 1, 0]) if case == "convolution" else torch.randn(5, 1, dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64) if weighted else None
    sampler, shapes = sampler_of(bnn, Batch(x, y, weights))
    positions = sampler.position.clone()
    found, slope = sampler.slope(positions)
    net, scale = make().double(), 2.0
    for chain in range(3):
        z = positions[chain].clone().requires_grad_()
        parts = (scale * z).split([math.prod(size) for size in shapes.values()])
        named = {name: part.view(size) for (name, size), part in zip(shapes.items(), parts, strict=True)}
        each = density(torch.func.functional_call(net, named, (x,)), y)
        joint = (each if weights is None else each * weights).sum() + Normal(0.0, scale).log_prob(scale * z).sum()
        torch.testing.assert_close(found[chain], joint.detach())
        torch.testing.assert_close(slope[chain], torch.autograd.grad(joint, z)[0])


def test_an_interrupted_run_continues_to_the_same_draws(tmp_path: Path) -> None:
    data = toy.linear(num_data=8)
    bnn, options = linear(data, 3), {"num_warmup": 4, "thin": 2, "max_steps": 8, "seed": 3}
    before = torch.get_rng_state()
    whole = microcanonical(bnn, data.x, data.y, num_draws=6, **options)
    assert torch.equal(before, torch.get_rng_state())
    path = tmp_path / "chains.safetensors"
    for count in (2, 6):
        parts = microcanonical(bnn, data.x, data.y, num_draws=count, checkpoint=path, **options)
    assert torch.equal(whole.draws.weights["weight"], parts.draws.weights["weight"])
    assert torch.equal(whole.log_density, parts.log_density)
    with pytest.raises(ValueError, match="was written with"):
        microcanonical(bnn, data.x, data.y, checkpoint=path, max_steps=8, num_warmup=5)
    with pytest.raises(ValueError, match="written with different data"):
        microcanonical(bnn, data.x, data.y + 1, checkpoint=path, **options)
    with pytest.raises(ValueError, match="a different network or a different number of members"):
        microcanonical(linear(data, 2), data.x, data.y, checkpoint=path, **options)


def test_chains_are_saved_with_their_diagnostics(tmp_path: Path) -> None:
    data = toy.linear(num_data=8)
    chains = microcanonical(linear(data, 2), data.x, data.y, num_draws=6, num_warmup=3, max_steps=8)
    bayesify.save(chains, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", nn.Linear(3, 1, bias=False))
    assert isinstance(loaded, Chains)
    assert loaded.num_chains == 2
    assert loaded.diagnostics(data.x) == chains.diagnostics(data.x)
    assert torch.equal(loaded.predict(data.x).mean, chains.predict(data.x).mean)


def test_what_cannot_be_sampled_is_refused_with_a_remedy() -> None:
    data = toy.linear(num_data=4, num_features=2)
    point = bayesify.bayesianize(nn.Linear(2, 1), "point", likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(TypeError, match=r"microcanonical: the posterior is not an Ensemble; make the network with"):
        microcanonical(point, data.x, data.y)
    with pytest.raises(ValueError, match="targets are not finite; remove the rows with these targets"):
        microcanonical(linear(data), data.x, data.y.clone().fill_(float("inf")))
    with pytest.raises(ValueError, match="the network has only 1 weight"):
        microcanonical(linear(toy.linear(num_data=4, num_features=1)), data.x[:, :1], data.y)
    with pytest.raises(ValueError, match="one number per draw"):
        Chains(point.draw(3), likelihoods.Gaussian(), log_density=torch.zeros(2, 2))
    for wrong in (torch.zeros(2), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="one finite number per chain"):
            Chains(point.draw(3), likelihoods.Gaussian(), acceptance=wrong)
