"""Inducing weights by kernels are those of plain torch operations on the same noise.

Run with `-m gpu` on a GPU, or with Triton's interpreter in place of one; see `test_fused_draws_cuda.py`.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, priors
from bayesify.maths import fused_draws, fused_matheron
from bayesify.maths.noise import NoiseSource
from bayesify.posteriors import InducingWeights

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fused_draws, "HAS_FAST_SINES", False)
        monkeypatch.setattr(fused_matheron, "CHUNK", 64)  # several parts of a matrix
        monkeypatch.setattr(NoiseSource, "by_kernel", lambda self, like: like.dtype == torch.float32)


def network(kind: str, *more: nn.Module) -> nn.Module:
    """Matrices of one block and of several, with and without bias, of equal and other sizes, a lookup, smaller than U."""
    wide = 79 if INTERPRETED else 1327  # the bias is the last column that a kernel takes at a time
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Linear(wide, 66),
        nn.Linear(66, 41),
        nn.Linear(66, 41, bias=False),
        nn.Linear(66, 41),
        nn.Conv2d(8, 41, (4, 2), bias=False),
        nn.Embedding(40, 30),
        nn.Linear(4, 20),  # fewer columns of U than rows
        *more,
    ).to(DEVICE)
    return net.bfloat16() if kind == "bfloat16" else net.to(memory_format=getattr(torch, kind))


class WideBias(priors.Neal):
    """A bias has another scale than its weight."""

    def std_of(self, weight: Any) -> float:
        return super().std_of(weight) * (3.0 if weight.is_bias else 1.0)


def results(bnn: Any, num_draws: int, antithetic: bool) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    bnn.zero_grad()
    generator = torch.Generator(DEVICE).manual_seed(3)
    draws = bnn.draw(num_draws, generator=generator, antithetic=antithetic, local=True)
    torch.manual_seed(0)
    parts = [(weight.float() * torch.randn(weight.shape, device=DEVICE)).sum() for weight in draws.weights.values()]
    (sum(parts) + 1.7 * draws.kl.mean()).backward()
    return draws.weights, draws.kl.detach(), [parameter.grad.clone() for parameter in bnn.parameters()]


EVERY = list(product(["contiguous_format", "channels_last", "bfloat16"], [1, 3], [False, True], [False]))
EVERY += product(["channels_last"], [1, 3], [False, True], [True])  # kernels draw balanced matrices in this format only
SOME = [("contiguous_format", 1, False, False), ("bfloat16", 2, False, False)]
SOME += [("channels_last", 3, True, balanced) for balanced in (False, True)]


@pytest.mark.parametrize(("kind", "num_draws", "antithetic", "balanced"), SOME if INTERPRETED else EVERY)
@pytest.mark.parametrize("size", [(10, 13)] if INTERPRETED else [(10, 13), (64, 64)])
def test_draws_and_gradients(
    kind: str,
    num_draws: int,
    antithetic: bool,
    balanced: bool,
    size: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = network(kind, *([nn.Conv2d(40, 20, (4, 2), bias=False), nn.Conv2d(9, 8, 3, bias=False)] if balanced else []))
    posterior = InducingWeights(*size, balanced=balanced)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical(), prior=WideBias())
    assert any(weight.balanced for weight in bnn.posterior.weights) == balanced
    fused = results(bnn, num_draws, antithetic)
    with torch.no_grad():
        alone = bnn.draw(num_draws, generator=torch.Generator(DEVICE).manual_seed(3), antithetic=antithetic).weights
    monkeypatch.setattr(InducingWeights, "draws_by_kernels", lambda self, request: False)
    plain = results(bnn, num_draws, antithetic)
    for name, weight in plain[0].items():
        assert fused[0][name].dtype == weight.dtype
        assert fused[0][name].stride()[1:] == net.get_parameter(name).stride()
        # two roundings to bfloat16 may go the other way; the interpreter cuts in place of rounding
        largest = float(weight.detach().float().abs().max())
        tolerance = (2**-6 if weight.dtype == torch.bfloat16 else 4e-6) * largest
        torch.testing.assert_close(fused[0][name].float(), weight.float(), rtol=0, atol=tolerance)
        # without gradients products of a network in bfloat16 are in bfloat16
        torch.testing.assert_close(alone[name].float(), weight.float(), rtol=0, atol=4 * tolerance)
    torch.testing.assert_close(fused[1], plain[1], rtol=1e-6, atol=0)
    for one, other in zip(fused[2], plain[2], strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())


@pytest.mark.parametrize(
    "frozen", [(), ("raw_lambda", "z_col", "raw_d_col"), ("z_row", "location", "raw_std", "raw_d")]
)
def test_second_derivatives(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Conv2d(4, 30, (3, 2)).to(DEVICE).to(memory_format=torch.channels_last)
    bnn = bayesify.bayesianize(net, InducingWeights(5, 6), likelihood=likelihoods.Categorical())
    named = [(name, value) for name, value in bnn.named_parameters() if not any(part in name for part in frozen)]
    bnn.requires_grad_(False)
    parameters = [value.requires_grad_() for _, value in named]

    def curvature() -> list[Tensor]:
        draws = bnn.draw(2, generator=torch.Generator(DEVICE).manual_seed(1))
        value = sum(weight.pow(3).sum() for weight in draws.weights.values()) + draws.kl.mean()
        first = torch.autograd.grad(value, parameters, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters))

    fused = curvature()
    monkeypatch.setattr(InducingWeights, "draws_by_kernels", lambda self, request: False)
    for one, other in zip(fused, curvature(), strict=True):
        assert float((one - other).abs().max()) < 2e-5 * float(other.abs().max())


def test_a_draw_is_of_what_is_asked_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what an earlier one with the same posterior was."""
    bnn = bayesify.bayesianize(
        nn.Linear(5, 4).to(DEVICE), InducingWeights(2, 3), likelihood=likelihoods.Categorical()
    ).requires_grad_(False)

    def drawn() -> list[Tensor]:
        found = []
        for count, antithetic in ((2, True), (2, False), (3, True)):
            generator = torch.Generator(DEVICE).manual_seed(1)
            found += bnn.draw(count, generator=generator, antithetic=antithetic).weights.values()
        return found

    with torch.no_grad():
        for _ in range(2):
            fused = drawn()
            with monkeypatch.context() as without:
                without.setattr(InducingWeights, "draws_by_kernels", lambda self, request: False)
                torch.testing.assert_close(fused, drawn(), rtol=0, atol=1e-5)
            for parameter in bnn.parameters():
                parameter.add_(0.1)


def test_what_kernels_do_not_draw_is_drawn_without_them() -> None:
    """Transposed kernels, U that is larger than a program holds, weights of two types, no noise of W's size, and balanced
    kernels without channels last."""
    transposed = nn.ConvTranspose2d(3, 4, 2).to(DEVICE)
    mixed = nn.Sequential(nn.Linear(5, 4).bfloat16(), nn.Linear(4, 3)).to(DEVICE)
    cases = [
        (transposed, InducingWeights(3, 3)),
        (nn.Linear(80, 70).to(DEVICE), InducingWeights(65, 5)),
        (nn.Conv2d(8, 7, 3, bias=False).to(DEVICE), InducingWeights(2, 2, balanced=True)),
        (mixed, InducingWeights(2, 2)),
        (nn.Linear(8, 7).to(DEVICE), InducingWeights(2, 2, max_lambda=0.0)),
        (nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 7)).to(DEVICE), InducingWeights(2, 2, shared=(2, 2))),
    ]
    for net, posterior in cases:
        draws = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).draw(2)
        assert all(weight.isfinite().all() for weight in draws.weights.values())
        assert all(weight.dtype == net.get_parameter(name).dtype for name, weight in draws.weights.items())
