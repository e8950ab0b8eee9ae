"""Deep Gaussian processes against exact ones: evidence, predictions, sparse bounds, conditionals, and what a user may do wrong."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import generator
from torch import Tensor

import bayesify
from bayesify import likelihoods
from bayesify.deep_gp import KERNELS, DeepGP
from bayesify.maths.kernels import MATERN, distances
from bayesify.maths.positive_definite import inverse_and_log_det, linear_and_quadratic_forms

NOISE = 0.05


def data(count: int = 20, outputs: int = 1, inputs: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(count, inputs, dtype=torch.float64)
    f = torch.stack([torch.sin((k + 1) * x.sum(1)) for k in range(outputs)], dim=1)
    return x, f + 0.1 * torch.randn(count, outputs, dtype=torch.float64)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def exact(x: Tensor, y: Tensor, **more: Any) -> DeepGP:
    """One layer with inducing inputs at the data, pseudo-outputs at the targets, and the noise's precision."""
    noise = likelihoods.Gaussian(NOISE, learn=False)
    gp = DeepGP(x, y, depth=1, likelihood=noise, **more)
    layer: Any = gp.layers[0]
    with torch.no_grad():
        layer.pseudo_outputs.copy_(y)
        layer.log_precision.fill_(-math.log(NOISE))
        assert gp.inducing_inputs is not None
        gp.inducing_inputs.copy_(x)
    return gp


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_layer_is_gp_regression(kernel: str, outputs: int) -> None:
    """ELBO = log evidence, and the predictive is the exact one, without any draws."""
    x, y = data(outputs=outputs)
    gp = exact(x, y, kernel=kernel)
    k: Any = gp.layers[0].kernel
    total = k(x, x) + NOISE * eye(len(x))
    evidence = sum(
        torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), total).log_prob(column) for column in y.T
    )
    bound = gp.elbo(x, y, num_data=len(x))
    torch.testing.assert_close(bound, torch.as_tensor(evidence), rtol=0, atol=1e-9)
    new = data(7)[0] + 0.3
    prediction: Any = gp.predict(new)
    cross = k(new, x)
    mean = cross @ torch.linalg.solve(total, y)
    variance = k.diagonal(new) - (cross * torch.linalg.solve(total, cross.T).T).sum(1)
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(prediction.epistemic, variance[:, None].expand_as(mean), rtol=0, atol=1e-9)
    torch.testing.assert_close(prediction.variance, variance[:, None].expand_as(mean) + NOISE, rtol=0, atol=1e-9)
    expected = torch.distributions.Normal(mean, (variance[:, None] + NOISE).sqrt()).log_prob(y[:7]).sum(-1)
    torch.testing.assert_close(prediction.log_prob(y[:7]), expected, rtol=0, atol=1e-9)


def test_other_pseudo_outputs_lie_below_the_evidence() -> None:
    """The evidence is the maximum: moving V, Lambda or U_0 away only loses."""
    x, y = data()
    best = float(exact(x, y).elbo(x, y, num_data=len(x)).detach())
    for name in ("pseudo_outputs", "log_precision"):
        gp = exact(x, y)
        with torch.no_grad():
            gp.layers[0].get_parameter(name).add_(0.1)
        assert float(gp.elbo(x, y, num_data=len(x)).detach()) < best - 1e-4
    gp = exact(x, y)
    with torch.no_grad():
        gp.inducing_inputs.add_(0.1)  # type: ignore[union-attr]
    assert float(gp.elbo(x, y, num_data=len(x)).detach()) < best - 1e-4


def test_the_posterior_is_the_papers() -> None:
    """Sigma = K - K (K + Lambda^-1)^-1 K and mean Sigma Lambda V (eq. 22); its KL to N(0, K) by dense matrices."""
    x, y = data(6)
    gp = DeepGP(x, y, depth=1, kernel="matern32")
    layer: Any = gp.layers[0]
    with torch.no_grad():
        layer.log_precision.copy_(torch.linspace(-1, 2, 6, dtype=torch.float64))
        (part,), kl = gp.conditionals(1)
        k = layer.kernel(x, x)
        precision = layer.log_precision.exp()
        sigma = torch.linalg.inv(torch.linalg.inv(k) + torch.diag(precision))
        mean = sigma @ (precision[:, None] * layer.pseudo_outputs)
        ours, variance = part.moments(x[None])
        torch.testing.assert_close(ours[0], mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(variance[0, :, 0], sigma.diagonal(), rtol=0, atol=1e-9)
        normal = torch.distributions.MultivariateNormal
        q, p = normal(mean[:, 0], sigma), normal(torch.zeros(6).double(), k)
        assert kl.item() == pytest.approx(torch.distributions.kl_divergence(q, p).item(), rel=1e-8)


def test_drawn_values_have_the_posteriors_moments() -> None:
    """Matheron's rule: n = 20000 draws of U, mean and covariance within 5 standard errors."""
    x, y = data(5)
    gp = DeepGP(x, y, depth=2, width=1, kernel="matern52", skip=False, jitter=1e-10)
    layer: Any = gp.layers[0]
    n = 20_000
    with torch.no_grad():
        layer.pseudo_outputs.copy_(y)
        layer.log_precision.copy_(torch.linspace(-1, 2, 5, dtype=torch.float64))
        _, _, values = layer.draw(x[None], n, generator())
        u = values[:, :, 0]
        k = layer.kernel(x, x)
        sigma = torch.linalg.inv(torch.linalg.inv(k) + torch.diag(layer.log_precision.exp()))
        mean = sigma @ (layer.log_precision.exp() * y[:, 0])
    assert bool(((u.mean(0) - mean).abs() <= 5 * u.std(0) / math.sqrt(n)).all())
    products = (u - mean)[:, :, None] * (u - mean)[:, None, :]
    assert bool(((products.mean(0) - sigma).abs() <= 5 * products.std(0) / math.sqrt(n)).all())


def test_draws_at_data_follow_the_conditional_of_the_process() -> None:
    """Given U, f is pointwise N(k K^-1 u, k - k K^-1 k): by dense matrices, 1e-8, for each draw of U."""
    x, y = data(6)
    new = data(9)[0] - 0.2
    gp = DeepGP(x, y, depth=2, width=2, kernel="matern32", skip=False, jitter=1e-12)
    layer: Any = gp.layers[0]
    with torch.no_grad():
        part, _, values = layer.draw(x[None], 3, generator())
        mean, variance = part.moments(new[None])
        k, cross = layer.kernel(x, x), layer.kernel(new, x)
        expected = cross @ torch.linalg.solve(k, values)
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-8)
        left = layer.kernel.diagonal(new) - (cross * torch.linalg.solve(k, cross.T).T).sum(1)
        torch.testing.assert_close(variance[0, :, 0], left, rtol=0, atol=1e-8)
        at_inducing, none = part.moments(x[None])
        torch.testing.assert_close(at_inducing, values, rtol=0, atol=1e-8)
        assert float(none.abs().max()) < 1e-8


def test_local_at_its_optimum_is_titsias_bound() -> None:
    """q(v) at the closed-form optimum: log N(y; 0, Q + noise) - tr(K - Q) / (2 noise), and the sparse predictions."""
    x, y = data(40)
    z = x[::5]
    gp = DeepGP(z, num_outputs=1, depth=1, inducing="local", likelihood=likelihoods.Gaussian(NOISE), jitter=1e-13)
    layer: Any = gp.layers[0]
    k = layer.kernel
    with torch.no_grad():
        factor = torch.linalg.cholesky(k(z, z))
        reach = torch.linalg.solve_triangular(factor, k(z, x), upper=False)
        spread = torch.linalg.inv(eye(len(z)) + reach @ reach.T / NOISE)
        layer.mean_value.copy_(spread @ reach @ y / NOISE)
        layer.set_covariance(spread)
        q = reach.T @ reach
        collapsed = torch.distributions.MultivariateNormal(torch.zeros(40).double(), q + NOISE * eye(40)).log_prob(
            y[:, 0]
        )
        bound = collapsed - (k.diagonal(x) - q.diagonal()).sum() / (2 * NOISE)
        torch.testing.assert_close(gp.elbo(x, y, num_data=40), bound, rtol=0, atol=1e-8)
        new = data(7)[0] + 0.3
        prediction: Any = gp.predict(new)
        across = torch.linalg.solve_triangular(factor, k(z, new), upper=False)
        torch.testing.assert_close(prediction.mean, across.T @ layer.mean_value, rtol=0, atol=1e-8)
        variance = k.diagonal(new) - across.square().sum(0) + (across * (spread @ across)).sum(0)
        torch.testing.assert_close(prediction.epistemic[:, 0], variance, rtol=0, atol=1e-8)


def test_global_start_and_local_start_are_one_posterior() -> None:
    x, y = data(12, outputs=2)
    pair = [DeepGP(x, y, depth=1, inducing=kind, jitter=1e-12) for kind in ("global", "local")]  # type: ignore[arg-type]
    bounds = [float(gp.elbo(x, y, num_data=12).detach()) for gp in pair]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-7)


def test_a_batch_estimates_the_whole() -> None:
    """With one layer, the mean of the bound over a partition into batches is the bound, exactly."""
    x, y = data(12)
    gp = DeepGP(x, y, depth=1)
    whole = gp.elbo(x, y, num_data=12)
    parts = [gp.elbo(x[rows], y[rows], num_data=12) for rows in torch.arange(12).split(4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    weights = torch.ones(12, dtype=torch.float64)
    torch.testing.assert_close(gp.elbo(x, y, num_data=12, example_weights=weights), whole)
    half = gp.elbo(x, y, num_data=12, kl_weight=0.5)
    torch.testing.assert_close(half - whole, 0.5 * gp.kl())


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_the_bound_lies_below_the_evidence_of_a_two_layer_model(inducing: str) -> None:
    """The evidence by the mean likelihood over n = 4000 prior draws of the hidden layer, the last one integrated out: the bound's
    mean over 500 draws is below its logarithm, up to 5 standard errors of both."""
    x, y = data(3, inputs=1)
    likelihood = likelihoods.Gaussian(0.5, learn=False)
    gp = DeepGP(x, y, depth=2, width=1, inducing=inducing, likelihood=likelihood, skip=False, kernel="matern12")  # type: ignore[arg-type]
    first, second = (layer.kernel for layer in gp.layers)
    n = 4000
    with torch.no_grad():
        noise = torch.randn(n, 3, 1, generator=generator(), dtype=torch.float64)
        hidden = torch.linalg.cholesky(first(x, x) + 1e-10 * eye(3)) @ noise  # type: ignore[operator]
        total = second(hidden, hidden) + 0.5 * eye(3)  # type: ignore[operator]
        each = torch.distributions.MultivariateNormal(torch.zeros(3).double(), total).log_prob(y[:, 0]).exp()
        evidence = each.mean().log()
        slack = 5 * each.std() / each.mean() / math.sqrt(n)
        data_term, kl = gp.elbo_terms(x, y, num_data=3, num_draws=500, generator=generator(1))
    bounds = data_term - kl
    assert bounds.mean() - 5 * bounds.std() / math.sqrt(500) <= evidence + slack
    assert bounds.mean() > evidence - 20


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_their_formulas(kernel: str) -> None:
    x, y = data(6)
    gp = DeepGP(x, y, kernel=kernel)
    k: Any = gp.layers[0].kernel
    with torch.no_grad():
        for parameter in k.parameters():
            parameter.add_(0.1 * torch.arange(1, 1 + parameter.numel(), dtype=torch.float64).reshape(parameter.shape))
    found = k(x, x[:4])
    for i in range(6):
        for j in range(4):
            if kernel == "linear":
                scale, bias = (torch.nn.functional.softplus(raw) for raw in (k.raw_scale, k.raw_bias))
                expected = bias**2 + (scale**2 * x[i] * x[j]).sum()
            else:
                r = ((x[i] - x[j]) / k.lengthscale).square().sum().sqrt()
                s3, s5 = math.sqrt(3) * r, math.sqrt(5) * r
                kappa = {
                    "squared_exponential": (-0.5 * r**2).exp(),
                    "matern12": (-r).exp(),
                    "matern32": (1 + s3) * (-s3).exp(),
                    "matern52": (1 + s5 + 5 * r**2 / 3) * (-s5).exp(),
                }[kernel]
                expected = k.amplitude**2 * kappa
            assert found[i, j].item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(k.diagonal(x), k(x, x).diagonal(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MATERN)
def test_kernels_have_finite_gradients_at_equal_inputs(name: str) -> None:
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    MATERN[name](distances(x, x)).sum().backward()
    assert bool(torch.isfinite(x.grad).all())  # type: ignore[arg-type]


def test_gradients_that_are_written_out() -> None:
    torch.manual_seed(0)
    root = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    columns = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    weights = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def forms(weights: Tensor, root: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        return linear_and_quadratic_forms(weights, root @ root.mT, columns)

    assert torch.autograd.gradcheck(forms, (weights, root.requires_grad_(), columns))
    shared = torch.randn(1, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(forms, (weights[:1], shared, columns))
    linear, quadratic = forms(weights, shared, columns)
    torch.testing.assert_close(linear, torch.einsum("smb,smo->sbo", columns, weights))
    torch.testing.assert_close(quadratic, torch.einsum("smb,omn,snb->sob", columns, shared[0] @ shared[0].mT, columns))

    def inverse(root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return inverse_and_log_det(root @ root.mT + eye(3), "a test's matrix")

    assert torch.autograd.gradcheck(inverse, (root,))


@pytest.mark.parametrize(("width", "expected"), [(3, "identity"), (2, "axes"), (5, "padded")])
def test_hidden_layers_start_near_the_skip_function(width: int, expected: str) -> None:
    x, y = data(30)
    for skip in (True, False):
        gp = DeepGP(x, y, width=width, skip=skip)
        layer: Any = gp.layers[0]
        matrix = torch.eye(3, width, dtype=torch.float64)
        if expected == "axes":
            matrix = DeepGP(x, y, width=width).layers[0].skip_matrix  # type: ignore[assignment]
            torch.testing.assert_close(matrix.T @ matrix, eye(2))
        if skip:
            torch.testing.assert_close(layer.skip_matrix, matrix)
            assert not bool(layer.pseudo_outputs.any())
        else:
            torch.testing.assert_close(layer.pseudo_outputs.detach(), x @ matrix)


def test_inducing_inputs_are_centers() -> None:
    """Three clusters, three inducing inputs: k-means finds their means; pseudo-outputs are the clusters' means."""
    torch.manual_seed(0)
    middle = torch.tensor([[-10.0, 0.0], [0.0, 10.0], [10.0, 0.0]])
    x = (middle[:, None] + 0.1 * torch.randn(3, 20, 2)).reshape(60, 2)
    y = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(20)
    gp = DeepGP(x, y, num_inducing=3, depth=1, seed=3)
    means, targets = x.reshape(3, 20, 2).mean(1), torch.tensor([1.0, 2.0, 3.0])
    assert gp.inducing_inputs is not None
    nearest = torch.cdist(gp.inducing_inputs.detach(), means).argmin(1)
    torch.testing.assert_close(gp.inducing_inputs.detach(), means[nearest])
    torch.testing.assert_close(gp.layers[0].pseudo_outputs.detach()[:, 0], targets[nearest])  # type: ignore[union-attr, operator]
    torch.testing.assert_close(gp.layers[0].log_precision.detach().exp(), torch.full((3,), 200.0))  # type: ignore[union-attr, operator]


# -- as an object ----------------------------------------------------------------------------------------------------


def model(inducing: str, task: str = "regression", dtype: torch.dtype = torch.float32) -> tuple[DeepGP, Tensor, Tensor]:
    x, y = data(16)
    x, y = x.to(dtype), y.to(dtype)
    likelihood: Any = likelihoods.Gaussian(0.1)
    if task == "classification":
        y, likelihood = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), likelihoods.Categorical()
    if task == "bernoulli":
        y, likelihood = (x[:, :1] > 0).to(dtype), likelihoods.Bernoulli()
    gp = DeepGP(x, y, depth=3, width=[2, 4], num_inducing=8, inducing=inducing, likelihood=likelihood)  # type: ignore[arg-type]
    return gp, x, y


@pytest.mark.parametrize("task", ["regression", "classification", "bernoulli"])
@pytest.mark.parametrize("inducing", ["global", "local"])
def test_protocol(inducing: str, task: str, tmp_path: Path) -> None:
    gp, x, y = model(inducing, task)
    bound = gp.elbo(x, y, num_data=32, num_draws=3, generator=generator())
    assert torch.equal(bound, gp.elbo(x, y, num_data=32, num_draws=3, generator=generator()))
    bound.backward()
    for name, parameter in gp.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    data_term, kl = gp.elbo_terms(x, y, num_data=32, num_draws=3)
    assert data_term.shape == kl.shape == (3,)
    assert bool((kl > 0).all())
    bayesify.save(gp, tmp_path / "gp.safetensors")
    prediction = gp.predict(x, num_draws=5, generator=generator())
    assert prediction.outputs.shape == (5, 16, {"regression": 1, "classification": 3, "bernoulli": 1}[task])
    for other in (bayesify.load(tmp_path / "gp.safetensors"), copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        assert type(other) is DeepGP
        again = other.predict(x, num_draws=5, generator=generator())
        assert torch.equal(again.outputs, prediction.outputs)
        assert torch.equal(again.log_prob(y), prediction.log_prob(y))
    pieces = gp.predict(x, num_draws=5, generator=generator(), memory=1)
    assert pieces.outputs.shape == prediction.outputs.shape


def test_pieces_of_a_prediction_share_the_draws() -> None:
    """In pieces of one row, a process without pointwise noise (one layer) predicts the same."""
    x, y = data(10)
    gp = DeepGP(x, y, depth=1)
    whole, pieces = gp.predict(x), gp.predict(x, memory=1)
    torch.testing.assert_close(whole.mean, pieces.mean)  # type: ignore[attr-defined]


def test_single_and_double_precision_agree() -> None:
    """Parameters in float32, kernel matrices in float64: bounds differ by the rounding of parameters alone."""
    single, x, y = model("global")
    double = copy.deepcopy(single).double()
    first = single.elbo(x, y, num_data=16, num_draws=2, generator=generator())
    second = double.elbo(x.double(), y.double(), num_data=16, num_draws=2, generator=generator())
    assert first.item() == pytest.approx(second.item(), rel=1e-5)


def test_layers_are_correlated_with_global_inducing_points_only() -> None:
    """A hidden layer's draw moves the last layer's posterior mean at a fixed hidden point, or does not."""
    for kind, moves in (("global", True), ("local", False)):
        gp, _, _ = model(kind, dtype=torch.float64)
        with torch.no_grad():
            parts, _ = gp.conditionals(6, generator())
            mean, _ = parts[-1].moments(torch.zeros(1, 1, gp.widths[-2], dtype=torch.float64))
        assert (mean.shape[0] == 6 and float(mean.std(0)) > 1e-3) is moves


# -- bad input -------------------------------------------------------------------------------------------------------

X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": X[0]}, "floating-point"),
        ({"inputs": X.long()}, "floating-point"),
        ({"inputs": X * math.nan}, "index"),
        ({"targets": Y[:3]}, "3 targets, but 5 inputs"),
        ({"targets": None}, "neither targets= nor num_outputs="),
        ({"depth": 0}, "depth=0"),
        ({"width": [3, 3]}, "2 widths are given for depth=2"),
        ({"width": 0}, "width=0"),
        ({"num_inducing": 0}, "num_inducing=0"),
        ({"inducing": "both"}, "'global' or 'local'"),
        ({"kernel": "rbf"}, "squared_exponential"),
        ({"jitter": 0.0}, "jitter=0.0"),
        ({"lengthscale": -1.0}, "lengthscale=-1.0"),
        ({"targets": None, "num_outputs": 0}, "num_outputs=0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepGP(**{"inputs": X, "targets": Y, **arguments})


def test_bad_calls_are_named() -> None:
    gp = DeepGP(X, Y)
    with pytest.raises(ValueError, match=r"give a tensor \[B, 2\]"):
        gp.predict(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="empty"):
        gp.predict(X[:0])
    with pytest.raises(ValueError, match="num_draws=0"):
        gp.predict(X, num_draws=0)
    with pytest.raises(ValueError, match="index"):
        gp.elbo(X * math.inf, Y, num_data=5)
    with pytest.raises(ValueError, match="num_data=2"):
        gp.elbo(X, Y, num_data=2)
    with pytest.raises(ValueError, match="no MAP phase"):
        gp.fit((X, Y), epochs=1, map_epochs=1, progress=False)
    with torch.no_grad():
        gp.layers[0].kernel.raw_lengthscale.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"raw_lengthscale contains NaN .* lower the learning rate"):
        gp.elbo(X, Y, num_data=5)


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("inducing", ["global", "local"])
def test_a_broken_parameter_is_named_whatever_lapack_notices(
    inducing: str, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some machines' factorizations report NaN, others let it through."""
    original = torch.linalg.cholesky_ex

    def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, failed = original(matrix)
        broken = ~torch.isfinite(matrix).all(-1).all(-1)
        failed = torch.where(broken, int(noticed), failed)
        return torch.where(broken[..., None, None] & (not noticed), torch.nan, factor), failed

    gp = DeepGP(X, Y, inducing=inducing)  # type: ignore[arg-type]
    with torch.no_grad():
        gp.layers[1].kernel.raw_amplitude.fill_(math.nan)  # type: ignore[union-attr, operator]
    monkeypatch.setattr(torch.linalg, "cholesky_ex", cholesky_ex)
    for call in (lambda: gp.elbo(X, Y, num_data=5), lambda: gp.predict(X), gp.kl):
        with pytest.raises(
            ValueError, match=r"DeepGP: layers\.1\.kernel\.raw_amplitude contains NaN .* lower the learning rate"
        ):
            call()


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_a_matrix_that_cannot_be_factorized_names_its_layer(inducing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gp = DeepGP(X, Y, inducing=inducing)  # type: ignore[arg-type]
    monkeypatch.setattr(gp.layers[0].kernel, "forward", lambda x, other: -50 * torch.eye(5, dtype=torch.float64)[None])
    with pytest.raises(ValueError, match=r"layer 1: the kernel matrix .* \(5 x 5\) .* a larger jitter"):
        gp.elbo(X, Y, num_data=5)


def test_loading_still_asks_for_a_network_where_there_is_one(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    bayesify.save(net, tmp_path / "net.safetensors")
    with pytest.raises(TypeError, match=r"pass as net= the torch\.nn\.Module"):
        bayesify.load(tmp_path / "net.safetensors")
