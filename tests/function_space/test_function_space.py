"""Function-space variational inference against dense Jacobians and exact Gaussians, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case, call, convert
from dense_reference import kl_normals
from matrix import some_leaves
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors
from bayesify.function_space import (
    Box,
    FunctionSpaceVI,
    GaussianProcess,
    NeuralTangent,
)
from bayesify.function_space.divergence import dense_kl
from bayesify.running.inputs_and_outputs import select_output

KINDS = ("diagonal", "full", "joint")
DETERMINISTIC = [case for case in CASES.values() if case.name != "batch_norm_training"]


class Features(nn.Module):
    """Fixed features, so that a linear layer on top is linear in its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x.square(), torch.cos(2 * x), torch.sin(x)), dim=-1)


def linear_network(outputs: int = 3) -> tuple[nn.Module, BayesianNetwork]:
    net = nn.Sequential(Features(), nn.Linear(8, outputs)).double()
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.3), likelihood=likelihoods.Gaussian(noise=0.5))
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
    return net, bnn


def inputs(case: Case, size: int = 3) -> Any:
    return case.batch(size, torch.float64)


def dense_jacobian(bnn: BayesianNetwork, given: Any, names: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B O], Jacobian [B O, P] at the means by automatic differentiation, and variances [P]."""
    net = bnn.mean_network().requires_grad_()
    outputs = select_output(call(net, given), None)
    parameters = [net.get_parameter(name) for name in names]
    rows = []
    for entry in outputs.flatten():
        grads = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    variance = {name: value for part in bnn.posteriors for name, value in part.variance().items()}
    return outputs.detach().flatten(), torch.stack(rows), torch.cat([variance[name].flatten() for name in names])


def blocks(joint: Tensor, size: int) -> dict[str, Tensor]:
    """The parts of a joint covariance [B O, B O] that each form shows."""
    whole = joint.reshape(size, -1, size, joint.shape[0] // size)  # [B, O, B, O]
    return {
        "diagonal": joint.diagonal().reshape(size, -1),
        "full": whole.diagonal(dim1=1, dim2=3).movedim(-1, 0),
        "example": whole.diagonal(dim1=0, dim2=2).movedim(-1, 0),
        "joint": joint,
    }


BUDGETS = {"transposed1d": 2**17, "transposed2d": 2**20, "transposed3d": 2**16}
"""Bytes that cut some layers into pieces; 4096 elsewhere."""


@some_leaves(DETERMINISTIC)
def test_moments_are_those_of_the_dense_jacobian(case: Case) -> None:
    """At once and in pieces, with gradients and without."""
    bnn = convert("mean_field", case, torch.float64)
    given = inputs(case)
    outputs, jacobian, variance = dense_jacobian(bnn, given, list(bnn.weights))
    exact = blocks(jacobian * variance @ jacobian.T, 3)
    for memory, grad in ((None, True), (BUDGETS.get(case.name, 4096), False)):
        space = FunctionSpaceVI(bnn, memory=memory)
        for kind, expected in exact.items():
            with torch.set_grad_enabled(grad and case.name != "embedding_bag"):  # torch: no second derivative
                mean, found = space.function_moments(given, kind)
            torch.testing.assert_close(mean.flatten(), outputs, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def many_positions() -> BayesianNetwork:
    """A convolution and a linear layer at far more positions than there are outputs, and a layer that is called twice."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x)).flatten(2).transpose(1, 2)  # [B, 16, 3]
            return self.head(torch.tanh(self.second(torch.tanh(self.second(hidden)))).mean(1))

    torch.manual_seed(4)
    return bayesify.bayesianize(Network().double(), posteriors.MeanField(init_std=0.2))


@pytest.mark.parametrize("memory", [None, 2048], ids=["at_once", "in_pieces"])
def test_many_positions(memory: int | None) -> None:
    bnn = many_positions()
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    _, jacobian, variance = dense_jacobian(bnn, (x,), list(bnn.weights))
    space = FunctionSpaceVI(bnn, 0.3, 2.0, memory=memory)
    for kind, expected in blocks(jacobian * variance @ jacobian.T, 3).items():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                _, found = space.function_moments(x, kind)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
    slope, difference = slope_and_difference(space, lambda: space.function_kl(x))
    torch.testing.assert_close(slope, difference, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_network_is_exact(kind: str) -> None:
    """The push-forward of the weights' Gaussian, and the KL between the two Gaussians over function values."""
    _, bnn = linear_network()
    x = torch.randn(4, 2, dtype=torch.float64)
    features = torch.cat((Features()(x), torch.ones(4, 1, dtype=torch.float64)), dim=1)  # [B, 9]
    mean = {name: value.detach() for name, value in bnn.posterior.mean().items()}
    variance = {name: value.detach() for name, value in bnn.posterior.variance().items()}
    weight = torch.cat((mean["1.weight"], mean["1.bias"][:, None]), dim=1)  # [O, 9]
    spread = torch.cat((variance["1.weight"], variance["1.bias"][:, None]), dim=1)
    exact_mean = features @ weight.T
    per_output = torch.einsum("bi,oi,ci->obc", features, spread, features)
    space = FunctionSpaceVI(bnn, 0.2, [0.7, 1.5, 3.0], Box(-1.0, 1.0, 4), kind)  # type: ignore[arg-type]
    found_mean, found = space.function_moments(x)
    torch.testing.assert_close(found_mean, exact_mean, rtol=1e-10, atol=1e-12)
    prior = torch.tensor([0.7, 1.5, 3.0], dtype=torch.float64)
    if kind == "diagonal":
        torch.testing.assert_close(found, per_output.diagonal(dim1=1, dim2=2).T, rtol=1e-10, atol=1e-12)
        kl = sum(
            kl_normals(
                exact_mean[b, o : o + 1],
                per_output[o, b, b].view(1, 1),
                torch.full((1,), 0.2).double(),
                prior[o].view(1, 1),
            )
            for b in range(4)
            for o in range(3)
        )
    else:
        kl = sum(
            kl_normals(
                exact_mean[:, o], per_output[o], torch.full((4,), 0.2).double(), prior[o] * torch.eye(4).double()
            )
            for o in range(3)
        )
        if kind == "joint":
            joint = torch.zeros(4, 3, 4, 3, dtype=torch.float64)
            for o in range(3):
                joint[:, o, :, o] = per_output[o]
            torch.testing.assert_close(found, joint.reshape(12, 12), rtol=1e-10, atol=1e-12)
        else:
            torch.testing.assert_close(found, per_output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(space.function_kl(x), torch.as_tensor(kl), rtol=1e-8, atol=1e-8)


def test_joint_kl_of_correlated_outputs() -> None:
    """Outputs that share weights are correlated: the joint form is the dense KL, the others are not."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.3))
    x = torch.randn(3, 2, dtype=torch.float64)
    outputs, jacobian, variance = dense_jacobian(bnn, (x,), list(bnn.weights))
    dense = kl_normals(outputs, jacobian * variance @ jacobian.T, torch.zeros(6).double(), 2.0 * torch.eye(6).double())
    found = {kind: FunctionSpaceVI(bnn, 0.0, 2.0, covariance=kind).function_kl(x) for kind in KINDS}  # type: ignore[arg-type]
    torch.testing.assert_close(found["joint"], dense.detach(), rtol=1e-8, atol=1e-8)
    assert found["joint"] > found["full"] > found["diagonal"]


def squared_exponential(a: Tensor, b: Tensor) -> Tensor:
    return 1.5 * torch.exp(-0.5 * torch.cdist(a, b).square())


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_process_prior(kind: str) -> None:
    _, bnn = linear_network(2)
    x = torch.randn(4, 2, dtype=torch.float64)
    prior = GaussianProcess(squared_exponential, mean=lambda x: x.sum(-1))
    space = FunctionSpaceVI(bnn, covariance=kind, prior=prior)  # type: ignore[arg-type]
    mean, joint = space.function_moments(x, "joint")
    kernel = squared_exponential(x, x)
    center = x.sum(-1, keepdim=True).expand(4, 2)
    parts = blocks(joint.detach(), 4)
    if kind == "joint":
        exact = kl_normals(
            mean.flatten().detach(), joint.detach(), center.flatten(), torch.kron(kernel, torch.eye(2).double())
        )
    elif kind == "full":
        exact = sum(kl_normals(mean[:, o].detach(), parts["full"][o], center[:, o], kernel) for o in range(2))
    else:
        exact = sum(
            kl_normals(
                mean[b, o : o + 1].detach(),
                parts["diagonal"][b, o].view(1, 1),
                center[b, o : o + 1],
                kernel[b, b].view(1, 1),
            )
            for b in range(4)
            for o in range(2)
        )
    torch.testing.assert_close(space.function_kl(x).detach(), torch.as_tensor(exact), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_neural_tangent_prior_is_the_initial_linearization(kind: str) -> None:
    """At the initial means and with the weights' prior variances the KL is 0; away from them it is the dense one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.7), prior=bayesify.priors.Gaussian(0.7))
    space = FunctionSpaceVI(bnn, covariance=kind, prior=NeuralTangent())  # type: ignore[arg-type]
    x = torch.randn(3, 2, dtype=torch.float64)
    first_outputs, first, _ = dense_jacobian(bnn, (x,), list(bnn.weights))
    torch.testing.assert_close(space.function_kl(x), torch.zeros(()).double(), rtol=0, atol=1e-9)
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    outputs, jacobian, variance = dense_jacobian(bnn, (x,), list(bnn.weights))
    q, p = blocks(jacobian * variance @ jacobian.T, 3), blocks(0.49 * first @ first.T, 3)
    mean, center = outputs.reshape(3, 2), first_outputs.reshape(3, 2)
    if kind == "joint":
        exact = kl_normals(outputs, q["joint"], first_outputs, p["joint"])
    elif kind == "full":
        exact = sum(kl_normals(mean[:, o], q["full"][o], center[:, o], p["full"][o]) for o in range(2))
    else:
        exact = sum(
            kl_normals(
                mean[b, o : o + 1], q["diagonal"][b, o].view(1, 1), center[b, o : o + 1], p["diagonal"][b, o].view(1, 1)
            )
            for b in range(3)
            for o in range(2)
        )
    torch.testing.assert_close(space.function_kl(x).detach(), torch.as_tensor(exact).detach(), rtol=1e-7, atol=1e-7)


CURVED = [
    "linear",
    "conv2d",
    "conv2d_depthwise",
    "transposed3d",
    "embedding",
    "layer_norm",
    "batch_norm",
    "lstm",
    "attention",
    "tied",
]


def slope_and_difference(space: FunctionSpaceVI, value: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Derivative along a random direction of all trained parameters, by backward pass and by central differences."""
    parameters = [parameter for parameter in space.bnn.parameters() if parameter.requires_grad]
    parameters = [
        parameter for parameter in parameters if parameter is not getattr(space.bnn.likelihood, "raw_noise", None)
    ]
    grads = torch.autograd.grad(value(), parameters, allow_unused=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for parameter in parameters]
    slope = sum((grad * direction).sum() for grad, direction in zip(grads, directions, strict=True))
    ends, step = [], 1e-6
    for sign in (1.0, -2.0):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += sign * step * direction
        ends.append(value().detach())
    return torch.as_tensor(slope), (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CURVED)
def test_gradients_of_the_kl(name: str, kind: str) -> None:
    case = CASES[name]
    bnn = convert("mean_field", case, torch.float64)
    given = inputs(case, 2)
    jitter = None if kind == "diagonal" else 0.1  # some of these covariances have no full rank
    for memory in (None, BUDGETS.get(name, 4096)):
        space = FunctionSpaceVI(bnn, 0.3, 2.0, covariance=kind, jitter=jitter, memory=memory)  # type: ignore[arg-type]
        slope, difference = slope_and_difference(space, lambda space=space: space.function_kl(given))
        torch.testing.assert_close(slope, difference, rtol=2e-6, atol=1e-5)


def test_pieces_add_up() -> None:
    """Context inputs one at a time give the same KL and the same gradients, those of point estimates included."""
    case = CASES["batch_norm"]
    results = []
    for memory in (None, 1):
        bnn = convert("mean_field", case, torch.float64)
        space = FunctionSpaceVI(bnn, 0.0, 2.0, memory=memory)
        kl = space.function_kl(inputs(case, 5))
        kl.backward()
        results.append(
            [
                kl.detach(),
                *(p.grad for p in (*bnn.posteriors.parameters(), *bnn.network.parameters()) if p.grad is not None),
            ]
        )
    assert len(results[0]) == len(results[1]) == 1 + 8 + 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_k_tied_is_diagonal_too() -> None:
    case = CASES["conv2d"]
    bnn = convert("k_tied", case, torch.float64)
    _, jacobian, variance = dense_jacobian(bnn, inputs(case), list(bnn.weights))
    _, found = FunctionSpaceVI(bnn).function_moments(inputs(case))
    torch.testing.assert_close(found, blocks(jacobian * variance @ jacobian.T, 3)["diagonal"], rtol=1e-9, atol=1e-12)


def test_last_layer_only() -> None:
    case = CASES["linear"]
    bnn = convert("mean_field", case, torch.float64)
    _, jacobian, variance = dense_jacobian(bnn, inputs(case), ["2.weight", "2.bias"])
    _, found = FunctionSpaceVI(bnn, layers="last").function_moments(inputs(case), "joint")
    torch.testing.assert_close(found, jacobian * variance @ jacobian.T, rtol=1e-9, atol=1e-12)


def test_objective_is_the_scaled_likelihood_less_the_kl() -> None:
    case = CASES["linear"]
    bnn = convert("mean_field", case, torch.float64)
    space = FunctionSpaceVI(bnn, 0.1, 2.0, Box(-1.0, 1.0, 5))
    (x,), y = inputs(case, 4), torch.randn(4, 2, dtype=torch.float64)
    found = space.objective(x, y, num_data=100, num_draws=3, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    data = bnn.elbo_terms(x, y, num_data=100, num_draws=3, generator=generator)[0].mean()
    context = space.context.draw(x, generator)
    torch.testing.assert_close(found, data - space.function_kl(context), rtol=1e-12, atol=0)
    assert context.shape == (5, 3)
    assert context.abs().max() <= 1


def test_covariance_without_full_rank() -> None:
    """Repeated points get the documented jitter and a warning; more values than weights are an error; jitter= is exact."""
    _, bnn = linear_network(2)
    x = torch.randn(3, 2, dtype=torch.float64)
    twice = torch.cat((x, x[:1]))
    space = FunctionSpaceVI(bnn, covariance="full", prior_variance=2.0)
    with pytest.warns(UserWarning, match="does not have full rank"):
        assert torch.isfinite(space.function_kl(twice))
    with pytest.raises(
        ValueError, match=r"20 function values has no inverse, because there are only 18 weights.*jitter"
    ):
        FunctionSpaceVI(bnn, covariance="joint").function_kl(torch.randn(10, 2, dtype=torch.float64))
    space = FunctionSpaceVI(bnn, covariance="full", prior_variance=2.0, jitter=0.01)
    mean, found = space.function_moments(twice)
    eye = torch.eye(4).double()
    exact = sum(
        kl_normals(mean[:, o], found[o] + 0.01 * found[o].diagonal().mean() * eye, torch.zeros(4).double(), 2.02 * eye)
        for o in range(2)
    )
    torch.testing.assert_close(space.function_kl(twice), torch.as_tensor(exact), rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="no Cholesky factor"):
        dense_kl(torch.zeros(2), -torch.eye(2), torch.zeros(2), torch.eye(2), jitter=1e-6)


def test_linearized_prediction_is_the_closed_form() -> None:
    _, bnn = linear_network(2)
    x = torch.randn(5, 2, dtype=torch.float64)
    space = FunctionSpaceVI(bnn)
    prediction = space.predict(x, method="linearized")
    mean, variance = space.function_moments(x, "diagonal")
    torch.testing.assert_close(prediction.mean, mean.detach())
    torch.testing.assert_close(prediction.epistemic, variance.detach())
    torch.testing.assert_close(prediction.variance, (variance + 0.5).detach())
    # The network is linear in its weights, so weight draws have these moments: n = 20000, standard error of a variance
    # v * sqrt(2 / n), of a mean sqrt(v / n), k = 5.
    drawn = space.predict(x, 20_000, generator=torch.Generator().manual_seed(0))
    assert ((drawn.mean - mean).abs() <= 5 * (variance / 20_000).sqrt()).all()
    assert ((drawn.epistemic - variance).abs() <= 5 * variance * (2 / 20_000) ** 0.5).all()
