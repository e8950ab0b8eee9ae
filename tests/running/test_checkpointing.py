"""Gradient checkpointing in the network: a module that runs again in the backward pass gets the weights of its pass."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import BayesianNetwork, baselines, likelihoods, posteriors
from bayesify.function_space.priors import NeuralTangent
from bayesify.predictor import Batch
from bayesify.running.generators import own_generators
from bayesify.training.stack import ModelStack
from bayesify.weights.structured import UsedAgain

torch.manual_seed(1)
X = torch.randn(40, 2, dtype=torch.float64)
Y = (X[:, :1] * X[:, 1:]).sin()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=20)
pytestmark = pytest.mark.filterwarnings("ignore:.*vmap refused")  # torch 2.6 says so once


class Block(nn.Module):
    """Runs its inner module with or without gradient checkpointing."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.on = nn.Sequential(*inner), False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.on else self.inner(x)


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


def elbo(bnn: BayesianNetwork, num_draws: int, seed: int = 1) -> Tensor:
    return bnn.elbo(X, Y, num_data=40, num_draws=num_draws, generator=torch.Generator().manual_seed(seed))


def gradients(bnn: BayesianNetwork, num_draws: int = 2) -> list[Tensor]:
    bnn.zero_grad()
    elbo(bnn, num_draws).backward()
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
@pytest.mark.filterwarnings("ignore:ModelStack. vmap refused")
def test_a_stack_of_models(vectorize: bool | None) -> None:
    models = [bayesify.bayesianize(net(seed=seed), "mean_field", likelihood="gaussian") for seed in range(2)]
    found = []
    for on in (False, True):
        for model in models:
            switch(model.network, on)
        stack = ModelStack(models, **({} if vectorize is None else {"vectorize": vectorize}))
        data, kl = stack.terms(Batch(X, Y), num_data=40, generator=torch.Generator().manual_seed(0))
        (data.sum() - kl.sum()).backward()
        found.append([parameter.grad for parameter in stack.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_local_reparameterization_refuses() -> None:
    bnn = bayesian(posteriors.MeanField(local_reparameterization=True))
    switch(bnn.network, True)
    with pytest.raises(UsedAgain, match=r"recomputed by checkpointing\); use local_reparameterization=False"):
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


class Ways(nn.Module):
    """Runs two layers again, which a closure reaches in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.on = way, False
        self.first, self.a, self.n, self.last = nn.Linear(2, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.both = nn.ModuleDict({"a": self.a, "n": self.n})
        self.lists, self.methods = {"inner": [[self.a, self.n]]}, [self.a.forward, self.n.forward]
        self.calls = [functools.partial(self.a), functools.partial(self.n)]
        self.held = SimpleNamespace(layers=[self.a, self.n])

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=False) if self.on else function(x)

    def calls_of(self) -> Any:
        """What a closure keeps, and the functions that it gets from there."""
        if self.way == "made in the pass":
            self.made = nn.Sequential(self.a, nn.Sequential(self.n))
            return [self.made]
        return {
            "modules": [self.a, self.n],
            "values of a dict": self.both.values(),
            "dict of children": self.both._modules.values(),
            "nested list": self.lists["inner"][0],
            "methods": self.methods,
            "partials": self.calls,
            "list of an object": self.held.layers,
        }[self.way]

    def middle(self, x: Tensor) -> Tensor:
        if self.way == "no weights":
            return self.n(self.a(self.again(torch.tanh, x)))
        if self.way == "weights":
            weight, slots = self.a.weight, self.a._parameters
            return self.n(self.again(lambda x: F.linear(x, weight, slots["bias"]), x))
        if self.way == "one by one":
            return functools.reduce(lambda x, function: self.again(function, x), self.methods, x)
        if self.way == "nested":
            return self.again(lambda x: self.n(self.again(self.a, x)), x)
        kept = self.calls_of()
        return self.again(lambda x: functools.reduce(lambda x, function: function(x), kept, x), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


WAYS = ["modules", "values of a dict", "dict of children", "nested list", "methods", "partials", "list of an object"]
WAYS += ["made in the pass", "no weights", "weights", "one by one", "nested"]


@pytest.mark.parametrize("num_draws", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_layers_are_run_again_with_their_weights(way: str, num_draws: int) -> None:
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(Ways(way).double(), posteriors.MeanField(init_std=0.3), likelihood="gaussian")
    expected = gradients(bnn, num_draws=num_draws)
    bnn.network.on = True
    for _ in range(2):
        torch.testing.assert_close(gradients(bnn, num_draws=num_draws), expected)


@pytest.mark.parametrize("way", WAYS)
def test_input_gradients_of_one_draw(way: str) -> None:
    draw, found = bayesify.Laplace(Ways(way).double(), likelihoods.Gaussian(0.05)).fit(LOADER).draw(2)[1], []
    for on in (False, True):
        draw.runner.network.on = on
        x = X[:5].clone().requires_grad_()
        draw(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


class Older(nn.Module):
    """Uses `use_reentrant=True`, which cannot be noticed in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.*vmap refused")
def test_the_older_kind_is_refused() -> None:
    """It would run layers with the weights of the network, or with none."""
    bnn = bayesify.bayesianize(Older().double(), "mean_field", likelihood="gaussian")
    laplace = bayesify.Laplace(Older().double(), likelihoods.Gaussian(0.05)).fit(LOADER)
    for draws in (bnn.prediction_draws(2), laplace.draw(2)):
        for call in (draws, draws[1]):
            x = X[:5].clone().requires_grad_()
            with pytest.raises(RuntimeError, match=r"use torch\.utils\.checkpoint with use_reentrant=False"):
                call(x).sum().backward()


def test_global_inducing_points_refuse() -> None:
    bnn = bayesian(posteriors.GlobalInducing(X[:6]))
    switch(bnn.network, True)
    with pytest.raises(RuntimeError, match="use another posterior than GlobalInducing, or turn gradient checkpointing"):
        gradients(bnn)


@pytest.mark.filterwarnings("error")
def test_no_warning_and_no_noise_is_lost() -> None:
    """The first pass is repeated. In a training run, layers such as dropout then draw the same noise again."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        bnn = bayesian(None, nn.Linear(8, 8), nn.Dropout(0.5))
        switch(bnn.network, on)
        with own_generators(seed=0):
            found += [gradients(bnn, num_draws=1), gradients(bnn, num_draws=1), [torch.rand(3)]]
        gradients(bnn)
    torch.testing.assert_close(found[3:], found[:3])


def test_statistics_of_the_network_stay() -> None:
    """A copy that keeps the statistics of a draw does not write them to the network."""
    bnn = bayesian(None, nn.BatchNorm1d(8), nn.Tanh())
    bayesify.fit(bnn, LOADER, epochs=2, progress=False)
    bayesify.keep_draws(bnn.eval(), LOADER, num_draws=2)
    switch(bnn.network, True)
    before = copy.deepcopy(bnn.state_dict())
    bnn.prediction_draws(2)[1](X[:5].clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(dict(bnn.state_dict()), dict(before), rtol=0, atol=0)


def test_the_repeated_pass_updates_batch_statistics_once() -> None:
    found = []
    for on in (False, True):
        network = nn.Sequential(nn.BatchNorm1d(2), net()).double()
        bnn = bayesify.bayesianize(network, "mean_field", likelihood="gaussian", batch_statistics="train").train()
        switch(bnn.network, on)
        for _ in range(2):
            gradients(bnn, num_draws=1)
        found.append(dict(bnn.network.named_buffers()))
    assert int(found[0]["0.num_batches_tracked"]) == 2
    torch.testing.assert_close(found[1], found[0])


def test_the_repeated_pass_updates_statistics_of_members_once() -> None:
    found = []
    for on in (False, True):
        network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), net()).double()
        posterior = posteriors.Ensemble(2)
        bnn = bayesify.bayesianize(network, posterior, likelihood="gaussian", batch_statistics="train").train()
        switch(bnn.network, on)
        gradients(bnn, num_draws=2)
        found.append({name: value for name, value in bnn.named_buffers() if "num_batches_tracked" in name})
    assert max(int(value.max()) for value in found[0].values()) == 1
    torch.testing.assert_close(found[1], found[0])


class Counting(nn.Module):
    """Counts its passes in a buffer that it changes in place. Other buffers are sparse and a view of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((1,), 2.0, dtype=torch.float64).expand(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.scale


@pytest.mark.parametrize("num_draws", [1, 2])
def test_the_repeated_pass_counts_once(num_draws: int) -> None:
    """The loop after a refused `vmap`, too, has one pass for each draw."""
    network = nn.Sequential(Counting(), net())
    bnn = bayesify.bayesianize(network, "mean_field", likelihood="gaussian").train()
    switch(bnn.network, True)
    for index in range(1, 4):
        gradients(bnn, num_draws=num_draws)
        assert int(bnn.network[0].count) == index * num_draws


def test_a_graph_in_use_keeps_its_buffers() -> None:
    """The first pass with checkpointing restores the statistics without a trace in the graph of an earlier pass."""
    bnn = bayesify.bayesianize(nn.Sequential(nn.BatchNorm1d(2), net()).double(), "mean_field", likelihood="gaussian")
    clean = bnn.eval()(X)
    switch(bnn.network, True)
    (bnn.train()(X) - clean).square().mean().backward()


def test_an_error_that_is_its_own_cause() -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x)
            error = KeyError("mine")
            raise error from error

    with pytest.raises(KeyError, match="mine"):
        bayesify.bayesianize(Raising().double(), "mean_field", likelihood="gaussian").draw(1)(X)


class Doubling(nn.Module):
    """Changes its inputs before a block that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            inputs["x"] = inputs["x"] * 2
            return self.inner(inputs["x"])
        if isinstance(inputs, SimpleNamespace):
            inputs.x = inputs.x * 2
            return self.inner(inputs.x)
        return self.inner(inputs.mul_(2))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("inputs", [X, {"x": X}, SimpleNamespace(x=X)])
def test_changed_inputs(inputs: Any, known: bool) -> None:
    """After a pass without checkpointing, inputs are not copied, so the pass cannot be repeated. The next pass is not repeated."""
    draws = bayesify.bayesianize(Doubling(), posteriors.MeanField(), likelihood="gaussian").draw(1)
    expected = draws(copy.deepcopy(inputs))
    if not known:
        draws.runner.state.passed.clear()
    switch(draws.runner.network, True)
    if known:
        with pytest.raises(RuntimeError, match="it changed its inputs before; turn gradient checkpointing off"):
            draws(copy.deepcopy(inputs))
    for _ in range(2):
        torch.testing.assert_close(draws(copy.deepcopy(inputs)), expected)


def test_a_network_that_renames_errors() -> None:
    class Renaming(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except RuntimeError as error:
                raise ValueError("the network failed") from error

    bnn = bayesify.bayesianize(Renaming(net()), posteriors.MeanField(), likelihood="gaussian")
    expected = gradients(bnn)
    switch(bnn.network, True)
    torch.testing.assert_close(gradients(bnn), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_parts() -> None:
    """A compiled part may use gradient checkpointing, but no other part of the network may."""
    for part, backend in ((1, "aot_eager"), (0, "eager")):
        network = net()
        network[part] = torch.compile(network[part], backend=backend)
        bnn = bayesify.bayesianize(network, posteriors.MeanField(init_std=0.3), likelihood="gaussian")
        expected = gradients(bnn, num_draws=1)
        switch(bnn.network, True)
        if part == 1:
            torch.testing.assert_close(gradients(bnn, num_draws=1), expected)
        else:
            with pytest.raises(RuntimeError, match="a network with compiled parts cannot be copied; turn gradient"):
                gradients(bnn)


class Storing(nn.Module):
    """Runs an inner module, perhaps again, and stores a tensor in an attribute and a buffer."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.inner, self.last = again, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), None
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        self.last, self.steps = x.detach(), self.steps + 1
        return x


@pytest.mark.parametrize("num_draws", [1, 3])
@pytest.mark.parametrize("around", [save_on_cpu, "checkpoint", None])
def test_callers_may_save_tensors_in_their_own_way(around: Any, num_draws: int) -> None:
    found = []
    for again, outside in ((False, None), (False, around), (True, around)):
        torch.manual_seed(0)
        bnn = bayesify.bayesianize(Storing(again).double(), "mean_field", likelihood="gaussian")
        for _ in range(2):
            bnn.zero_grad()

            bound = functools.partial(elbo, bnn, num_draws)
            if outside == "checkpoint":
                checkpoint(bound, use_reentrant=False).backward()
            else:
                with outside() if outside else nullcontext():
                    bound().backward()
        found.append([parameter.grad for parameter in bnn.parameters() if parameter.grad is not None])
        copy.deepcopy(bnn).predict(X)
    torch.testing.assert_close(found[1:], [found[0]] * 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own decompositions
@pytest.mark.parametrize("again", [False, True])
def test_function_transforms(again: bool) -> None:
    try:
        torch.func.jacfwd(lambda x: checkpoint(torch.tanh, x, use_reentrant=False))(X[0])
    except RuntimeError:
        pytest.skip("this version of torch cannot transform gradient checkpointing")
    bnn = bayesify.bayesianize(Storing(again).double(), "mean_field", likelihood="gaussian")
    draws, x = bnn.draw(1), X[:4].clone().requires_grad_()
    (expected,) = torch.autograd.grad(draws(x).sum(), x)
    found = torch.func.jacfwd(lambda x: draws(x).sum())(X[:4])
    torch.testing.assert_close(found, expected)
    models = [bnn, copy.deepcopy(bnn)]
    ModelStack(models, vectorize=True).terms(Batch(X, Y), num_data=40)
    for model in models:  # no tensor of a transform is left in the network
        copy.deepcopy(model).predict(X)


class Odd(nn.Module):
    """Keeps its layers in one of many ways, but runs none of them again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b, self.last, self.used = kind, nn.Linear(2, 8), nn.Linear(8, 1), None, []

    @functools.lru_cache(maxsize=128)  # noqa: B019
    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.kind == "cache":
            x = x * self.scale()
        if self.kind == "attribute":
            self.last = self.b
        if self.kind == "list":
            self.used = [self.a, self.b]
        if self.kind == "hook" and x.requires_grad:
            x.register_hook(lambda grad: grad * self.scale())
        if self.kind == "recursion":

            def run(x: Tensor, depth: int) -> Tensor:
                return run(x, depth - 1) if depth else self.b(x)

            return run(x, 1)
        if self.kind == "error":
            try:
                raise ValueError(self.b)
            except ValueError as error:
                kept = error
            assert kept.args[0] is self.b
        if self.kind == "saved on the host":
            with save_on_cpu():
                return self.b(x)
        return self.b(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["local", "global_inducing", "mean_field", "stack"])
@pytest.mark.parametrize("kind", ["cache", "attribute", "list", "hook", "recursion", "error", "saved on the host"])
def test_other_networks_run_as_before(kind: str, name: str) -> None:
    made: Any = {
        "local": posteriors.MeanField(local_reparameterization=True),
        "global_inducing": posteriors.GlobalInducing(X[:6]),
    }.get(name, "mean_field")
    bnn = bayesify.bayesianize(Odd(kind).double(), made, likelihood="gaussian")
    if name == "stack":
        for terms in ModelStack([bnn, copy.deepcopy(bnn)], vectorize=False).terms(Batch(X, Y), num_data=40):
            terms.sum().backward(retain_graph=True)
    assert all(grad.isfinite().all() for _ in range(2) for grad in gradients(bnn))


def test_a_cached_method_keeps_no_weights() -> None:
    bnn = bayesify.bayesianize(Odd("cache").double(), "mean_field", likelihood="gaussian")
    kept = []
    for _ in range(5):
        draws = bnn.draw(1)
        draws(X).sum().backward()
        kept += map(weakref.ref, draws.weights.values())
        del draws
    gc.collect()
    assert not any(ref() is not None for ref in kept)
