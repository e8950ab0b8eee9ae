"""Random Fourier features against the kernel that they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from bayesify.random_features import RandomFeatureNetwork, RandomFourierFeatures


def test_inner_products_converge_to_the_kernel_at_the_monte_carlo_rate():
    x = torch.rand(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for m in (100, 10_000):
        generator = torch.Generator().manual_seed(m)
        layer = RandomFourierFeatures(
            3, 2 * m, lengthscale=[0.3, 0.5, 1.0], amplitude=1.5, generator=generator
        ).double()
        features = layer(x).detach()
        products, kernel = features @ features.T, layer.kernel(x, x).detach()
        # One frequency gives a^2 cos(t), t ~ N(0, 2 log(a^2 / k)): its variance is a^4 (1 - r^2)^2 / 2 with r = k / a^2.
        a2 = 1.5**2
        error = a2 * (1 - (kernel / a2).square()) / math.sqrt(2 * m)
        assert bool(((products - kernel).abs() <= 5 * error + 1e-6).all())
        off = ~torch.eye(6, dtype=torch.bool)
        # 15 pairs: errors as large as the Monte Carlo rate says, neither far larger nor far smaller.
        ratio = ((products - kernel)[off] / error[off]).square().mean().sqrt()
        assert 0.3 < float(ratio) < 5


def test_a_point_with_itself_has_no_error():
    layer = RandomFourierFeatures(2, 4, amplitude=0.7)
    x = torch.rand(5, 2)
    torch.testing.assert_close(layer(x).square().sum(-1), torch.full((5,), 0.49))


def test_kernel_is_the_squared_exponential():
    layer = RandomFourierFeatures(2, 2, lengthscale=[0.5, 2.0], amplitude=3.0).double()
    x, other = torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    expected = 9.0 * math.exp(-0.5 * (1 / 0.25 + 1 / 4))
    assert float(layer.kernel(x, other).detach()) == pytest.approx(expected, rel=1e-6)


def test_start_is_the_papers():
    layer = RandomFourierFeatures(8, 16)
    torch.testing.assert_close(layer.lengthscale, torch.full((8,), math.sqrt(8) / 2))
    assert float(layer.amplitude.detach()) == pytest.approx(1.0)
    assert layer.frequencies.shape == (8, 8)
    assert {name for name, _ in layer.named_parameters()} == {"raw_lengthscale", "raw_amplitude"}
    fixed = RandomFourierFeatures(8, 16, learn=False)
    assert not any(parameter.requires_grad for parameter in fixed.parameters())


def test_network_is_linear_in_its_features():
    net = RandomFeatureNetwork(3, 10, num_outputs=2)
    x = torch.rand(4, 3)
    expected = net.features(x) @ torch.cat([head.weight for head in net.heads]).T
    torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_inputs": 0}, "num_inputs=0; give an integer of at least 1"),
        ({"num_features": 7}, "num_features=7; give an even number"),
        ({"num_features": 0}, "num_features=0; give an integer of at least 1"),
        ({"lengthscale": 0.0}, "lengthscale=0.0; give a positive number"),
        ({"lengthscale": [1.0, 2.0, 3.0]}, "3 lengthscales are given for 2 inputs"),
        ({"amplitude": -1.0}, "amplitude=-1.0; give a positive number"),
        ({"amplitude": math.nan}, "amplitude=nan; give a positive number"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomFourierFeatures(**{"num_inputs": 2, "num_features": 8, **arguments})


def test_inputs_of_another_number():
    with pytest.raises(ValueError, match="3 columns; give 2"):
        RandomFourierFeatures(2, 8)(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="num_outputs=0"):
        RandomFeatureNetwork(2, 8, num_outputs=0)
