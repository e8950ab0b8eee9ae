"""Gradient checkpointing in the network: a module that runs again in the backward pass gets the weights of its pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import BayesianNetwork, baselines, likelihoods, posteriors
from bayesify.function_space.priors import NeuralTangent
from bayesify.predictor import Batch
from bayesify.training.stack import ModelStack

torch.manual_seed(1)
X = torch.randn(40, 2, dtype=torch.float64)
Y = (X[:, :1] * X[:, 1:]).sin()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=20)
pytestmark = pytest.mark.filterwarnings("ignore:.*vmap refused")


class Block(nn.Module):
    """Runs its inner module with or without gradient checkpointing."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.on = nn.Sequential(*inner), False

    def forward(self, x: Tensor) -> Tensor:
        again = self.on and torch.is_grad_enabled()
        return checkpoint(self.inner, x, use_reentrant=False) if again else self.inner(x)


def switch(network: nn.Module, on: bool) -> None:
    for block in network.modules():
        if isinstance(block, Block):
            block.on = on


def net(*inner: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = inner or (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
    return nn.Sequential(nn.Linear(2, 8), Block(*middle), nn.Linear(8, 1)).double()


def bayesian(posterior: Any = None, *inner: nn.Module) -> BayesianNetwork:
    posterior = posterior or posteriors.MeanField(init_std=0.3)
    return bayesify.bayesianize(net(*inner), posterior, likelihood=likelihoods.Gaussian(0.05))


def gradients(bnn: BayesianNetwork, seed: int = 1) -> list[Tensor]:
    bnn.zero_grad()
    bnn.elbo(X, Y, num_data=40, num_draws=2, generator=torch.Generator().manual_seed(seed)).backward()
    return [parameter.grad.clone() for parameter in bnn.parameters() if parameter.grad is not None]


def from_laplace() -> Any:
    return bayesify.Laplace(net(), likelihoods.Gaussian(0.05)).fit(LOADER).draw(2)


def from_swag() -> Any:
    swag = baselines.SWAG(net(), likelihoods.Gaussian(0.05), rank=5)
    return swag.fit(LOADER, epochs=6, learning_rate=1e-2, progress=False).draw(2)


def from_statistics() -> Any:
    bnn = bayesian(None, nn.BatchNorm1d(8), nn.Tanh())
    bayesify.fit(bnn, LOADER, epochs=5, progress=False)
    bayesify.keep_draws(bnn.eval(), LOADER, num_draws=2)
    with torch.no_grad():
        return bnn.prediction_draws(2)


@pytest.mark.parametrize("make", [from_laplace, from_swag, from_statistics])
def test_input_gradients_of_draws(make: Callable[[], Any]) -> None:
    """Here the network has weights or statistics of its own, which differ from those of the draws."""
    draws, found = make(), []
    for call in (draws, draws[1]):
        for on in (False, True):
            switch(draws.runner.network, on)
            x = X[:5].clone().requires_grad_()
            call(x).square().sum().backward()
            found.append(x.grad)
    torch.testing.assert_close(found[1::2], found[::2])


def test_a_prior_keeps_the_point_estimates_of_its_start() -> None:
    bnn = bayesian(None, nn.LayerNorm(8), nn.Tanh())
    switch(bnn.network, True)
    prior = bayesify.FunctionSpaceVI(bnn, prior=NeuralTangent(), covariance="full").prior
    found = []
    for _ in range(2):
        found.append(prior.moments((X[:5],), {}, X.new_zeros(5, 1), "full")[1])
        nn.init.normal_(bnn.network[1].inner[0].weight)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("vectorize", [None, False])
def test_a_stack_refuses(vectorize: bool | None) -> None:
    models = [bayesify.bayesianize(net(seed=seed), "mean_field", likelihood="gaussian") for seed in range(2)]
    for model in models:
        switch(model.network, True)
    stack = ModelStack(models, **({} if vectorize is None else {"vectorize": vectorize}))
    with pytest.raises(
        RuntimeError, match=r"a ModelStack runs all its models by one network; turn gradient checkpoint"
    ):
        stack.terms(Batch(X, Y), num_data=40)


def test_local_reparameterization_refuses() -> None:
    bnn = bayesian(posteriors.MeanField(local_reparameterization=True))
    switch(bnn.network, True)
    with pytest.raises(
        RuntimeError, match=r"local reparameterization would draw other noise; turn gradient checkpoint"
    ):
        gradients(bnn)


class Gate(nn.Module):
    """Holds a pass of the second thread until the first thread has gone backward."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[threading.Event] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.events and threading.current_thread().name == "second":
            self.events[0].set()
            self.events[1].wait(20)
        return x


def test_a_pass_of_another_thread_does_not_lend_its_weights() -> None:
    bnn = bayesify.bayesianize(nn.Sequential(net(), Gate()), posteriors.MeanField(init_std=0.3), likelihood="gaussian")
    expected = gradients(bnn)
    switch(bnn.network, True)
    inside, go = threading.Event(), threading.Event()
    for _ in range(3):
        gradients(bnn)
    bnn.zero_grad()
    loss = bnn.elbo(X, Y, num_data=40, num_draws=2, generator=torch.Generator().manual_seed(1))
    bnn.network[1].events[:] = [inside, go]
    second = threading.Thread(name="second", target=lambda: bnn.elbo(X, Y, num_data=40))
    second.start()
    inside.wait(20)
    try:
        loss.backward()
    finally:
        go.set()
        second.join()
    found = [parameter.grad for parameter in bnn.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected)


class Container(nn.Module):
    """Stores a new module with its own children in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.held = nn.Linear(2, 8), nn.Linear(8, 1), None

    def forward(self, x: Tensor) -> Tensor:
        self.stack = nn.Sequential(self.a, nn.Sequential(nn.Tanh(), self.b))
        self.held = [self.stack]
        return self.stack(x)


def test_a_module_made_in_a_pass_holds_the_networks_modules() -> None:
    bnn = bayesify.bayesianize(Container(), "mean_field", likelihood="gaussian")
    names, numel = [name for name, _ in bnn.named_parameters()], sum(value.numel() for value in bnn.parameters())
    bnn.elbo(X.float(), Y.float(), num_data=40).backward()
    assert bnn.network.stack[0] is bnn.network.a
    assert bnn.network.stack[1][1] is bnn.network.b
    assert bnn.network.held == [bnn.network.stack]
    assert [name for name, _ in bnn.named_parameters()] == names
    assert sum(value.numel() for value in bnn.parameters()) == numel
    bayesify.fit(bnn, DataLoader(TensorDataset(X.float(), Y.float()), 20), epochs=1, progress=False)


class Chain(nn.Module):
    """Runs again what a plain list, a dict or a bound method of another object holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.on = nn.Linear(2, 8), nn.Linear(8, 1), False
        self.held: Any = {
            "list": [self.a, self.b],
            "dict": {0: self.a, 1: self.b},
            "method": [self.a.forward, self.b.forward],
        }[kind]

    def forward(self, x: Tensor) -> Tensor:
        held = self.held

        def run(x: Tensor) -> Tensor:
            for layer in held.values() if isinstance(held, dict) else held:
                x = torch.tanh(layer(x))
            return x

        return checkpoint(run, x, use_reentrant=False) if self.on else run(x)


@pytest.mark.parametrize("kind", ["list", "dict", "method"])
def test_layers_are_kept_through_what_holds_them(kind: str) -> None:
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(Chain(kind).double(), posteriors.MeanField(init_std=0.3), likelihood="gaussian")
    expected = gradients(bnn)
    bnn.network.on = True
    torch.testing.assert_close(gradients(bnn), expected)
