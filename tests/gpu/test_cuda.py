"""What only a GPU can show: devices, generators, mixed precision, a torchvision network. Run with `-m gpu`."""

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors
from bayesify.methods import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
INDUCED = {
    "global_inducing": lambda x: posteriors.GlobalInducing(x[:3]),
    "local_inducing": lambda _: posteriors.LocalInducing(4),
}
NAMES = [name for name, method in METHODS.items() if method.posterior is not None and name not in INDUCED]


@pytest.mark.parametrize("name", NAMES)
def test_draws_train_and_predict_on_the_gpu(name):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).cuda()
    x, y = torch.randn(6, 1, 8, 8, device="cuda"), torch.randint(0, 3, (6,), device="cuda")
    bnn = bayesify.bayesianize(net, name, likelihood=likelihoods.Categorical())
    for generator in (None, torch.Generator("cuda").manual_seed(0), torch.Generator().manual_seed(0)):
        value = bnn.elbo(x, y, num_data=60, num_draws=2, generator=generator)
        value.backward()
        assert torch.isfinite(value)
    assert all(parameter.grad is not None for parameter in bnn.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.isfinite(bnn.elbo(x, y, num_data=60))
    assert bnn.predict(x).probs.device.type == "cuda"


@pytest.mark.parametrize("name", INDUCED)
def test_inducing_points_train_and_predict_on_the_gpu(name):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).cuda()
    x, y = torch.randn(6, 1, 8, 8, device="cuda"), torch.randint(0, 3, (6,), device="cuda")
    bnn = bayesify.bayesianize(net, INDUCED[name](x), likelihood=likelihoods.Categorical())
    for generator in (None, torch.Generator("cuda").manual_seed(0), torch.Generator().manual_seed(0)):
        value = bnn.elbo(x, y, num_data=60, num_draws=2, generator=generator)
        value.backward()
        assert torch.isfinite(value)
    assert all(parameter.grad is not None for parameter in bnn.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.isfinite(bnn.elbo(x, y, num_data=60))
    assert bnn.predict(x).probs.device.type == "cuda"


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_generator_gives_the_same_draws_on_both_devices(name):
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(nn.Linear(3, 2), name)
    here = bnn.draw(3, generator=torch.Generator().manual_seed(1)).weights
    there = bnn.cuda().draw(3, generator=torch.Generator().manual_seed(1)).weights
    for key, value in here.items():
        torch.testing.assert_close(there[key].cpu(), value, rtol=1e-2, atol=1e-3)  # a small D magnifies rounding


@pytest.mark.parametrize("posterior", ["inducing", "mean_field"])
def test_bfloat16_channels_last_network(posterior):
    net = models.resnet18().cuda().to(torch.bfloat16).to(memory_format=torch.channels_last).eval()
    x = torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    draws = bnn.draw(2)
    kernel = draws.weights["layer1.0.conv1.weight"]
    assert kernel.dtype == torch.bfloat16
    assert kernel[0].is_contiguous(memory_format=torch.channels_last)
    assert draws(x).shape == (2, 8, 10)
    assert next(bnn.posteriors.parameters()).dtype == torch.float32


def test_a_torchvision_resnet_converts():
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(num_classes=10).cuda()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(16, 16), likelihood=likelihoods.Categorical())
    x = torch.randn(4, 3, 64, 64, device="cuda")
    bnn.elbo(x, torch.tensor([0, 1, 2, 3], device="cuda"), num_data=4).backward()
    assert bnn.eval().predict(x, num_draws=2).probs.shape == (4, 10)


@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 4, 7)])
def test_log_densities_of_labels_are_those_of_the_cpu(shape):
    outputs, y = torch.randn(shape, dtype=torch.float64), torch.randint(0, 7, shape[1:-1])
    y[0], y[1] = -100, 9  # left out; out of range
    found = []
    for device in ("cpu", "cuda"):
        logits = outputs.to(device).requires_grad_()
        density = likelihoods.Categorical().log_density(logits, y.to(device))
        found.append((density, torch.autograd.grad(density.square().sum(), logits)[0]))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, equal_nan=True)
