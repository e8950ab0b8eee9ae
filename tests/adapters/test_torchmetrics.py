"""The metrics give over batches what `metrics.evaluate` gives of everything at once."""

import itertools
import pickle

import pytest
import torch

pytest.importorskip("torchmetrics")

from bayesify import metrics
from bayesify.adapters.torchmetrics import (
    CRPS,
    NLL,
    RMSE,
    Accuracy,
    BrierScore,
    CalibrationError,
    Coverage,
    IntervalWidth,
    collection,
)
from bayesify.likelihoods import Bernoulli, Categorical, Gaussian
from bayesify.predictive.base import Outputs

GENERATOR = torch.Generator().manual_seed(0)
F = 2 * torch.randn(5, 60, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(3, (60,), generator=GENERATOR)
VALUES = F.mean(0) + torch.randn(60, 3, generator=GENERATOR, dtype=torch.float64)
CUTS = (0, 7, 40, 60)
LIKELIHOODS = {
    "categorical": (Categorical(), LABELS),
    "bernoulli": (Bernoulli(), (VALUES > 0).long()),
    "gaussian": (Gaussian([0.5, 1.0, 2.0]).double(), VALUES),
}


def prediction(likelihood, rows=slice(None)):
    return likelihood.predictive(Outputs(kept=F[:, rows]))


def in_batches(metric, likelihood, y):
    for start, stop in itertools.pairwise(CUTS):
        metric.update(prediction(likelihood, slice(start, stop)), y[start:stop])
    return metric


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_batches_give_what_all_together_give(name):
    likelihood, y = LIKELIHOODS[name]
    found = in_batches(collection(likelihood.task), likelihood, y).compute()
    wanted = metrics.evaluate(prediction(likelihood), y)
    wanted.pop(
        "nll_per_element", None
    )  # `nll` over the number of a target's elements, which a collection does not know
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert float(found[key]) == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_interval_width_is_that_of_the_intervals():
    likelihood, y = LIKELIHOODS["gaussian"]
    lower, upper = prediction(likelihood).interval(0.8)
    found = in_batches(IntervalWidth(0.8), likelihood, y).compute()
    assert float(found) == pytest.approx(float((upper - lower).mean()), rel=1e-9)


def test_probabilities_will_do_for_a_classification():
    likelihood, y = LIKELIHOODS["categorical"]
    probs = prediction(likelihood).probs
    wanted = metrics.evaluate(prediction(likelihood), y)
    for metric, key in ((Accuracy(), "accuracy"), (BrierScore(), "brier"), (CalibrationError(), "ece"), (NLL(), "nll")):
        assert float(metric(probs, y)) == pytest.approx(wanted[key], rel=1e-9)


def test_states_of_two_processes_add_up():
    likelihood, y = LIKELIHOODS["categorical"]
    whole, one, two = (CalibrationError() for _ in range(3))
    whole.update(prediction(likelihood), y)
    one.update(prediction(likelihood, slice(0, 20)), y[:20])
    two.update(prediction(likelihood, slice(20, 60)), y[20:])
    one.merge_state(two)
    torch.testing.assert_close(one.compute(), whole.compute())


def test_metrics_reset_and_pickle():
    likelihood, y = LIKELIHOODS["gaussian"]
    metric = in_batches(CRPS(), likelihood, y)
    again = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(again.compute(), metric.compute())
    metric.reset()
    in_batches(metric, likelihood, y)
    torch.testing.assert_close(again.compute(), metric.compute())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: RMSE().update(prediction(Categorical()), LABELS),
            TypeError,
            "RMSE: prediction=ClassificationPredictive; give a RegressionPredictive",
        ),
        (
            lambda: Accuracy().update(prediction(Gaussian().double()), VALUES),
            TypeError,
            "Accuracy: prediction=RegressionPredictive; give a ClassificationPredictive",
        ),
        (lambda: Accuracy().update(F[0], LABELS), ValueError, "does not contain class probabilities"),
        (lambda: Coverage(1.0), ValueError, "Coverage: level=1.0"),
        (lambda: CalibrationError(0), ValueError, "num_bins=0; give an integer of at least 1"),
        (lambda: collection("ranking"), ValueError, "task='ranking'; give"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
