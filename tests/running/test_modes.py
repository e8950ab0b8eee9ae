"""The way that draws run is chosen by the kind of network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.running.modes import full_float32
from bayesify.running.runner import Pass


class Caching(nn.Module):
    """A network with a configuration as Hugging Face's models have it."""

    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_network_that_returns_a_cache_is_never_tried_by_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("tried")

    x = torch.randn(4, 3)
    draws = {use: bayesify.bayesianize(Caching(use), posteriors.MeanField()).draw(3) for use in (True, False)}
    assert draws[False].runner.mode(3) == "vmap"
    monkeypatch.setattr(Pass, "_vmap", refuse)
    outputs = draws[True](x)
    for index in range(3):
        torch.testing.assert_close(outputs[index], draws[True][index](x))


def test_full_float32_gives_the_settings_back() -> None:
    settings = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [setting.allow_tf32 for setting in settings]
    with full_float32():
        assert not any(setting.allow_tf32 for setting in settings)
    assert [setting.allow_tf32 for setting in settings] == before


def test_work_of_a_pass_by_rows_and_tokens() -> None:
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    runner = bayesify.bayesianize(net, posteriors.MeanField()).draw(2).runner
    weights = 7 * 4 + 4 * 3 + 3
    with runner.alone() as own:
        assert own._work((torch.zeros(5, 6, dtype=torch.long),), {}) == 2 * 30 * weights
        assert own._work((), {"x": torch.zeros(5, 6, 4), "scale": torch.tensor(1.0), "note": "a"}) == 2 * 30 * weights


class Held(nn.Module):
    """Holds a layer in a tuple, where `modules()` does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.held = nn.Linear(3, 4), nn.ReLU(), (nn.Tanh(),)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.held[0](self.act(self.first(x))))


def test_decisions_are_made_once_whatever_asks_for_them() -> None:
    bnn = bayesify.bayesianize(Held(), posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1))
    x = torch.randn(4, 3)
    bnn.predict(x)
    runner = bnn.draw(2).runner
    known = runner.decisions()
    for look in (lambda: bnn.predict(x), lambda: bnn(x), lambda: bnn.draw(3)(x), lambda: runner.mode(3)):
        look()
        assert runner.decisions() is known
    bnn.network.act = nn.GELU()
    bnn(x)
    assert runner.decisions() is not known
