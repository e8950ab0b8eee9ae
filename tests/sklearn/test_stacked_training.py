"""Networks that an estimator trains together are those that it trains one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesify.likelihoods import Gaussian
from bayesify.network import BayesianNetwork
from bayesify.registry import METHODS
from bayesify.sklearn.rows import Rows, stacked
from bayesify.sklearn.training import Plan, estimate_noise, make_bayesian, make_network, train_networks


def make(method: str, alike: bool = False) -> tuple[list[BayesianNetwork], list[Rows], list[Plan]]:
    """Three networks with different rows, priors, noise and seeds, and unless `alike` different numbers of rows, and weights."""
    bnns, rows, plans = [], [], []
    for index in range(3):
        random = np.random.default_rng(index)
        x = random.normal(size=(20 if alike else 20 + index, 2))
        weights = np.ones(len(x)) if alike else 1.0 + random.random(len(x))
        rows.append(Rows(x, x[:, :1] + 0.1 * random.normal(size=(len(x), 1)), weights))
        plans.append(Plan(METHODS[method], {}, 1.0 + index, epochs=8, seed=index))
        torch.manual_seed(index)
        net = make_network(2, (5,), "tanh", 1, index)
        bnns.append(make_bayesian(net, Gaussian(0.1 * (index + 1)).double(), rows[-1], plans[-1]))
    return bnns, rows, plans


@pytest.mark.parametrize(
    ("method", "alike", "tolerance"),
    [
        ("point", False, 1e-5),
        ("mean_field", False, 1e-5),
        ("rank_one", False, 1e-5),
        ("ensemble", False, 1e-5),
        ("global_inducing", False, 1e-12),
        ("mean_field", True, 1e-9),
        ("inducing", True, 1e-9),
        ("global_inducing", True, 1e-9),
        ("walsh_hadamard", True, 1e-9),
    ],
)
def test_together_as_one_by_one(method: str, alike: bool, tolerance: float) -> None:
    """1e-5 where Adam's epsilon of 1e-8 stands beside gradients whose scale differs by the number of rows; global inducing inputs
    of different number are not stacked."""
    bnns, rows, plans = make(method, alike)
    train_networks(bnns, rows, plans)
    alone, _, _ = make(method, alike)
    for mine, plain, part, plan in zip(bnns, alone, rows, plans, strict=True):
        train_networks([plain], [part], [plan])
        assert not mine.training
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_padded_rows_have_no_weight() -> None:
    _, rows, _ = make("point")
    batch = stacked(rows)
    assert batch.x.shape == (3, 22, 2)
    assert len(batch) == 22
    assert batch.weights is not None
    assert batch.weights[0, 20:].tolist() == [0, 0]
    assert torch.equal(batch.weights[2], torch.from_numpy(rows[2].weights))


def test_little_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 rows of a curve whose noise is 0.0001 of its variance: one short training of the folds leaves ten times what four do."""
    random = np.random.default_rng(0)
    x = random.uniform(-1.7, 1.7, (80, 2))
    curve = x[:, :1] + np.sin(2 * x[:, 1:])
    y = (curve + 0.01 * curve.std() * random.normal(size=(80, 1))) / curve.std()
    net, rows = make_network(2, (20,), "tanh", 1, 0), Rows(x, y, np.ones(80))
    plan = Plan(METHODS["laplace"], {}, 2.0, epochs=250)
    found = float(estimate_noise(net, rows, plan)[0])
    monkeypatch.setattr("bayesify.sklearn.training.ROUNDS", 1)
    assert 1e-4 <= found < 0.3 * float(estimate_noise(net, rows, plan)[0])
