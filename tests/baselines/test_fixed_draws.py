"""Fixed draws predict as the draws do, and come back from a file."""

import pytest
import torch
from cases import logits_network, mlp, normed
from torch import nn

import bayesify
from bayesify import baselines, likelihoods, posteriors


def make(network, likelihood, size=6):
    bnn = bayesify.bayesianize(network, posteriors.MeanField(init_std=0.3), likelihood=likelihood)
    draws = bnn.draw(size, generator=torch.Generator().manual_seed(0)).detach()
    return baselines.FixedDraws(draws, bnn.likelihood)


def test_predictions_are_those_of_the_draws():
    model = make(mlp(), likelihoods.Gaussian(0.3))
    x = torch.randn(7, 3)
    torch.testing.assert_close(model.predict(x).outputs, model.draws(x))
    torch.testing.assert_close(model.predict(x, 3).outputs, model.draws[::2](x))
    with pytest.raises(ValueError, match="num_draws=7; give at least 1 and at most 6"):
        model.predict(x, 7)


@pytest.mark.parametrize("network", [logits_network, lambda: normed(nn.BatchNorm1d(4))])
def test_save_and_load(tmp_path, network):
    model = make(network(), likelihoods.Categorical())
    x = torch.randn(7, 3)
    bayesify.save(model, tmp_path / "draws.safetensors")
    loaded = bayesify.load(tmp_path / "draws.safetensors", network())
    assert torch.equal(loaded.predict(x).probs, model.predict(x).probs)
