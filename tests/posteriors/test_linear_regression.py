"""Short optimisations of `bnn.elbo` that end at a known optimum: Bayesian linear regression."""

from collections.abc import Iterable

import torch
from cases import generator
from dense_reference import LinearRegression, gaussian
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors

STEPS, DRAWS = 500, 512


def train(posterior: posteriors.Posterior, problem: LinearRegression) -> tuple[BayesianNetwork, Tensor, Tensor]:
    """Adam on the stochastic ELBO with antithetic pairs and a learning rate that decays to 1e-4 of its start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = nn.Linear(problem.x.shape[1], 1).double()
    bnn = bayesify.bayesianize(
        net,
        posterior,
        likelihood=likelihoods.Gaussian(noise=problem.noise, learn=False),
        prior=priors.Gaussian(problem.prior_variance**0.5),
    )
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1e-4 ** (1 / STEPS))
    noise = generator(6)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = -bnn.elbo(
            problem.x, problem.y, num_data=len(problem.y), num_draws=DRAWS, generator=noise, antithetic=True
        )
        loss.backward()
        optimizer.step()
        schedule.step()
    return bnn, *gaussian(bnn.posterior)


def test_full_covariance_reaches_the_exact_posterior() -> None:
    """With antithetic pairs the gradient of the mean has no noise, since the log-likelihood is quadratic: 1e-3 of a
    posterior standard deviation is optimisation error. That of the factor has relative noise of about
    sqrt(2 / DRAWS) = 0.06 a step, averaged over the last steps by the decay: 0.06 / sqrt(80) = 0.007, and 3 % is more than
    four of those."""
    problem = LinearRegression()
    bnn, mean, covariance = train(posteriors.FullCovariance(init_std=0.05), problem)
    std = problem.covariance.diagonal().sqrt()
    assert float(((mean - problem.mean) / std).abs().max()) < 1e-3
    scaled = (covariance - problem.covariance) / torch.outer(std, std)
    assert float(scaled.abs().max()) < 0.03
    bound = problem.expected_log_likelihood(mean, covariance) - bnn.kl().detach()
    assert 0 <= float(problem.log_evidence - bound) < 2e-3  # second order in the errors above


def test_mean_field_reaches_the_known_optimum() -> None:
    """Mean exact, variance 1 / diag(precision), not the marginal variance. Tolerances as above."""
    problem = LinearRegression()
    _, mean, covariance = train(posteriors.MeanField(init_std=0.05), problem)
    std = problem.covariance.diagonal().sqrt()
    assert float(((mean - problem.mean) / std).abs().max()) < 1e-3
    ratio = covariance.diagonal() * problem.precision.diagonal()
    assert float((ratio - 1).abs().max()) < 0.03
    marginal = problem.covariance.diagonal() * problem.precision.diagonal()
    assert float(marginal.max()) > 1.2, "the problem must tell the two optima apart"


def minimize(bnn: bayesify.BayesianNetwork, problem: LinearRegression, parameters: Iterable[nn.Parameter]) -> None:
    """Minimize the negative bound in some parameters to rounding errors."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -bnn.elbo(problem.x, problem.y, num_data=len(problem.y))
        value.backward()
        return value

    optimizer.step(loss)


def test_point_reaches_the_posterior_mode() -> None:
    problem = LinearRegression()
    bnn = bayesify.bayesianize(
        nn.Linear(3, 1).double(),
        posteriors.Point(),
        likelihood=likelihoods.Gaussian(noise=problem.noise, learn=False),
        prior=priors.Gaussian(1.0),
    )
    minimize(bnn, problem, bnn.parameters())
    weights = bnn.posterior.mean()
    found = torch.cat([weights["weight"].flatten(), weights["bias"]])
    torch.testing.assert_close(found.detach(), problem.mean, rtol=1e-8, atol=1e-8)


def test_learned_noise_reaches_its_maximum_likelihood() -> None:
    """With the weights held at w the best variance is the mean squared residual."""
    problem = LinearRegression()
    net = nn.Linear(3, 1).double()
    bnn = bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihoods.Gaussian(noise=1.0))
    assert isinstance(bnn.likelihood, likelihoods.Gaussian)
    minimize(bnn, problem, bnn.likelihood.parameters())
    with torch.no_grad():
        residual = (net(problem.x)[:, 0] - problem.y).square().mean()
    torch.testing.assert_close(bnn.likelihood.noise.detach(), residual, rtol=1e-6, atol=0)
