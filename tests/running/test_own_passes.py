"""What a forward leaves in its modules is seen by no other pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesify import bayesianize
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import MeanField


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
