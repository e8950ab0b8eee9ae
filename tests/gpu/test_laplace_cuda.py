"""Laplace on a GPU equals Laplace on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bayesify import Laplace, likelihoods, subnetwork
from bayesify.laplace import Sampled

pytestmark = pytest.mark.gpu


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(100, 3)
    )
    return net.eval().double(), torch.randn(7, 2, 5, 5, dtype=torch.float64), torch.randint(3, (7,))


@pytest.mark.filterwarnings("ignore:Laplace.fit. 2 draws take")  # 200 steps on seven rows take many passes
def test_one_draw_at_a_time_leaves_the_rest_on_the_host() -> None:
    net, x, y = problem()
    net, x, y = net.cuda(), x.cuda(), y.cuda()
    found = [
        Laplace(
            net,
            likelihoods.Categorical(),
            covariance=Sampled(2, 60, 1, tolerance=1e-8, solver=solver, steps=200, batch=7),  # type: ignore[arg-type]
            prior_precision=1.0,
        ).fit([(x, y)])
        for solver in ("minibatch", "conjugate_gradients")
    ]
    assert [one.posterior.draws.device.type for one in found] == ["cpu", "cpu"]
    # The noise is the same, and momentum in bfloat16 ends at the same solution.
    torch.testing.assert_close(found[0].posterior.draws, found[1].posterior.draws, rtol=0.05, atol=0.02)
    assert found[0].predict(x).probs.is_cuda
    assert found[0].draw(3)(x).shape == (3, 7, 3)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
def test_equals_the_cpu(structure: Any, subset: str) -> None:
    net, x, y = problem()
    here = Laplace(net, likelihoods.Categorical(), subset, covariance=structure).fit([(x, y)])
    there = Laplace(net.cuda(), likelihoods.Categorical(), subset, covariance=structure).fit([(x, y)])
    torch.testing.assert_close(there.covariance_matrix().cpu(), here.covariance_matrix(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.predict(x.cuda()).probs.cpu(), here.predict(x).probs, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.log_evidence().cpu(), here.log_evidence())
    draws = there.draw(3, generator=torch.Generator("cuda").manual_seed(0))
    assert draws(x.cuda()).shape == (3, 7, 3)
    assert there.predict(x.cuda(), 5, method="linearized_mc").probs.device.type == "cuda"


def test_subnetworks_and_tuning() -> None:
    net, x, y = problem()
    chosen = [
        subnetwork.largest_variance(20),
        subnetwork.random(20),
        subnetwork.from_mask({"0.weight": torch.ones(4, 2, 3, 3)}),
    ]
    for selector in chosen:
        here = Laplace(net.cpu(), likelihoods.Categorical(), selector).fit([(x, y)])
        there = Laplace(net.cuda(), likelihoods.Categorical(), selector).fit([(x, y)])
        assert torch.equal(here.subset.flat(), there.subset.flat())
        tuned = [each.tune_prior_precision([(x, y)], grid=(0.01, 1.0, 100.0)) for each in (here, there)]
        assert tuned[0] == pytest.approx(tuned[1])


def test_bfloat16_network() -> None:
    net, x, y = problem()
    whole = Laplace(net.float().cuda(), likelihoods.Categorical(), "last_layer").fit([(x.float(), y)])
    half = Laplace(net.bfloat16().cuda(), likelihoods.Categorical(), "last_layer").fit([(x.bfloat16(), y)])
    assert half.posterior.curvature.dtype == torch.float32
    scale = whole.posterior.curvature.abs().max()
    # bfloat16 has 8 bits: rounded activations and outputs are off by a few percent of the largest entry
    assert (half.posterior.curvature - whole.posterior.curvature).abs().max() < 0.05 * scale


def test_many_outputs_are_sampled() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 200)).cuda()
    x, y = torch.randn(20, 3, device="cuda"), torch.randint(200, (20,), device="cuda")
    made = Laplace(net, likelihoods.Categorical(), ["0.weight"]).fit([(x, y)])
    assert "200 outputs sampled" in repr(made)
    assert torch.equal(made.predict(x).probs, made.predict(x).probs)


@pytest.mark.filterwarnings("ignore:Laplace.fit:UserWarning")
def test_draws_over_all_weights_have_the_covariance_of_the_cpu() -> None:
    net, x, y = problem()
    options = Sampled(num_draws=512, iterations=60, at_once=512, tolerance=1e-6)
    there = Laplace(net.cuda(), likelihoods.Categorical(), covariance=options, prior_precision=2.0).fit([(x, y)])
    exact = Laplace(net.cpu(), likelihoods.Categorical(), "all", "full", prior_precision=2.0).fit([(x, y)])
    truth = exact.output_covariance(x).diagonal(dim1=1, dim2=2)
    found = there.output_covariance(x.cuda()).diagonal(dim1=1, dim2=2).cpu()
    # A variance of n draws has a standard error of sqrt(2 / n) of itself.
    assert ((found - truth).abs() <= 5 * truth * (2 / 512) ** 0.5).all()
