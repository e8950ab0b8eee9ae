"""The summary: each weight, its posterior or why it was left alone, and parameters before and after."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, Tied, convert, pairs
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors


@pytest.mark.parametrize(
    ("name", "leaf"), pairs(["linear", "batch_norm", "tied", "lstm", "custom", "attention_kdim", "encoder"])
)
def test_numbers_add_up(name: str, leaf: str) -> None:
    case: Case = CASES[leaf]
    bnn = convert(name, case)
    net, summary = case.network(), bnn.summary()
    assert [row.name for row in summary.rows] == [key for key, _ in net.named_parameters()]
    assert [row.shape for row in summary.rows] == [tuple(value.shape) for value in net.parameters()]
    assert summary.before == sum(value.numel() for value in net.parameters()) == bayesify.count_parameters(net)
    assert summary.after == bayesify.count_parameters(bnn)
    treatments = {row.name: row.treatment for row in summary.rows}
    assert {key for key, value in treatments.items() if value != "point estimate"} == set(bnn.weights)


def test_contents() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
    net[3].bias.requires_grad_(False)
    bnn = bayesify.bayesianize(
        net,
        {"0": posteriors.MeanField(), "2": posteriors.FullCovariance()},
        likelihood=likelihoods.Gaussian([0.1, 0.2]),
    )
    rows = {row.name: row for row in bnn.summary().rows}
    assert (rows["0.weight"].treatment, rows["0.weight"].before, rows["0.weight"].after) == ("MeanField", 12, 24)
    assert rows["0.bias"].after == 8
    assert rows["2.weight"].after == 10 + 10 * 11 // 2, "weight and bias in one factor"
    assert rows["2.bias"].after is None
    assert rows["1.weight"].remark == "normalization layer; name it to include it"
    assert rows["3.weight"].remark == "no selector matches it"
    assert rows["3.weight"].after == 4
    assert rows["3.bias"].remark == "frozen (requires_grad=False)"
    assert rows["3.bias"].after == 0
    assert bnn.summary().shared == 2
    text = str(bnn.summary())
    for word in ("weight", "posterior", "MeanField", "FullCovariance", "point estimate", "4x3", "with weight", "total"):
        assert word in text
    assert len({len(line) for line in text.splitlines() if set(line) == {"-"}}) == 1


def test_tied_weights_are_named() -> None:
    bnn = bayesify.bayesianize(Tied(), "mean_field")
    row = next(row for row in bnn.summary().rows if row.name == "embedding.weight")
    assert row.remark == "tied to out.weight"
    left = bayesify.bayesianize(Tied(), {"body": "mean_field"}).summary()
    row = next(row for row in left.rows if row.name == "embedding.weight")
    assert row.remark == "no selector matches it; tied to out.weight"


def test_a_scalar_has_a_word() -> None:
    bnn = convert("mean_field", CASES["custom"])
    assert "scalar" in str(bnn.summary())


def test_count_parameters_counts_a_tensor_once() -> None:
    net = Tied()
    assert bayesify.count_parameters(net) == 5 * 3 + 3 * 3 + 3 + 5
    net.body.requires_grad_(False)
    assert bayesify.count_parameters(net) == 5 * 3 + 5


def test_repr() -> None:
    bnn = convert("mean_field", CASES["linear"])
    assert "4 of 4 weights under a posterior" in repr(bnn)
    assert repr(bnn.draw(3)) == "Draws(3 draws of 4 weights of Sequential)"
    assert not torch.is_grad_enabled() or bnn.draw(1).kl.requires_grad
