"""Products of bfloat16 patches against the same matrices in float64."""

import math

import pytest
import torch

import bayesify
from bayesify import likelihoods, models, posteriors, priors
from bayesify.maths import patch_products
from bayesify.maths.convolution_moments import Geometry, convolution_moments

GEOMETRIES = [
    Geometry((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    Geometry((3, 2), (2, 1), (1, 2), ((1, 0), (2, 1))),
    Geometry((2,), (1,), (1,), ((0, 0),)),
]

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: f"{geometry.kernel}")
@pytest.mark.parametrize("largest", [2**28, 500])
@pytest.mark.parametrize("device", DEVICES)
def test_matrices_and_gradients_are_those_of_float64(geometry, bias, largest, device, monkeypatch):
    """The first matrix to the digits of float32, the second and gradients with respect to maps to those of bfloat16, 2**-8."""
    monkeypatch.setattr(patch_products, "MAX_PATCH_NUMBERS", largest)
    generator = torch.Generator().manual_seed(0)
    sizes = (9, 8)[: len(geometry.kernel)]
    x = torch.randn(6, 3, *sizes, generator=generator).bfloat16()
    v = torch.randn(6, 4, *geometry.outputs(sizes), generator=generator)
    scale = torch.rand(6, generator=generator)
    near = [value.to(device, copy=True).requires_grad_() for value in (x, v, scale)]
    exact = [value.double().requires_grad_() for value in (x, v, scale)]
    found = [part.cpu() for part in patch_products.patch_products(*near[:2], geometry, near[2], bias)]
    scaled = [value * exact[2].view(-1, *[1] * (x.ndim - 1)) for value in exact[:2]]
    known = convolution_moments(*scaled, geometry, exact[2] if bias else None)
    for own, other in zip(found, known, strict=True):
        limit = 2e-5 if own.shape[-1] == own.shape[-2] else 2**-8
        torch.testing.assert_close(own.double(), other, rtol=limit, atol=limit * float(other.detach().abs().max()))
    weights = [torch.randn(value.shape, generator=generator) for value in found]
    for values in (found, known):
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    for own, other in zip(near, exact, strict=True):
        difference = own.grad.cpu().double() - other.grad
        assert torch.linalg.vector_norm(difference) < 2**-8 * torch.linalg.vector_norm(other.grad)


def test_a_network_under_autocast_has_the_bound_of_float32():
    """Both terms of the bound within 2**-8, bfloat16's rounding; gradients, which pass eight layers, within 5 %."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, 8, 8), torch.randint(10, (40,))
    inducing = posteriors.GlobalInducing(x[:20], y[:20], precision=math.exp(-4), last_precision=1.0)
    net = models.narrow_resnet(width=6)
    prior = priors.SpatialInverseWishart()
    bnn = bayesify.bayesianize(net, inducing, likelihood=likelihoods.Categorical(), prior=prior)
    found = {}
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            terms = bnn.elbo_terms(x, y, num_data=40, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad((terms[0] - terms[1]).sum(), list(bnn.parameters()))
        found[enabled] = (*(term.detach() for term in terms), torch.cat([grad.flatten() for grad in grads]))
    for own, other, limit in zip(found[True], found[False], (2**-8, 2**-8, 0.05), strict=True):
        assert torch.linalg.vector_norm(own - other) < limit * torch.linalg.vector_norm(other)


def test_the_prior_is_drawn_in_float32_under_autocast():
    net = torch.nn.Conv2d(2, 3, 3)
    prior = priors.SpatialInverseWishart()
    bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Gaussian(0.1), prior=prior)
    kls = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            kls.append(bnn.draw(2, generator=torch.Generator().manual_seed(0)).kl)
    assert torch.equal(*kls)
