"""Walks over a module's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayesify.weights.named_parameters import first_parameter, tensors_in


def test_walks_find_what_torchs_find() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3)), nn.Linear(3, 1))
    net.register_module("none", None)
    net[2].register_buffer("none", None)
    assert {*map(id, tensors_in(net))} == {*map(id, (*net.parameters(), *net.buffers()))}
    assert {*map(id, tensors_in(net, buffers=False))} == {*map(id, net.parameters())}
    assert first_parameter(net) is next(net.parameters())
    net.register_parameter("own", nn.Parameter(torch.ones(1)))
    assert first_parameter(net) is net.own
    with pytest.raises(ValueError, match="ReLU has no parameters; give"):
        first_parameter(nn.ReLU())
