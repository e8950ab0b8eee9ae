"""A step whose data pass runs beside its draw: the terms and gradients of a plain one. On a GPU: tests/gpu."""

from contextlib import nullcontext

import pytest
import torch

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.running import beside


class _Nothing:
    """A stream or an event where operations run in order."""

    def record(self, *_):
        pass

    def wait_event(self, _):
        pass


@pytest.fixture
def _in_order(monkeypatch):
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("_in_order")
def test_terms_and_gradients_are_those_of_a_plain_step(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 3))
    x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    bnn = bayesify.bayesianize(net, posteriors.GlobalInducing(x[:5]), likelihood=likelihoods.Categorical())
    found = []
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        used = beside.find_beside(bnn.posteriors, bnn.network, bnn.likelihood, 1)
        assert (used is not None) == captured
        data, kl = bnn.elbo_terms(x, y, num_data=80, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad((0.3 * kl - data).sum() / 80, list(bnn.parameters()))
        found.append([data.detach(), kl.detach(), *grads])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.usefixtures("_in_order")
def test_nothing_runs_beside_where_more_is_trained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    gi = posteriors.GlobalInducing(torch.randn(4, 2))
    for posterior, likelihood in ((gi, likelihoods.Gaussian(0.1)), ({"2": gi}, likelihoods.Gaussian(0.1, learn=False))):
        bnn = bayesify.bayesianize(net, posterior, likelihood=likelihood)
        assert beside.find_beside(bnn.posteriors, bnn.network, bnn.likelihood, 1) is None
    whole = bayesify.bayesianize(net, gi, likelihood=likelihoods.Gaussian(0.1, learn=False))
    assert beside.find_beside(whole.posteriors, whole.network, whole.likelihood, 1) is not None
    assert beside.find_beside(whole.posteriors, whole.network, whole.likelihood, 2) is None
