"""Predictions from draws that exist already, and messages for names that are those of another thing."""

import pytest
import torch
from torch import nn

import bayesify
from bayesify import draws, likelihoods, metrics, posteriors, subnetwork
from bayesify.predictive.base import Outputs


def make(likelihood, outputs=3):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
    return bayesify.bayesianize(net, posteriors.MeanField(init_std=0.2), likelihood=likelihood)


@pytest.mark.parametrize("rows", [1, 5])
def test_existing_draws_give_what_they_would_by_themselves(rows):
    bnn, x = make(likelihoods.Categorical()), torch.randn(rows, 4)
    draws = bnn.draw(16, generator=torch.Generator().manual_seed(1)).detach()
    expected = draws(x).softmax(-1).mean(0)
    torch.testing.assert_close(bnn.predict(x, draws=draws).probs, expected)
    fresh = bnn.predict(x, 16, generator=torch.Generator().manual_seed(1)).probs
    torch.testing.assert_close(bnn.predict(x, draws=draws).probs, fresh)
    with pytest.raises(ValueError, match="predict: the draws belong to another network"):
        make(likelihoods.Categorical()).predict(x, draws=draws)


def test_a_single_example_is_not_measured_before_it_is_run(monkeypatch):
    """The pass that measures memory would cost as much as several draws."""
    calls = []
    original = draws.count_activation_bytes
    monkeypatch.setattr(draws, "count_activation_bytes", lambda *args: calls.append(1) or original(*args))
    bnn = make(likelihoods.Categorical())
    bnn.predict(torch.randn(1, 4), 4)
    assert not calls
    bnn.predict(torch.randn(2, 4), 4)
    assert calls
    unkept = bnn.predict(torch.randn(1, 4), 4, keep_outputs=False)
    with pytest.raises(RuntimeError, match="not kept"):
        _ = unkept.outputs


def test_names_of_the_other_kind_of_prediction():
    classes, values = make(likelihoods.Categorical()), make(likelihoods.Gaussian(0.1))
    x = torch.randn(2, 4)
    with pytest.raises(AttributeError, match=r"interval is for regression; this is a classification, which has probs"):
        classes.predict(x).interval(0.9)
    with pytest.raises(AttributeError, match=r"probs is for classification; this is a regression, which has mean, std"):
        _ = values.predict(x).probs
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = values.predict(x).nonsense
    assert not hasattr(values.predict(x), "probs")


def test_names_of_other_libraries():
    bnn, loader = make(likelihoods.Categorical()), [(torch.randn(3, 4), torch.zeros(3).long())]
    with pytest.raises(TypeError, match=r"fit: got an unexpected keyword argument 'lr'; use learning_rate instead"):
        bayesify.fit(bnn, loader, epochs=1, lr=1e-3)
    with pytest.raises(TypeError, match=r"'learning_rat'; use learning_rate instead"):
        bayesify.fit(bnn, loader, epochs=1, learning_rat=1e-3)
    with pytest.raises(
        TypeError, match=r"predict: got an unexpected keyword argument 'num_samples'; use num_draws instead"
    ):
        bnn.predict(loader[0][0], num_samples=3)
    with pytest.raises(TypeError, match=r"'zzz'; it takes init_std"):
        posteriors.FullCovariance(zzz=1)
    with pytest.raises(AttributeError, match=r"call bayesify.fit\(bnn, loader, epochs=10\)"):
        bnn.fit(loader)
    with pytest.raises(ValueError, match=r"give the network to Laplace: Laplace\(net, likelihood, subset="):
        subnetwork.largest_variance(bnn.mean_network(), 100)


def test_nll_of_each_element_of_dense_outputs():
    """Segmented images of 2 x 3 positions: the NLL of an example over its labels, whole or in part."""
    likelihood = likelihoods.Categorical(class_axis=1)
    logits, y = torch.randn(4, 5, 3, 2, 3).double(), torch.randint(3, (5, 2, 3))
    predictive = likelihood.predictive(Outputs(kept=logits))
    scores = metrics.evaluate(predictive, y)
    assert scores["nll_per_element"] == pytest.approx(scores["nll"] / 6)
    torch.testing.assert_close(predictive.nll_per_element(y), -predictive.log_prob(y) / 6)
    y[0, 0] = -100
    y[1] = -100
    torch.testing.assert_close(predictive.nll_per_element(y), -predictive.log_prob(y) / torch.tensor([3, 1, 6, 6, 6]))
    values = likelihoods.Gaussian(0.1).predictive(Outputs(kept=torch.randn(4, 5, 3)))
    targets = torch.randn(5, 3)
    scores = metrics.evaluate(values, targets)
    assert scores["nll_per_element"] == pytest.approx(scores["nll"] / 3)
    assert "nll_per_element" not in metrics.evaluate(
        likelihoods.Gaussian(0.1).predictive(Outputs(kept=torch.randn(4, 5, 1))), targets[:, :1]
    )
