"""The fused Walsh-Hadamard kernel, and the posterior on it, against plain torch. Run with `-m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.transforms import hadamard, walsh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-12}
"""Relative error of the norm: tensor cores cut the sums of float32 at about 1e-6; 16-bit results are rounded once or twice."""


def error(actual, exact):
    return float((actual.double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [2, 128, 256, 1024, 4096, 8192, 16384, 32768])
def test_is_the_plain_transform(size, dtype):
    for rows in (1, 37):
        x = torch.randn(rows, size, device="cuda").to(dtype)
        exact = walsh.plain_transform(x.double().cpu(), size**-0.5)
        result = hadamard(x)
        assert result.dtype == dtype
        assert result.shape == x.shape
        assert error(result, exact) < ROUNDING[dtype]
        assert error(walsh.plain_transform(x, size**-0.5), exact) < ROUNDING[dtype]


def test_two_terms_where_tf32_is_allowed():
    x = torch.randn(9, 16384, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # pytest's monkeypatch cannot undo this
    try:
        result = hadamard(x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert error(result, walsh.plain_transform(x.double().cpu(), 1 / 128)) < 1e-5


def test_large_and_small_numbers():
    """The terms are bfloat16, whose range is float32's."""
    for scale in (1e30, 1e-30):
        x = scale * torch.randn(5, 4096, device="cuda")
        assert error(hadamard(x), walsh.plain_transform(x.double().cpu(), 1 / 64)) < 3e-6


def test_repeated_launches():
    """The kernel is compiled once and then launched by its handle: other numbers of rows, and memory that is not aligned."""
    buffer = torch.randn(70 * 1024 + 1, device="cuda")
    for rows in (1, 2, 37, 64, 37, 1):
        for start in (0, 1):
            x = buffer[start : start + rows * 1024].view(rows, 1024)
            assert error(hadamard(x), walsh.plain_transform(x.double().cpu(), 1 / 32)) < 3e-6


def test_gradient_vmap_and_strides():
    x = torch.randn(6, 3, 512, device="cuda", requires_grad=True)
    hadamard(x).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, hadamard(3 * hadamard(x.detach()).square()), rtol=1e-4, atol=1e-4)
    rows = x.detach().transpose(0, 2)  # [512, 3, 6]
    mapped = torch.func.vmap(hadamard, in_dims=1)(rows.transpose(0, 2))
    torch.testing.assert_close(mapped, hadamard(rows.permute(1, 2, 0)), rtol=1e-5, atol=1e-5)


def test_in_a_recorded_graph():
    for size in (64, 1024, 32768):
        x = torch.randn(8, size, device="cuda")
        hadamard(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = hadamard(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, hadamard(x))


@pytest.mark.parametrize("covariance", ["diagonal", "full", "flow"])
def test_a_wide_network_as_on_the_cpu(covariance):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 512), nn.ReLU(), nn.Linear(512, 1))
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(covariance), likelihood=likelihoods.Gaussian(0.1))
    x, y = torch.randn(32, 300), torch.randn(32, 1)
    values = {}
    for device in ("cpu", "cuda"):
        bnn.to(device).zero_grad()
        bound = bnn.elbo(
            x.to(device), y.to(device), num_data=32, num_draws=2, generator=torch.Generator().manual_seed(1)
        )
        bound.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in bnn.parameters()])
        values[device] = bound.item(), gradient.cpu()
    assert values["cuda"][0] == pytest.approx(values["cpu"][0], rel=1e-3)
    assert error(values["cuda"][1], values["cpu"][1].double()) < 1e-2
