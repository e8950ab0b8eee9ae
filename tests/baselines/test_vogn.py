"""VOGN: one step against a naive one, its fixed point in linear regression, single examples in every kind of network."""

import math

import cases
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors, priors


def regression(n=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return x, y + 0.6 * torch.randn(n, 1, dtype=torch.float64, generator=generator)


def linear(std=0.3, noise=0.4, prior=1.5):
    model = nn.Linear(3, 1, bias=False).double()
    return bayesify.bayesianize(
        model,
        posteriors.MeanField(init_std=std),
        likelihood=likelihoods.Gaussian(noise, learn=False),
        prior=priors.Gaussian(prior),
    )


def squares_of(x, y, mean, variance, noise):
    """Sum over examples of E_q g^2 for linear regression: x^2 (r^2 + x Sigma x) / noise^2."""
    residual = (y - x @ mean.T).square()
    spread = x.square() @ variance.T
    return (x.square() * (residual + spread)).sum(0, keepdim=True) / noise**2


@torch.no_grad()
def test_two_steps_are_the_formula():
    x, y = regression()
    bnn = linear()
    noise, prior, n = float(bnn.likelihood.noise), 1 / 1.5**2, 45.0
    mean, std = bnn.posterior.mean()["weight"].clone(), torch.full((1, 3), 0.3, dtype=torch.float64)
    trainer = baselines.VOGN(
        bnn, num_data=90, learning_rate=0.2, momentum=0.8, decay=0.7, damping=0.05, num_draws=2, kl_weight=2.0
    )
    s = u = torch.zeros(1, 3, dtype=torch.float64)
    for step in (1, 2):
        draws = bnn.draw(2, generator=torch.Generator().manual_seed(step)).weights["weight"]
        g = -(y - x @ draws.transpose(-1, -2)) * x / noise  # [2, 30, 3]
        s = 0.7 * s + 0.3 * g.square().mean((0, 1))
        u = 0.8 * u + 0.2 * (g.mean((0, 1)) + prior / n * mean)
        precision = s / (1 - 0.7**step) + prior / n + 0.05
        mean = mean - 0.2 * u / (1 - 0.8**step) / precision
        std = (n * precision).rsqrt()
        nll = 0.5 * ((y - x @ draws.transpose(-1, -2)).square() / noise + math.log(2 * math.pi * noise)).mean()
        found = trainer.step(x, y, generator=torch.Generator().manual_seed(step))
        assert found == pytest.approx(float(nll), rel=1e-12)
        torch.testing.assert_close(bnn.posterior.mean()["weight"], mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(bnn.posterior.variance()["weight"], std.square(), rtol=1e-12, atol=0)


def test_fixed_point_of_linear_regression():
    """The exact posterior mean; precisions delta + sum_i x_i^2 (r_i^2 + x_i Sigma x_i) / v^2, solved by iteration."""
    x, y = regression()
    bnn = linear()
    noise, prior = float(bnn.likelihood.noise), 1 / 1.5**2
    exact = torch.linalg.solve(x.T @ x / noise + prior * torch.eye(3, dtype=torch.float64), x.T @ y / noise).T
    variance = torch.full((1, 3), 0.01, dtype=torch.float64)
    for _ in range(200):
        variance = 1 / (prior + squares_of(x, y, exact, variance, noise))
    trainer = baselines.VOGN(bnn, num_data=30, learning_rate=0.5, decay=0.9, num_draws=2, antithetic=True)
    generator = torch.Generator().manual_seed(0)
    observed = []
    for step in range(500):
        trainer.step(x, y, generator=generator)
        if step >= 100:
            observed.append(1 / bnn.posterior.variance()["weight"])
    # Antithetic pairs cancel the noise of a gradient that is linear in the weights: the mean converges exactly.
    torch.testing.assert_close(bnn.posterior.mean()["weight"], exact, rtol=1e-8, atol=1e-8)
    # Precisions fluctuate around the fixed point. n = 400 of them with decay 0.9 are as good as n / 19 independent ones.
    precisions = torch.stack(observed)
    error = precisions.std(0) / math.sqrt(len(observed) / 19)
    # Draws that follow the fluctuating precision shift it by a relative O(var), well under the error allowed.
    assert ((precisions.mean(0) - 1 / variance).abs() <= 5 * error).all()
    assert (error * 5 < 0.12 / variance).all()


def naive_squares(bnn, weights, x, y):
    """Mean over examples of squared gradients, one example at a time."""
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for row in range(len(y)):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        one = [tensor[row : row + 1] for tensor in x]
        output = bayesify.running.runner.Runner(bnn.network, bnn.weights).call(leaves, tuple(one), {})
        loss = -bnn.likelihood.log_prob(output, y[row : row + 1]).sum()
        for (name, leaf), grad in zip(
            leaves.items(), torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True
        ):
            total[name] += (torch.zeros_like(leaf) if grad is None else grad).square() / len(y)
    return total


KINDS = [
    "linear", "conv1d", "conv2d", "conv2d_depthwise", "transposed2d", "embedding", "layer_norm", "batch_norm", "lstm",
    "attention", "encoder", "custom", "tied", "nested", "bilinear",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_squares_of_single_examples_in_every_kind_of_layer(kind):
    case = cases.CASES[kind]
    torch.manual_seed(0)
    bnn = cases.convert("mean_field", case, torch.float64).eval()
    x = tuple(t.double() if t.is_floating_point() else t for t in case.inputs(5))
    with torch.no_grad():
        y = torch.randn_like(bnn(*x))
    trainer = baselines.VOGN(bnn, num_data=50, decay=0.0)
    with torch.no_grad():
        draws = bnn.draw(1, generator=torch.Generator().manual_seed(1))
    wanted = naive_squares(bnn, {name: value[0] for name, value in draws.weights.items()}, x, y)
    before = {name: value.clone() for name, value in bnn.posterior.mean().items()}
    trainer.step(x, y, generator=torch.Generator().manual_seed(1))
    for name, square in wanted.items():
        torch.testing.assert_close(trainer.moments["second_moments"][name], square, rtol=1e-8, atol=1e-10, msg=name)
    assert any(not torch.equal(before[name], value) for name, value in bnn.posterior.mean().items())


@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention", "tied"])
def test_an_example_of_weight_two_is_the_example_twice(kind):
    case = cases.CASES[kind]
    found = []
    for weights, rows in ((torch.tensor([2.0, 1.0, 0.0]), [0, 1, 2]), (None, [0, 0, 1])):
        torch.manual_seed(0)
        bnn = cases.convert("mean_field", case, torch.float64).eval()
        x = tuple(t[rows].double() if t.is_floating_point() else t[rows] for t in case.inputs(3))
        with torch.no_grad():
            y = torch.zeros_like(bnn(*x))
        trainer = baselines.VOGN(bnn, num_data=50, decay=0.0)
        trainer.step(x, y, example_weights=weights, generator=torch.Generator().manual_seed(1))
        found.append((trainer.moments["second_moments"], bnn.posterior.mean()))
    for one, other in zip(*found, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-12, msg=name)


def test_operations_in_place_on_a_layers_output():
    torch.manual_seed(0)
    layers = nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 1)
    x, y = regression(8)
    found = []
    for inplace in (True, False):
        net = nn.Sequential(*layers).double()
        net[1] = nn.ReLU(inplace=inplace)
        bnn = bayesify.bayesianize(net, "mean_field", likelihood="gaussian")
        trainer = baselines.VOGN(bnn, num_data=8)
        trainer.step(x, y, generator=torch.Generator().manual_seed(1))
        found.append(trainer.moments["second_moments"])
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_epochs_shuffle_anew():
    x, y = regression()
    order = []

    def reader(item):
        order.append(item[0][:, 0].clone())
        return item

    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    baselines.VOGN(linear(), num_data=30).fit(loader, 2, seed=0, read_batch=reader)
    first, second = torch.cat(order[:3]), torch.cat(order[3:])
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def small_conv():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers)


def images(n=60):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(2, (n,), generator=generator)
    return torch.randn(n, 1, 4, 4, generator=generator) + 2.0 * y.view(-1, 1, 1, 1), y


def test_conv_net_with_batch_norm_trains_predicts_and_stores(tmp_path):
    x, y = images()
    bnn = bayesify.bayesianize(small_conv(), posteriors.MeanField(), likelihood="categorical")
    scale = bnn.network[1].weight.detach().clone()
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
    trainer = baselines.VOGN(bnn, learning_rate=0.3).fit(loader, 15, seed=0, progress=False)
    assert trainer.num_data == 60
    assert trainer.history.column("nll")[-1] < trainer.history.column("nll")[0]
    assert not torch.equal(bnn.network[1].weight, scale)  # point estimates are trained along
    prediction = bnn.eval().predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert float((prediction.labels == y).float().mean()) > 0.85
    bayesify.save(bnn, tmp_path / "vogn.safetensors")
    loaded = bayesify.load(tmp_path / "vogn.safetensors", small_conv()).eval()
    again = loaded.predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prediction.probs, again.probs)


def test_interrupted_training_continues_to_the_same_result(tmp_path):
    x, y = images()
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)

    def make():
        return baselines.VOGN(bayesify.bayesianize(small_conv(), posteriors.MeanField(), likelihood="categorical"))

    path = tmp_path / "run.safetensors"
    whole = make().fit(loader, 4, seed=1)
    make().fit(loader, 2, seed=1, checkpoint=path)
    rest = make().fit(loader, 4, seed=1, checkpoint=path)
    for name, value in whole.bnn.state_dict().items():
        assert torch.equal(value, rest.bnn.state_dict()[name]), name
    assert [row["nll"] for row in rest.history] == [row["nll"] for row in whole.history]
    with pytest.raises(ValueError, match="belongs to another network"):
        baselines.SWAG(small_conv(), "categorical").fit(loader, 4, checkpoint=path)


def test_bfloat16_steps_are_finite():
    bnn = bayesify.bayesianize(
        cases.mlp().bfloat16(), posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1, learn=False)
    )
    trainer = baselines.VOGN(bnn, num_data=8)
    trainer.step(torch.randn(8, 3).bfloat16(), torch.randn(8, 2).bfloat16())
    assert all(parameter.dtype == torch.float32 for parameter in bnn.posteriors.parameters())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in bnn.posteriors.parameters())


def test_bad_input():
    bnn = linear()
    with pytest.raises(TypeError, match="has the posterior Point; make the network with MeanField"):
        baselines.VOGN(bayesify.bayesianize(cases.mlp(), "point", likelihood="gaussian"))
    with pytest.raises(TypeError, match="give a BayesianNetwork; bayesianize makes one"):
        baselines.VOGN(cases.mlp())
    with pytest.raises(ValueError, match="no likelihood"):
        baselines.VOGN(bayesify.bayesianize(cases.mlp(), "mean_field"))
    for options, words in (
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"num_draws": 0}, "num_draws=0"),
        ({"num_data": 0}, "num_data=0"),
    ):
        with pytest.raises(ValueError, match=words):
            baselines.VOGN(bnn, **options)
    with pytest.raises(ValueError, match="number of training examples is unknown"):
        baselines.VOGN(bnn).step(*regression())
    x, y = regression()
    with pytest.raises(ValueError, match="num_data=5, but the loader has 30"):
        baselines.VOGN(bnn, num_data=5).fit(DataLoader(TensorDataset(x, y)), 1)
    capped = bayesify.bayesianize(cases.mlp(), posteriors.MeanField(max_std=0.1), likelihood="gaussian")
    with pytest.raises(ValueError, match=r"max_std=0.1"):
        baselines.VOGN(capped)
    tied = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    coupled = baselines.VOGN(bayesify.bayesianize(tied, "mean_field", likelihood="gaussian"), num_data=9)
    before = [parameter.clone() for parameter in coupled.bnn.posteriors.parameters()]
    with pytest.raises(ValueError, match=r"0.weight needs per-example gradients"):
        coupled.step(torch.randn(9, 3), torch.randn(9, 3))
    after = coupled.bnn.posteriors.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
