"""Scores against enumeration, closed forms and an independent library."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.acquisition import bald, batch_bald, epistemic, expected_improvement
from bayesify.predictive.base import Outputs


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def logits(draws, examples, classes, seed=0, scale=2.0):
    return scale * torch.randn(draws, examples, classes, generator=seeded(seed), dtype=torch.float64)


def of_classes(outputs):
    return likelihoods.Categorical().predictive(Outputs(kept=outputs))


class Given(nn.Module):
    """A network whose weight is its table of logits: an example is its row number."""

    def __init__(self, examples, classes):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(examples, classes, dtype=torch.float64))

    def forward(self, x):
        return self.table[x[:, 0].long()]


def draws_of(outputs):
    bnn = bayesify.bayesianize(Given(*outputs.shape[1:]), posteriors.MeanField())
    found = bnn.draw(len(outputs))
    found.weights["table"] = outputs
    return found, torch.arange(outputs.shape[1], dtype=torch.float64)[:, None]


def information(probs, chosen):
    """I(y; w) of examples by enumeration of all labels, from probabilities [S, N, C]."""
    joint_entropy = 0.0
    for labels in itertools.product(range(probs.shape[-1]), repeat=len(chosen)):
        joint = math.prod(probs[:, n, c] for n, c in zip(chosen, labels, strict=True)).mean()
        joint_entropy -= float(joint * joint.log())
    return joint_entropy + float((probs[:, chosen] * probs[:, chosen].log()).sum(-1).mean(0).sum())


def test_bald_is_the_information_of_a_label():
    outputs = logits(5, 7, 3)
    probs = outputs.softmax(-1)
    wanted = torch.tensor([information(probs, [n]) for n in range(7)], dtype=torch.float64)
    torch.testing.assert_close(bald(of_classes(outputs)), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("classes", "size"), [(2, 5), (3, 4)])
def test_batch_bald_is_greedy_in_the_joint_information(classes, size):
    outputs = logits(6, 8, classes)
    draws, x = draws_of(outputs)
    chosen, found = batch_bald(draws, x, size)
    expected = []
    for place in range(size):
        scores = {n: information(outputs.softmax(-1), [*expected, n]) for n in range(8) if n not in expected}
        expected.append(max(scores, key=scores.get))
        assert float(found[place]) == pytest.approx(scores[expected[-1]], abs=1e-10)
    assert chosen.tolist() == expected


def test_sampled_configurations_approach_enumeration():
    """The information of the fifth example is a mean over 9,999 configurations of an entropy from 0 to log 10: 5 errors."""
    draws, x = draws_of(logits(6, 8, 10))
    chosen, exact = batch_bald(draws, x, 5, num_configurations=10_000)
    sampled, close = batch_bald(draws, x, 5, num_configurations=9_999, generator=seeded())
    assert torch.equal(sampled[:4], chosen[:4])
    assert torch.equal(close[:4], exact[:4])
    assert 0 < abs(float(close[4] - exact[4])) < 5 * 0.5 * math.log(10) / math.sqrt(9_999)


def test_copies_add_nothing_to_a_batch():
    outputs = logits(40, 4, 3)
    repeated = outputs.repeat(1, 3, 1)
    outputs[:, 0] = logits(40, 1, 3, seed=1, scale=4.0)[:, 0]  # the example that tells most
    repeated[:, ::4] = outputs[:, :1]
    draws, x = draws_of(repeated)
    chosen, _ = batch_bald(draws, x, 3)
    assert len({n % 4 for n in chosen.tolist()}) == 3
    assert len({n % 4 for n in bald(of_classes(repeated)).topk(3).indices.tolist()}) == 1


def test_batches_of_binary_labels():
    outputs = logits(6, 5, 1)
    two = torch.cat((-outputs / 2, outputs / 2), -1)
    draws, x = draws_of(outputs)
    found = batch_bald(draws, x, 3, likelihood=likelihoods.Bernoulli())
    expected = batch_bald(*draws_of(two), 3)
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1])


def test_scores_are_those_of_scikit_activeml():
    pytest.importorskip("makefun")
    module = pytest.importorskip("skactiveml.pool._bald")
    outputs = logits(6, 8, 3)
    probs = outputs.softmax(-1).numpy()
    theirs = module.batch_bald(probs.copy(), 3, n_MC_samples=100_000, random_state=0)
    np.testing.assert_allclose(theirs[0], bald(of_classes(outputs)).numpy(), atol=1e-6)
    chosen, found = batch_bald(*draws_of(outputs), 3)
    for place, (index, value) in enumerate(zip(chosen.tolist(), found.tolist(), strict=True)):
        assert int(np.nanargmax(theirs[place])) == index
        assert theirs[place, index] == pytest.approx(value, abs=1e-6)


def test_expected_improvement_of_draws_and_of_a_gaussian():
    """4,000 draws of N(0.3, 0.25): the mean of max(f - 0.5, 0), whose standard deviation is below 0.5, within 5 errors."""
    outputs = 0.3 + 0.5 * torch.randn(4000, 1, 1, generator=seeded(), dtype=torch.float64)
    predictive = likelihoods.Gaussian(0.1).predictive(Outputs(kept=outputs))
    found = expected_improvement(predictive, 0.5)
    assert torch.equal(found, (outputs - 0.5).clamp_min(0).mean(0)[:, 0])
    net = nn.Linear(1, 1).double()
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.2), prior_precision=1.0)
    laplace.fit([(torch.randn(9, 1, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))])
    closed = laplace.predict(torch.tensor([[0.4], [-2.0]], dtype=torch.float64))
    grid = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    for maximize, sign in ((True, 1), (False, -1)):
        f = closed.mean + closed.epistemic.sqrt() * grid  # [2, K]
        density = torch.exp(-0.5 * grid.square()) / math.sqrt(2 * math.pi)
        wanted = torch.trapezoid((sign * (f - 0.1)).clamp_min(0) * density, grid)
        torch.testing.assert_close(expected_improvement(closed, 0.1, maximize=maximize), wanted, rtol=1e-5, atol=1e-8)
    z = (0.3 - 0.5) / 0.5
    exact = 0.5 * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    assert abs(float(found) - exact) < 5 * 0.5 / math.sqrt(4000)


def test_epistemic_leaves_the_noise_out():
    outputs = torch.randn(50, 4, 2, generator=seeded(), dtype=torch.float64)
    predictive = likelihoods.Gaussian(3.0).predictive(Outputs(kept=outputs))
    torch.testing.assert_close(epistemic(predictive), outputs.var(0, unbiased=False).sum(-1))


def test_what_does_not_fit_is_named():
    draws, x = draws_of(logits(3, 4, 3))
    with pytest.raises(ValueError, match="size=5 is larger than the number of examples, 4"):
        batch_bald(draws, x, 5)
    with pytest.raises(TypeError, match="Gaussian is not a classification likelihood"):
        batch_bald(draws, x, 2, likelihood=likelihoods.Gaussian())
    single, x = draws_of(logits(3, 4, 1))
    with pytest.raises(ValueError, match=r"one output.*likelihood=Bernoulli\(\)"):
        batch_bald(single, x, 2)
    assert batch_bald(single, x, 2, likelihood=likelihoods.Bernoulli())[1][-1] > 0
    with pytest.raises(TypeError, match=r"give a Draws, such as bnn.draw\(16\)"):
        batch_bald(x, x, 2)
    numbers = likelihoods.Gaussian().predictive(Outputs(kept=torch.zeros(3, 4, 2)))
    with pytest.raises(ValueError, match="2 targets per example"):
        expected_improvement(numbers, 0.0)
    with pytest.raises(TypeError, match=r"bald: .*the result of predict\(x\) for a classifier"):
        bald(numbers)
