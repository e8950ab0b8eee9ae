"""When draws go to a kernel, with a stand-in for it: what the kernel computes is tested on a GPU."""

import gc
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths.noise import NoiseSource
from bayesify.posteriors.common.base import DrawRequest
from bayesify.weights.layout import PlacedWeights


class Launches:
    """Stands for a kernel: counts its launches and writes zeros."""

    def __init__(self, *outputs: int) -> None:
        self.outputs, self.grids = outputs, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **_: [arguments[place].zero_() for place in self.outputs]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("bayesify.maths.philox_kernels")
    module.draw_kernel, module.gradient_kernel, module.normal_kernel = Launches(5, 6), Launches(7, 8), Launches(1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tied = ModuleType("bayesify.maths.tied_kernels")
    tied.positive_kernel, tied.tied_draw_kernel = Launches(3), Launches(6, 7)
    tied.tied_gradient_kernel, tied.factor_kernel = Launches(8, 9), Launches(5)
    monkeypatch.setitem(sys.modules, tied.__name__, tied)
    module.tied = tied
    monkeypatch.setattr(NoiseSource, "by_kernel", lambda self, like: like.dtype == torch.float32)
    return module


def network(posterior: Any = None, net: nn.Module | None = None) -> Any:
    net = nn.Sequential(nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 60)) if net is None else net
    return bayesify.bayesianize(net, posterior or posteriors.MeanField(), likelihood=likelihoods.Categorical())


def test_one_launch_for_all_weights_and_one_for_all_gradients(kernels: Any) -> None:
    bnn = network()
    draws = bnn.draw(3)
    assert kernels.draw_kernel.grids == [(6,)]  # 70 x 60 are three tiles, the three others one each
    assert {name: tuple(weight.shape) for name, weight in draws.weights.items()} == {
        name: (3, *weight.shape) for name, weight in bnn.weights.items()
    }
    (sum(weight.sum() for weight in draws.weights.values()) + draws.kl.sum()).backward()
    assert kernels.gradient_kernel.grids == [(6,)]
    assert all(parameter.grad.shape == parameter.shape for parameter in bnn.parameters())


def test_k_tied_draws_are_written_as_the_network_has_them(kernels: Any) -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 70), nn.Embedding(5, 7))
    net = nn.Sequential(*layers).bfloat16().to(memory_format=torch.channels_last)
    bnn = network(posteriors.KTied(), net)
    draws = bnn.draw(2)
    assert [len(kernel.grids) for kernel in (kernels.tied.positive_kernel, kernels.tied.tied_draw_kernel)] == [1, 1]
    for name, weight in net.named_parameters():
        assert draws.weights[name].dtype == torch.bfloat16
        assert draws.weights[name][0].stride() == weight.stride()
    (sum(weight.sum().float() for weight in draws.weights.values()) + draws.kl.sum()).backward()
    assert kernels.tied.factor_kernel.grids == [
        (8, 2)
    ]  # blocks of 32 rows and columns of 8 x 28, 70 x 9, 7 x 5; rank 2
    assert all(parameter.grad.shape == parameter.shape for parameter in bnn.parameters())


def test_without_gradients_a_draw_is_a_tensor_when_it_is_asked_for(kernels: Any) -> None:
    bnn = network()
    with torch.no_grad():
        draws = bnn.draw(3)
        assert isinstance(draws.weights, PlacedWeights)
        assert draws(torch.ones(4, 5)).shape == (3, 4, 60)
        assert draws[-1](torch.ones(4, 5)).shape == bnn(torch.ones(4, 5)).shape == (4, 60)


def test_weights_of_two_types_are_drawn_without_the_kernel(kernels: Any) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).bfloat16())
    draws = network(net=net).draw(2)
    assert kernels.draw_kernel.grids == []
    assert [weight.dtype for weight in draws.weights.values()] == 2 * [torch.float32] + 2 * [torch.bfloat16]


def test_the_plan_is_made_once(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, made = network(), []
    plan = sys.modules["bayesify.maths.fused_draws"].Plan
    monkeypatch.setattr("bayesify.maths.fused_draws.Plan", lambda *given: made.append(1) or plan(*given))
    for _ in range(3):
        bnn.draw(2)
    assert len(made) == 1
    bnn.draw(1)
    assert len(made) == 2
    bnn.double().float()  # other memory
    bnn.draw(1)
    assert len(made) == 3


def test_draws_go_with_their_last_name(kernels: Any) -> None:
    """A cycle between the draws and what their backward pass keeps would hold a step's memory until Python looks for cycles."""
    gc.disable()
    try:
        draws = network().draw(1, local=True)
        seen = weakref.ref(draws.weights["0.weight"])
        del draws
        assert seen() is None
    finally:
        gc.enable()


def test_what_a_kernel_does_not_take(kernels: Any) -> None:
    def fused(bnn: Any, noise: NoiseSource | None = None, **options: Any) -> bool:
        request = DrawRequest(num_draws=1, prior=bnn.prior.draw(1), noise=noise or NoiseSource(), **options)
        return bool(bnn.posterior.draws_fused(request))

    class Replayed(NoiseSource):
        pass

    assert fused(network())
    assert not fused(network(), Replayed())
    assert not fused(network(posteriors.MeanField(max_std=1.0)))
    assert not fused(network(posteriors.MeanField(units="prior")))
    assert not fused(network(posteriors.MeanField(local_reparameterization=True)), local=True)
    assert not fused(network().double())
    pruned = network()
    bayesify.prune(pruned, 0.5)
    assert not fused(pruned)
    bnn = network()
    assert not torch.func.vmap(lambda x: torch.ones_like(x) * fused(bnn))(torch.zeros(2)).any()
    with torch.no_grad():
        bnn.posterior.mean_value["0.weight"].set_(torch.zeros(140, 5)[::2])  # with gaps
    assert bnn.draw(1).weights["0.weight"].shape == (1, 70, 5)
    assert not kernels.draw_kernel.grids
