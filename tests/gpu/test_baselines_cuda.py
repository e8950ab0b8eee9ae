"""Baselines on a GPU: devices follow the network, and results are those of the CPU up to rounding."""

import copy

import pytest
import torch
from torch import nn

import bayesify
from bayesify import baselines, posteriors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def problem(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(device)
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(2, (40,), generator=generator)
    return net, torch.randn(40, 1, 4, 4, generator=generator) + y.view(-1, 1, 1, 1), y


def predictions(device):
    net, x, y = problem(device)
    loader = [(x[:20], y[:20]), (x[20:], y[20:])]  # on the CPU: batches follow the network
    there = x.to(device)
    found = {}
    swag = baselines.SWAG(copy.deepcopy(net), "categorical", rank=3).fit(loader, 4, 0.05, seed=0, progress=False)
    draws = swag.draw(3, generator=torch.Generator().manual_seed(0), loader=loader)
    found["swag"] = swag.predict(there, draws=draws).probs
    for name, trainer, posterior in (
        ("vogn", baselines.VOGN, posteriors.MeanField()),
        ("ivon", baselines.IVON, posteriors.MeanField()),
        ("nng", baselines.NoisyKFAC, posteriors.MatrixNormal()),
    ):
        bnn = bayesify.bayesianize(net, posterior, likelihood="categorical")
        steps, noise = trainer(bnn, num_data=len(x)), torch.Generator().manual_seed(0)  # on the CPU: the same on both
        for inputs, labels in 3 * loader:
            steps.step(inputs.to(device), labels.to(device), generator=noise)
        found[name] = bnn.eval().predict(there, 4, generator=torch.Generator().manual_seed(0)).probs
        trained = bayesify.bayesianize(net, posterior, likelihood="categorical")
        trainer(trained).fit(loader, 1, seed=0, progress=False)  # with the device's own noise
        assert bool(torch.isfinite(trained.eval().predict(there, 2).probs).all())
    scaled = baselines.TemperatureScaling(swag.mean_network(loader), "categorical").fit(loader)
    found["scaled"] = scaled.predict(there).probs
    ensemble = bayesify.bayesianize(net, posteriors.Ensemble(2, init="network"), likelihood="categorical")
    baselines.fit_members(ensemble, loader, 2, seed=0, progress=False)
    return found, ensemble.eval().predict(there).probs


def test_same_as_on_the_cpu():
    here, _ = predictions("cpu")
    there, ensemble = predictions("cuda")
    assert ensemble.device.type == "cuda"
    for name, probs in there.items():
        assert probs.device.type == "cuda", name
        torch.testing.assert_close(probs.cpu(), here[name], rtol=0, atol=2e-3, msg=name)
