"""ArviZ sees the same draws, chains and log-likelihoods."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from torch import nn

if importlib.util.find_spec("arviz") is None:  # its import warns, which is an error here
    pytest.skip("arviz is not installed", allow_module_level=True)

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.adapters.arviz import to_inference_data
from bayesify.arguments.installing import load
from bayesify.baselines import FixedDraws

X = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def network():
    torch.manual_seed(0)
    return bayesify.bayesianize(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
        posteriors.MeanField(init_std=0.3),
        likelihood=likelihoods.Gaussian(0.2),
    )


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_chains_keep_names_and_order():
    bnn = network()
    chains = [bnn.draw(6, generator=seeded(seed)) for seed in range(3)]
    data = to_inference_data(chains, num_draws=5)
    assert set(data.posterior.data_vars) == set(bnn.weights)
    assert data.posterior.sizes["chain"] == 3
    assert data.posterior.sizes["draw"] == 5
    for name in bnn.weights:
        wanted = torch.stack([chain.weights[name][:5] for chain in chains]).detach().numpy()
        np.testing.assert_array_equal(data.posterior[name].values, wanted)


def test_log_likelihood_is_that_of_each_draw_by_hand():
    bnn = network()
    data = to_inference_data(bnn, num_draws=4, x=X, y=Y, generator=seeded(0))
    outputs = bnn.draw(4, generator=seeded(0))(X).detach()
    wanted = -0.5 * ((Y - outputs).square() / 0.2 + math.log(2 * math.pi * 0.2))[..., 0]
    np.testing.assert_allclose(data.log_likelihood["y"].values[0], wanted.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(data.posterior_predictive["outputs"].values[0], outputs.numpy(), atol=1e-6)
    np.testing.assert_array_equal(data.observed_data["y"].values, Y.numpy())


def test_independent_draws_are_effectively_as_many_as_they_are():
    """4 chains of 500 independent draws: the estimate of their effective number lies within a fifth of 2,000 for every weight."""
    bnn = network()
    data = to_inference_data([bnn.draw(500, generator=seeded(seed)) for seed in range(4)])
    table = load("arviz", extra="arviz", owner="the tests").summary(data, kind="diagnostics")
    assert len(table) == sum(weight.numel for weight in bnn.weights.values())
    assert (table["ess_bulk"] > 1600).all()
    assert (table["r_hat"] < 1.02).all()


def test_other_models_that_draw():
    bnn = network()
    draws = bnn.draw(6, generator=seeded(0))
    kept = to_inference_data(FixedDraws(draws, bnn.likelihood), x=X, y=Y)
    alone = to_inference_data(draws, x=X, y=Y, likelihood=bnn.likelihood)
    np.testing.assert_array_equal(kept.log_likelihood["y"].values, alone.log_likelihood["y"].values)
    net = nn.Linear(2, 1)
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.1)).fit([(X, Y)])
    assert to_inference_data(laplace, num_draws=3).posterior["weight"].shape == (1, 3, 1, 2)


def test_a_file_comes_back(tmp_path):
    data = to_inference_data(network(), num_draws=4)
    data.to_netcdf(str(tmp_path / "draws.nc"))
    again = load("arviz", extra="arviz", owner="the tests").from_netcdf(str(tmp_path / "draws.nc"))
    np.testing.assert_array_equal(again.posterior["0.weight"].values, data.posterior["0.weight"].values)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: to_inference_data(nn.Linear(1, 1)), TypeError, "Linear has no draws"),
        (lambda: to_inference_data(network(), y=Y), ValueError, "y= is given without x="),
        (lambda: to_inference_data([]), ValueError, "empty sequence of chains"),
        (lambda: to_inference_data([network().draw(2), network().draw(3)]), ValueError, "chain 1 has 3 draws"),
        (lambda: to_inference_data(network().draw(2), num_draws=3), ValueError, "num_draws=3; give at least 1 and at"),
        (lambda: to_inference_data(network().draw(2), x=X, y=Y), ValueError, "no likelihood"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
