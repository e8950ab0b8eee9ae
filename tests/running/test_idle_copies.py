"""A copy that served a pass serves the next: it is the network as it is then, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.running import runner as runners
from bayesify.running.light_copies import LightCopy

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Net(nn.Module):
    """What other tests of copies have not: layers with and without weights to draw, a buffer, a number."""

    factor = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU())
        self.head, self.factor = nn.Linear(4, 1), 1.0
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.head(self.body(x)) + self.shift


def made() -> Any:
    torch.manual_seed(0)
    return bayesify.bayesianize(
        Net(), {"*.0": posteriors.MeanField(0.1), "head": posteriors.MeanField(0.1)}, likelihood=likelihoods.Gaussian()
    ).eval()


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mode of all": lambda net: net.train(),
    "mode of one without weights": lambda net: net.body[1].train(),
    "attribute": lambda net: setattr(net, "factor", 3.0),
    "new attribute": lambda net: setattr(net.head, "note", 1),
    "attribute in place of another": lambda net: (delattr(net, "factor"), setattr(net, "scale", 1.0)),
    "buffer": lambda net: setattr(net, "shift", torch.ones(())),
    "point estimate": lambda net: setattr(net.body[1], "weight", nn.Parameter(torch.full((4,), 2.0))),
    "hook of one with weights": lambda net: net.head.register_forward_hook(double),
    "hook of one without": lambda net: net.body[3].register_forward_hook(double),
    "hooks in a new place": lambda net: setattr(net.head, "_forward_hooks", {0: double}),
    "pre-hook": lambda net: net.head.register_forward_pre_hook(lambda module, args: (3 * args[0],)),
    "forward pass of one": lambda net: setattr(net.body[3], "forward", torch.tanh),
    "child": lambda net: net.body.__setitem__(3, nn.Tanh()),
    "one more child": lambda net: net.body.append(nn.Tanh()),
    "order of children": lambda net: setattr(net.body, "_modules", dict(zip("0132", net.body, strict=True))),
    "type": lambda net: setattr(net.body[3], "__class__", nn.Tanh),
    "list of modules": lambda net: setattr(net, "others", [net.head]),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("detached", [False, True])
def test_changes_of_the_network_are_seen(what: str, detached: bool) -> None:
    bnn = made()
    draws = bnn.draw(2)
    with torch.no_grad():
        draws[0](X), draws(X), bnn.predict(X, 2)
    assert len(runners._IDLE[bnn.network]) >= 2
    CHANGES[what](bnn.network)
    draws = draws.detach() if detached else draws

    def answers() -> list[Tensor]:
        found = []
        for ask in (lambda: draws(X), lambda: draws[1](X), lambda: bnn.predict(X, draws=draws).mean):
            torch.manual_seed(1)
            with torch.no_grad():
                found.append(ask())
        return found

    state = copy.deepcopy((bnn.network.state_dict(), draws.runner.point_values))
    found = answers()
    bnn.network.load_state_dict(state[0])  # running statistics are those before
    draws.runner.point_values = state[1]
    runners._IDLE.clear()  # the same by copies that were made just now
    assert all(map(torch.equal, found, answers()))


def test_copies_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = made()
    draws = bnn.draw(2)
    with torch.no_grad():
        want = draws(X)
        monkeypatch.setattr(LightCopy, "__init__", None)
        assert torch.equal(draws(X), want)
        assert torch.equal(
            bnn.draw(1, generator=torch.Generator().manual_seed(1))(X),
            bnn.draw(1, generator=torch.Generator().manual_seed(1))(X),
        )


class Counts(nn.Module):
    """Counts its passes in an attribute, a buffer and an attribute of a child, and puts a child in another's place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare, self.count = nn.Linear(3, 1), nn.Linear(3, 1), 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total = self.total + 1
        self.layer.padding = self.count
        self.layer, self.spare = self.spare, self.layer
        return self.layer(x) + self.count


def test_what_a_pass_assigns_stays_in_it_or_goes_to_the_network() -> None:
    torch.manual_seed(0)
    bnn: Any = bayesify.bayesianize(Counts(), posteriors.MeanField(0.1), likelihood=likelihoods.Gaussian())
    draws, layer = bnn.draw(1), bnn.network.layer
    want = bnn.predict(X, draws=draws).mean
    for _ in range(3):
        assert torch.equal(bnn.predict(X, draws=draws).mean, want)
    assert (bnn.network.count, float(bnn.network.total), bnn.network.layer) == (0, 0.0, layer)
    for count in range(1, 4):
        draws(X)
        assert (bnn.network.count, float(bnn.network.total)) == (count, float(count))
        assert (bnn.network.layer is layer) == (count % 2 == 0)


def test_nothing_is_kept_alive() -> None:
    bnn = made()
    draws = bnn.draw(2).detach()
    with torch.no_grad():
        draws(X), bnn.predict(X, 2)
    held = [weakref.ref(value) for value in (bnn.network, *draws.weights.values(), *draws.runner.point_values.values())]
    del draws, bnn
    gc.collect()
    assert not any(ref() is not None for ref in held)
