"""What a forward leaves in its modules is seen by no other pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesify import bayesianize
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import InducingWeights, MeanField, Posterior
from bayesify.running.runner import Runner


class SetsItsLeaves(nn.Module):
    """Its forward sets attributes of its own layers, and the second result depends on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.drop = nn.Linear(3, 8), nn.Upsample(scale_factor=2.0), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.up.scale_factor = float(1 + (x.mean() > 0))
        self.drop.train()
        return self.up(self.first(x)[:, None]).sum((1, 2))[:, None]


def test_what_a_forward_sets_in_layers_stays_in_its_pass() -> None:
    bnn = bayesianize(SetsItsLeaves().eval(), MeanField(), likelihood=Gaussian(0.1)).eval()
    bnn.predict(torch.full((4, 3), -1.0), 4)
    assert bnn.network.up.scale_factor == 2.0
    assert not bnn.network.drop.training


class Remembers(nn.Module):
    """Keeps the weight that its first pass saw, in a slot that no dictionary has."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        try:
            weight = self.seen
        except AttributeError:
            weight = self.seen = self.first.weight
        return x @ weight.T + self.first.bias


def test_a_pass_does_not_see_what_an_earlier_one_kept() -> None:
    bnn = bayesianize(Remembers(), MeanField(), likelihood=Gaussian(0.1)).eval()
    x = torch.randn(4, 3)
    for _ in range(3):
        draws = bnn.draw(1).detach()
        weights = draws.weights
        torch.testing.assert_close(draws[0](x), x @ weights["first.weight"][0].T + weights["first.bias"][0])


class Scaled(nn.Linear):
    """Half as large in training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * (0.5 if self.training else 1.0))


class Checkpointed(nn.Module):
    """Computes the output of its block again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), Scaled(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


def test_recomputation_runs_in_the_mode_of_its_own_pass() -> None:
    torch.manual_seed(0)
    bnn = bayesianize(Checkpointed(), {"last": MeanField()}, likelihood=Gaussian(0.1))
    x = torch.randn(6, 3)

    def gradient(between: bool) -> Tensor:
        bnn.train()
        loss = bnn(x, generator=torch.Generator().manual_seed(0)).sum()
        if between:
            with torch.no_grad():
                bnn.eval()(x)
            bnn.train()
        (grad,) = torch.autograd.grad(loss, [bnn.network.block.weight])
        return grad

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.parametrize("posterior", [MeanField(), InducingWeights(3, 3)], ids=lambda one: one.name)
def test_bounds_under_checkpointing_have_the_same_gradients(posterior: Posterior) -> None:
    bnn = bayesianize(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), posterior, likelihood=Gaussian(0.1))
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 1)
    found = []
    for again in (False, True):
        bnn.zero_grad()
        torch.manual_seed(3)
        bound = bnn.elbo(x, y, num_data=4) if not again else checkpoint(bnn.elbo, x, y, num_data=4, use_reentrant=False)
        bound.backward()
        found.append([parameter.grad for parameter in bnn.posterior.parameters()])
    torch.testing.assert_close(*found)


class FillsItsSteps(nn.Module):
    """Its first pass makes a list of its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm, self.last = nn.Linear(3, 6), nn.Dropout(), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.steps: list[nn.Module] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.steps is None:
            self.steps = [self.first, self.drop, self.norm, self.last]
        for step in self.steps:
            x = step(x)
        return x


def test_layers_in_a_list_that_the_first_pass_made_are_the_copies() -> None:
    bnn = bayesianize(FillsItsSteps(), MeanField(), likelihood=Gaussian(0.1)).train()
    x = torch.randn(4, 3)
    bnn(x)
    draws, mean = bnn.draw(4).detach(), bnn.network.norm.running_mean.clone()
    torch.testing.assert_close(bnn.predict(x, draws=draws).mean, bnn.predict(x, draws=draws).mean, rtol=0, atol=0)
    torch.testing.assert_close(bnn.network.norm.running_mean, mean, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_layers_run_in_networks() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    bnn = bayesianize(nn.Sequential(scripted, nn.Linear(3, 1)), {"1": MeanField()}, likelihood=Gaussian(0.1))
    x = torch.randn(4, 3)
    bnn.elbo(x, torch.randn(4, 1), num_data=4).backward()
    weights = bnn.draw(2).detach()
    expected = (
        torch.stack([scripted(x) @ w.T for w in weights.weights["1.weight"]]) + weights.weights["1.bias"][:, None]
    )
    torch.testing.assert_close(weights(x), expected)
    assert isinstance(bnn.network[0], torch.jit.ScriptModule)


def test_classes_of_modules_can_go() -> None:
    class Local(nn.Linear):
        """Nobody else has it."""

    bnn = bayesianize(nn.Sequential(Local(3, 1)), MeanField(), likelihood=Gaussian(0.1))
    bnn.predict(torch.randn(4, 3))
    gone = weakref.ref(Local)
    del bnn, Local
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_see_the_networks_modules_and_leave_them(compiled: bool) -> None:
    """Compiled code runs the modules themselves, so the hooks have to be removed from them."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    if compiled:
        net[1].compile(backend="eager")
    seen: list[nn.Module] = []
    with Runner(net, {}).hooked([net[0]], lambda module, args, made: seen.append(module)) as own:
        own.module(net[0])(torch.ones(1, 3))
        assert bool(net[0]._forward_hooks) is compiled
    assert seen == [net[0]]
    assert not net[0]._forward_hooks
