"""Draws as rows of one batch give what they give one by one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bayesify
from bayesify import posteriors
from bayesify.running.row_draws import RowWeight


class Keeps(nn.Module):
    """A network that says that it keeps a cache, as those of transformers do."""

    def __init__(self, use=None):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.use = use or (lambda net, x: net.last(net.first(x).relu().cumsum(-2)[..., -1, :]))

    def forward(self, x, scale=None):
        found = self.use(self, x)
        return {"logits": found if scale is None else found * scale, "note": "same"}


def made(use=None):
    torch.manual_seed(0)
    return bayesify.bayesianize(Keeps(use).double(), posteriors.MeanField(init_std=0.3), likelihood="categorical")


def one_by_one(draws, *args, **kwargs):
    return torch.stack([draw(*args, **kwargs)["logits"] for draw in draws])


def test_rows_of_one_batch_are_the_draws(monkeypatch):
    bnn, passes = made(), []
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    draws = bnn.draw(3, generator=torch.Generator().manual_seed(0))
    assert draws.runner.mode(3) == "rows"
    wanted = one_by_one(draws, x, scale=torch.tensor(2.0))
    forward = Keeps.forward
    monkeypatch.setattr(
        Keeps, "forward", lambda self, *args, **kwargs: passes.append(1) or forward(self, *args, **kwargs)
    )
    found = draws(x, scale=torch.tensor(2.0))
    assert len(passes) == 1
    assert found["note"] == "same"
    torch.testing.assert_close(found["logits"], wanted, rtol=1e-12, atol=1e-12)
    slopes = [
        torch.autograd.grad(part.square().sum(), list(bnn.posteriors.parameters()), retain_graph=True)
        for part in (found["logits"], wanted)
    ]
    for got, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_prediction_cuts_the_batch_by_the_memory_of_all_draws():
    bnn, x = made(), torch.randn(40, 7, 4, dtype=torch.float64)
    whole, cut = (
        bnn.predict(x, 3, generator=torch.Generator().manual_seed(0), memory=memory).probs
        for memory in ("1GiB", "20KB")
    )
    torch.testing.assert_close(whole, cut, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: net.last(net.first(x.transpose(0, 1)).relu()[-1]),  # the batch is not first
        lambda net, x: net.last((x @ net.first.weight.T).relu().mean(-2)),  # not by a linear layer
        lambda net, x: net.last(net.first(x).mean(-2)).mean(0, keepdim=True),  # rows are mixed
    ],
)
def test_other_networks_run_in_a_loop(use):
    bnn = made(use)
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    draws = bnn.draw(3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws(x)["logits"], one_by_one(draws, x), rtol=1e-12, atol=1e-12)
    assert draws.runner.mode(3) == "loop"


def test_weights_of_other_layers_run_in_a_loop():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    net.config = SimpleNamespace(use_cache=True)
    bnn = bayesify.bayesianize(net, posteriors.MeanField())
    assert bnn.draw(2).runner.mode(2) == "loop"


def test_a_row_weight_stands_for_no_tensor():
    weight = RowWeight(torch.randn(3, 2, 4), 6)
    assert weight.shape == (2, 4)
    with pytest.raises(RuntimeError, match="a function other than"):
        weight + 1
