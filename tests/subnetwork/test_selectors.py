"""Which weights selectors choose, against dense algebra and enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesify import Laplace, likelihoods, subnetwork
from bayesify.baselines import SWAG
from bayesify.likelihoods import Likelihood


def fitted(net: nn.Module, likelihood: Likelihood, data: list[Any], *args: Any, **kwargs: Any) -> Laplace:
    return Laplace(net, likelihood, *args, **{"prior_precision": 1.0, **kwargs}).fit(data)


def problem() -> tuple[nn.Module, list[Any], Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    return net, [(x, torch.randint(3, (20,)))], x


def test_selectors() -> None:
    net, data, _ = problem()
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    diagonal = fitted(net, likelihoods.Categorical(), data, covariance="diagonal")
    chosen = {
        "variance": (subnetwork.largest_variance(5), diagonal.posterior.variances().topk(5).indices.sort().values),
        "magnitude": (subnetwork.largest_magnitude(5), flat.abs().topk(5).indices.sort().values),
        "last": (subnetwork.last_layer(), torch.arange(12, 27)),
        "names": (subnetwork.from_names(["0.bias"]), torch.arange(8, 12)),
        "share": (subnetwork.largest_magnitude(0.2), flat.abs().topk(5).indices.sort().values),
        "mask": (subnetwork.from_mask({"2.bias": torch.tensor([True, False, True])}), torch.tensor([24, 26])),
    }
    for selector, expected in chosen.values():
        laplace = fitted(net, likelihoods.Categorical(), data, selector)
        torch.testing.assert_close(laplace.subset.flat(), expected)
    first, second = (fitted(net, likelihoods.Categorical(), data, subnetwork.random(6, seed=s)) for s in (1, 1))
    torch.testing.assert_close(first.subset.flat(), second.subset.flat())


def test_weights_without_curvature_can_come_last() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        net[0].bias[1] = -100.0  # a unit that is never on: its 2 + 1 weights in and 2 out are flat
    x = torch.randn(10, 2, dtype=torch.float64)
    data = [(x, torch.randint(2, (10,)))]
    flat = {2, 3, 7, 10, 13}
    paper = fitted(net, likelihoods.Categorical(), data, subnetwork.largest_variance(5, skip_flat=False))
    assert set(paper.subset.flat().tolist()) == flat
    assert paper.remarks == ()
    for size in (12, 17):  # what has no curvature is left out, even if fewer are left than asked for
        other = fitted(net, likelihoods.Categorical(), data, subnetwork.largest_variance(size))
        assert set(range(17)) - set(other.subset.flat().tolist()) == flat
        assert other.remarks == ("29.4% of all weights have no curvature and are left out",)
    assert "12 of 17 weights, 29.4% of all weights have no curvature and are left out" in repr(other)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.copy_(torch.tensor([-800.0, 800.0]))
    with pytest.raises(ValueError, match="no weight has any curvature"):
        fitted(net, likelihoods.Categorical(), data, subnetwork.largest_variance(3))


def test_variances_of_iterates_choose_weights_that_move() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        net[0].bias[1] = -100.0
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(40, 2, dtype=torch.float64)
    data = [(x[i : i + 10], (x[i : i + 10].sum(1) > 0).long()) for i in range(0, 40, 10)]
    chosen = subnetwork.largest_swag_variance(12, epochs=5, weight_decay=0.0)
    laplace = fitted(net, likelihoods.Categorical(), data, chosen)
    assert set(range(17)) - set(laplace.subset.flat().tolist()) == {2, 3, 7, 10, 13}
    swag = SWAG(net, likelihoods.Categorical(), rank=0).fit(data, 5, 1e-2, momentum=0.9, seed=0)
    variances = torch.cat([value.flatten() for value in swag.variance().values()])
    torch.testing.assert_close(laplace.subset.flat(), variances.topk(12).indices.sort().values)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"epochs=1 is too few.*give at least 2"):
        subnetwork.largest_swag_variance(3, epochs=1)


def test_weights_that_the_data_hardly_narrow_come_after_the_others() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    x = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([3.0, 1e-3, 1e-2], dtype=torch.float64)
    data = [(x, torch.randint(2, (40,)))]
    chosen = [
        set(fitted(net, likelihoods.Categorical(), data, subnetwork.largest_variance(size)).subset.flat().tolist())
        for size in (2, 4, 6, 8)
    ]
    dark = {1, 4}  # of the second input, the darkest, and {2, 5} of the third
    assert chosen == [{6, 7}, {0, 3, 6, 7}, set(range(8)) - dark, set(range(8))]


def test_posterior_gap_is_the_squared_wasserstein_distance() -> None:
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    covariance = root @ root.T + 0.1 * torch.eye(6, dtype=torch.float64)
    for mask in itertools.product([False, True], repeat=6):
        chosen = torch.tensor(mask)
        if not chosen.any():
            continue
        masked = covariance * torch.outer(chosen, chosen)
        values, vectors = torch.linalg.eigh(covariance)
        half = vectors @ torch.diag(values.sqrt()) @ vectors.T
        inner = torch.linalg.eigvalsh(half @ masked @ half).clamp_min(0).sqrt().sum()
        exact = covariance.trace() + masked.trace() - 2 * inner
        gap = subnetwork.posterior_gap(covariance, chosen)
        torch.testing.assert_close(gap, exact, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(gap, covariance.diagonal()[~chosen].sum(), rtol=1e-7, atol=1e-7)


def test_largest_variance_is_the_optimum_by_enumeration() -> None:
    torch.manual_seed(1)
    root = torch.randn(7, 7, dtype=torch.float64)
    covariance = root @ root.T
    gaps = {}
    for chosen in itertools.combinations(range(7), 3):
        mask = torch.zeros(7, dtype=torch.bool)
        mask[list(chosen)] = True
        gaps[chosen] = float(subnetwork.posterior_gap(covariance, mask))
    best = tuple(sorted(covariance.diagonal().topk(3).indices.tolist()))
    assert min(gaps, key=gaps.__getitem__) == best
