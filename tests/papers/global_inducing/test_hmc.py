"""Hamiltonian Monte Carlo side by side draws from the posteriors that are known."""

import math

import pytest
import torch
from bayesify_papers.global_inducing import hmc

from bayesify.datasets import toy


def test_draws_have_the_moments_of_linear_regression() -> None:
    """Two problems in four chains each; batch means over 10 stretches of 50 draws give standard errors, k = 5."""
    problems = [toy.linear(12, 2, prior_std=math.sqrt(0.5), noise=0.5, seed=seed) for seed in (0, 1)]
    x, y = (torch.stack(part).repeat_interleave(4, 0) for part in ([p.x for p in problems], [p.y for p in problems]))
    posterior = hmc.Posterior((2, 1), x, y, torch.full((8,), 0.5))
    drawn = hmc.sample(posterior, num_warmup=100, num_draws=500, leapfrogs=4, step_size=0.3)  # [500, 8, 3]
    ones = torch.ones(12, 1)
    for index, problem in enumerate(problems):
        design = torch.cat((problem.x, ones), 1)  # the bias has the weights' prior
        exact = toy.linear_posterior(design, problem.y, math.sqrt(0.5), 0.5)
        weights = drawn[:, 4 * index : 4 * index + 4] * math.sqrt(0.5)
        for power, wanted in ((1, exact.mean), (2, exact.covariance.diagonal() + exact.mean.square())):
            parts = (weights**power).unflatten(0, (10, 50)).mean(1).flatten(0, 1)  # [40, 3]
            error = parts.std(0) / math.sqrt(len(parts))
            assert bool(((parts.mean(0) - wanted).abs() < 5 * error).all())


def test_gradients_are_those_of_the_density_and_chains_are_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5, 2, generator=generator), torch.randn(2, 5, 1, generator=generator)
    posterior = hmc.Posterior((2, 3, 1), x, y, torch.tensor([0.2, 0.4]))
    position = torch.randn(2, sum(posterior.numbers), generator=generator, dtype=torch.float64)
    value, grad = posterior.gradient(position)
    moved = position.clone()
    moved[0, 4] += 1e-6
    after, _ = posterior.gradient(moved)
    assert float(after[0] - value[0]) / 1e-6 == pytest.approx(float(grad[0, 4]), rel=1e-4)
    assert float(after[1]) == float(value[1])


def test_shrink_factor_is_1_for_chains_that_agree_and_large_for_others() -> None:
    values = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    assert hmc.shrink_factor(values) == pytest.approx(1.0, abs=0.02)
    assert hmc.shrink_factor(values + torch.arange(4)) > 1.5
