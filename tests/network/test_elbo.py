"""The ELBO in nats over the whole dataset: mini-batches, weights, and Bayesian linear regression in closed form."""

from __future__ import annotations

import pytest
import torch
from cases import POSTERIORS, Case, convert, generator, mlp
from dense_reference import LinearRegression, gaussian
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors

PLAIN = Case("mlp", mlp, lambda size: (torch.randn(size, 3),))


@pytest.mark.parametrize("name", POSTERIORS)
def test_mini_batches_average_to_the_full_elbo(name: str) -> None:
    """sum_k (B_k / N) elbo_k = elbo, for batches of unequal size and the same draws in each."""
    bnn = convert(name, PLAIN, torch.float64)
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randn(11, 2, dtype=torch.float64)
    with torch.no_grad():
        full = bnn.elbo(x, y, num_data=11, num_draws=3, kl_weight=0.7, generator=generator(1))
        parts = [
            len(rows) / 11 * bnn.elbo(x[rows], y[rows], num_data=11, num_draws=3, kl_weight=0.7, generator=generator(1))
            for rows in torch.arange(11).split([5, 4, 2])
        ]
    torch.testing.assert_close(torch.stack(parts).sum(), full, rtol=1e-12, atol=1e-10)


def test_terms() -> None:
    """elbo = N/B sum_b w_b log p(y_b | f_s) averaged over draws, less the weighted KL, from plain forward passes."""
    bnn = convert("mean_field", PLAIN, torch.float64)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    weights = torch.rand(5, dtype=torch.float64)
    with torch.no_grad():
        draws = bnn.draw(4, generator=generator(2))
        expected = torch.zeros((), dtype=torch.float64)
        for draw in draws:
            noise = bnn.likelihood.noise.sqrt()  # type: ignore[union-attr]
            log_prob = torch.distributions.Normal(draw(x), noise).log_prob(y).sum(-1)
            expected += (20 / 5 * (weights * log_prob).sum() - 0.3 * bnn.kl()) / 4
        actual = bnn.elbo(
            x, y, num_data=20, num_draws=4, kl_weight=0.3, example_weights=weights, generator=generator(2)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_point_elbo_is_the_map_objective() -> None:
    bnn = convert("point", PLAIN, torch.float64)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    data, penalty = bnn.map_terms(x, y, num_data=9)
    torch.testing.assert_close(bnn.elbo(x, y, num_data=9), (data - penalty).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(bnn.map_objective(x, y, num_data=9), (data - penalty).sum(), rtol=1e-12, atol=0)


def regression_network(posterior: posteriors.Posterior, problem: LinearRegression) -> BayesianNetwork:
    net = nn.Linear(problem.x.shape[1], 1).double()
    return bayesify.bayesianize(
        net,
        posterior,
        likelihood=likelihoods.Gaussian(noise=problem.noise, learn=False),
        prior=priors.Gaussian(problem.prior_variance**0.5),
    )


def exact_elbo(bnn: BayesianNetwork, problem: LinearRegression) -> Tensor:
    mean, covariance = gaussian(bnn.posterior)
    return problem.expected_log_likelihood(mean, covariance) - bnn.kl().detach()


def set_factor(part: posteriors.FullCovariance, mean: Tensor, covariance: Tensor) -> None:
    factor = torch.linalg.cholesky(covariance)
    (name,) = part.mean_value
    rows, cols = torch.tril_indices(len(mean), len(mean), -1)
    with torch.no_grad():
        part.mean_value[name].copy_(mean)
        part.lower[name].copy_((factor / factor.diagonal()[:, None])[rows, cols])
        part.raw_diagonal[name].copy_(torch.log(torch.expm1(factor.diagonal())))


@pytest.mark.parametrize("prior_variance", [1.0, 0.2])
@pytest.mark.parametrize(
    "posterior",
    [posteriors.MeanField(0.2), posteriors.FullCovariance(0.2), posteriors.MatrixNormal(0.2), posteriors.KTied(2, 0.2)],
    ids=lambda posterior: posterior.name,
)
def test_elbo_never_exceeds_the_evidence(posterior: posteriors.Posterior, prior_variance: float) -> None:
    problem = LinearRegression(prior_variance=prior_variance)
    bnn = regression_network(posterior, problem)
    for size in (0.0, 0.01, 0.1, 0.5, 2.0):
        with torch.no_grad():
            for parameter in bnn.posteriors.parameters():
                parameter += size * torch.randn_like(parameter)
        assert exact_elbo(bnn, problem) < problem.log_evidence


def test_the_exact_posterior_attains_the_evidence() -> None:
    problem = LinearRegression()
    bnn = regression_network(posteriors.FullCovariance(), problem)
    part = bnn.posterior
    assert isinstance(part, posteriors.FullCovariance)
    set_factor(part, problem.mean, problem.covariance)
    assert exact_elbo(bnn, problem).item() == pytest.approx(problem.log_evidence.item(), abs=1e-8)


def test_mean_field_falls_short_by_the_correlation() -> None:
    """At its optimum (mean exact, variance 1 / diag(precision)) the gap is half the log-determinant of the correlations."""
    problem = LinearRegression()
    bnn = regression_network(posteriors.MeanField(), problem)
    part = bnn.posterior
    assert isinstance(part, posteriors.MeanField)
    variance = 1 / problem.precision.diagonal()
    with torch.no_grad():
        part.mean_value["weight"].copy_(problem.mean[None, :-1])
        part.mean_value["bias"].copy_(problem.mean[-1:])
        part.raw_std["weight"].copy_(0.5 * variance[None, :-1].log())
        part.raw_std["bias"].copy_(0.5 * variance[-1:].log())
    gap = 0.5 * (torch.logdet(problem.covariance) - variance.log().sum())
    assert gap > 0.01
    expected = problem.log_evidence - gap
    assert exact_elbo(bnn, problem).item() == pytest.approx(expected.item(), abs=1e-8)


@pytest.mark.parametrize("antithetic", [False, True])
def test_elbo_estimates_the_exact_one(antithetic: bool) -> None:
    """`elbo` over n = 4000 draws against the closed form, k = 5 standard errors of the (paired) draws."""
    n, k = 4000, 5.0
    problem = LinearRegression()
    bnn = regression_network(posteriors.FullCovariance(init_std=0.1), problem)
    with torch.no_grad():
        terms, kl = bnn.elbo_terms(
            problem.x, problem.y, num_data=30, num_draws=n, generator=generator(3), antithetic=antithetic
        )
        each = (terms - kl).reshape(-1, 2).mean(1)
    error = abs(float(each.mean() - exact_elbo(bnn, problem)))
    assert error < k * float(each.std()) / (n / 2) ** 0.5
