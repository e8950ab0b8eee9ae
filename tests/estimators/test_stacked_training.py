"""Networks that an estimator trains together are those that it trains one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesify.likelihoods import Gaussian
from bayesify.network import BayesianNetwork
from bayesify.registry import METHODS
from bayesify.sklearn.rows import Rows, stacked
from bayesify.sklearn.training import Plan, make_bayesian, make_network, train_networks


def make(method: str) -> tuple[list[BayesianNetwork], list[Rows], list[Plan]]:
    """Three networks with different rows, numbers of rows, weights, priors, noise and seeds."""
    bnns, rows, plans = [], [], []
    for index in range(3):
        random = np.random.default_rng(index)
        x = random.normal(size=(20 + index, 2))
        rows.append(Rows(x, x[:, :1] + 0.1 * random.normal(size=(len(x), 1)), 1.0 + random.random(len(x))))
        plans.append(Plan(METHODS[method], {}, 1.0 + index, epochs=8, seed=index))
        torch.manual_seed(index)
        net = make_network(2, (5,), "tanh", 1, index)
        bnns.append(make_bayesian(net, Gaussian(0.1 * (index + 1)).double(), rows[-1], plans[-1]))
    return bnns, rows, plans


@pytest.mark.parametrize("method", ["point", "mean_field", "rank_one", "inducing", "global_inducing", "ensemble"])
def test_together_as_one_by_one(method: str) -> None:
    """Adam's epsilon of 1e-8 beside gradients whose scale differs by the number of rows: 1e-5."""
    bnns, rows, plans = make(method)
    train_networks(bnns, rows, plans)
    alone, _, _ = make(method)
    for mine, plain, part, plan in zip(bnns, alone, rows, plans, strict=True):
        train_networks([plain], [part], [plan])
        assert not mine.training
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_padded_rows_have_no_weight() -> None:
    _, rows, _ = make("point")
    batch = stacked(rows)
    assert batch.x.shape == (3, 22, 2)
    assert len(batch) == 22
    assert batch.weights is not None
    assert batch.weights[0, 20:].tolist() == [0, 0]
    assert torch.equal(batch.weights[2], torch.from_numpy(rows[2].weights))
