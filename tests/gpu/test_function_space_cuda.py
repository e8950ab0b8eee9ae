"""Function-space inference on a GPU: the same moments as on the CPU, and memory under the budget."""

from __future__ import annotations

import copy

import pytest
import torch
from bayesify_papers.function_space.networks import convolutional_network

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.function_space import Box, FunctionSpaceVI

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def network() -> bayesify.BayesianNetwork:
    torch.manual_seed(0)
    net = convolutional_network(1, 28)
    return bayesify.bayesianize(net, posteriors.MeanField(init_std=0.01), likelihood=likelihoods.Categorical())


@pytest.mark.parametrize("kind", ["diagonal", "full", "example"])
def test_moments_equal_those_of_the_cpu(kind: str) -> None:
    bnn, x = network(), torch.rand(4, 1, 28, 28)
    here = FunctionSpaceVI(bnn).function_moments(x, kind)  # type: ignore[arg-type]
    there = FunctionSpaceVI(copy.deepcopy(bnn).cuda()).function_moments(x.cuda(), kind)  # type: ignore[arg-type]
    for one, other in zip(here, there, strict=True):  # convolutions run in TF32, 10 bits
        torch.testing.assert_close(other.cpu(), one, rtol=0.02, atol=0.02 * float(one.detach().abs().max()))


def test_memory_stays_under_the_budget() -> None:
    bnn, budget = network().cuda(), 2**28
    space = FunctionSpaceVI(bnn, context=Box(n=40), memory=budget)
    x = torch.rand(40, 1, 28, 28, device="cuda")
    space.function_kl(x).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    space.function_kl(x).backward()
    assert torch.cuda.max_memory_allocated() - before <= budget


def test_a_recorded_kl_is_that_of_the_same_network_without_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, plain = network().cuda(), network().cuda()
    spaces = [FunctionSpaceVI(bnn, context=Box(n=5)) for bnn in (recorded, plain)]
    monkeypatch.setattr(spaces[1], "_records", False)
    optimizers = [torch.optim.Adam(bnn.parameters(), lr=1e-2) for bnn in (recorded, plain)]
    for step in range(8):
        x = torch.rand(5 if step != 5 else 3, 1, 28, 28, device="cuda")  # another size goes without the graph, once
        values = [space.function_kl(x) for space in spaces]
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)
        for optimizer, value in zip(optimizers, values, strict=True):
            optimizer.zero_grad()
            (2 * value).backward()
        pairs = zip(recorded.parameters(), plain.parameters(), strict=True)
        for mine, other in pairs:
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                scale = float(other.grad.abs().max()) + 1e-12
                torch.testing.assert_close(mine.grad / scale, other.grad / scale, rtol=2e-2, atol=2e-3)
        optimizers[0].step()
        with torch.no_grad():  # the same path for both, in place
            for mine, other in zip(recorded.parameters(), plain.parameters(), strict=True):
                other.copy_(mine)
    assert spaces[0]._capture.captures.calls("divergence") >= 1


def test_two_recorded_kls_may_wait_for_their_gradients() -> None:
    bnn = network().cuda()
    space = FunctionSpaceVI(bnn, context=Box(n=5))
    first, second = torch.rand(2, 5, 1, 28, 28, device="cuda")
    parameters = [parameter for parameter in bnn.parameters() if parameter.requires_grad]
    apart = [torch.autograd.grad(space.function_kl(x), parameters, allow_unused=True) for x in (first, second)]
    for _ in range(4):
        space.function_kl(first)
    assert space._capture.captures.known("divergence").made is not None
    both = space.function_kl(first) + space.function_kl(second)
    found = torch.autograd.grad(both, parameters, allow_unused=True)
    for total, one, other in zip(found, *apart, strict=True):
        if total is not None:
            torch.testing.assert_close(total, one + other, rtol=2e-2, atol=2e-3 * float((one + other).abs().max()))
