"""The Gaussian process with inducing points against dense formulas."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest
import torch

import bayesify
from bayesify.random_features import InducingPointGP, RandomFourierFeatures
from bayesify.random_features.inducing_points import count_inducing_parameters

needs_gpytorch = pytest.mark.skipif(find_spec("gpytorch") is None, reason="gpytorch is not installed")


def data(n=25):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x[:, :1]) + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def stirred(gp):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gp.process.variational_strategy._variational_distribution.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return gp


@needs_gpytorch
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_bound_and_moments_are_the_dense_ones(covariance):
    x, y = data()
    gp = stirred(InducingPointGP(x[:6], covariance, noise=0.3, lengthscale=[0.3, 0.8], amplitude=1.3))
    q = gp.process.variational_strategy._variational_distribution()
    m, s = q.mean.detach(), q.covariance_matrix.detach()
    layer = RandomFourierFeatures(2, 2, lengthscale=[0.3, 0.8], amplitude=1.3).double()
    with torch.no_grad():
        jitter = 1e-6 * torch.eye(6, dtype=torch.float64)  # gpytorch's in double precision is at most this
        root = torch.linalg.cholesky(layer.kernel(x[:6], x[:6]) + jitter)
        a = torch.linalg.solve_triangular(root, layer.kernel(x[:6], x), upper=False)  # [M, N]
        mean = a.T @ m
        variance = layer.amplitude**2 - a.square().sum(0) + ((a.T @ s) * a.T).sum(-1)
        found_mean, found_variance = gp.function_moments(x)
        bound = gp.elbo(x, y, num_data=50)
    torch.testing.assert_close(found_mean[:, 0], mean, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found_variance[:, 0], variance, atol=1e-4, rtol=1e-4)
    error = (y[:, 0] - mean).square() + variance
    likelihood = -0.5 * (error / 0.3 + math.log(2 * math.pi * 0.3)).sum()
    kl = 0.5 * (s.trace() + m.square().sum() - 6 - torch.logdet(s))
    assert float(bound) == pytest.approx(float(2 * likelihood - kl), abs=1e-2)


@needs_gpytorch
def test_training_reaches_the_evidence_where_inducing_points_are_the_data():
    x, y = data()
    noise = 0.05
    gp = InducingPointGP(x, "full", noise=noise, lengthscale=0.5, learn_kernel=False)
    gp.process.variational_strategy.inducing_points.requires_grad_(False)
    gp.likelihood.raw_noise.requires_grad_(False)
    layer = RandomFourierFeatures(2, 2, lengthscale=0.5).double()
    covariance = (layer.kernel(x, x) + noise * torch.eye(len(x))).detach()
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), covariance).log_prob(y[:, 0])
    optimizer = torch.optim.LBFGS(
        [parameter for parameter in gp.parameters() if parameter.requires_grad],
        max_iter=200,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimizer.zero_grad()
        value = -gp.elbo(x, y, num_data=len(x))
        value.backward()
        return value

    optimizer.step(loss)
    assert float(gp.elbo(x, y, num_data=len(x)).detach()) == pytest.approx(float(evidence), abs=0.05)
    assert float(gp.elbo(x, y, num_data=len(x)).detach()) <= float(evidence) + 1e-2
    exact = layer.kernel(x, x).detach() @ torch.linalg.solve(covariance, y)
    torch.testing.assert_close(gp.predict(x).mean, exact, atol=0.02, rtol=0.02)


@needs_gpytorch
def test_starts_at_the_prior_and_counts_its_parameters():
    x, _ = data()
    gp = InducingPointGP(x[:5].float())
    assert float(gp.kl().detach()) == pytest.approx(0.0, abs=1e-5)
    mean, variance = (moment.detach() for moment in gp.function_moments(x.float()))
    torch.testing.assert_close(mean, torch.zeros_like(mean))
    torch.testing.assert_close(variance, torch.ones_like(variance), atol=2e-3, rtol=0)
    assert bayesify.count_parameters(gp) == count_inducing_parameters(5, 2, "diagonal") + 2 + 1 + 1
    assert count_inducing_parameters(5, 2, "full") == 5 * 3 + 15
    with torch.no_grad():
        chunked = gp.function_moments(x.float(), memory=1)
    torch.testing.assert_close(chunked[1], variance)


@needs_gpytorch
def test_is_stored_as_a_module(tmp_path):
    x, _ = data()
    gp = stirred(InducingPointGP(x[:5], "full"))
    bayesify.save(gp, tmp_path / "gp.safetensors")
    loaded = bayesify.load(tmp_path / "gp.safetensors", InducingPointGP(x[5:10], "full"))
    torch.testing.assert_close(loaded.predict(x).mean, gp.predict(x).mean)
    assert type(loaded) is InducingPointGP


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"inducing inputs have shape \(3,\); give \[M, D\]"):
        InducingPointGP(torch.zeros(3))
    with pytest.raises(ValueError, match="covariance='low-rank'; give 'diagonal' or 'full'"):
        InducingPointGP(torch.zeros(3, 2), "low-rank")
    with pytest.raises(ValueError, match="2 lengthscales are given for 3 inputs"):
        InducingPointGP(torch.zeros(3, 3), lengthscale=[1.0, 1.0])


def test_without_gpytorch_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ImportError, match=r"pip install 'gpytorch>="):
        InducingPointGP(torch.zeros(3, 2))
