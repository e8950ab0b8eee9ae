"""Noise and prior precision by rows that are left out, against linear models that are fitted again without each row."""

import math

import pytest
import torch
from torch import Tensor, nn

from bayesify import Laplace, likelihoods
from bayesify.laplace.leave_one_out import LeftOutRows, LinearModel, leave_out, nearest_good

N, D = 40, 6


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)


def linear_problem(rows: int = N, noise: float = 0.25) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    w = torch.randn(D, generator=generator, dtype=torch.float64)
    return x, x @ w + math.sqrt(noise) * torch.randn(rows, generator=generator, dtype=torch.float64)


def model_at(x: Tensor, y: Tensor, w: Tensor) -> tuple[LinearModel, Tensor]:
    """The linear model around some weights, and its rows in the eigenbasis."""
    values, vectors = torch.linalg.eigh(x.T @ x)
    residuals = y - x @ w
    turned = x @ vectors
    return LinearModel(values, w @ vectors, turned.T @ residuals, float(residuals.square().sum())), turned


def leverages(turned: Tensor, model: LinearModel, penalty: float) -> Tensor:
    return (turned.square() / (model.spectrum + penalty)).sum(1)


@pytest.mark.parametrize("penalty", [0.03, 0.7, 20.0])
def test_the_penalty_of_a_ridge_regression_is_found_and_its_left_out_residuals_are_exact(penalty: float) -> None:
    x, y = linear_problem()
    model, turned = model_at(x, y, ridge(x, y, penalty))
    found, ratio = model.training_penalty()
    assert (found, ratio) == (pytest.approx(penalty, rel=1e-6), 1.0)
    expected = []
    for row in range(N):
        others = torch.arange(N) != row
        expected.append(y[row] - x[row] @ ridge(x[others], y[others], penalty))
    residuals = y - x @ ridge(x, y, penalty)
    torch.testing.assert_close(residuals / (1 - leverages(turned, model, found)), torch.stack(expected))


def test_a_network_closer_to_its_rows_than_any_penalty_counts_as_the_least_one() -> None:
    x, y = linear_problem(D)
    model, _ = model_at(x, y, ridge(x, y, 1e-13))
    found, ratio = model.training_penalty()
    assert found == pytest.approx(model.penalties()[0])
    assert ratio * model.squared_error == pytest.approx(model.squared_error_at(found))


def left_out_density(x: Tensor, y: Tensor, penalty: float, noise: float, factor: float) -> float:
    """Log density of each row under the posterior of the others, around a ridge regression, by brute force."""
    total = 0.0
    for row in range(len(x)):
        others = torch.arange(len(x)) != row
        mean = x[row] @ ridge(x[others], y[others], penalty)
        precision = x[others].T @ x[others] / noise + factor * torch.eye(x.shape[1], dtype=x.dtype)
        variance = noise + x[row] @ torch.linalg.solve(precision, x[row])
        total += float(-0.5 * (torch.log(2 * math.pi * variance) + (y[row] - mean).square() / variance))
    return total


def chosen(x: Tensor, y: Tensor, penalty: float, *, moves: bool) -> tuple[float, float]:
    model, turned = model_at(x, y, ridge(x, y, penalty))
    rows = LeftOutRows(model.penalties())
    found = [leverages(turned, model, value).reshape(-1, 1, 1) for value in (penalty, *rows.penalties)]
    residuals = (y - x @ ridge(x, y, penalty)).unsqueeze(1)
    rows.add(residuals, found[0], found[1:], torch.ones(len(x), dtype=torch.float64))
    return rows.choose(moves=moves)


def test_no_other_noise_and_no_better_factor_nearer_to_one_predict_left_out_rows_better() -> None:
    x, y = linear_problem()
    y = 30 * y  # so that the prior with factor 1 is far too narrow
    noise, factor = chosen(x, y, 0.01, moves=True)
    own = left_out_density(x, y, 0.01, noise, factor)
    penalty = noise * factor
    for other in (0.9 * noise, 1.1 * noise):
        assert left_out_density(x, y, 0.01, other, penalty / other) < own
    fixed_noise, one = chosen(x, y, 0.01, moves=False)
    assert one == 1.0
    default = left_out_density(x, y, 0.01, fixed_noise, 1.0)
    assert own > default or factor == 1.0
    grid = [10 ** (power / 4) for power in range(-40, 9)]
    best = max(left_out_density(x, y, 0.01, noise * ratio, f / 1.0) for f in grid[::6] for ratio in (0.9, 1.0, 1.1))
    assert own > best - 2.0 - 1e-6


def test_the_factor_stays_one_where_rows_do_not_mind() -> None:
    x, y = linear_problem()
    noise, factor = chosen(x, y, 0.25, moves=True)
    assert factor == 1.0
    # The noise is the fixed point of the mean of squared left-out residuals times 1 - h, interpolated between penalties.
    model, turned = model_at(x, y, ridge(x, y, 0.25))
    left = 1 - leverages(turned, model, noise)
    residuals = (y - x @ ridge(x, y, 0.25)) / (1 - leverages(turned, model, 0.25))
    assert noise == pytest.approx(float((residuals.square() * left).mean()), rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"prior_precision": 1.0}])
def test_the_noise_of_a_linear_model_is_that_of_the_data(options: dict) -> None:
    """2,000 rows; an estimate of a variance has the standard error sqrt(2 / N) of it."""
    truth = 0.25
    x, y = linear_problem(2000, truth)
    net = nn.Linear(D, 1).double()
    with torch.no_grad():
        net.weight.copy_(ridge(x, y, truth))
        net.bias.zero_()
    laplace = Laplace(net, likelihoods.Gaussian(), **options).fit([(x, y[:, None])])
    noise = float(laplace.likelihood.noise.detach())
    assert abs(noise - truth) < 5 * math.sqrt(2 / 2000) * truth
    assert laplace.prior_precision == (1.0 if options else laplace.prior_precision)


def test_weights_of_rows_are_repeated_rows() -> None:
    torch.manual_seed(0)
    x, y = linear_problem()
    net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    counts = torch.randint(0, 3, (N,)).double()
    found = []
    index = torch.repeat_interleave(torch.arange(N), counts.long())
    for batch in ((x, y[:, None], counts), (x[index], y[index, None])):
        laplace = Laplace(net, likelihoods.Gaussian()).fit([batch])
        found.append(laplace.predict(x).variance)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("outputs", [1, 3])
def test_sums_of_left_out_rows_are_those_of_models_fitted_again(outputs: int) -> None:
    """Rows that count more than once, and correlated outputs of a row that are left out together, against brute force."""
    generator = torch.Generator().manual_seed(1)
    size, rows = outputs * 2, 15
    jacobian = torch.randn(rows, outputs, size, generator=generator, dtype=torch.float64)
    jacobian[:, -1] = jacobian[:, 0]  # the last output is a copy of the first one
    y = torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    counts = torch.tensor([1.0, 1.0, 3.0, 2.0, 1.5] * 3, dtype=torch.float64)
    training, penalty, eye = 0.5, 2.0, torch.eye(size, dtype=torch.float64)

    def solved(own: Tensor, amount: float) -> tuple[Tensor, Tensor]:
        matrix = torch.einsum("n,nos,not->st", own, jacobian, jacobian) + amount * eye
        return torch.linalg.solve(matrix, torch.einsum("n,nos,no->s", own, jacobian, y)), torch.linalg.inv(matrix)

    weights, spread = solved(counts, training)
    turned = [jacobian @ inverse @ jacobian.mT for inverse in (spread, solved(counts, penalty)[1])]
    found = LeftOutRows([penalty])
    found.add(y - jacobian @ weights, turned[0], turned[1:], counts)
    squares = logs = 0.0
    for row in range(rows):
        own = counts.clone()
        own[row] -= 1
        left = y[row] - jacobian[row] @ solved(own, training)[0]
        cov = torch.eye(outputs, dtype=torch.float64) + jacobian[row] @ solved(own, penalty)[1] @ jacobian[row].mT
        squares += counts[row] * left @ torch.linalg.solve(cov, left)
        logs -= counts[row] * torch.logdet(cov)
    torch.testing.assert_close(found.sums[:, 0], torch.stack([squares, logs]))
    assert float(found.count) == pytest.approx(float(counts.sum()) * outputs)


def trained_regressor(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(x.shape[1], 8), nn.Tanh(), nn.Linear(8, y.shape[1])).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net


def noise_of(net: nn.Module, loader: list) -> float:
    return float(Laplace(net, likelihoods.Gaussian()).fit(loader).likelihood.noise.detach())


@pytest.mark.parametrize("kind", ["half", "uniform", "one by N"])
def test_weights_below_one_do_not_make_the_noise_explode(kind: str) -> None:
    """A row with weight 0.5 cannot be left out once: its leverage would exceed 1. The noise then comes from the evidence."""
    x, y = linear_problem(60)
    net, y = trained_regressor(x, y[:, None]), y[:, None]
    uniform = 2 * torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = {"half": torch.full_like(uniform, 0.5), "uniform": uniform, "one by N": torch.full_like(uniform, 1 / 60)}
    found = Laplace(net, likelihoods.Gaussian()).fit([(x, y, weights[kind])]).predict(x)
    whole = Laplace(net, likelihoods.Gaussian()).fit([(x, y)]).predict(x)
    assert 0.1 < float(found.variance.mean() / whole.variance.mean()) < 10


def test_copies_of_a_target_do_not_make_it_certain() -> None:
    """Leaving out one of eight equal outputs alone would leave seven that tell its value, and intervals held 32 %."""
    x, y = linear_problem(1060)
    net = trained_regressor(x[:60], y[:60, None])
    copied = nn.Sequential(net, nn.Linear(1, 8, bias=False).double())
    with torch.no_grad():
        copied[1].weight.fill_(1.0)
    copied[1].requires_grad_(False)
    laplace = Laplace(copied, likelihoods.Gaussian()).fit([(x[:60], y[:60, None].repeat(1, 8))])
    lower, upper = laplace.predict(x[60:]).interval(0.9)
    inside = (lower[:, 0] <= y[60:]) & (y[60:] <= upper[:, 0])
    assert 0.5 < float(inside.double().mean()) < 1


def test_sorted_batches_give_the_noise_of_shuffled_ones() -> None:
    """3,000 rows whose noise rises with the input: the first 2,000 of them have less noise than all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3000, 1, generator=generator, dtype=torch.float64).sort(0).values
    y = x.sin() + x * torch.randn(3000, 1, generator=generator, dtype=torch.float64)
    net = trained_regressor(x, y)
    whole = noise_of(net, [(x, y)])
    assert noise_of(net, list(zip(x.split(50), y.split(50), strict=True))) == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("shape", [(2,), (3, 2), ()])
def test_outputs_of_any_shape_and_a_perfect_network(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    size = math.prod(shape)
    end = [nn.Unflatten(1, shape)] if len(shape) > 1 else [nn.Flatten(0)] if not shape else []
    net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, size), *end)
    x = torch.randn(50, D)
    with torch.no_grad():
        exact = net(x)
    for y in (exact + 0.1 * torch.randn(50, *shape), exact):
        found = Laplace(net, likelihoods.Gaussian()).fit([(x[:30], y[:30]), (x[30:], y[30:])]).predict(x)
        assert bool(torch.isfinite(found.variance).all() and (found.variance > 0).all())


def test_outputs_of_left_out_rows_are_exact_for_a_linear_model_with_gaussian_noise() -> None:
    x, y = linear_problem()
    noise, factor = 0.3, 2.0
    weights = ridge(x, y, noise * factor)
    precision = x.T @ x / noise + factor * torch.eye(D, dtype=torch.float64)
    spread = (x @ torch.linalg.inv(precision) * x).sum(1).reshape(N, 1, 1)
    law = likelihoods.Gaussian(noise=noise, learn=False).double()
    (mean, variance), *others = leave_out(law, (x @ weights)[:, None], y[:, None], [spread, spread])
    assert not others
    for row in range(N):
        kept = torch.arange(N) != row
        own = x[kept].T @ x[kept] / noise + factor * torch.eye(D, dtype=torch.float64)
        expected = x[row] @ ridge(x[kept], y[kept], noise * factor), x[row] @ torch.linalg.solve(own, x[row])
        # 1 - h is not below 1e-4 of itself, by which both are off.
        torch.testing.assert_close(mean[row, 0], expected[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(variance[row, 0, 0], expected[1], rtol=1e-3, atol=0.0)


def test_the_nearest_factor_among_the_good_ones() -> None:
    assert nearest_good([0.1, 1.0, 10.0], [-5.0, -4.0, -3.5], 8.0) == 10.0
    assert nearest_good([0.1, 1.0, 10.0], [-5.0, -4.0, -9.0], 8.0) == 1.0
    assert nearest_good([0.1, 1.0, 10.0], [-1.0, -4.0, -9.0], 8.0) == 0.1


def test_a_classifier_that_memorized_its_rows_becomes_less_sure_and_better() -> None:
    """Labels are random for a third of the rows, and the network is trained to fit most of them."""
    torch.manual_seed(0)
    x = torch.randn(1200, 4)
    y = torch.where(torch.rand(1200) < 0.33, torch.randint(2, (1200,)), (x[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:200]), y[:200]).backward()
        optimizer.step()
    with torch.no_grad():
        plain = -net(x[200:]).log_softmax(1).gather(1, y[200:, None]).mean()
    laplace = Laplace(net, likelihoods.Categorical()).fit([(x[:200], y[:200])])
    found = -laplace.predict(x[200:]).log_prob(y[200:]).mean()
    assert float(found) < 0.6 * float(plain)
