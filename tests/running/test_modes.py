"""The way that draws run is chosen by the kind of network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import posteriors
from bayesify.running.kernels import full_float32
from bayesify.running.runner import Runner


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
    monkeypatch.setattr(Runner, "_vmap", refuse)
    outputs = draws[True](x)
    for index in range(3):
        torch.testing.assert_close(outputs[index], draws[True][index](x))


def test_full_float32_gives_the_settings_back() -> None:
    settings = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [setting.allow_tf32 for setting in settings]
    with full_float32():
        assert not any(setting.allow_tf32 for setting in settings)
    assert [setting.allow_tf32 for setting in settings] == before
