"""Laplace posteriors against dense algebra: linear regression, Hessians by automatic differentiation, enumeration."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from cases import CASES, Case, call
from matrix import some_leaves
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import bayesify
from bayesify import Laplace, likelihoods, subnetwork
from bayesify.laplace import prior_precision
from bayesify.laplace.covariances import FullCovariance, low_rank_eigh
from bayesify.laplace.prior_precision import FACTOR_PER_LAYER
from bayesify.likelihoods import Likelihood
from bayesify.running.inputs_and_outputs import select_output

LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": likelihoods.Gaussian(noise=[0.3, 0.7]),
    "heteroscedastic": likelihoods.HeteroscedasticGaussian(),
    "categorical": likelihoods.Categorical(),
    "bernoulli": likelihoods.Bernoulli(),
}


def targets_for(name: str, outputs: Tensor) -> Tensor:
    torch.manual_seed(5)
    if name == "categorical":
        return torch.randint(outputs.shape[-1], outputs.shape[:-1])
    if name == "bernoulli":
        return torch.randint(2, outputs.shape).to(outputs.dtype)
    size = outputs.shape[-1] // 2 if name == "heteroscedastic" else outputs.shape[-1]
    return torch.randn(*outputs.shape[:-1], size, dtype=outputs.dtype)


def dense_jacobian(net: nn.Module, inputs: Any) -> Tensor:
    """[B, O, P] over all trainable parameters, one backward pass per output."""
    outputs = select_output(call(net, inputs), None)
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    rows = []
    for entry in outputs.flatten():
        grads = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows).reshape(outputs.shape[0], -1, len(rows[0]))


def hessian_of_linearized(net: nn.Module, x: Any, y: Tensor, likelihood: Likelihood, name: str) -> Tensor:
    """Hessian by automatic differentiation of the linearized model's loss; over expected targets where it depends on them."""
    jacobian = dense_jacobian(net, x)
    with torch.no_grad():
        outputs = select_output(call(net, x), None)

    def loss(offset: Tensor, y: Tensor) -> Tensor:
        moved = outputs + (jacobian @ offset).reshape(outputs.shape)
        return -likelihood.log_prob(moved, y, has_draws=False).sum()

    zero = torch.zeros(jacobian.shape[-1], dtype=jacobian.dtype)
    if name != "heteroscedastic":
        return torch.autograd.functional.hessian(lambda offset: loss(offset, y), zero)
    # y at one standard deviation on either side has the expected residual and squared residual.
    mean, variance = likelihoods.HeteroscedasticGaussian().components(outputs)
    ends = [mean + sign * variance.sqrt() for sign in (1, -1)]
    return sum(0.5 * torch.autograd.functional.hessian(lambda offset, end=end: loss(offset, end), zero) for end in ends)


def fitted(net: nn.Module, likelihood: Likelihood, data: list[Any], *args: Any, **kwargs: Any) -> Laplace:
    return Laplace(net, likelihood, *args, **{"prior_precision": 1.0, **kwargs}).fit(data)


# -- exact models ------------------------------------------------------------------------------------------------------


def linear_regression() -> tuple[nn.Module, Tensor, Tensor, float, float, Tensor, Tensor]:
    """A linear network at its posterior mean, with the exact posterior precision and evidence ingredients."""
    torch.manual_seed(0)
    x, precision = torch.randn(30, 3, dtype=torch.float64), 1.7
    noise = 0.2
    design = torch.cat((x, torch.ones(30, 1, dtype=torch.float64)), dim=1)
    y = design @ torch.randn(4, 1, dtype=torch.float64) + noise**0.5 * torch.randn(30, 1, dtype=torch.float64)
    exact = design.T @ design / noise + precision * torch.eye(4, dtype=torch.float64)
    mean = torch.linalg.solve(exact, design.T @ y / noise)
    net = nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight.copy_(mean[:3].T)
        net.bias.copy_(mean[3])
    return net, x, y, noise, precision, exact, design


def test_linear_regression_is_exact() -> None:
    net, x, y, noise, precision, exact, design = linear_regression()
    laplace = fitted(
        net, likelihoods.Gaussian(noise=noise), [(x[:13], y[:13]), (x[13:], y[13:])], prior_precision=precision
    )
    torch.testing.assert_close(laplace.covariance_matrix(), torch.linalg.inv(exact), rtol=1e-8, atol=1e-10)
    kernel = design @ design.T / precision + noise * torch.eye(30, dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), kernel).log_prob(y[:, 0])
    torch.testing.assert_close(laplace.log_evidence(), evidence, rtol=1e-8, atol=1e-8)
    new = torch.randn(5, 3, dtype=torch.float64)
    row = torch.cat((new, torch.ones(5, 1, dtype=torch.float64)), dim=1)
    prediction = laplace.predict(new)
    variance = (row @ torch.linalg.inv(exact) * row).sum(-1, keepdim=True)
    torch.testing.assert_close(prediction.epistemic, variance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(prediction.variance, variance + noise, rtol=1e-8, atol=1e-10)
    exact_density = torch.distributions.Normal(net(new), (variance + noise).sqrt()).log_prob(y[:5]).sum(-1)
    torch.testing.assert_close(prediction.log_prob(y[:5]), exact_density, rtol=1e-8, atol=1e-10)
    joint = laplace.output_covariance(new, joint=True)
    torch.testing.assert_close(joint, row @ torch.linalg.inv(exact) @ row.T, rtol=1e-8, atol=1e-10)


def test_evidence_has_its_maximum_at_the_tuned_precision() -> None:
    net, x, y, noise, precision, *_ = linear_regression()
    laplace = fitted(net, likelihoods.Gaussian(noise=noise), [(x, y)], prior_precision=precision)
    chosen = laplace.tune_prior_precision(method="evidence")
    best = float(laplace.log_evidence())
    for factor in (0.5, 0.9, 1.1, 2.0):
        laplace.set_prior_factor(chosen / precision * factor)
        assert float(laplace.log_evidence()) <= best + 1e-3
    before = fitted(net, likelihoods.Gaussian(noise=noise), [(x, y)], prior_precision=chosen)
    laplace.set_prior_factor(chosen / precision)
    torch.testing.assert_close(laplace.covariance_matrix(), before.covariance_matrix(), rtol=1e-9, atol=1e-12)


def test_noise_by_evidence_is_a_fixed_point() -> None:
    net, x, y, *_ = linear_regression()
    laplace = fitted(net, likelihoods.Gaussian(noise=1.0), [(x, y)], prior_precision=1.0)
    laplace.tune_prior_precision(method="evidence", noise=True)
    noise = float(laplace.likelihood.noise.detach())
    again = fitted(net, likelihoods.Gaussian(noise=noise), [(x, y)], prior_precision=1.0)
    again.set_prior_factor(laplace.posterior.factor)
    torch.testing.assert_close(laplace.covariance_matrix(), again.covariance_matrix(), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(laplace.log_evidence(), again.log_evidence(), rtol=1e-5, atol=1e-6)
    assert 0.1 < noise < 0.4  # the data's is 0.2


# -- curvature ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_ggn_is_the_hessian_of_the_linearized_model(name: str) -> None:
    case = CASES["linear"]
    net, x = case.network(torch.float64), case.batch(dtype=torch.float64)
    y = targets_for(name, net(*x))
    likelihood = LIKELIHOODS[name]
    exact = hessian_of_linearized(net, x, y, likelihood.double(), name)
    laplace = fitted(net, likelihood, [(x[0], y)], prior_precision=0.5)
    eye = torch.eye(len(exact), dtype=torch.float64)
    torch.testing.assert_close(laplace.posterior.curvature, exact, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(laplace.covariance_matrix(), torch.linalg.inv(exact + 0.5 * eye), rtol=1e-8, atol=1e-9)
    diagonal = fitted(net, likelihood, [(x[0], y)], covariance="diagonal", prior_precision=0.5)
    torch.testing.assert_close(diagonal.posterior.curvature, exact.diagonal(), rtol=1e-8, atol=1e-10)


LEAVES = [case for case in CASES.values() if not case.training]


@some_leaves(LEAVES)
@pytest.mark.filterwarnings("ignore:.*num_samples='exact'")  # of what a pass for each output costs
def test_ggn_for_each_kind_of_layer(case: Case) -> None:
    net = case.network(torch.float64)
    x = case.batch(dtype=torch.float64)
    outputs = select_output(call(net, x), None)
    y = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
    jacobian = dense_jacobian(net, x).flatten(0, 1)
    exact = jacobian.T @ jacobian / 0.5
    batch = {**x, "y": y} if isinstance(x, dict) else (x, y)
    laplace = fitted(net, likelihoods.Gaussian(noise=0.5), [batch], num_samples="exact")
    torch.testing.assert_close(laplace.posterior.curvature, exact, rtol=1e-8, atol=1e-10)
    diagonal = fitted(net, likelihoods.Gaussian(noise=0.5), [batch], covariance="diagonal", num_samples="exact")
    torch.testing.assert_close(diagonal.posterior.curvature, exact.diagonal(), rtol=1e-8, atol=1e-10)
    size = max(1, len(exact) // 2)
    some = fitted(net, likelihoods.Gaussian(noise=0.5), [batch], subnetwork.random(size, seed=1), num_samples="exact")
    index = some.subset.flat()
    torch.testing.assert_close(some.posterior.curvature, exact[index][:, index], rtol=1e-8, atol=1e-10)
    closed = some.output_covariance(x)
    rows = dense_jacobian(net, x)[..., index]
    torch.testing.assert_close(closed, rows @ some.covariance_matrix() @ rows.mT, rtol=1e-7, atol=1e-9)
    within = diagonal.output_covariance(x)
    rows = dense_jacobian(net, x)
    torch.testing.assert_close(within, (rows * diagonal.posterior.variances()) @ rows.mT, rtol=1e-7, atol=1e-9)


def test_empirical_fisher() -> None:
    case = CASES["linear"]
    net, (x,) = case.network(torch.float64), case.batch(dtype=torch.float64)
    y = torch.tensor([0, 1, 1])
    laplace = fitted(net, likelihoods.Categorical(), [(x, y)], curvature="empirical")
    total = torch.zeros(())
    for row, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(net(row[None]), label[None])
        grad = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])
        total = total + torch.outer(grad, grad)
    torch.testing.assert_close(laplace.posterior.curvature, total, rtol=1e-8, atol=1e-10)


def test_positions_and_class_axis() -> None:
    torch.manual_seed(0)
    net = nn.Conv1d(2, 3, 1).double()
    x, y = torch.randn(4, 2, 5, dtype=torch.float64), torch.randint(3, (4, 5))
    likelihood = likelihoods.Categorical(class_axis=1)
    laplace = fitted(net, likelihood, [(x, y)])
    exact = hessian_of_linearized(net, (x,), y, likelihood, "categorical")
    torch.testing.assert_close(laplace.posterior.curvature, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("memory", ["1GiB", "2kB"])
def test_memory_changes_nothing(memory: str) -> None:
    case = CASES["conv2d"]
    net, (x,) = case.network(torch.float64), case.batch(dtype=torch.float64)
    y = net(x).detach() + 0.1
    reference = fitted(net, likelihoods.Gaussian(noise=0.5), [(x, y)], covariance="diagonal")
    other = fitted(net, likelihoods.Gaussian(noise=0.5), [(x, y)], covariance="diagonal", memory=memory)
    torch.testing.assert_close(other.posterior.curvature, reference.posterior.curvature)
    torch.testing.assert_close(other.predict(x).variance, reference.predict(x).variance)


# -- Kronecker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_kronecker_is_exact_for_one_example(name: str) -> None:
    case = CASES["linear"]
    net, (x,) = case.network(torch.float64), case.batch(1, dtype=torch.float64)
    y = targets_for(name, net(x))
    likelihood = LIKELIHOODS[name]
    whole = fitted(net, likelihood, [(x, y)])
    kron = fitted(net, likelihood, [(x, y)], covariance="kronecker", prior_precision=0.3)
    eye = torch.eye(whole.subset.size, dtype=torch.float64)
    blocks = torch.block_diag(*[torch.ones(n, n) for n in (20, 12)]).double()
    exact = torch.linalg.inv(whole.posterior.curvature * blocks + 0.3 * eye)
    torch.testing.assert_close(kron.covariance_matrix(), exact, rtol=1e-8, atol=1e-8)
    _check_kronecker(kron, net, x)


def _check_kronecker(kron: Laplace, net: nn.Module, x: Tensor) -> None:
    """Every way to use the covariance agrees with the dense matrix."""
    dense = kron.covariance_matrix()
    torch.testing.assert_close(kron.posterior.variances(), dense.diagonal(), rtol=1e-8, atol=1e-9)
    rows = dense_jacobian(net, (x,))
    torch.testing.assert_close(kron.output_covariance(x), rows @ dense @ rows.mT, rtol=1e-7, atol=1e-8)
    flat = rows.flatten(0, 1)
    torch.testing.assert_close(kron.output_covariance(x, joint=True), flat @ dense @ flat.T, rtol=1e-7, atol=1e-8)
    prior = torch.logdet(kron.posterior.factor * torch.diag(kron.posterior.prior))
    torch.testing.assert_close(kron.posterior.log_det_ratio(), -torch.logdet(dense) - prior, rtol=1e-7, atol=1e-8)
    scaled = kron.posterior.rescaled(2.5)
    draws = scaled.draw(40_000, torch.Generator().manual_seed(0))
    exact = scaled.dense()
    # the standard error of a covariance entry is at most sqrt(2 C_ii C_jj / n); n = 40000, k = 5
    error = (2 * torch.outer(exact.diagonal(), exact.diagonal()) / 40_000).sqrt()
    assert bool(((draws.T @ draws / 40_000 - exact).abs() < 5 * error).all())


def test_kronecker_is_exact_for_many_where_all_above_is_linear() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    y = torch.randn(7, 2, dtype=torch.float64)
    names = ["0.weight", "0.bias"]
    whole = fitted(net, likelihoods.Gaussian(noise=0.5), [(x, y)], names)
    kron = fitted(net, likelihoods.Gaussian(noise=0.5), [(x[:3], y[:3]), (x[3:], y[3:])], names, "kronecker")
    torch.testing.assert_close(kron.covariance_matrix(), whole.covariance_matrix(), rtol=1e-8, atol=1e-9)


def test_kronecker_of_a_convolution() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).double()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)  # one output position
    y = torch.randn(1, 3, dtype=torch.float64)
    whole = fitted(net, likelihoods.Gaussian(noise=0.5), [(x, y)])
    kron = fitted(net, likelihoods.Gaussian(noise=0.5), [(x, y)], covariance="kronecker")
    torch.testing.assert_close(kron.covariance_matrix(), whole.covariance_matrix(), rtol=1e-8, atol=1e-9)
    wide = torch.randn(
        2, 2, 4, 4, dtype=torch.float64
    )  # several positions: the dense matrix is the reference for all uses
    other = fitted(net, likelihoods.Gaussian(noise=0.5), [(wide, net(wide).detach())], covariance="kronecker")
    _check_kronecker(other, net, wide)


def test_kronecker_with_norms_and_embeddings_is_diagonal_there() -> None:
    case = CASES["keywords_to_dict"]
    net, x = case.network(torch.float64), case.batch(dtype=torch.float64)
    batch = {**x, "y": torch.tensor([0, 1, 2])}
    kron = fitted(net, likelihoods.Categorical(), [batch], covariance="kronecker")
    diagonal = fitted(net, likelihoods.Categorical(), [batch], covariance="diagonal")
    places = kron.subset.split(torch.arange(kron.subset.size))
    for name in ("embeddings.weight", "norm.weight", "norm.bias"):
        inside = kron.covariance_matrix()[places[name]][:, places[name]]
        torch.testing.assert_close(inside, torch.diag(diagonal.posterior.variances()[places[name]]))


@pytest.mark.parametrize("covariance", ["full", "kronecker", "diagonal"])
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_what_a_table_does_to_its_gradients_changes_nothing(option: str, covariance: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 2)).double()
    batch = torch.tensor([[0, 0], [0, 1], [5, 4]]), torch.randn(3, 2, dtype=torch.float64)
    plain = fitted(net, likelihoods.Gaussian(noise=0.5), [batch], covariance=covariance)
    setattr(net[0], option, True)
    other = fitted(net, likelihoods.Gaussian(noise=0.5), [batch], covariance=covariance)
    torch.testing.assert_close(other.covariance_matrix(), plain.covariance_matrix())


class Functional(nn.Module):
    """A linear map whose layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.first(x)), self.second.weight, self.second.bias)


def test_kronecker_leaves_no_weight_out() -> None:
    torch.manual_seed(0)
    net, x, y = Functional().double(), torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,))
    kron = fitted(net, likelihoods.Categorical(), [(x, y)], covariance="kronecker")
    diagonal = fitted(net, likelihoods.Categorical(), [(x, y)], covariance="diagonal")
    assert [block.layer.name for block in kron.posterior.blocks] == ["first"]
    places = kron.subset.split(torch.arange(kron.subset.size))
    variances = kron.posterior.variances()
    for name in ("second.weight", "second.bias", "unused.weight", "unused.bias"):
        torch.testing.assert_close(variances[places[name]], diagonal.posterior.variances()[places[name]])
    _check_kronecker(kron, net, x)


def test_ignored_labels_have_no_curvature() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 3).double(), torch.randn(8, 4, 3, dtype=torch.float64), torch.randint(3, (8, 4))
    y[:, 2:] = -100
    laplace = fitted(net, likelihoods.Categorical(), [(x, y)])
    exact = hessian_of_linearized(net, (x,), y, likelihoods.Categorical(), "categorical")
    torch.testing.assert_close(laplace.posterior.curvature, exact, rtol=1e-8, atol=1e-10)


def test_the_noise_follows_example_weights() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    data = [(torch.randn(30, 2).double(), torch.randn(30, 1).double(), 2 * torch.rand(30))]
    laplace = fitted(net, likelihoods.Gaussian(noise=0.3), data)
    before = laplace.log_evidence()
    laplace.set_noise(0.3)
    torch.testing.assert_close(laplace.log_evidence(), before, rtol=1e-9, atol=1e-9)
    other = fitted(net, likelihoods.Gaussian(noise=0.8), data)
    laplace.set_noise(0.8)
    torch.testing.assert_close(laplace.log_evidence(), other.log_evidence(), rtol=1e-9, atol=1e-9)


# -- subnetworks -------------------------------------------------------------------------------------------------------


def problem() -> tuple[nn.Module, list[Any], Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    return net, [(x, torch.randint(3, (20,)))], x


def test_all_weights_is_the_full_posterior() -> None:
    net, data, x = problem()
    whole = fitted(net, likelihoods.Categorical(), data)
    every = fitted(net, likelihoods.Categorical(), data, subnetwork.from_indices(torch.randperm(27)))
    torch.testing.assert_close(every.covariance_matrix(), whole.covariance_matrix(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(every.predict(x).probs, whole.predict(x).probs)
    marginal = fitted(net, likelihoods.Categorical(), data, marginal=True)
    torch.testing.assert_close(marginal.covariance_matrix(), whole.covariance_matrix(), rtol=1e-9, atol=1e-12)


def test_conditional_and_marginal() -> None:
    net, data, x = problem()
    whole = fitted(net, likelihoods.Categorical(), data, prior_precision=0.7)
    index = torch.tensor([0, 3, 5, 13, 20, 26])
    marginal = fitted(
        net, likelihoods.Categorical(), data, subnetwork.from_indices(index), prior_precision=0.7, marginal=True
    )
    exact = whole.covariance_matrix()[index][:, index]
    torch.testing.assert_close(marginal.covariance_matrix(), exact, rtol=1e-9, atol=1e-12)
    conditional = fitted(net, likelihoods.Categorical(), data, subnetwork.from_indices(index), prior_precision=0.7)
    precision = torch.linalg.inv(whole.covariance_matrix())[index][:, index]
    torch.testing.assert_close(conditional.covariance_matrix(), torch.linalg.inv(precision), rtol=1e-8, atol=1e-10)
    rows = dense_jacobian(net, (x,))[..., index]
    torch.testing.assert_close(marginal.output_covariance(x), rows @ exact @ rows.mT, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        marginal.output_covariance(x, joint=True),
        rows.flatten(0, 1) @ exact @ rows.flatten(0, 1).T,
        rtol=1e-8,
        atol=1e-10,
    )
    assert marginal.log_evidence() == pytest.approx(float(whole.log_evidence()), rel=1e-10)
    for laplace in (marginal, conditional, whole):  # KL to the prior, by brute force
        dense, index_of = laplace.covariance_matrix(), laplace.subset.flat()
        mean = torch.cat([p.detach().flatten() for p in net.parameters()])[index_of]
        q = torch.distributions.MultivariateNormal(mean, dense)
        p = torch.distributions.MultivariateNormal(torch.zeros_like(mean), torch.eye(len(mean)).double() / 0.7)
        torch.testing.assert_close(laplace.kl(), torch.distributions.kl_divergence(q, p), rtol=1e-8, atol=1e-8)


def test_the_default_precision_is_the_number_of_inputs() -> None:
    net, data, _ = problem()
    layers = sum(isinstance(module, nn.Linear) for module in net.modules())
    for structure in ("full", "kronecker", "diagonal"):
        factor = 1.0 if structure == "full" else FACTOR_PER_LAYER * layers
        laplace = Laplace(net, likelihoods.Categorical(), covariance=structure)  # type: ignore[arg-type]
        inputs = {name: 1.0 * net.get_parameter(name.replace("bias", "weight"))[0].numel() for name in laplace.values}
        assert laplace.prior_precision == pytest.approx({name: factor * size for name, size in inputs.items()})
        laplace.fit(data).tune_prior_precision(data, grid=[0.1], fine=False)
        tuned = laplace.prior_precision
        assert laplace.fit(data).prior_precision == pytest.approx(tuned)  # not the default again


def test_the_default_precision_counts_layers_under_the_posterior() -> None:
    net, data, _ = problem()
    last, everything = (
        Laplace(net, likelihoods.Categorical(), subset, "diagonal").fit(data).prior_precision
        for subset in ("last_layer", "all")
    )
    layers = sum(isinstance(module, nn.Linear) for module in net.modules())
    assert isinstance(last, dict)
    assert layers > 1
    assert {name: layers * value for name, value in last.items()} == pytest.approx(everything)
    alone = Laplace(net, likelihoods.Categorical(), "last_layer").fit(data)
    assert alone.base_precision == pytest.approx(last)  # one layer starts at the same under each structure


@pytest.mark.parametrize(("rows", "bound"), [pytest.param(600, False, marks=pytest.mark.slow), (30, True)])
def test_the_default_precision_of_one_layer_is_the_evidences_as_far_as_training_rows_bear(
    rows: int, bound: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randint(3, (rows,))
    y = torch.where(torch.rand(rows) < 0.7, x.argmax(1), y)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    data = list(zip(x.split(20), y.split(20), strict=True))
    laplace = Laplace(net, likelihoods.Categorical(), "last_layer").fit(data)
    assert laplace.link == "probit"
    assert laplace.posterior is not None
    found = laplace.posterior.factor
    plain = -float(nn.functional.cross_entropy(net(x), y).detach())
    evidence, loss = [], []
    for factor in prior_precision.SETTLING_FACTORS:
        laplace.set_prior_factor(factor)
        evidence.append(float(laplace.log_evidence()))
        loss.append(plain - float(laplace.predict(x).log_prob(y).mean()))
    best = evidence.index(max(evidence))
    bearable = [place for place in range(best, len(loss)) if loss[place] <= prior_precision.MAX_TRAINING_LOSS_RISE]
    assert found == pytest.approx(prior_precision.SETTLING_FACTORS[bearable[0] if bearable else -1])
    assert (found > prior_precision.SETTLING_FACTORS[best] * 1.01) == bound
    tuned = Laplace(net, likelihoods.Categorical(), "last_layer", prior_precision=2.0).fit(data)
    assert tuned.prior_precision == 2.0  # what is given stays
    assert Laplace(net, likelihoods.Categorical()).fit(data).link == "mc"


def test_examples_that_count_for_nothing_have_no_say_in_the_default_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(200, 3, dtype=torch.float64)
    y, weights = x.argmax(1), (torch.arange(200) < 100).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    wrong = torch.where(weights > 0, y, (y + 1) % 3)
    found, alone = (
        Laplace(net, likelihoods.Categorical(), "last_layer").fit([batch]).posterior
        for batch in ((x, wrong, weights), (x[:100], y[:100]))
    )
    assert found is not None
    assert alone is not None
    assert found.factor == alone.factor < 1


class Times(nn.Module):
    """A network whose outputs are in a unit."""

    def __init__(self, net: nn.Module, unit: float) -> None:
        super().__init__()
        self.net, self.unit = net, unit

    def forward(self, x: Tensor) -> Tensor:
        return self.unit * self.net(x)


@pytest.mark.thin(2)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_predictions_under_the_default_precision_follow_the_unit_of_the_targets(
    structure: Any, subset: str, outputs: int
) -> None:
    """To rounding, whether the last layer's weights hold the unit or the network multiplies by it; far from the rows too."""
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x[:, :1].sin() + 0.3 * torch.randn(60, outputs, dtype=torch.float64)
    for body in ([], [nn.Linear(3, 8), nn.Tanh()]):
        net = nn.Sequential(*body, nn.Linear(8 if body else 3, outputs)).double()
        features = torch.cat((net[:-1](x).detach(), torch.ones(60, 1)), 1)
        solution = torch.linalg.lstsq(features, y).solution
        found = []
        for unit in (1.0, 1e-2, 1e2, 1e4):
            net[-1].weight.data, net[-1].bias.data = unit * solution[:-1].T, unit * solution[-1]
            made = Laplace(net, likelihoods.Gaussian(), subset, structure).fit([(x, unit * y)]).predict(30 * x[:5])
            found.append(torch.stack((made.mean / unit, made.epistemic / unit**2, made.aleatoric / unit**2)))
        net[-1].weight.data, net[-1].bias.data = solution[:-1].T, solution[-1]
        scaled = (
            Laplace(Times(net, 1e3), likelihoods.Gaussian(), subset, structure).fit([(x, 1e3 * y)]).predict(30 * x[:5])
        )
        found.append(torch.stack((scaled.mean / 1e3, scaled.epistemic / 1e6, scaled.aleatoric / 1e6)))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-6, atol=0.0)


def test_the_default_precision_of_what_has_no_inputs_is_by_its_size() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.tensor([[0.3, -0.4]]))
            self.norm = nn.LayerNorm(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.position)

    found = Laplace(Tokens(), likelihoods.Categorical()).prior_precision
    assert found == pytest.approx({"position": 8.0, "norm.weight": 1.0, "norm.bias": 1.0})


def test_a_temperature_scales_the_covariance() -> None:
    net, data, x = problem()
    plain, warm = (fitted(net, likelihoods.Categorical(), data, temperature=t) for t in (1.0, 3.0))
    torch.testing.assert_close(warm.covariance_matrix(), 3 * plain.covariance_matrix())
    torch.testing.assert_close(warm.output_covariance(x), 3 * plain.output_covariance(x))
    torch.testing.assert_close(warm.log_evidence(), plain.log_evidence())
    draws, others = (found.draw(2, generator=torch.Generator().manual_seed(0)).weights for found in (warm, plain))
    for name, value in others.items():
        mean = plain.values[name]
        torch.testing.assert_close(draws[name] - mean, math.sqrt(3) * (value - mean))
    assert float(warm.predict(x).entropy.mean()) > float(plain.predict(x).entropy.mean())
    with pytest.raises(ValueError, match="temperature=0; give a positive number"):
        Laplace(net, likelihoods.Categorical(), temperature=0)


def test_a_search_goes_on_beyond_an_edge_and_says_where_it_ends() -> None:
    net, data, x = problem()
    laplace = fitted(net, likelihoods.Categorical(), data)
    wrong = [(x, (net(x).argmax(-1) + 1) % 3)]  # the wider the better
    with pytest.warns(UserWarning, match=r"the best prior precision, .*, is the smallest value that was tried"):
        chosen = laplace.tune_prior_precision(wrong)
    assert chosen < 1e-5
    assert laplace.tune_prior_precision(wrong, grid=[0.1, 1.0], fine=False) == 0.1  # as it is


# -- prediction --------------------------------------------------------------------------------------------------------


def test_probit_and_draws() -> None:
    net, data, x = problem()
    laplace = fitted(net, likelihoods.Categorical(), data, prior_precision=0.5, link="probit")
    prediction = laplace.predict(x)
    center = torch.eye(3, dtype=torch.float64) - 1 / 3
    variance = (center @ laplace.output_covariance(x) @ center).diagonal(dim1=-2, dim2=-1)
    exact = torch.softmax(net(x).detach() @ center / (1 + math.pi / 8 * variance).sqrt(), dim=-1)
    torch.testing.assert_close(prediction.probs, exact)
    assert prediction.outputs.shape == (32, 20, 3)
    assert bool((prediction.mutual_information >= 0).all())
    torch.testing.assert_close(prediction.entropy, torch.special.entr(exact).sum(-1))


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
def test_draws_of_the_linearized_model_have_its_moments(structure: Any) -> None:
    net, data, x = problem()
    laplace = fitted(net, likelihoods.Categorical(), data, covariance=structure)
    outputs = laplace.predict(x, 20_000, generator=torch.Generator().manual_seed(0), method="linearized_mc").outputs
    exact = laplace.output_covariance(x)
    centered = outputs - net(x).detach()
    found = torch.einsum("sbk,sbl->bkl", centered, centered) / 20_000
    scale = exact.diagonal(dim1=-2, dim2=-1)
    # the standard error of a covariance entry is at most sqrt(2 C_kk C_ll / n); n = 20000, k = 5
    error = (2 * scale.unsqueeze(-1) * scale.unsqueeze(-2) / 20_000).sqrt()
    assert bool(((found - exact).abs() < 5 * error).all())


def test_network_draws_vary_the_subset_only() -> None:
    net, data, x = problem()
    laplace = fitted(net, likelihoods.Categorical(), data, subnetwork.from_indices([1, 2, 25]))
    draws = laplace.draw(4, generator=torch.Generator().manual_seed(0))
    assert set(draws.weights) == {"0.weight", "2.bias"}
    changed = (draws.weights["0.weight"] != net[0].weight).reshape(4, -1)
    assert changed[:, [1, 2]].all()
    assert changed.sum() == 8
    assert laplace.predict(x, 8, method="network_mc").outputs.shape == (8, 20, 3)
    again = laplace.draw(4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again.weights["2.bias"], draws.weights["2.bias"])


def test_correlated_outputs_have_their_joint_density() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    laplace = fitted(net, likelihoods.Gaussian(noise=0.2), [(x, y)])
    covariance = laplace.output_covariance(x) + 0.2 * torch.eye(2).double()
    exact = torch.distributions.MultivariateNormal(net(x).detach(), covariance).log_prob(y)
    torch.testing.assert_close(laplace.predict(x).log_prob(y), exact)
    lower, upper = laplace.predict(x).interval(0.9)
    torch.testing.assert_close(laplace.predict(x).cdf(upper), torch.full_like(upper, 0.95), rtol=1e-6, atol=1e-8)
    assert bool((lower < upper).all())


@pytest.mark.filterwarnings("ignore:tune_prior_precision")
def test_validation_picks_the_best_of_the_grid() -> None:
    net, data, x = problem()
    held = [(x[:10], net(x[:10]).argmax(-1).roll(1))]  # some right, some wrong
    laplace = fitted(net, likelihoods.Categorical(), data, subnetwork.random(10))

    def score(value: float) -> float:
        other = fitted(net, likelihoods.Categorical(), data, subnetwork.random(10), prior_precision=value)
        return float(other.predict(held[0][0]).log_prob(held[0][1]).mean())

    grid = [10.0**power for power in range(-8, 9, 2)]
    chosen = laplace.tune_prior_precision(held, grid=grid, fine=False)
    assert chosen == max(grid, key=score)
    finer = laplace.tune_prior_precision(held, grid=grid)
    assert score(finer) >= score(chosen) - 1e-12
    direct = fitted(net, likelihoods.Categorical(), data, subnetwork.random(10), prior_precision=finer)
    torch.testing.assert_close(laplace.covariance_matrix(), direct.covariance_matrix(), rtol=1e-8, atol=1e-10)


def test_precision_per_layer() -> None:
    net, data, _ = problem()
    laplace = fitted(net, likelihoods.Categorical(), data, prior_precision={"0": 2.0, "*": 5.0})
    whole = fitted(net, likelihoods.Categorical(), data)
    prior = torch.cat((torch.full((12,), 2.0), torch.full((15,), 5.0))).double()
    exact = torch.linalg.inv(whole.posterior.curvature + torch.diag(prior))
    torch.testing.assert_close(laplace.covariance_matrix(), exact, rtol=1e-9, atol=1e-12)


def test_the_network_is_not_changed() -> None:
    net, data, x = problem()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    laplace = fitted(net, likelihoods.Categorical(), data)
    laplace.predict(x)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net[0]._forward_hooks
    with torch.no_grad():
        net[0].weight.zero_()
    torch.testing.assert_close(laplace.network[0].weight, before["0.weight"])
    assert bayesify.Laplace is Laplace


@pytest.mark.parametrize(
    ("hidden", "memory", "covariance", "size", "remark"),
    [
        (8, "1GiB", "full", 10 * 8 + 8 + 8 * 3 + 3, ""),
        (
            64,
            "1MiB",
            "full",
            64 * 3 + 3,
            ", last layer, because a full covariance over all 899 weights would take 9.25 MiB",
        ),
        (64, "100KiB", "kronecker", 64 * 3 + 3, ", last layer, because a full covariance over all 899 weights"),
    ],
)
def test_without_a_subset_the_budget_chooses(hidden, memory, covariance, size, remark):
    """All weights, or the last layer, with a full covariance or Kronecker factors: what somebody chooses who asks for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    loader = [(torch.randn(40, 10), torch.randint(0, 3, (40,)))]
    laplace = bayesify.Laplace(net, "categorical", memory=memory).fit(loader)
    assert (laplace.covariance, laplace.subset.size) == (covariance, size)
    assert remark in repr(laplace)
    subset = "last_layer" if remark else "all"
    same = bayesify.Laplace(net, "categorical", subset, covariance, memory=memory).fit(loader)
    x = torch.randn(5, 10)
    assert torch.equal(laplace.predict(x).probs, same.predict(x).probs)
    again = bayesify.Laplace(net, "categorical", covariance="diagonal", memory=memory).fit(loader)
    assert again.subset.size == sum(parameter.numel() for parameter in net.parameters())


def test_a_default_that_takes_long_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.laplace.laplace.MAX_QUIET_WEIGHTS", 10)
    net, loader = nn.Linear(4, 3), [(torch.randn(20, 4), torch.arange(20) % 3)]
    with pytest.warns(
        UserWarning, match=r"all 15 weights can take a minute .* subset='last_layer', which takes seconds"
    ) as told:
        bayesify.Laplace(net, "categorical").fit(loader)
    assert [warning.filename for warning in told] == [__file__]
    bayesify.Laplace(net, "categorical", subset="all").fit(loader)  # the user's choice: no warning
    bayesify.Laplace(net, "categorical").fit([(torch.randn(1, 4), torch.arange(1))])  # one row: rank 3 of 15


@pytest.mark.parametrize("likelihood", ["categorical", likelihoods.Gaussian(), likelihoods.Gaussian(noise=0.1)])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_few_rows_have_the_posterior_of_a_whole_diagonalization(
    monkeypatch: pytest.MonkeyPatch, likelihood: Any, subset: str
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()  # 242 weights, 82 in the last layer
    x = torch.randn(12, 3, dtype=torch.float64)
    y = torch.arange(12) % 2 if likelihood == "categorical" else torch.stack([x[:, 0].sin(), x.prod(1)], 1)
    found = []
    for low in (True, False):
        if not low:
            monkeypatch.setattr(FullCovariance, "has_low_rank", False)
        laplace = bayesify.Laplace(net, likelihood, subset, "full").fit([(x[:7], y[:7]), (x[7:], y[7:])])
        assert laplace.posterior.has_low_rank == low
        evidence = laplace.log_evidence()
        factor = laplace.tune_prior_precision(method="evidence")
        spread = laplace.output_covariance(torch.cat([x[:3], x[:3] + 1]))
        values = laplace.posterior.spectrum().sort(descending=True).values[:12]  # the others may be left out as zeros
        found.append([evidence, torch.tensor(factor), spread, values, laplace.predict(x + 0.5).log_prob(y)])
    for few, whole in zip(*found, strict=True):
        assert torch.allclose(few, whole, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*leaves almost no uncertainty")
def test_repeated_rows_have_the_posterior_of_a_whole_diagonalization(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curvature of 259 weights has rank 40 up to rounding errors, but the known bound is 600."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)), torch.randn(20, 4).repeat(15, 1)
    loader, found = [(x, torch.arange(20).repeat(15) % 3)], []
    for least in (10, 10_000):
        monkeypatch.setattr("bayesify.laplace.covariances.MIN_SKETCHED_WEIGHTS", least)
        laplace = bayesify.Laplace(net, "categorical").fit(loader)
        assert not laplace.posterior.has_low_rank
        assert len(laplace.posterior.spectrum()) == (64 if least == 10 else 259)
        fitted, evidence, probs = laplace.posterior.factor, laplace.log_evidence(), laplace.predict(x + 0.5).probs
        factors = torch.tensor([fitted, laplace.tune_prior_precision([(x + 0.5, loader[0][1])])])
        found.append([factors, evidence, probs, laplace.predict(x + 0.5).probs])
    for few, whole in zip(*found, strict=True):
        torch.testing.assert_close(few, whole, rtol=1e-4, atol=1e-5)


def test_a_curvature_of_high_rank_is_diagonalized_as_a_whole() -> None:
    matrix = torch.diag(torch.logspace(0, -3, 1200))
    assert low_rank_eigh(matrix, None, "a matrix") is None
    matrix.diagonal()[::2] = 0.0  # a quarter of the weights does not show that the rank is 600
    assert low_rank_eigh(matrix, None, "a matrix") is None
    matrix.diagonal()[250:] = 0.0
    values, vectors = low_rank_eigh(matrix, None, "a matrix")  # type: ignore[misc]
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix.double(), rtol=0, atol=1e-12)
    assert low_rank_eigh(matrix.fill_(math.nan), None, "a matrix") is None


def test_other_noise_keeps_the_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1)).double(), torch.randn(30, 2).double()
    loader = [(x, x[:, :1].sin())]
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.1), prior_precision=2.0).fit(loader)
    again = bayesify.Laplace(net, likelihoods.Gaussian(0.4), prior_precision=2.0).fit(loader)
    assert len(laplace.posterior.spectrum()) == len(again.posterior.spectrum()) == 37
    monkeypatch.delattr("bayesify.laplace.covariances.stable_eigh")
    laplace.set_noise(0.4)
    torch.testing.assert_close(laplace.posterior.spectrum(), again.posterior.spectrum())
    torch.testing.assert_close(laplace.log_evidence(), again.log_evidence())
    torch.testing.assert_close(laplace.predict(x).std, again.predict(x).std)


def test_probabilities_given_as_logits_are_reported() -> None:
    net, loader = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), [(torch.randn(20, 4), torch.arange(20) % 3)]
    with pytest.warns(UserWarning, match=r"Laplace\.fit: .*outputs are probabilities .* remove the softmax") as told:
        bayesify.Laplace(net, "categorical").fit(loader)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize(("labels", "told"), [(torch.arange(20) % 3, True), (torch.arange(20.0) % 3, False)])
def test_class_labels_under_a_gaussian_are_reported(labels: Tensor, told: bool) -> None:
    laplace = bayesify.Laplace(nn.Linear(4, 1), "gaussian")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        laplace.fit([(torch.randn(20, 4), labels)])
    sentence = r"Laplace\.fit: targets are the integers 0 to 2, .*use likelihoods\.Categorical\(\) with 3 outputs"
    assert [bool(re.match(sentence, str(warning.message))) for warning in found] == [True] * told
    assert [warning.filename for warning in found] == [__file__] * told


@pytest.mark.parametrize(
    ("layer", "reason"), [(nn.BatchNorm1d(3), "batch normalization uses"), (nn.Dropout(), "dropout is")]
)
def test_a_layer_in_training_mode_is_named(layer: nn.Module, reason: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), layer.train(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=rf"^layer '1': {reason} .*call net\.eval\(\) first"):
        bayesify.Laplace(net, "gaussian").fit([(torch.randn(20, 4), torch.randn(20, 1))])


def test_inputs_of_a_prediction_name_the_remedy() -> None:
    x = torch.randn(20, 4)
    laplace = bayesify.Laplace(nn.Linear(4, 3), "categorical").fit([(x, torch.arange(20) % 3)])
    with pytest.raises(TypeError, match=r"inputs are ndarray; give tensors, for example torch\.from_numpy"):
        laplace.predict(x.numpy())
    with pytest.raises(ValueError, match=r"type float64 do not fit the network: .*x\.float\(\)$"):
        laplace.predict(x.double())
    with pytest.raises(ValueError, match=r"do not fit the network: .*x\.unsqueeze\(0\) for one example"):
        laplace.predict(x[0])
    with pytest.raises(ValueError, match=r"do not fit the network: .*DataLoader\(dataset, batch_size=\.\.\.\)"):
        laplace.fit(TensorDataset(x, torch.arange(20)[:, None] % 3))
