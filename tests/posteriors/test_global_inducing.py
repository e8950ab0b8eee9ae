"""Global and local inducing points against exact answers: evidence, dense regressions, the concatenated batch, correlations."""

import math
import re
import warnings
from collections import UserDict

import pytest
import torch
from cases import CASES, Case, call, convert, generator
from dense_reference import kl_normals
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors
from bayesify.maths.noise import NoiseSource
from bayesify.posteriors import DrawRequest, GlobalInducing, LocalInducing, MeanField, Posterior
from bayesify.running.runner import Runner

NOISE = 0.3


def regression_data(rows: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, dtype=torch.float64, generator=generator(1))
    return x, torch.randn(rows, 2, dtype=torch.float64, generator=generator(2))


def linear_network(x: Tensor, y: Tensor, **options: object) -> BayesianNetwork:
    net = nn.Linear(3, 2).double()
    made = GlobalInducing(x, y, precision=1 / NOISE, **options)  # type: ignore[arg-type]
    return bayesify.bayesianize(net, made, likelihood=likelihoods.Gaussian(NOISE, learn=False))


def evidence(x: Tensor, y: Tensor) -> float:
    """log p(Y) of Bayesian linear regression with Neal's prior on weights and bias."""
    design = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1)
    covariance = design @ design.T / 3 + NOISE * torch.eye(len(x), dtype=x.dtype)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), covariance)
    return float(normal.log_prob(y.T).sum())


# -- the exact posterior ---------------------------------------------------------------------------------------------


def test_every_draw_of_the_exact_posterior_gives_the_evidence() -> None:
    x, y = regression_data()
    with torch.no_grad():
        log_likelihood, kl = linear_network(x, y, kl_form="sampled").elbo_terms(x, y, num_data=20, num_draws=50)
    torch.testing.assert_close(log_likelihood - kl, torch.full((50,), evidence(x, y), dtype=x.dtype), rtol=0, atol=1e-8)


@torch.no_grad()
def test_the_closed_bound_is_the_evidence_in_expectation() -> None:
    """E_q log p(Y | W) by q's two moments, which is exact for a Gaussian likelihood."""
    x, y = regression_data()
    bnn = linear_network(x, y)
    design = torch.cat((x, torch.ones(20, 1, dtype=x.dtype)), 1)
    mean = bnn.posterior.mean()
    matrix = torch.cat((mean["weight"], mean["bias"][:, None]), 1)
    precision = 3 * torch.eye(4, dtype=x.dtype) + design.T @ design / NOISE
    spread = torch.trace(design @ torch.linalg.inv(precision) @ design.T)
    squares = (y - design @ matrix.T).square().sum() + 2 * spread
    expected = -0.5 * squares / NOISE - 20 * math.log(2 * math.pi * NOISE)
    assert float(expected - bnn.kl()) == pytest.approx(evidence(x, y), abs=1e-8)


def test_the_gradient_of_the_bound_vanishes_at_the_exact_posterior() -> None:
    """With the sampled KL every draw's gradient with respect to V and the precision is that of a constant."""
    x, y = regression_data()
    bnn = linear_network(x, y, kl_form="sampled")
    value = bnn.elbo(x, y, num_data=20, num_draws=400, generator=generator())
    gradient = torch.autograd.grad(value, bnn.posterior.pseudo_outputs[""])[0]  # type: ignore[union-attr]
    again = bnn.elbo(x, y, num_data=20, num_draws=400, generator=generator(5))
    other = torch.autograd.grad(again, bnn.posterior.pseudo_outputs[""])[0]  # type: ignore[union-attr]
    assert float((gradient - other).abs().max()) < 1.0  # one over sqrt(400) of a draw's, which is of order 10


# -- every linear map ------------------------------------------------------------------------------------------------


SINGLE = {
    **{name: CASES[name] for name in ("linear_no_bias", "bilinear", "conv1d", "conv2d", "conv2d_depthwise", "conv3d")},
    **{name: CASES[name] for name in ("transposed1d", "transposed2d", "transposed3d")},
    "linear": Case("linear", lambda: nn.Linear(3, 2), lambda size: (torch.randn(size, 3),)),
    "sequences": Case("sequences", lambda: nn.Linear(3, 2), lambda size: (torch.randn(size, 4, 3),)),
    "conv_same": Case("same", lambda: nn.Conv2d(2, 3, 4, padding="same"), lambda size: (torch.randn(size, 2, 5, 6),)),
    "conv_circular": Case(
        "circular",
        lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", groups=2),
        lambda size: (torch.randn(size, 2, 5, 6),),
    ),
    "conv_strided": Case(
        "strided", lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda size: (torch.randn(size, 2, 6, 6),)
    ),
    "transposed_padded": Case(
        "padded",
        lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        lambda size: (torch.randn(size, 2, 3, 4),),
    ),
}
every_map = pytest.mark.parametrize("case", SINGLE.values(), ids=SINGLE.keys())
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def design(bnn: BayesianNetwork) -> tuple[Tensor, Tensor, Tensor]:
    """A, from the derivative of the outputs by all weights; V; the prior's variances. Any layer that is linear in its weights."""
    part = bnn.posterior
    assert isinstance(part, GlobalInducing)
    args, kwargs = part.inducing_inputs.arguments()
    runner = Runner(bnn.network, bnn.weights)
    names = [weight.name for weight in part.weights]
    zeros = tuple(torch.zeros(weight.shape, dtype=torch.float64) for weight in part.weights)

    def outputs(*values: Tensor) -> Tensor:
        return runner.call(dict(zip(names, values, strict=True)), args, kwargs).flatten()

    with torch.enable_grad():
        columns = [part.flatten(1) for part in torch.autograd.functional.jacobian(outputs, zeros)]
    variance = torch.cat(
        [torch.full((weight.numel,), bnn.prior.std_of(weight) ** 2, dtype=torch.float64) for weight in part.weights]
    )
    (name,) = part.pseudo_outputs
    return torch.cat(columns, 1), part.pseudo_outputs[name].detach(), variance


def precision_matrix(part: GlobalInducing, targets: Tensor) -> Tensor:
    """Lambda over all entries of V."""
    (name,) = part.pseudo_outputs
    if part.covariance == "diagonal":
        examples = torch.diag(part.log_precision[name].exp())
    else:
        size = part.inducing_inputs.num_points
        factor = torch.diag(nn.functional.softplus(part.raw_diagonal[name]))
        rows, cols = torch.tril_indices(size, size, -1)
        factor = factor.index_put((rows, cols), part.lower[name])
        examples = factor @ factor.T
    return torch.kron(examples, torch.eye(targets[0].numel(), dtype=targets.dtype))


@pytest.mark.thin(2)
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@every_map
@torch.no_grad()
def test_each_layer_is_a_dense_regression(case: Case, covariance: str) -> None:
    bnn = convert("global_inducing", case, torch.float64, covariance=covariance)
    part = bnn.posterior
    a, v, prior = design(bnn)
    weighted = precision_matrix(part, v)  # type: ignore[arg-type]
    dense = torch.linalg.inv(torch.diag(1 / prior) + a.T @ weighted @ a)
    mean = dense @ a.T @ weighted @ v.flatten()
    names = [weight.name for weight in part.weights]
    torch.testing.assert_close(torch.cat([part.mean()[name].flatten() for name in names]), mean, rtol=1e-8, atol=1e-9)
    variances = torch.cat([part.variance()[name].flatten() for name in names])
    torch.testing.assert_close(variances, dense.diagonal(), rtol=1e-8, atol=1e-10)
    exact = kl_normals(mean, dense, torch.zeros_like(mean), torch.diag(prior)).item()
    draws = bnn.draw(3, generator=generator())
    assert draws.kl.tolist() == pytest.approx([exact] * 3, rel=1e-8)


class UnitNoise(DrawRequest):
    """As many draws as there are random numbers, the i-th with 1 for the i-th number and 0 for all others."""

    def normals(self, sizes, like):  # type: ignore[no-untyped-def]
        """Columns of the identity."""
        return list(torch.eye(sum(sizes), dtype=like.dtype).split(list(sizes), 1))


@pytest.mark.thin(3)
@every_map
@torch.no_grad()
def test_draws_have_the_covariance_of_the_regression(case: Case) -> None:
    """A draw is the mean plus a linear map of the noise, and that map times its transpose is the covariance."""
    bnn = convert("global_inducing", case, torch.float64)
    part = bnn.posterior
    a, v, prior = design(bnn)
    dense = torch.linalg.inv(torch.diag(1 / prior) + a.T @ precision_matrix(part, v) @ a)  # type: ignore[arg-type]
    size = len(dense)
    drawn, _ = part.draw(UnitNoise(num_draws=size, prior=bnn.prior.draw(size), runner=Runner(bnn.network, bnn.weights)))
    flat = torch.cat([drawn[weight.name].flatten(1) for weight in part.weights], 1)
    root = flat - torch.cat([part.mean()[weight.name].flatten() for weight in part.weights])
    torch.testing.assert_close(root.T @ root, dense, rtol=1e-8, atol=1e-10)


# -- whole networks --------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A convolutional network with a shortcut, a stride and a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.down = nn.Conv2d(4, 6, 3, stride=2)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + torch.relu(self.body(x))
        return self.head(torch.relu(self.norm(self.down(x))).mean((2, 3)))


def concatenated(bnn: BayesianNetwork, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 as printed: inducing inputs and data in one batch, weights drawn inside each layer from patches.

    Whitened by the prior's std, with the noise that the library draws from the same generator.
    """
    part = bnn.posterior
    assert isinstance(part, GlobalInducing)
    layers = [entry.layer for entry in part.maps.values()]
    request = DrawRequest(num_draws=1, prior=bnn.prior.draw(1), noise=NoiseSource(generator(seed)))
    noise = dict(zip([layer.name for layer in layers], request.normals([layer.numel for layer in layers],
                     next(part.parameters())), strict=True))  # fmt: skip
    (inputs,), _ = part.inducing_inputs.arguments()
    size, kls = len(inputs), []

    def layer(name: str, value: Tensor, apply, unfold) -> Tensor:  # type: ignore[no-untyped-def]
        module = bnn.network.get_submodule(name)
        features = unfold(module, value[:size])  # [M, T, d]
        own = next(layer for layer in layers if layer.name == name)
        if len(own.weights) == 2:
            features = torch.cat((features, torch.ones_like(features[..., :1])), -1)
        std = bnn.prior.std_of(own.weights[0])
        positions = features.shape[1]
        a = features.flatten(0, 1) * std
        weights = part.log_precision[name].exp().repeat_interleave(positions)[:, None]
        v = part.pseudo_outputs[name]
        v = v.flatten(2).transpose(1, 2).flatten(0, 1) if v.ndim == 4 else v
        precision = torch.eye(a.shape[1], dtype=a.dtype) + a.T @ (weights * a)
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(a.T @ (weights * v), factor)
        drawn = mean + torch.linalg.solve_triangular(factor.T, noise[name].view(mean.shape), upper=True)
        covariance = torch.cholesky_inverse(factor)
        eye = torch.eye(a.shape[1], dtype=a.dtype)
        kls.extend(kl_normals(mean[:, i], covariance, torch.zeros_like(mean[:, i]), eye) for i in range(mean.shape[1]))
        return apply(module, value, own.from_matrix(std * drawn.T))

    def linear(module: nn.Module, value: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return nn.functional.linear(value, *weights.values())

    def convolution(module: nn.Conv2d, value: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return nn.functional.conv2d(value, *weights.values(), stride=module.stride, padding=module.padding)

    def patches(module: nn.Conv2d, value: Tensor) -> Tensor:
        return nn.functional.unfold(value, module.kernel_size, padding=module.padding, stride=module.stride).transpose(
            1, 2
        )

    value = torch.cat((inputs, x))
    if isinstance(bnn.network, Residual):
        value = torch.relu(layer("stem", value, convolution, patches))
        value = value + torch.relu(layer("body", value, convolution, patches))
        value = torch.relu(bnn.network.norm(layer("down", value, convolution, patches))).mean((2, 3))
        value = layer("head", value, linear, lambda _, rows: rows[:, None])
    else:
        for index, module in enumerate(bnn.network):  # type: ignore[arg-type]
            value = layer(str(index), value, linear, lambda _, rows: rows[:, None]) if index % 2 == 0 else module(value)
    return value[size:], torch.stack(kls).sum()


@pytest.mark.parametrize("kind", ["mlp", "residual"])
@torch.no_grad()
def test_draws_equal_the_concatenated_batch(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "mlp":
        net: nn.Module = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        inputs, x = torch.randn(7, 3).double(), torch.randn(4, 3).double()
    else:
        net = Residual().double()
        inputs, x = torch.randn(5, 1, 8, 8).double(), torch.randn(3, 1, 8, 8).double()
    bnn = bayesify.bayesianize(net, GlobalInducing(inputs, torch.randn(len(inputs), 2), precision=3.0))
    expected, kl = concatenated(bnn, x, seed=9)
    draws = bnn.draw(1, generator=generator(9))
    torch.testing.assert_close(draws(x)[0], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(draws.kl[0], kl, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_layers_are_correlated_and_local_ones_are_not() -> None:
    """Correlation of the two weights of y = w2 w1 x over n = 4000 draws; for independent ones its standard error is 1 / sqrt(n)."""
    n, k = 4000, 5.0
    x = torch.linspace(-1, 1, 10, dtype=torch.float64)[:, None]
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    found = {}
    for name, made in (
        ("global", GlobalInducing(x, 2 * x, precision=3.0)),
        ("local", LocalInducing(10, precision=3.0)),
    ):
        bnn = bayesify.bayesianize(net, made)
        bnn.posterior.pseudo_outputs["0"].copy_(1.4 * x)  # type: ignore[union-attr]
        drawn = bnn.draw(n, generator=generator()).weights
        found[name] = float(
            torch.corrcoef(torch.stack([drawn["0.weight"].flatten(), drawn["1.weight"].flatten()]))[0, 1]
        )
    assert found["global"] < -k / math.sqrt(n)
    assert abs(found["local"]) < k / math.sqrt(n)


@torch.no_grad()
def test_the_two_forms_of_the_kl_agree_on_average() -> None:
    """Over n = 4000 draws the mean of their difference is within k = 5 standard errors of 0, and the two are not the same."""
    n, k = 4000, 5.0
    bnn = convert("global_inducing", CASES["linear"], torch.float64, kl_form="sampled")
    sampled = bnn.draw(n, generator=generator()).kl
    bnn.posterior.kl_form = "closed"  # type: ignore[assignment]
    difference = sampled - bnn.draw(n, generator=generator()).kl
    error = float(difference.std()) / math.sqrt(n)
    assert abs(float(difference.mean())) < k * error
    assert error > 1e-4


@torch.no_grad()
def test_vmap_equals_loop() -> None:
    bnn = convert("global_inducing", CASES["nested"], torch.float64)
    runner = Runner(bnn.network, bnn.weights)
    prior = bnn.prior.draw(6)
    together = bnn.posterior.draw(DrawRequest(num_draws=6, prior=prior, noise=NoiseSource(generator()), runner=runner))
    runner.mode = lambda num_draws: "loop"  # type: ignore[method-assign, assignment]
    apart = bnn.posterior.draw(DrawRequest(num_draws=6, prior=prior, noise=NoiseSource(generator()), runner=runner))
    torch.testing.assert_close(together[0], apart[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together[1], apart[1], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_layer_that_is_called_twice_is_drawn_at_its_first_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.step(torch.tanh(self.step(x)))

    x = torch.randn(5, 3).double()
    twice = bayesify.bayesianize(Twice().double(), GlobalInducing(x, precision=2.0))
    once = bayesify.bayesianize(nn.Linear(3, 3).double(), GlobalInducing(x, precision=2.0))
    once.posterior.pseudo_outputs[""].copy_(twice.posterior.pseudo_outputs["step"])  # type: ignore[union-attr]
    a, b = twice.draw(2, generator=generator()), once.draw(2, generator=generator())
    torch.testing.assert_close(a.weights["step.weight"], b.weights["weight"])
    torch.testing.assert_close(a.kl, b.kl)


def test_attention_is_drawn_by_its_linear_maps() -> None:
    """The projection at the end of attention is regressed on what the heads make under the drawn projections before it."""
    case = CASES["attention"]
    bnn = convert("global_inducing", case, torch.float64)
    part = bnn.posterior
    assert list(part.maps) == ["attention.in_proj", "attention.out_proj"]  # type: ignore[arg-type]
    with torch.no_grad():
        drawn = {name: value[0] for name, value in bnn.draw(1, generator=generator(6)).weights.items()}
        args, kwargs = part.inducing_inputs.arguments()  # type: ignore[union-attr]
        eye = {"attention.out_proj.weight": torch.eye(4).double(), "attention.out_proj.bias": torch.zeros(4).double()}
        heads = Runner(bnn.network, bnn.weights).call({**drawn, **eye}, args, kwargs).flatten(0, 1)
        features = torch.cat((heads, torch.ones(len(heads), 1).double()), 1)
        weights = part.log_precision["attention.out_proj"].exp().repeat_interleave(3)[:, None]  # type: ignore[union-attr]
        precision = 4 * torch.eye(5).double() + features.T @ (weights * features)
        targets = part.pseudo_outputs["attention.out_proj"].flatten(0, 1)  # type: ignore[union-attr]
        mean = torch.linalg.solve(precision, features.T @ (weights * targets)).T
        sizes = [entry.layer.numel for entry in part.maps.values()]  # type: ignore[union-attr]
        noise = (
            DrawRequest(num_draws=1, prior=bnn.prior.draw(1), noise=NoiseSource(generator(6)))
            .normals(sizes, mean)[1]
            .view(5, 4)
        )
        factor = torch.linalg.cholesky(precision / 4)
        expected = mean + 0.5 * torch.linalg.solve_triangular(factor.T, noise, upper=True).T
    ours = torch.cat((drawn["attention.out_proj.weight"], drawn["attention.out_proj.bias"][:, None]), 1)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)


# -- mixtures by layer -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_last_layer_on_factorized_ones_is_the_optimal_last_layer() -> None:
    """fac -> gi: given the lower weights, V = Y and Lambda = 1 / noise, the last layer's draws give log p(Y | lower weights)."""
    x, y = regression_data()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    top = GlobalInducing(x, y, precision=1 / NOISE, kl_form="sampled")
    bnn = bayesify.bayesianize(
        net, {"2": top, "*": MeanField(0.3)}, likelihood=likelihoods.Gaussian(NOISE, learn=False)
    )
    draws = bnn.draw(6, generator=generator())
    lower = bnn.posteriors[1].kl(bnn.prior.draw(1))  # type: ignore[operator]
    bound = bnn.likelihood.log_prob(draws(x), y, has_draws=True).sum(-1) - (draws.kl - lower)  # type: ignore[union-attr]
    for index in range(6):
        hidden = torch.tanh(x @ draws.weights["0.weight"][index].T + draws.weights["0.bias"][index])
        features = torch.cat((hidden, torch.ones(20, 1).double()), 1)
        covariance = features @ features.T / 4 + NOISE * torch.eye(20).double()
        exact = torch.distributions.MultivariateNormal(torch.zeros(20).double(), covariance).log_prob(y.T).sum()
        assert float(bound[index]) == pytest.approx(float(exact), abs=1e-8)


@torch.no_grad()
def test_lower_layers_from_the_prior() -> None:
    """rand -> gi: n = 4000 draws of the lower layer have the prior's variance within k = 5 standard errors sqrt(2 / (n P))."""
    n, k = 4000, 5.0
    x, y = regression_data()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    bnn = bayesify.bayesianize(net, GlobalInducing(x, y, learned="last"))
    assert list(bnn.posterior.pseudo_outputs) == ["2"]  # type: ignore[arg-type]
    drawn = bnn.draw(n, generator=generator()).weights["0.weight"]
    assert abs(float(drawn.square().mean()) * 3 - 1) < k * math.sqrt(2 / drawn.numel())
    assert bayesify.count_parameters(bnn) == x.numel() + y.numel() + 20


# -- priors that draw their scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["global_inducing", "local_inducing"])
@pytest.mark.parametrize("prior", [priors.Scale(), priors.SpatialInverseWishart()], ids=lambda prior: prior.name)
@torch.no_grad()
def test_draws_of_the_prior(name: str, prior: priors.Prior) -> None:
    """Given the S drawn priors, draw s is the regression under prior s: its KL is the dense one, in both forms on average."""
    case = SINGLE["conv_strided"]
    inputs = case.inputs(4)
    made = GlobalInducing(inputs, precision=0.5) if name == "global_inducing" else LocalInducing(4, precision=0.5)
    bnn = bayesify.bayesianize(case.network(torch.float64), made, prior=prior)
    part, scales = bnn.posterior, bnn.prior.draw(3, generator(2))
    runner = Runner(bnn.network, bnn.weights)
    _, kl = part.draw(DrawRequest(num_draws=3, prior=scales, noise=NoiseSource(generator()), runner=runner))
    if isinstance(part, GlobalInducing):
        a, v, _ = design(bnn)
        weighted = precision_matrix(part, v)
    else:
        z = torch.cat((part.points_value[""], torch.ones(4, 1).double()), 1)
        rows = torch.eye(3).double()
        kernel, bias = torch.kron(rows, z[:, :-1].contiguous()), torch.kron(rows, z[:, -1:].contiguous())
        a, v = torch.cat((kernel, bias), 1), part.pseudo_outputs[""].T
        weighted = torch.kron(rows, torch.diag(part.log_precision[""].exp()))
    for index in range(3):
        blocks = []
        for weight in part.weights:
            std = torch.as_tensor(scales.std[weight.name]).double()
            variance = std[index] ** 2 if std.ndim else std**2
            factor = scales.factor.get(weight.name)
            block = torch.eye(weight.numel).double()
            if factor is not None:
                size = factor.shape[-1]
                block = torch.kron(torch.eye(weight.numel // size).double(), factor[index] @ factor[index].T)
            blocks.append(variance * block)
        covariance = torch.block_diag(*blocks)
        dense = torch.linalg.inv(torch.linalg.inv(covariance) + a.T @ weighted @ a)
        mean = dense @ a.T @ weighted @ v.flatten()
        exact = kl_normals(mean, dense, torch.zeros_like(mean), covariance)
        assert float(kl[index]) == pytest.approx(float(exact), rel=1e-7)


# -- local inducing points -------------------------------------------------------------------------------------------

LEAVES = [
    "linear_no_bias",
    "conv1d",
    "conv2d_depthwise",
    "transposed1d",
    "embedding",
    "layer_norm",
    "custom",
    "tied",
    "lstm",
]


@pytest.mark.parametrize("leaf", LEAVES)
@torch.no_grad()
def test_local_inducing_is_a_dense_regression(leaf: str) -> None:
    bnn = convert("local_inducing", CASES[leaf], torch.float64)
    part = bnn.posterior
    assert isinstance(part, LocalInducing)
    total, mean, variance = 0.0, part.mean(), part.variance()
    for layer in part.layers:
        z = part.points_value[layer.name]
        if z.shape[1] < layer.cols:
            z = torch.cat((z, torch.ones(5, 1).double()), 1)
        prior = torch.cat(
            [torch.full((w.matrix_shape[1],), bnn.prior.std_of(w) ** 2, dtype=torch.float64) for w in layer.weights]
        )
        weighted = torch.diag(part.log_precision[layer.name].exp())
        dense = torch.linalg.inv(torch.diag(1 / prior) + z.T @ weighted @ z)
        means = part.pseudo_outputs[layer.name].T @ weighted @ z @ dense  # [rows, cols]
        torch.testing.assert_close(layer.to_matrix(mean), means, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(layer.to_matrix(variance), dense.diagonal().expand_as(means), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(part.covariance(layer), dense, rtol=1e-8, atol=1e-10)
        zero = torch.zeros(layer.cols).double()
        total += sum(float(kl_normals(row, dense, zero, torch.diag(prior))) for row in means)
    assert float(bnn.kl()) == pytest.approx(total, rel=1e-8)
    assert float(Posterior.kl(part, bnn.prior.draw(1))) == pytest.approx(total, rel=1e-8)  # by entropy and moments


# -- what a user may do wrong ----------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).mean(0)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def shared() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


X = torch.linspace(-1, 1, 15).view(5, 3)


@pytest.mark.parametrize(
    ("net", "made", "message"),
    [
        (Mixing, lambda: GlobalInducing(X), r"the input of second for an example depends on the other examples; .*GroupNorm"),
        (TimeFirst, lambda: GlobalInducing(torch.randn(5, 2, 3)), r"layer gets inputs of shape \(2, 5, 3\) for 5 inducing.*; .*"),
        (Unused, lambda: GlobalInducing(X), r"idle is not called when the network runs; give this layer another posterior"),
        (shared, lambda: GlobalInducing(X), r"0.weight is tied to 2.weight.*; give this weight another posterior"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), lambda: GlobalInducing(X),
         r"1 \(BatchNorm1d\) normalizes by batch statistics.*; use GroupNorm, or .*batch_statistics='frozen'"),
        (mlp, lambda: GlobalInducing(X, torch.zeros(5, 3)),
         r"targets have shape \(5, 3\), but the last layer 2 has outputs of shape \(5, 2\)"),
        (mlp, lambda: GlobalInducing(X, torch.zeros(4, 2)), r"targets have shape \(4, 2\).*; give 5 rows, each with 2 numbers"),
        (mlp, lambda: GlobalInducing(X, torch.tensor([0, 1, 2, 0, 1])), r"the label 2, but the last layer 2 has 2 outputs; "),
        (lambda: nn.Linear(3, 2), lambda: GlobalInducing(X, torch.zeros(5, 1)),
         r"the last layer \(the network\) has outputs of shape \(5, 2\)"),
        (mlp, lambda: GlobalInducing(torch.zeros(5, 4)), r"does not run on inducing inputs of shape \(5, 4\) .*; give inputs"),
        (mlp, lambda: GlobalInducing(X.where(X > 0, math.nan)), r"inputs hold nan at index \[0, 0\]; give finite numbers"),
        (mlp, lambda: GlobalInducing(X, X[:, :2].log()), r"targets hold NaN or infinity; give finite numbers"),
        (mlp, lambda: GlobalInducing(X[:0]), r"inputs have shape \(0, 3\); give at least one"),
        (mlp, lambda: GlobalInducing(0), r"inputs=0; give an integer of at least 1"),
        (mlp, lambda: GlobalInducing(X, precision=0.0), r"precision=0.0; give a positive number"),
        (mlp, lambda: GlobalInducing(X, covariance="dense"), r"covariance='dense'; give 'diagonal' or 'full'"),  # type: ignore[arg-type]
        (mlp, lambda: GlobalInducing(X, learned="first"), r"learned='first'; give 'all' or 'last'"),  # type: ignore[arg-type]
        (mlp, lambda: GlobalInducing(X, kl_form="exact"), r"kl_form='exact'; give 'closed' or 'sampled'"),  # type: ignore[arg-type]
        (lambda: nn.Conv2d(1, 2, 3), lambda: GlobalInducing(5), r"inputs= is a number, .* first layer is not linear"),
        (mlp, lambda: LocalInducing(0), r"LocalInducing: points=0; give an integer of at least 1"),
        (mlp, lambda: LocalInducing(3, precision=-1.0), r"LocalInducing: precision=-1.0; give a positive number"),
        (mlp, lambda: LocalInducing(3, kl_form="exact"), r"LocalInducing: kl_form='exact'; give"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_input(net, made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        bayesify.bayesianize(net(), made())


def test_bad_types() -> None:
    for inputs in (None, "data", True, 1.5, [X.numpy()]):
        with pytest.raises(TypeError, match=r"GlobalInducing: inputs.*; give"):
            GlobalInducing(inputs)


def test_batch_normalization_may_be_frozen_and_is_refused_in_training() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    bnn = bayesify.bayesianize(net, GlobalInducing(X), likelihood=likelihoods.Gaussian(0.1))
    bnn.predict(X, 3)
    bnn.train()
    with pytest.raises(ValueError, match=r"use GroupNorm, or .*batch_statistics='frozen'"):
        bnn.draw()
    assert bnn.network[0].weight is None, "an error leaves no weight behind"  # type: ignore[index]


def test_a_factorization_that_fails_names_the_layer() -> None:
    bnn = bayesify.bayesianize(mlp(), GlobalInducing(X[:3]))  # fewer than the columns, so that the rest is the prior's
    part = bnn.posterior
    with torch.no_grad():
        part.log_precision["2"].fill_(60.0)  # type: ignore[union-attr]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bnn.draw(2, generator=generator())
    assert re.search(
        r"the precision of layer 2: its largest entry is .* times the prior precision", str(caught[0].message)
    )
    with torch.no_grad():
        part.log_precision["2"].fill_(1000.0)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"the precision of layer 2 \(5 x 5\) is not finite; "):
        bnn.draw(generator=generator())
    assert bnn.network[0].weight is None  # type: ignore[index]


def test_two_that_run_the_network_are_refused() -> None:
    bnn = bayesify.bayesianize(mlp(), {"0": GlobalInducing(X), "2": GlobalInducing(X)})
    with pytest.raises(ValueError, match=r"2.weight is not yet drawn .*; use one GlobalInducing for all layers"):
        bnn.draw()


def test_noise_for_each_example_is_refused() -> None:
    choice = {"2": GlobalInducing(X), "*": MeanField(local_reparameterization=True)}
    bnn = bayesify.bayesianize(mlp(), choice, likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(ValueError, match="use local_reparameterization=False in the other posterior"):
        bnn.elbo(X, torch.zeros(5, 2), num_data=5)
    bnn.predict(X, 3)


# -- where inducing inputs come from ---------------------------------------------------------------------------------


def test_from_a_loader() -> None:
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    made = GlobalInducing.from_loader([(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])], points=6, precision=2.0)
    bnn = bayesify.bayesianize(mlp(), made, likelihood=likelihoods.Categorical())
    part = bnn.posterior
    assert torch.equal(part.inducing_inputs.entries()[0], x[:6])  # type: ignore[union-attr]
    assert torch.equal(part.pseudo_outputs["2"], nn.functional.one_hot(y[:6], 2).float())  # type: ignore[union-attr]
    assert torch.equal(part.log_precision["0"].exp(), torch.full((6,), 2.0))  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=r"points=20, but the loader has only 10 examples; give points= a smaller value"
    ):
        GlobalInducing.from_loader([(x, y)], points=20)


def test_a_loader_of_mappings_that_are_no_dicts() -> None:
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    loader = [(UserDict(input=x[:4]), y[:4]), (UserDict(input=x[4:]), y[4:])]
    made = GlobalInducing.from_loader(loader, points=6)
    assert torch.equal(made.inputs["input"], x[:6])


def test_words_are_kept_and_keyword_inputs_are_learned() -> None:
    case = CASES["keywords_to_dict"]
    inputs = case.inputs(5)
    choice = {"embeddings": MeanField(0.1), "classifier": GlobalInducing(inputs)}
    bnn = bayesify.bayesianize(case.network(), choice, likelihood=likelihoods.Gaussian(0.1))
    part = next(part for part in bnn.posteriors if isinstance(part, GlobalInducing))
    assert not list(part.inducing_inputs.parameters())
    call(bnn.draw(3), case.batch())
    again = bayesify.bayesianize(case.network(), bnn.config())
    again.load_state_dict(bnn.state_dict())
    for one, other in zip(call(bnn.draw(2, generator=generator()), case.batch()).values(),
                          call(again.draw(2, generator=generator()), case.batch()).values(), strict=True):  # fmt: skip
        assert torch.equal(one, other)


def test_positions_share_the_precision_of_their_example() -> None:
    bnn = bayesify.bayesianize(Residual(), GlobalInducing([4, 1, 8, 8]))
    part = bnn.posterior
    assert {name: tuple(value.shape) for name, value in part.pseudo_outputs.items()} == {  # type: ignore[union-attr]
        "stem": (4, 4, 8, 8), "body": (4, 4, 8, 8), "down": (4, 6, 3, 3), "head": (4, 2)
    }  # fmt: skip
    starts = {name: float(value.detach().exp()[0]) for name, value in part.log_precision.items()}  # type: ignore[union-attr]
    assert starts == pytest.approx({"stem": 1 / 64, "body": 1 / 64, "down": 1 / 9, "head": 1.0})


def test_it_learns_what_the_exact_posterior_would() -> None:
    """From a start elsewhere, training of one linear layer ends within 0.3 nats of the log evidence."""
    x, y = regression_data()
    net = nn.Linear(3, 2).double()
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(
        net, GlobalInducing(x[:8] + 0.1, kl_form="sampled"), likelihood=likelihoods.Gaussian(NOISE, learn=False)
    )
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 250)
    for _ in range(250):
        optimizer.zero_grad()
        (-bnn.elbo(x, y, num_data=20, num_draws=8)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        final = float(bnn.elbo(x, y, num_data=20, num_draws=500, generator=generator()))
    assert evidence(x, y) - 0.3 < final < evidence(x, y) + 0.05


def test_the_last_layer_may_start_with_a_precision_of_its_own() -> None:
    """With the noise's precision and the data as targets, the last layer is then the exact posterior given the layers below."""
    for covariance in ("diagonal", "full"):
        made = GlobalInducing(X, torch.zeros(5, 2), 0.1, covariance=covariance, last_precision=25.0)  # type: ignore[arg-type]
        posterior = bayesify.bayesianize(mlp(), made).posterior
        for name, wanted in (("0", 0.1), ("2", 25.0)):
            root = posterior._mix(name, torch.float32)(torch.eye(5))
            torch.testing.assert_close(root.mT @ root, wanted * torch.eye(5))
    assert GlobalInducing(X, last_precision=2.0).config()["last_precision"] == 2.0
    with pytest.raises(ValueError, match=r"last_precision=0; give a positive number"):
        GlobalInducing(X, last_precision=0)


def test_registered_by_name() -> None:
    assert isinstance(bayesify.bayesianize(mlp(), {"name": "gi", "inputs": 5}).posterior, posteriors.GlobalInducing)
    assert isinstance(bayesify.bayesianize(mlp(), {"name": "li", "points": 5}).posterior, posteriors.LocalInducing)
