"""Draws by one kernel are those of plain torch operations on the same noise.

Run with `-m gpu` on a GPU, or with Triton's interpreter in place of one: `TRITON_INTERPRET=1 pytest -m gpu` of this file, as
`tests/maths/test_interpreted_kernels.py` does.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from philox_reference import philox_normals
from scipy import stats
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths import fused_draws
from bayesify.maths.fused_draws import kernel_normals
from bayesify.maths.noise import NoiseSource
from bayesify.maths.philox import TILE
from bayesify.running.cuda_graphs import Captured, side_stream

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
COUNT = 2**15 if INTERPRETED else 2**22
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fused_draws, "HAS_FAST_SINES", False)
        monkeypatch.setattr(NoiseSource, "by_kernel", lambda self, like: like.dtype == torch.float32)


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, COUNT // 4 + 3])
def test_numbers_are_those_of_the_reference(count: int) -> None:
    seed = torch.tensor([2**62 + 77], device=DEVICE)
    # sines and cosines of the device are within 5e-7, radii below 6.8
    torch.testing.assert_close(kernel_normals(count, seed), philox_normals(count, seed), rtol=0, atol=1e-5)


def test_distribution() -> None:
    numbers = kernel_normals(COUNT, torch.tensor([5], device=DEVICE)).double().cpu().numpy()
    assert stats.kstest(numbers, "norm").pvalue > 1e-4
    assert abs(numbers.mean()) < 4.5 / COUNT**0.5
    assert abs(numbers.var() - 1) < 4.5 * (2 / COUNT) ** 0.5


def convolutional() -> nn.Module:
    """Weights of less than a tile, of whole tiles, and of some that are not whole."""
    wide, odd = (64, 41) if INTERPRETED else (288, 513)
    layers = (nn.Conv2d(3, 8, 3), nn.Linear(wide, 64), nn.Linear(64, odd), nn.Embedding(40, 30))
    return nn.Sequential(*layers).to(DEVICE)


NETWORKS = {
    "float32": convolutional,
    "channels_last": lambda: convolutional().to(memory_format=torch.channels_last),
    "bfloat16": lambda: convolutional().bfloat16(),
}


def results(bnn: Any, num_draws: int, antithetic: bool) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    bnn.zero_grad()
    generator = torch.Generator(DEVICE).manual_seed(3)
    draws = bnn.draw(num_draws, generator=generator, antithetic=antithetic, local=True)
    torch.manual_seed(0)
    parts = [(weight.float() * torch.randn(weight.shape, device=DEVICE)).sum() for weight in draws.weights.values()]
    (sum(parts) + 1.7 * draws.kl.mean()).backward()
    return draws.weights, draws.kl.detach(), [parameter.grad.clone() for parameter in bnn.parameters()]


FAMILIES = [posteriors.MeanField, posteriors.KTied]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(NETWORKS))
@pytest.mark.parametrize("num_draws", [1, 3])
@pytest.mark.parametrize("antithetic", [False, True])
def test_draws_and_gradients(
    family: Any, kind: str, num_draws: int, antithetic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = bayesify.bayesianize(NETWORKS[kind](), family(), likelihood=likelihoods.Categorical())
    fused = results(bnn, num_draws, antithetic)
    monkeypatch.setattr(family, "draws_fused", lambda self, request: False)
    plain = results(bnn, num_draws, antithetic)
    for name, weight in plain[0].items():
        assert fused[0][name].dtype == weight.dtype
        # one rounding to bfloat16 may go the other way; the interpreter cuts in place of rounding
        largest = (2**-7 if INTERPRETED else 2**-8) * float(weight.detach().float().abs().max())
        tolerance = largest if weight.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(fused[0][name].float(), weight.float(), rtol=0, atol=tolerance)
    torch.testing.assert_close(fused[1], plain[1], rtol=1e-6, atol=0)
    for one, other in zip(fused[2], plain[2], strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives(family: Any, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = bayesify.bayesianize(nn.Linear(40, 30).to(DEVICE), family(), likelihood=likelihoods.Categorical())
    parameters = list(bnn.requires_grad_(not frozen).parameters())[:: 2 if frozen else 1]
    for parameter in parameters:
        parameter.requires_grad_()

    def curvature() -> list[Tensor]:
        draws = bnn.draw(2, generator=torch.Generator(DEVICE).manual_seed(1))
        value = sum(weight.pow(3).sum() for weight in draws.weights.values()) + draws.kl.mean()
        first = torch.autograd.grad(value, parameters, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters))

    fused = curvature()
    monkeypatch.setattr(family, "draws_fused", lambda self, request: False)
    for one, other in zip(fused, curvature(), strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())


@on_gpu
def test_replays_take_the_numbers_of_plain_draws() -> None:
    bnn = bayesify.bayesianize(
        nn.Linear(64, 64).cuda(), posteriors.MeanField(1.0), likelihood=likelihoods.Categorical()
    )
    generator = torch.Generator(DEVICE).manual_seed(5)
    with torch.no_grad():
        plain = [bnn.draw(1, generator=generator).weights["weight"].clone() for _ in range(3)]
        with side_stream():
            bnn.draw(1, generator=generator)
        torch.cuda.synchronize()
        captured = Captured(lambda: bnn.draw(1, generator=generator).weights["weight"], generators=[generator])
        generator.manual_seed(5)
        for expected in plain:
            assert torch.equal(captured.replay(), expected)


@on_gpu
def test_moments_of_draws() -> None:
    bnn = bayesify.bayesianize(
        nn.Linear(50, 41).cuda(), posteriors.MeanField(0.5), likelihood=likelihoods.Categorical()
    )
    with torch.no_grad():
        weights = bnn.draw(4096, generator=torch.Generator(DEVICE).manual_seed(2)).weights["weight"]
        scores = (weights - bnn.posterior.mean()["weight"]) / 0.5
    assert float(scores.mean(0).abs().max()) < 5.5 / 64  # 2,050 entries, 4,096 draws each
    assert float((scores.var(0) - 1).abs().max()) < 5.5 * 2**0.5 / 64
