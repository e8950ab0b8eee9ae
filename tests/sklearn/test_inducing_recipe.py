"""Where the estimators and comparisons start global and local inducing points."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")

from bayesify.likelihoods import Gaussian
from bayesify.methods import METHODS
from bayesify.sklearn import training
from bayesify.sklearn.networks import NetworkShape
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.settings import Settings


def started(monkeypatch, name, num_rows=150, **options):
    """The posterior before its training, its network, and the rows."""
    monkeypatch.setattr(training, "train_posteriors", lambda *_, **__: None)
    rng = np.random.default_rng(0)
    rows = Rows(rng.normal(3.0, 1.0, (num_rows, 4)), rng.normal(size=(num_rows, 1)), np.ones(num_rows))
    net = NetworkShape(4, (6,), "tanh", 1).make(0)
    start = training.Start(net, Gaussian(0.1).double(), rows, Settings(METHODS[name], options=options))
    (bnn,) = training.train_methods([start])
    return bnn.posterior, net, rows


@pytest.mark.parametrize(("num_rows", "options", "count"), [(150, {}, 100), (20, {}, 20), (150, {"inputs": 12}, 12)])
@torch.no_grad()
def test_global_inducing_inputs_start_at_rows(monkeypatch, num_rows, options, count):
    posterior, net, rows = started(monkeypatch, "global_inducing", num_rows, **options)
    (inputs,) = posterior.inducing_inputs.entries()
    known = {row.tobytes() for row in rows.x}
    assert len({row.numpy().tobytes() for row in inputs} & known) == count == len(inputs)
    torch.testing.assert_close(posterior.pseudo_outputs["0"], net[0](inputs))


@torch.no_grad()
def test_inputs_that_are_given_stay(monkeypatch):
    given = torch.randn(7, 4, dtype=torch.float64)
    posterior, _, _ = started(monkeypatch, "global_inducing", inputs=given)
    torch.testing.assert_close(posterior.inducing_inputs.entries()[0], given)


def test_counts_that_mean_nothing_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="inputs=0; give an integer of at least 1"):
        started(monkeypatch, "global_inducing", inputs=0)
    with pytest.raises(TypeError, match="inputs=True; give inputs of the network"):
        started(monkeypatch, "global_inducing", inputs=True)


@torch.no_grad()
def test_local_inducing_points_start_at_the_network(monkeypatch):
    posterior, net, _ = started(monkeypatch, "local_inducing")
    torch.testing.assert_close(posterior.mean()["0.weight"], net[0].weight, rtol=0, atol=0.01)
