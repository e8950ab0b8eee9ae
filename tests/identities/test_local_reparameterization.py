"""Local reparameterisation keeps each example's distribution over outputs: mean and variance in closed form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, convert, generator
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths.noise import NoiseSource
from bayesify.weights.local_gaussian import LocalGaussian

LEAVES = {
    "linear": (nn.Linear(3, 2), (3,)),
    "positions": (nn.Linear(3, 2), (4, 3)),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2, stride=2, padding=1), (4, 5)),
    "conv2d": (nn.Conv2d(2, 3, 2, dilation=2, bias=False), (2, 4, 4)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 3, 3)),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 3, 3)),
}


def dense_moments(module: nn.Module, part: posteriors.MeanField, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a layer's output for one example, from the Jacobian by every single weight."""
    mean, variance = part.mean(), part.variance()
    names = list(mean)

    def run(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    values = tuple(mean[name].detach() for name in names)
    jacobians = torch.autograd.functional.jacobian(run, values)
    output = run(*values)
    spread = sum(
        (jacobian.square() * variance[name].detach()).flatten(output.ndim).sum(-1)
        for name, jacobian in zip(names, jacobians, strict=True)
    )
    return output, torch.as_tensor(spread)


class Constant(NoiseSource):
    """One number in place of random ones."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def normal(self, count: int, like: Tensor) -> Tensor:
        return torch.full((count,), self.value, dtype=like.dtype)


@pytest.mark.parametrize("name", LEAVES)
def test_moments_of_one_example(name: str) -> None:
    """Noise of 0 gives the mean, noise of 1 adds one standard deviation."""
    module, shape = LEAVES[name]
    module = module.double()
    bnn = bayesify.bayesianize(module, posteriors.MeanField(init_std=0.3, local_reparameterization=True))
    part = bnn.posterior
    assert isinstance(part, posteriors.MeanField)
    x = torch.randn(1, *shape, dtype=torch.float64)
    expected_mean, expected_variance = dense_moments(module, part, x)

    def with_noise(value: float) -> Tensor:
        with torch.no_grad():
            draws = bnn.draw(1, generator=Constant(value), local=True)
            assert all(isinstance(weight, LocalGaussian) for weight in draws.weights.values())
            output: Tensor = draws(x)[0]
        return output

    mean, shifted = with_noise(0.0), with_noise(1.0)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close((shifted - mean).square(), expected_variance, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "positions", "conv1d"])
def test_gradients_of_the_local_rule(name: str) -> None:
    """The hand-written backward pass against finite differences, with the same noise in every call."""
    module, shape = LEAVES[name]
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    weight = module.weight.detach().double().requires_grad_()
    bias = module.bias.detach().double().requires_grad_()
    spread = (0.1 + torch.rand_like(weight)).detach().requires_grad_()
    bias_spread = (0.1 + torch.rand_like(bias)).detach().requires_grad_()

    def run(x: Tensor, weight: Tensor, spread: Tensor, bias: Tensor, bias_spread: Tensor) -> Tensor:
        fixed = generator(4)
        local, local_bias = LocalGaussian(weight, spread, fixed), LocalGaussian(bias, bias_spread, fixed)
        if name == "conv1d":
            return F.conv1d(x, local, local_bias, stride=2, padding=1, groups=2)
        return F.linear(x, local, local_bias)

    assert torch.autograd.gradcheck(run, (x, weight, spread, bias, bias_spread))


def test_only_the_training_objective_uses_it() -> None:
    bnn = convert("mean_field", CASES["linear"], local_reparameterization=True)
    bnn.likelihood = likelihoods.Gaussian()
    x = torch.randn(1, 3).expand(6, -1)
    with torch.no_grad():
        local = bnn.draw(1, generator=generator(), local=True)(x)[0]
        assert not torch.allclose(local[0], local[1]), "examples have noise of their own in training"
        for outputs in (bnn(x), bnn.draw(2)(x)[1], bnn.predict(x, 2).outputs[0]):
            torch.testing.assert_close(outputs[0], outputs[1]), "a prediction is a function of x"


def test_the_objective_is_unbiased() -> None:
    """One layer with a Gaussian likelihood: E of the data term is the closed form; n = 4000, k = 5 standard errors."""
    n, k = 4000, 5.0
    net = nn.Linear(3, 1).double()
    bnn = bayesify.bayesianize(
        net,
        posteriors.MeanField(init_std=0.4, local_reparameterization=True),
        likelihood=likelihoods.Gaussian(noise=0.5, learn=False),
    )
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    with torch.no_grad():
        terms, _ = bnn.elbo_terms(x, y, num_data=5, num_draws=n, generator=generator())
        spread = 0.16 * (x.square().sum(-1, keepdim=True) + 1)
        exact = -0.5 * (((y - net(x)).square() + spread) / 0.5 + torch.log(torch.tensor(2 * torch.pi * 0.5))).sum()
    assert abs(float(terms.mean() - exact)) < k * float(terms.std()) / n**0.5


def test_a_tied_weight_is_drawn_once() -> None:
    """Two uses of one weight must see one value, so a tied weight is never local."""
    bnn = convert("mean_field", CASES["tied"], local_reparameterization=True)
    weights = bnn.draw(1, generator=generator(), local=True).weights
    assert not isinstance(weights["embedding.weight"], LocalGaussian)
    assert isinstance(weights["body.weight"], LocalGaussian)


def test_a_formed_weight_is_the_same_in_every_use() -> None:
    """A cell uses its weights at each step: one draw of them is one function of the sequence."""
    case = CASES["gru_cell"]
    bnn = convert("mean_field", case, local_reparameterization=True)
    x = case.batch()[0]
    with torch.no_grad():
        draw = bnn.draw(1, generator=generator(), local=True)[0]
        output = draw(x)
        formed = {name: weight.materialize() for name, weight in draw.weights.items()}
        torch.testing.assert_close(output, torch.func.functional_call(bnn.network, formed, (x,)))
