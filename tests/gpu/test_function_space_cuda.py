"""Function-space inference on a GPU: the same moments as on the CPU, and memory under the budget."""

from __future__ import annotations

import copy

import pytest
import torch

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.experiments.function_space.networks import convolutional_network
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
