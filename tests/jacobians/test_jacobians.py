"""Derivatives with respect to chosen weights equal those of automatic differentiation, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, call
from torch import Tensor, nn

from bayesify.jacobians import Jacobians
from bayesify.running.inputs_and_outputs import select_output
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

DETERMINISTIC = [case for case in CASES.values() if case.name != "batch_norm_training"]

DIRECT = {
    "linear", "conv1d", "conv2d", "conv2d_depthwise", "conv3d", "transposed1d", "transposed2d", "transposed3d",
    "embedding", "layer_norm", "batch_norm", "tied", "keywords_to_dict",
}  # fmt: skip
"""Cases whose every weight has a rule; they must not fall back."""


def inputs_of(case: Case, size: int = 3) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = case.batch(size, torch.float64)
    return ((), made) if isinstance(made, dict) else (made, {})


def dense_jacobian(net: nn.Module, inputs: Any, name: str) -> Tensor:
    """[O, B, *shape], one backward pass per output entry."""
    outputs = select_output(call(net, inputs), None)
    parameter = net.get_parameter(name)
    rows = [
        [
            torch.autograd.grad(entry, parameter, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
            for entry in example.flatten()
        ]
        for example in outputs
    ]
    return torch.stack([torch.stack(row) for row in rows], dim=1)


def make(net: nn.Module) -> Jacobians:
    weights = catalog(net).weights
    return Jacobians(Runner(net, weights), list(weights))


@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda case: case.name)
def test_equal_automatic_differentiation(case: Case) -> None:
    net = case.network(torch.float64)
    args, kwargs = inputs_of(case)
    jacobians = make(net)
    point = jacobians.at(args, kwargs)
    gradients = point.pull(point.identity())
    for name in jacobians.names:
        exact = dense_jacobian(net, kwargs or args, name)
        torch.testing.assert_close(gradients.dense(name), exact, rtol=1e-9, atol=1e-12)
        index = torch.randperm(exact[0, 0].numel())[:5].sort().values
        torch.testing.assert_close(
            gradients.columns(name, index), exact.reshape(*exact.shape[:2], -1)[..., index], rtol=1e-9, atol=1e-12
        )
    if case.name in DIRECT:
        assert point.general == ()


TWICE = [case for case in DETERMINISTIC if case.name != "embedding_bag"]
"""Torch has no second derivative of an embedding bag."""


@pytest.mark.parametrize("case", TWICE, ids=lambda case: case.name)
def test_differentiable_again(case: Case) -> None:
    net = case.network(torch.float64)
    args, kwargs = inputs_of(case, 2)
    jacobians = make(net)
    values = {name: net.get_parameter(name).detach().clone().requires_grad_() for name in jacobians.names}

    def total(weights: dict[str, Tensor]) -> Tensor:
        point = jacobians.at(args, kwargs, weights, differentiable=True)
        gradients = point.pull(point.identity())
        return sum((gradients.dense(name).square().sum() for name in jacobians.names), torch.zeros(()))

    loss = total(values)
    if not loss.requires_grad:  # linear in the weights: the Jacobian is a constant
        assert len(list(net.children())) == 0 or case.name == "bilinear"
        return
    grads = torch.autograd.grad(loss, list(values.values()), allow_unused=True, materialize_grads=True)
    direction = {name: torch.randn_like(value) for name, value in values.items()}
    slope = sum((grad * direction[name]).sum() for name, grad in zip(values, grads, strict=True))
    step = 1e-6
    ends = [
        total({name: (value + sign * step * direction[name]).detach() for name, value in values.items()})
        for sign in (1, -1)
    ]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


class InPlace(nn.Module):
    """Operations in place on the outputs and inputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu_() + x
        hidden *= 3.0
        return self.second(hidden).mul_(2.0)


class TimeFirst(nn.Module):
    """Examples are not on the first axis where the layer is applied, and there are as many steps as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.transpose(0, 1))).sum(0)


class UsedElsewhere(nn.Module):
    """A layer's weight is used a second time outside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.linear(x)), self.linear.weight)


@pytest.mark.parametrize(("kind", "general"), [(InPlace, False), (TimeFirst, True), (UsedElsewhere, True)])
def test_odd_networks_are_found_out(kind: type[nn.Module], general: bool) -> None:
    torch.manual_seed(0)
    net = kind().double()
    x = torch.randn(2, 3, dtype=torch.float64) if kind is not TimeFirst else torch.randn(2, 2, 3, dtype=torch.float64)
    jacobians = make(net)
    point = jacobians.at((x,), {})
    gradients = point.pull(point.identity())
    for name in jacobians.names:
        exact = dense_jacobian(net, (x,), name)
        torch.testing.assert_close(gradients.dense(name), exact, rtol=1e-9, atol=1e-12)
    assert bool(point.general) is general


class ByHand(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(F.linear(x, self.inner.weight)))


class Sorting(ByHand):
    """Sorts its examples inside, and puts them back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.outer(torch.tanh(self.inner(x[order])))[order.argsort()]


class Routing(nn.Module):
    """Sends some examples through one layer and the others through another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        found = x.new_zeros(len(x), 2).index_put((chosen.nonzero()[:, 0],), self.left(x[chosen]))
        return found.index_put(((~chosen).nonzero()[:, 0],), self.right(x[~chosen]))


@pytest.mark.parametrize("kind", [ByHand, Sorting, Routing])
@pytest.mark.parametrize("first", [[0.0, 1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0, 0.0], [-2.0, 1.0, -3.0, 0.5, 2.0]])
def test_what_the_first_examples_do_not_show_is_found_out(kind: type[nn.Module], first: list[float]) -> None:
    """A row of zeros first, sorted rows, and batches of which a layer sees a part."""
    torch.manual_seed(0)
    net = kind().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    x[:, 0] = torch.tensor(first)
    x[0] = 0 if kind is ByHand else x[0]
    later = torch.randn(4, 3, dtype=torch.float64)
    jacobians = make(net)
    for batch in (x, later):
        point = jacobians.at((batch,), {})
        gradients = point.pull(point.identity())
        for name in jacobians.names:
            torch.testing.assert_close(
                gradients.dense(name), dense_jacobian(net, (batch,), name), rtol=1e-9, atol=1e-12
            )


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out - out.mean(0)


def test_mixing_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the other examples"):
        make(Mixing()).at((torch.randn(4, 3),), {})


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=["batch_norm", "dropout"])
def test_training_mode_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"net\.eval"):
        make(nn.Sequential(nn.Linear(3, 3), layer).train())


def test_only_chosen_layers_are_watched() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False)
    jacobians = Jacobians(Runner(net, catalog(net).weights), ["2.weight"])
    point = jacobians.at((torch.randn(5, 3),), {})
    assert len(point.passed.applications) == 1
    assert point.pull(point.identity()).dense("2.weight").shape == (2, 5, 2, 4)
