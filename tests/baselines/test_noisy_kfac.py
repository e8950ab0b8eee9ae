"""Noisy K-FAC: factors against sums over examples, its fixed point in linear regression, convolutions, bad input."""

import math

import pytest
import torch
from cases import CASES, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors, priors
from bayesify.baselines.natural_gradient import LayerPass
from bayesify.baselines.noisy_kfac import fisher_root, inverse_root
from bayesify.running.runner import Runner


def regression(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator) @ torch.tensor(
        [[1.0, 0.5, 0.0], [0.0, 1.0, -0.7], [0.0, 0.0, 0.6]], dtype=torch.float64
    )
    weight = torch.tensor([[1.0, -0.3], [-2.0, 0.8], [0.5, 0.1]], dtype=torch.float64)
    return x, x @ weight + 0.3 + 0.5 * torch.randn(n, 2, dtype=torch.float64, generator=generator)


def linear(prior, noise=0.3):
    torch.manual_seed(1)
    return bayesify.bayesianize(
        nn.Linear(3, 2).double(),
        posteriors.MatrixNormal(init_std=0.1),
        likelihood=likelihoods.Gaussian(noise, learn=False),
        prior=priors.Gaussian(prior),
    )


def trained(bnn, x, y, steps=300, **options):
    trainer = baselines.NoisyKFAC(
        bnn, num_data=len(x), learning_rate=0.5, momentum=0.0, fisher="exact", num_draws=2, antithetic=True, **options
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        trainer.step(x, y, generator=generator)
    return bnn.posterior


def exact_posterior(x, y, noise, prior):
    """Mean [2, 4] and covariance [4, 4] of one output of Bayesian linear regression, the bias last."""
    a = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), dim=1)
    precision = a.T @ a / noise + torch.eye(4, dtype=torch.float64) / prior**2
    return torch.linalg.solve(precision, a.T @ y / noise).T, torch.linalg.inv(precision), a.T @ a / len(x)


def test_a_layer_at_several_positions():
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(
        nn.Linear(3, 2).double(), "matrix_normal", likelihood=likelihoods.Gaussian(1.0, learn=False)
    )
    x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 5, 2, dtype=torch.float64)
    with torch.no_grad():
        g = (bnn.draw(1, generator=torch.Generator().manual_seed(3))[0](x) - y) / bnn.likelihood.noise
    trainer = baselines.NoisyKFAC(bnn, num_data=4, fisher="empirical", decay=0.0)
    trainer.step(x, y, generator=torch.Generator().manual_seed(3))
    a = torch.cat((x, torch.ones(4, 5, 1, dtype=torch.float64)), dim=-1).flatten(0, 1)
    torch.testing.assert_close(trainer.moments["inputs"][""], a.T @ a / 4)
    torch.testing.assert_close(trainer.moments["gradients"][""], g.flatten(0, 1).T @ g.flatten(0, 1) / 20)


def test_fixed_point_of_linear_regression():
    """M is the exact posterior mean, and the covariance that of A = sum a a^T / N and S = I / v with the prior in both."""
    x, y = regression()
    bnn = linear(prior=0.8)
    noise, n = float(bnn.likelihood.noise), len(x)
    mean, _, inputs = exact_posterior(x, y, noise, 0.8)
    posterior = trained(bnn, x, y)
    torch.testing.assert_close(posterior.mean_value[""], mean, rtol=1e-9, atol=1e-9)
    gamma = 1 / (0.8**2 * n)
    ratio = math.sqrt(float(inputs.trace()) / 4 * noise)
    eye = torch.eye(4, dtype=torch.float64)
    cols = torch.linalg.inv(inputs + ratio * math.sqrt(gamma) * eye)
    rows = torch.eye(2, dtype=torch.float64) / (n * (1 / noise + math.sqrt(gamma) / ratio))
    row_tril, col_tril = posterior.scale_trils("")
    torch.testing.assert_close(row_tril @ row_tril.T, rows, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(col_tril @ col_tril.T, cols, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_covariance_becomes_exact_as_the_prior_becomes_flat():
    x, y = regression()
    errors = []
    for prior in (10.0, 100.0, 1000.0):
        bnn = linear(prior)
        _, covariance, _ = exact_posterior(x, y, float(bnn.likelihood.noise), prior)
        rows, cols = trained(bnn, x, y, steps=3).scale_trils("")
        found = torch.kron(rows @ rows.T, cols @ cols.T)  # row-major [W b]: outputs, then inputs
        wanted = torch.kron(torch.eye(2, dtype=torch.float64), covariance.contiguous())
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3


@torch.no_grad()
def test_a_step_is_the_formula_with_extra_damping():
    x, y = regression()
    bnn = linear(prior=0.8)
    noise, n = float(bnn.likelihood.noise), 80
    start = bnn.posterior.mean_value[""].clone()
    draw = bnn.draw(1, generator=torch.Generator().manual_seed(3))[0].weights
    trainer = baselines.NoisyKFAC(bnn, num_data=n, learning_rate=0.1, damping=0.2, fisher="empirical")
    trainer.step(x, y, generator=torch.Generator().manual_seed(3))
    a = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), dim=1)
    g = -(y - x @ draw["weight"].T - draw["bias"]) / noise
    inputs, gradients = a.T @ a / len(x), g.T @ g / len(x)
    ratio = torch.sqrt((inputs.trace() / 4) / (gradients.trace() / 2))

    def damped(gamma):
        cols = inputs + ratio * math.sqrt(gamma) * torch.eye(4, dtype=torch.float64)
        rows = gradients + math.sqrt(gamma) / ratio * torch.eye(2, dtype=torch.float64)
        return torch.linalg.inv(rows), torch.linalg.inv(cols)

    gamma = 1 / (0.8**2 * n)
    rows, cols = damped(gamma + 0.2)
    slope = g.T @ a / len(x) + gamma * start
    torch.testing.assert_close(bnn.posterior.mean_value[""], start - 0.1 * rows @ slope @ cols, rtol=1e-10, atol=1e-12)
    rows, cols = damped(gamma)
    torch.testing.assert_close(
        bnn.posterior.variance()["weight"], torch.outer(rows.diagonal(), cols.diagonal()[:3]) / n, rtol=1e-10, atol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 2**26])
def test_factors_of_a_convolution(budget, monkeypatch):
    """A sums over positions, S is their mean; patches in the order of the weight's matrix; whatever fits at a time."""
    monkeypatch.setattr("bayesify.baselines.noisy_kfac.MAX_GRADIENT_BYTES", budget)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1).double()
    bnn = bayesify.bayesianize(
        conv, posteriors.MatrixNormal(), likelihood=likelihoods.Gaussian(1.0, learn=False), prior=priors.Standard()
    )
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    y = torch.randn(5, 3, 3, 3, dtype=torch.float64)
    draw = bnn.draw(1, generator=torch.Generator().manual_seed(3))[0]
    g = -(y - draw(x)) / bnn.likelihood.noise
    trainer = baselines.NoisyKFAC(bnn, num_data=5, fisher="empirical", decay=0.0)
    trainer.step(x, y, generator=torch.Generator().manual_seed(3))
    patches = nn.functional.unfold(x, 2, stride=2, padding=1)  # [5, 8, 9]
    a = torch.cat((patches, torch.ones(5, 1, 9, dtype=torch.float64)), dim=1)
    torch.testing.assert_close(trainer.moments["inputs"][""], torch.einsum("bit,bjt->ij", a, a) / 5)
    flat = g.flatten(2)
    torch.testing.assert_close(trainer.moments["gradients"][""], torch.einsum("bit,bjt->ij", flat, flat) / 45)


def test_roots():
    torch.manual_seed(0)
    square = torch.randn(5, 5, dtype=torch.float64)
    matrix = square @ square.T
    root = inverse_root(matrix, torch.tensor(0.3, dtype=torch.float64))
    assert torch.equal(root, root.tril())
    identity = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(matrix + 0.3 * identity))
    outputs = torch.randn(3, 4, dtype=torch.float64)
    for likelihood in (likelihoods.Categorical(), likelihoods.Bernoulli(), likelihoods.HeteroscedasticGaussian()):
        found = fisher_root(likelihood, outputs)
        torch.testing.assert_close(found @ found.transpose(-1, -2), likelihood.fisher(outputs))
    with pytest.raises(ValueError, match="last axis"):
        fisher_root(likelihoods.Categorical(class_axis=1), torch.randn(2, 3, 4, 4))


def test_sampled_fisher_has_the_exact_one_as_its_mean():
    x, _ = regression(n=10)
    bnn = bayesify.bayesianize(nn.Linear(3, 4).double(), "matrix_normal", likelihood="categorical")
    runner = Runner(bnn.network, bnn.weights)
    found = {}
    for fisher in ("sampled", "exact"):
        trainer = baselines.NoisyKFAC(bnn, num_data=10, fisher=fisher)
        seen = LayerPass(runner, bnn.posterior.mean(), trainer.rules(), ((x,), {}), None)
        generator = torch.Generator().manual_seed(0)
        observed = [
            sum(
                trainer._gradient_factor("", pulled.calls(trainer.rules()[""]))
                for pulled in trainer._fisher_passes(seen, generator, None)
            )
            for _ in range(1 if fisher == "exact" else 1000)
        ]
        found[fisher] = torch.stack(observed)
    with torch.no_grad():
        wanted = likelihoods.Categorical().fisher(bnn.mean_network()(x)).mean(0)
    torch.testing.assert_close(found["exact"][0], wanted)
    error = found["sampled"].std(0) / math.sqrt(1000)
    assert ((found["sampled"].mean(0) - wanted).abs() <= 5 * error).all()


def images(n=60):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(2, (n,), generator=generator)
    return torch.randn(n, 1, 4, 4, generator=generator) + 2.0 * y.view(-1, 1, 1, 1), y


def small_conv():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers)


def test_conv_net_with_batch_norm_trains_resumes_and_stores(tmp_path):
    x, y = images()
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)

    def make():
        bnn = bayesify.bayesianize(small_conv(), posteriors.MatrixNormal(), likelihood="categorical")
        return baselines.NoisyKFAC(bnn, learning_rate=0.3, factor_every=2, inverse_every=3)

    path = tmp_path / "run.safetensors"
    whole = make().fit(loader, 8, seed=1)
    make().fit(loader, 3, seed=1, checkpoint=path)
    rest = make().fit(loader, 8, seed=1, checkpoint=path)
    for name, value in whole.bnn.state_dict().items():
        assert torch.equal(value, rest.bnn.state_dict()[name]), name
    assert whole.history.column("nll")[-1] < whole.history.column("nll")[0]
    bnn = whole.bnn.eval()
    prediction = bnn.predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert float((prediction.labels == y).float().mean()) > 0.85
    bayesify.save(bnn, tmp_path / "nng.safetensors")
    again = bayesify.load(tmp_path / "nng.safetensors", small_conv()).eval()
    assert torch.equal(again.predict(x, 8, generator=torch.Generator().manual_seed(0)).probs, prediction.probs)


@pytest.mark.parametrize(
    "kind", ["conv2d_depthwise", "transposed2d", "embedding", "tied", "lstm", "attention", "custom"]
)
def test_layers_without_factors_are_refused_when_the_trainer_is_made(kind):
    bnn = bayesify.bayesianize(CASES[kind].network(torch.float32), "matrix_normal", likelihood="gaussian")
    with pytest.raises(ValueError, match=r"its layer is neither linear nor|attention"):
        baselines.NoisyKFAC(bnn)


def test_bad_input():
    bnn = bayesify.bayesianize(mlp(), "matrix_normal", likelihood="gaussian")
    for options, words in (
        ({"fisher": "other"}, "fisher='other'"),
        ({"inverse_every": 0}, "inverse_every=0"),
        ({"damping": -0.1}, "damping=-0.1"),
        ({"decay": 1.0}, "decay=1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            baselines.NoisyKFAC(bnn, **options)
    with pytest.raises(TypeError, match="has the posterior MeanField; make the network with MatrixNormal"):
        baselines.NoisyKFAC(bayesify.bayesianize(mlp(), "mean_field", likelihood="gaussian"))
