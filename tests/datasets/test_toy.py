import math

import pytest
import torch

from bayesify.datasets import toy


@pytest.mark.parametrize("make", [toy.cosine, toy.cubic, toy.snelson, toy.two_moons])
def test_same_seed_same_data(make):
    first, again, other = make(seed=3), make(seed=3), make(seed=4)
    for name in ("x", "y", "x_test", "y_test"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.x, other.x)
    assert first.x.dtype == torch.float32
    assert not torch.equal(first.x, first.x_test[: len(first.x)])


def test_data_do_not_touch_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    toy.cosine(seed=1), toy.two_moons(seed=1), toy.linear(seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "function", "noise_std", "stretches"),
    [
        (toy.cosine, lambda x: torch.cos(4 * x + 0.8), 0.1, [(-1.0, -0.7), (0.5, 1.0)]),
        (toy.cubic, lambda x: x**3, 3.0, [(-4.0, -2.0), (2.0, 4.0)]),
        (toy.snelson, lambda x: torch.sin(2.3 * x) - 0.6 * torch.cos(1.1 * x + 0.4), 0.28, [(0.0, 6.0)]),
    ],
)
def test_inputs_and_noise_are_as_stated(make, function, noise_std, stretches):
    n = 20_000
    made = make(num_data=n, seed=0)
    inside = torch.zeros_like(made.x, dtype=torch.bool)
    for low, high in stretches:
        part = (made.x >= low) & (made.x <= high)
        inside |= part
        share = 1 / len(stretches)
        assert abs(part.double().mean() - share) <= 5 * math.sqrt(share * (1 - share) / n) + 1e-12
        middle = made.x[part].double()
        assert abs(middle.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * len(middle))
    assert inside.all()
    residual = (made.y - function(made.x)).double()
    assert abs(residual.mean()) < 5 * noise_std / math.sqrt(n)
    # Var of a sample variance of n normals: 2 sigma^4 / n.
    assert abs(residual.var() - noise_std**2) < 5 * noise_std**2 * math.sqrt(2 / n)
    assert made.noise == pytest.approx(noise_std**2)
    torch.testing.assert_close(made.truth, function(made.grid))


@pytest.mark.parametrize("make", [toy.cosine, toy.cubic])
def test_no_input_lies_in_the_gap(make):
    made = make()
    low, high = made.gap
    for x in (made.x, made.x_test):
        assert not ((x > low) & (x < high)).any()
    assert made.grid.min() < made.x.min()
    assert made.grid.max() > made.x.max()


def test_cosine_has_fifty_points_on_each_side():
    made = toy.cosine()
    assert (made.x < 0).sum() == 50
    assert (made.x > 0).sum() == 50
    assert len(toy.cosine(num_data=1).x) == 1


def test_standardized_is_the_same_problem_in_other_units():
    raw = toy.cubic(num_data=100)
    made = raw.standardized()
    for value in (made.x, made.y):
        assert float(value.mean()) == pytest.approx(0, abs=1e-6)
        assert float(value.var(unbiased=False)) == pytest.approx(1, rel=1e-5)
    x_std, y_std = raw.x.std(unbiased=False), raw.y.std(unbiased=False)
    torch.testing.assert_close(made.x_test * x_std + raw.x.mean(), raw.x_test)
    torch.testing.assert_close(made.truth * y_std + raw.y.mean(), raw.truth, rtol=1e-4, atol=1e-4)
    assert made.noise == pytest.approx(9 / float(y_std) ** 2)
    assert made.gap[0] * float(x_std) + float(raw.x.mean()) == pytest.approx(-2.0)


def test_moons_without_noise_lie_on_their_half_circles():
    made = toy.two_moons(num_data=101, noise_std=0.0)
    upper, lower = made.x[made.y == 0], made.x[made.y == 1]
    assert (len(upper), len(lower)) == (51, 50)
    torch.testing.assert_close(upper.norm(dim=1), torch.ones(51))
    torch.testing.assert_close((lower - torch.tensor([1.0, 0.5])).norm(dim=1), torch.ones(50))
    assert (upper[:, 1] >= 0).all()
    assert (lower[:, 1] <= 0.5).all()
    assert made.y.dtype == torch.int64


def test_moons_grid_runs_row_by_row_over_the_box():
    made = toy.two_moons()
    grid = made.grid(5).view(5, 5, 2)
    left, right, low, high = made.box
    torch.testing.assert_close(grid[0, :, 0], torch.linspace(left, right, 5))
    torch.testing.assert_close(grid[:, 0, 1], torch.linspace(low, high, 5))
    assert made.x[:, 0].min() > left
    assert made.x[:, 0].max() < right
    assert made.x[:, 1].min() > low
    assert made.x[:, 1].max() < high


@pytest.mark.parametrize(("num_data", "num_features"), [(12, 3), (2, 5)])
def test_evidence_is_that_of_a_dense_normal(num_data, num_features):
    made = toy.linear(num_data, num_features, prior_std=0.7, noise=0.2, seed=5)
    x, y = made.x.double(), made.y.double()[:, 0]
    covariance = 0.2 * torch.eye(num_data, dtype=torch.float64) + 0.49 * x @ x.T
    dense = torch.distributions.MultivariateNormal(torch.zeros(num_data, dtype=torch.float64), covariance)
    assert made.posterior.log_evidence == pytest.approx(float(dense.log_prob(y)), abs=1e-9)


def test_posterior_is_the_conditional_of_the_joint_normal():
    made = toy.linear(8, 4, noise=0.3, seed=1)
    prior_std = torch.tensor([0.5, 1.0, 2.0, 0.1])
    found = toy.linear_posterior(made.x, made.y, prior_std, 0.3)
    x, y = made.x.double(), made.y.double()[:, 0]
    prior = torch.diag(prior_std.double().square())
    gain = prior @ x.T @ torch.linalg.inv(x @ prior @ x.T + 0.3 * torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(found.mean, gain @ y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.covariance, prior - gain @ x @ prior, rtol=1e-9, atol=1e-11)


def test_posterior_of_many_data_finds_the_weights():
    made = toy.linear(5000, 3, noise=0.5, seed=2)
    error = (made.posterior.mean - made.weight.double()).abs()
    assert (error < 5 * made.posterior.covariance.diagonal().sqrt()).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: toy.cosine(num_data=0), "num_data=0; give an integer of at least 1"),
        (lambda: toy.two_moons(noise_std=-1.0), "noise_std=-1.0"),
        (lambda: toy.linear(noise=0.0), "noise=0.0"),
        (lambda: toy.linear(prior_std=-1.0), "prior_std=-1.0"),
        (lambda: toy.linear_posterior(torch.ones(3, 2), torch.ones(4), 1.0, 1.0), "do not match"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
