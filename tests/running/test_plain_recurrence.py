"""Recurrent layers in plain operations are torch's own, and gradients by example are those of one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesify.jacobians import general
from bayesify.jacobians.general import example_gradients
from bayesify.running.plain_recurrence import PlainRecurrence
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

LAYERS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_outputs_and_states_are_those_of_the_kernels(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = kind(4, 5, **options).double(), torch.randn(6, 7, 4, dtype=torch.float64)
    with PlainRecurrence():
        found = layer(x)
    torch.testing.assert_close(found, layer(x), rtol=1e-12, atol=1e-12)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_gradients_of_many_examples_at_once_are_those_of_each(
    kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Last(kind(4, 5, batch_first=True)).double()
    runner = Runner(net, catalog(net).weights, evaluate=True)
    x, vectors = torch.randn(3, 6, 4, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    values = {name: value.detach() for name, value in net.named_parameters()}
    slow = general._one_by_one(lambda weights, inputs: runner.call(weights, *inputs)[0], values, ((x,), {}), vectors)
    monkeypatch.setattr(general, "_one_by_one", None)  # not needed
    quick = example_gradients(runner, values, (x,), {}, vectors)
    torch.testing.assert_close(quick, slow, rtol=1e-10, atol=1e-12)
    net(x)  # no dead tensor is left in the layer
