"""Global and local inducing points, deep Gaussian processes and their captured trainings on a GPU. Run with `-m gpu`."""

import functools

import pytest
import torch
from bayesify_papers.global_inducing import processes, stacked_training, uci
from bayesify_papers.global_inducing.networks import Design, stack
from bayesify_papers.shared.regressions import synthetic

import bayesify
from bayesify import likelihoods, models, posteriors, priors
from bayesify.deep_gp import DeepGP
from bayesify.maths.convolution_moments import Geometry, convolution_moments
from bayesify.maths.patch_products import patch_products
from bayesify.training import Steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_deep_processes_are_made_and_trained_where_their_data_lie(inducing):
    x = torch.randn(60, 2, device="cuda")
    model = DeepGP(x, x[:, :1].sin(), inducing=inducing, num_inducing=10)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    bound = model.elbo(x, x[:, :1].sin(), num_data=60)
    bound.backward()
    assert torch.isfinite(bound)
    assert model.predict(x, 5).mean.is_cuda


@pytest.mark.parametrize("stride", [1, 2])
def test_moments_of_convolutions_are_those_of_the_cpu(stride):
    generator = torch.Generator().manual_seed(0)
    geometry = Geometry((3, 3), (stride, stride), (1, 1), ((1, 1), (1, 1)))
    x, y = (torch.randn(6, 4, *size, generator=generator) for size in ((9, 8), geometry.outputs((9, 8))))
    ones = torch.rand(6, generator=generator)
    here = convolution_moments(x, y, geometry, ones)
    there = convolution_moments(x.cuda(), y.cuda(), geometry, ones.cuda())
    for own, other in zip(here, there, strict=True):
        torch.testing.assert_close(own, other.cpu(), rtol=1e-3, atol=1e-3)


def test_products_of_patches_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 4, 9, 8, generator=generator) for _ in range(2))
    geometry = Geometry((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    scale, found = torch.rand(6, generator=generator), []
    for device in ("cpu", "cuda"):
        inputs = [value.to(device).requires_grad_() for value in (x.bfloat16(), y, scale)]
        made = patch_products(inputs[0], inputs[1], geometry, inputs[2], True)
        grads = torch.autograd.grad(sum(value.square().sum() for value in made), inputs)
        found.append([value.cpu() for value in (*made, *grads)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max()))


def test_a_captured_training_in_bfloat16_has_the_bound_of_float32():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, 8, 8, device="cuda"), torch.randint(10, (40,), device="cuda")
    bounds = []
    for precision in ("float32", "bf16"):
        torch.manual_seed(1)
        inducing = posteriors.GlobalInducing(x[:20].cpu(), y[:20].cpu())
        net = models.narrow_resnet(width=8)
        prior = priors.SpatialInverseWishart()
        bnn = bayesify.bayesianize(net, inducing, likelihood=likelihoods.Categorical(), prior=prior).cuda()
        history = bayesify.fit(bnn, [(x, y)] * 10, epochs=3, precision=precision, seed=0, progress=False)
        bounds.append(torch.tensor(history.column("elbo")))
    torch.testing.assert_close(*bounds, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("kind", [posteriors.GlobalInducing, posteriors.LocalInducing])
def test_draws_and_divergences_are_those_of_the_cpu(kind):
    torch.manual_seed(0)
    inducing = kind(torch.randn(6, 1, 8, 8)) if kind is posteriors.GlobalInducing else kind(6)
    net = models.narrow_resnet(3, in_channels=1, width=4)
    bnn = bayesify.bayesianize(net, inducing, likelihood=likelihoods.Categorical(), prior=priors.Neal())
    draws = bnn.draw(2, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 1, 8, 8)
    outputs, kl = draws(x), draws.kl
    draws = bnn.cuda().draw(2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws(x.cuda()).cpu(), outputs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(draws.kl.cpu(), kl, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("model", [*uci.MODELS, *processes.MODELS])
def test_a_captured_training_of_stacks_is_one_without_capture(model, monkeypatch):
    rows = uci.stack_splits(synthetic(splits=2), device="cuda")
    schedule = stacked_training.Schedule(steps=60, batch=32)
    found = []
    for capture in (True, False):
        monkeypatch.setattr(stacked_training, "Steps", functools.partial(Steps, capture=capture))
        if model in uci.MODELS:
            (x, y), _, _ = rows
            design = Design((x.shape[-1], 8, 8, 1), uci.MODELS[model], "scale", 10)
            networks = stack(design, x.cpu(), y.cpu()).cuda()
            stacked_training.train(networks, x, y, schedule)
            found.append(stacked_training.bounds(networks, x, y).cpu())
        else:
            found.append(torch.tensor(processes.run("synthetic", rows, model, schedule, 10)["elbo"]))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.05)
