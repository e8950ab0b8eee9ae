"""Scales of fixed priors, which are computed once."""

from __future__ import annotations

import copy

from torch import nn

from bayesify import bayesianize, priors
from bayesify.posteriors import MeanField
from bayesify.priors import Prior
from bayesify.weights.catalog import Weight


class Table(Prior):
    """Scales from a table that a user may change in place."""

    name = "table"

    def __init__(self) -> None:
        super().__init__()
        self.table = {"weight": 1.0, "bias": 2.0}

    def std_of(self, weight: Weight) -> float:
        return self.table[weight.name]


def test_scales_are_computed_once_and_follow_their_arguments() -> None:
    prior = bayesianize(nn.Linear(4, 1), MeanField(), prior=priors.Neal(2.0)).prior
    before = prior.draw(1)
    assert prior.draw(3) is before
    assert before.std == {"weight": 1.0, "bias": 1.0}
    other = copy.deepcopy(prior)
    other.scale = 4.0
    assert other.draw(1).std == {"weight": 2.0, "bias": 2.0}
    assert prior.draw(1) is before
    prior.weights = {"weight": prior.weights["weight"]}
    assert prior.draw(1).std == {"weight": 1.0}


def test_scales_of_what_is_no_number_are_computed_each_time() -> None:
    prior = Table().bind(bayesianize(nn.Linear(4, 1), MeanField()).weights)
    assert prior.draw(1).std == {"weight": 1.0, "bias": 2.0}
    prior.table["bias"] = 3.0
    assert prior.draw(1).std == {"weight": 1.0, "bias": 3.0}
