"""Written-out gradients of diagonal Gaussians against finite differences and autograd."""

from __future__ import annotations

import math

import pytest
import torch

from bayesify.maths.gaussian import diagonal_moments, draw_diagonals, standard_kl

SHAPES, PRIOR_STDS = [(2, 3), (4,)], [0.5, 2.0]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in (*SHAPES, *SHAPES)
    ]


def expected_kl(values):
    means, log_stds = values[:2], values[2:]
    parts = zip(means, log_stds, PRIOR_STDS, strict=True)
    return sum((math.log(p) - s + (m**2 + (2 * s).exp()) / (2 * p**2) - 0.5).sum() for m, s, p in parts)


@pytest.mark.parametrize("num_draws", [1, 3])
def test_draws(num_draws):
    values = parameters()
    noise = [torch.randn(num_draws, *shape, dtype=torch.float64) for shape in SHAPES]

    def run(*given):
        draws, kl = draw_diagonals(list(given[:2]), list(given[2:]), noise, PRIOR_STDS)
        return (*draws, kl)

    assert torch.autograd.gradcheck(run, values)
    *draws, kl = run(*values)
    torch.testing.assert_close(kl, expected_kl(values))
    for draw, mean, log_std, eps in zip(draws, values[:2], values[2:], noise, strict=True):
        torch.testing.assert_close(draw, mean + log_std.exp() * eps)


def test_moments():
    values = parameters()

    def run(*given):
        means, variances, kl = diagonal_moments(list(given[:2]), list(given[2:]), PRIOR_STDS)
        return (*means, *variances, kl)

    assert torch.autograd.gradcheck(run, values)
    *moments, kl = run(*values)
    torch.testing.assert_close(kl, expected_kl(values))
    for variance, log_std in zip(moments[2:], values[2:], strict=True):
        torch.testing.assert_close(variance, (2 * log_std).exp())


@pytest.mark.parametrize("only", ["draws", "kl"])
def test_gradients_where_one_output_is_unused(only):
    values = parameters()
    noise = [torch.randn(2, *shape, dtype=torch.float64) for shape in SHAPES]
    draws, kl = draw_diagonals(values[:2], values[2:], noise, PRIOR_STDS)
    loss = kl if only == "kl" else sum(draw.square().sum() for draw in draws)
    plain = [mean + log_std.exp() * eps for mean, log_std, eps in zip(values[:2], values[2:], noise, strict=True)]
    reference = expected_kl(values) if only == "kl" else sum(draw.square().sum() for draw in plain)
    for one, other in zip(torch.autograd.grad(loss, values), torch.autograd.grad(reference, values), strict=True):
        torch.testing.assert_close(one, other)


def test_kl_to_standard_normal_numbers() -> None:
    """Against torch's distributions; with its gradients, once and twice, and under `vmap`."""
    std, mean = torch.rand(3, 4, dtype=torch.float64) + 0.2, torch.randn(3, 4, dtype=torch.float64)
    counts = torch.tensor([[2.0], [7.0], [1.0]], dtype=torch.float64).expand(3, 4)
    normal = torch.distributions.Normal
    terms = torch.distributions.kl_divergence(normal(mean, std), normal(0.0, 1.0))
    torch.testing.assert_close(standard_kl(std, mean), terms.sum())
    centered = torch.distributions.kl_divergence(normal(0.0, std), normal(0.0, 1.0))
    torch.testing.assert_close(standard_kl(std, counts=counts), (counts * centered).sum())
    learned = (std.requires_grad_(), mean.requires_grad_())
    assert torch.autograd.gradcheck(standard_kl, learned)
    assert torch.autograd.gradgradcheck(lambda *given: standard_kl(*given, counts), learned)
    torch.testing.assert_close(torch.func.vmap(standard_kl)(*learned), terms.sum(1))
    one = torch.func.vmap(torch.func.grad(standard_kl))(*learned)
    torch.testing.assert_close(one, std - 1 / std)
