"""Memory of a pass over the data: the activations of one piece are gone before the network runs on the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bayesify import Laplace, likelihoods
from bayesify.laplace.curvature import Structure


class Kept:
    """A tensor that autograd keeps for a backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output with its graph would keep itself alive


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
def test_one_batch_of_activations_at_a_time(structure: Structure) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    x, y = torch.randn(24, 1, 6, 6), torch.randint(3, (24,))
    live: weakref.WeakSet[Kept] = weakref.WeakSet()
    found = []

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in zip(x.split(8), y.split(8), strict=True):
                found.append(len(live))
                yield batch
            found.append(len(live))

    def pack(tensor: Tensor) -> Kept:
        live.add(kept := Kept(tensor))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        Laplace(net.eval(), likelihoods.Categorical(), "all", covariance=structure).fit(Loader())
    assert len(found) >= 8  # a pass for the curvature and a pass for the precision
    assert set(found) == {0}
