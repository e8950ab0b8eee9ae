"""Errors about targets of a wrong shape: they show the shapes of the user's batch, not of rows that a check takes from it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods
from bayesify.baselines import NoisyKFAC, TemperatureScaling

X, B = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), 10


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def laplace(loader, **options):
    bayesify.Laplace(net(), likelihoods.Gaussian(0.1), **options).fit(loader)


def train(loader, posterior):
    bayesify.fit(
        bayesify.bayesianize(net(), posterior, likelihood=likelihoods.Gaussian(0.1)), loader, epochs=1, progress=False
    )


def natural(loader):
    bnn = bayesify.bayesianize(net(), "matrix_normal", likelihood=likelihoods.Gaussian(0.1))
    NoisyKFAC(bnn, num_data=len(X)).step(*next(iter(loader)))


FITS = {
    "laplace": laplace,
    "last layer": lambda loader: laplace(loader, subset="last_layer"),
    "kronecker": lambda loader: laplace(loader, covariance="kronecker"),
    "sampled": lambda loader: laplace(loader, covariance="sampled"),
    "tuning": lambda loader: (
        bayesify.Laplace(net(), likelihoods.Gaussian(0.1)).fit([(X, X[:, :1])]).tune_prior_precision(loader)
    ),
    "mean_field": lambda loader: train(loader, "mean_field"),
    "ensemble": lambda loader: train(loader, "ensemble"),
    "noisy K-FAC": natural,
    "temperature": lambda loader: TemperatureScaling(net(), likelihoods.Gaussian(0.1)).fit(loader),
    "check": lambda loader: bayesify.check(
        bayesify.bayesianize(net(), "mean_field", likelihood=likelihoods.Gaussian(0.1)), loader
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_errors_show_the_shapes_of_the_batch(name):
    loader = DataLoader(TensorDataset(X, torch.zeros(len(X), 2)), B)
    with pytest.raises(ValueError, match=rf"targets of shape \({B}, 2\) do not fit \w+ of shape \({B}, 1\)"):
        FITS[name](loader)


def test_laplace_refuses_a_batch_with_fewer_targets_than_inputs():
    with pytest.raises(ValueError, match=r"targets of shape \(18, 1\) do not fit outputs of shape \(20, 1\)"):
        laplace([(X, torch.zeros(18, 1))])
