"""Copies of a network that serve pass after pass, where nothing can tell them from fresh ones."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, bayesianize
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import MeanField
from bayesify.running import light_copies

X = torch.linspace(-1, 1, 12).view(4, 3)


class Net(nn.Module):
    """Notes the places of the objects that run, one after the other."""

    places: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LeakyReLU(), nn.Linear(4, 1)
        self.shift, self.steps, self.scale = torch.ones(1), [1.0], 2.0

    def add_weight(self, *parts: Any) -> Tensor:
        """A hook, or a forward, that needs the weights of its own pass."""
        return parts[-1] + self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        self.places.append(id(self))
        factor = self.steps[0] * getattr(self, "scale", 1.0)
        return self.last(self.act(self.norm(self.first(x)))) * factor + self.shift


def made(net: nn.Module) -> BayesianNetwork[Any]:
    return bayesianize(net, {"first": MeanField(), "last": MeanField()}, likelihood=Gaussian(0.1)).eval()


def run(bnn: BayesianNetwork[Any], seed: int = 0) -> Tensor:
    return bnn(X, generator=torch.Generator().manual_seed(seed))


def settled() -> BayesianNetwork[Any]:
    """A network of which a copy serves again."""
    bnn = made(Net())
    for _ in range(3):
        run(bnn)
    assert Net.places[-1] == Net.places[-2]
    return bnn


@pytest.mark.parametrize("grad", [True, False])
def test_a_copy_serves_again_with_other_weights(grad: bool) -> None:
    bnn = made(Net())
    with torch.set_grad_enabled(grad):
        found = [run(bnn, seed) for seed in (0, 0, 1, 0)]
    assert len(set(Net.places[-3:])) == 1
    assert Net.places[-1] != id(bnn.network)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[2])


def rename(state: dict[str, Any], old: str, new: str) -> None:
    value = state.pop(old)
    state[new] = value


class Doubled(nn.LeakyReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda net: setattr(net, "scale", 3.0),
    "the name of a number": lambda net: rename(vars(net), "scale", "other"),
    "a tensor of the same value": lambda net: (setattr(net, "shift", torch.ones(1)), net.shift.add_(1)),
    "an entry of a list": lambda net: net.steps.__setitem__(0, 5.0),
    "a list of the same values": lambda net: (setattr(net, "steps", [1.0]), net.steps.__setitem__(0, 5.0)),
    "a leaf that was shared": lambda net: setattr(net, "act", nn.Tanh()),
    "a leaf with weights": lambda net: setattr(net.last, "forward", lambda x: x[:, :1]),
    "the forward of a shared leaf": lambda net: setattr(net.act, "forward", torch.exp),
    "the type of a shared leaf": lambda net: setattr(net.act, "__class__", Doubled),
    "the type of the network": lambda net: setattr(
        net, "__class__", type("Other", (Net,), {"forward": lambda _, x: x})
    ),
    "a hook of the network": lambda net: net.register_forward_hook(lambda *parts: parts[2] + 1),
    "a hook of a shared leaf": lambda net: net.act.register_forward_hook(lambda *parts: parts[2] + 1),
    "a method as hook of a shared leaf": lambda net: net.act.register_forward_hook(net.add_weight),
    "a method as forward of a shared leaf": lambda net: setattr(net.act, "forward", net.add_weight),
    "a hook of a leaf with weights": lambda net: net.last.register_forward_pre_hook(lambda _, x: (x[0] + 1,)),
    "a dict of hooks": lambda net: (
        setattr(net.last, "_forward_hooks", OrderedDict()),
        net.last.register_forward_hook(lambda *_: X),
    ),
    "a buffer": lambda net: setattr(net.norm, "running_mean", torch.ones(4)),
    "a parameter": lambda net: setattr(net.norm, "weight", nn.Parameter(torch.full((4,), 3.0))),
    "the mode": lambda net: net.train(),
    "the mode of a leaf": lambda net: net.norm.train(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_the_network_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = settled()
    before = run(bnn)
    CHANGES[what](bnn.network)
    found = run(bnn)
    monkeypatch.setattr(light_copies.FreeCopies, "take", take_none)
    if "mode" not in what:  # whose statistics the pass has moved
        assert torch.equal(found, run(bnn))
    assert what == "the name of a number" or not torch.equal(found, before)
    assert what != "the name of a number" or torch.allclose(found - bnn.network.shift, (before - 1) / 2)


def test_a_layer_under_another_name_is_missed() -> None:
    bnn = settled()
    rename(bnn.network._modules, "last", "other")
    with pytest.raises(AttributeError, match="last"):
        run(bnn)


class Sees(nn.LeakyReLU):
    """Keeps what it sees."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


@pytest.mark.parametrize("change", [lambda net: net.norm.train(), lambda net: setattr(net.act, "__class__", Sees)])
def test_predictions_leave_a_leaf_as_it_is_after_a_change_too(change: Callable[[Any], Any]) -> None:
    bnn = made(Net())
    draws = bnn.draw(1)
    predict = functools.partial(draws.runner.evaluating().run, draws.weights, (X,), {})
    for _ in range(3):
        predict()
    change(bnn.network)
    predict()
    assert torch.equal(bnn.network.norm.running_mean, torch.zeros(4))
    assert "seen" not in vars(bnn.network.act)


class Lists(Net):
    """Holds its layers in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.first, self.norm, self.last]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_in_a_list_are_those_of_now() -> None:
    bnn = made(Lists())
    *_, expected = [run(bnn) for _ in range(3)]
    bnn.network.layers[1] = nn.Identity()
    assert not torch.equal(run(bnn), expected)


def take_none(self: Any, network: nn.Module, owners: Any) -> Any:
    self._free.setdefault(owners is None, [])
    return light_copies.LightCopy(network, hooks=False, owners=owners)


WEAK: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()
STRONG: dict[nn.Module, Tensor] = {}


class Keeps(nn.Module):
    """Uses the weight that it has kept, in one of several places."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layer, self.list, self.dict = where, nn.Linear(3, 1), [], {}

    def kept(self) -> Tensor:
        if self.where == "attribute":
            self.__dict__.setdefault("weight", self.layer.weight)
            return self.weight
        if self.where == "buffer":
            self._buffers.setdefault("weight", self.layer.weight)
            return self._buffers["weight"]
        if self.where == "list":
            self.list.append(self.layer.weight)
            return self.list[0]
        if self.where == "layer":
            return self.layer.__dict__.setdefault("first", self.layer.weight)
        if self.where == "cache":
            return self.cached()
        return (WEAK if self.where == "weak" else STRONG).setdefault(self, self.layer.weight)

    @functools.lru_cache  # noqa: B019
    def cached(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept().T


@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "layer", "cache", "weak", "strong"])
def test_what_a_pass_has_kept_is_seen_by_no_later_one(where: str) -> None:
    bnn = bayesianize(Keeps(where), {"layer": MeanField()}, likelihood=Gaussian(0.1)).eval()
    for _ in range(2 * light_copies.MAX_MISSED_COPIES):
        draws = bnn.draw(1).detach()
        expected = X @ draws.weights["layer.weight"][0].T
        torch.testing.assert_close(bnn.predict(X, draws=draws).outputs[0], expected)
    STRONG.clear()
    Keeps.cached.cache_clear()


def test_a_network_that_changes_in_every_pass_is_no_longer_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    remember = light_copies.LightCopy.remember
    monkeypatch.setattr(light_copies.LightCopy, "remember", lambda self: (looks.append(None), remember(self))[1])
    bnn = bayesianize(Keeps("list"), {"layer": MeanField()}, likelihood=Gaussian(0.1))
    for count in range(3 * light_copies.MAX_MISSED_COPIES):
        run(bnn)
        assert len(bnn.network.list) == count + 1
    assert len(looks) == light_copies.MAX_MISSED_COPIES


def test_passes_at_the_same_time_have_copies_of_their_own() -> None:
    barrier = threading.Barrier(3)

    class Waits(Net):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                barrier.wait(10)
            return super().forward(x)

    bnn = made(Waits())
    expected = [run(bnn, seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            found = list(threads.map(functools.partial(run, bnn), range(3)))
            assert all(map(torch.equal, found, expected))
            assert len(set(Net.places[-3:])) == 3


def test_a_pass_that_fails_leaves_nothing() -> None:
    bnn = settled()
    expected = run(bnn)
    with pytest.raises(RuntimeError):
        bnn(X[:, :2])
    for _ in range(2):
        assert torch.equal(run(bnn), expected)


def test_copies_of_draws_are_of_their_own_network() -> None:
    bnn = settled()
    draws = bnn.draw(1).detach()
    size = len(pickle.dumps(draws))
    for _ in range(4):
        expected = draws(X)
    assert len(pickle.dumps(draws)) == size
    for other in (copy.deepcopy(draws), pickle.loads(pickle.dumps(draws))):
        assert other.runner.network is not bnn.network
        assert torch.equal(other(X), expected)
        other.runner.network.scale = 4.0
        torch.testing.assert_close(other(X) - 1, 2 * (expected - 1))
    assert torch.equal(draws(X), expected)


def test_another_network_in_its_place_is_run() -> None:
    bnn = settled()
    expected = run(bnn)
    bnn.network = copy.deepcopy(bnn.network)
    bnn.network.scale = 4.0
    torch.testing.assert_close(run(bnn) - 1, 2 * (expected - 1))


def test_a_network_goes_with_its_copies() -> None:
    bnn = settled()
    gone = weakref.ref(bnn.network)
    del bnn
    gc.collect()
    assert gone() is None


def test_a_network_that_refers_to_its_owner_goes_too() -> None:
    bnn = settled()
    bnn.network.owner = functools.partial(getattr, bnn)
    for _ in range(3):
        run(bnn)
    gone = weakref.ref(bnn.network)
    del bnn
    gc.collect()
    assert gone() is None
