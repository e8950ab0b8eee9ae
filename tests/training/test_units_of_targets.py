"""The unit of the targets: a fit to y * c, from a network whose outputs are c times as large, is c times the fit to y."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Laplace, posteriors
from bayesify.baselines import SWAG
from bayesify.function_space import Box
from bayesify.likelihoods import Gaussian
from bayesify.training.noise import restart

UNITS = (0.01, 100.0)
TOLERANCE = 2e-4
"""Relative: the same operations in float32, with a network whose last layer is multiplied by the unit and rounded."""
OPTIONS = {"global_inducing": {"inputs": 12}, "local_inducing": {"points": 8}, "inducing": {"rows": 4, "cols": 4}}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + x[:, 2:] + 0.1 * torch.randn(96, 1, generator=generator)


@pytest.fixture(scope="module")
def networks() -> dict[str, nn.Module]:
    """A trained network, and a fresh one."""
    x, y = rows()
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    trained = copy.deepcopy(fresh)
    optimizer = torch.optim.Adam(trained.parameters(), 2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        (trained(x) - y).square().mean().backward()
        optimizer.step()
    return {"trained": trained.eval(), "fresh": fresh.eval()}


def in_unit(net: nn.Module, unit: float) -> nn.Module:
    net = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net[-1].parameters():
            parameter.mul_(unit)
    return net


def loader(unit: float) -> DataLoader:
    x, y = rows()
    return DataLoader(TensorDataset(x, unit * y), 32, shuffle=True, generator=torch.Generator().manual_seed(1))


def bayesian(name: str):
    def fitted(net: nn.Module, unit: float):
        options = OPTIONS.get(name, {})
        if name == "global_inducing":
            options = {"inputs": rows()[0][:12]}
        torch.manual_seed(2)
        bnn = bayesify.bayesianize(net, posteriors.REGISTRY[name](**options), likelihood=Gaussian())
        history = bayesify.fit(bnn, loader(unit), epochs=2, seed=0, progress=False)
        return bnn, history.findings.codes

    return fitted


def function_space(net: nn.Module, unit: float):
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=Gaussian())
    model = bayesify.FunctionSpaceVI(bnn, context=Box(-3.0, 3.0))
    return model, bayesify.fit(model, loader(unit), epochs=2, seed=0, progress=False).findings.codes


def swag(net: nn.Module, unit: float):
    model = SWAG(net, Gaussian()).fit(loader(unit), 4, seed=0, progress=False)
    return model, model.history.findings.codes


def laplace(**options):
    return lambda net, unit: (Laplace(net, Gaussian(), **options).fit(loader(unit)), [])


METHODS = {name: bayesian(name) for name in posteriors.REGISTRY} | {
    "function_space": function_space,
    "swag": swag,
    "laplace": laplace(),
    "last_layer": laplace(subset="last_layer"),
    "kronecker": laplace(covariance="kronecker"),
    "diagonal": laplace(covariance="diagonal"),
}
"""All but subnetworks, whose weights are chosen by their variance, which is in their units."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_the_same_in_any_unit(name, networks):
    x = rows()[0][:20]
    seen = {}
    for unit in (1.0, *UNITS):
        model, findings = METHODS[name](in_unit(networks["trained"], unit), unit)
        found = model.predict(x, 8, generator=torch.Generator().manual_seed(0))
        seen[unit] = found.mean / unit, found.std / unit, findings
    mean, std, findings = seen[1.0]
    for unit in UNITS:
        torch.testing.assert_close(seen[unit][0], mean, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(seen[unit][1], std, rtol=TOLERANCE, atol=TOLERANCE)
        assert seen[unit][2] == findings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["point", "mean_field", "ensemble"])
def test_a_fresh_network_learns_the_same_in_any_unit(name, networks):
    x = rows()[0][:20]
    means = []
    for unit in (1.0, *UNITS):
        model, _ = METHODS[name](copy.deepcopy(networks["fresh"]), unit)
        means.append(model.predict(x, 8, generator=torch.Generator().manual_seed(0)).mean / unit)
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mean_field", "dropout"])
def test_units_and_rates_are_stored(name, networks, tmp_path):
    """In files, in state dicts and in checkpoints of `fit`."""
    net, x = in_unit(networks["trained"], 100.0), rows()[0][:20]
    bnn, _ = METHODS[name](net, 100.0)
    assert bnn.layout.units == {"2.weight": 100.0, "2.bias": 100.0}

    def mean(model):
        return model.predict(x, 8, generator=torch.Generator().manual_seed(0)).mean

    bayesify.save(bnn, tmp_path / "model.safetensors")
    torch.testing.assert_close(mean(bayesify.load(tmp_path / "model.safetensors", net)), mean(bnn))
    other = bayesify.bayesianize(net, posteriors.REGISTRY[name](), likelihood=Gaussian())
    other.load_state_dict(bnn.state_dict())
    torch.testing.assert_close(mean(other), mean(bnn))
    torch.testing.assert_close(mean(copy.deepcopy(bnn)), mean(bnn))
    torch.testing.assert_close(bnn.mean_network()(x).std(), mean(bnn).std(), rtol=0.3, atol=0.0)

    def stop(model, history):
        if len(history) == 2:
            raise KeyboardInterrupt

    path, results = tmp_path / "run.safetensors", []
    for options in ({}, {"checkpoint": path, "callbacks": [stop]}, {"checkpoint": path}):
        torch.manual_seed(2)
        again = bayesify.bayesianize(net, posteriors.REGISTRY[name](), likelihood=Gaussian())
        with suppress(KeyboardInterrupt):
            bayesify.fit(again, loader(100.0), epochs=4, seed=0, progress=False, **options)
        results.append(again.state_dict())
    assert not torch.equal(results[1]["likelihood.raw_noise"], results[0]["likelihood.raw_noise"])
    for key, value in results[0].items():
        torch.testing.assert_close(results[2][key], value)


def test_a_posterior_that_was_changed_keeps_its_units(networks):
    """`restart` would lose what was done to it since `bayesianize`."""
    bnn = bayesify.bayesianize(in_unit(networks["trained"], 100.0), posteriors.MeanField(), likelihood=Gaussian())
    with torch.no_grad():
        bnn.posterior.mean_value["0.weight"].add_(0.01)
    assert not restart(bnn, {"2.weight": 2})
    assert bnn.layout.units == {}


def test_a_network_that_scales_its_last_layer_keeps_its_units(networks):
    """The layer itself is of size 1 whatever the targets' unit."""

    class Scaled(nn.Module):
        def forward(self, x):
            return 100.0 * x

    net = nn.Sequential(*copy.deepcopy(networks["trained"]), Scaled())
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=Gaussian())
    bayesify.fit(bnn, loader(100.0), epochs=1, seed=0, progress=False)
    assert bnn.layout.units == {}
