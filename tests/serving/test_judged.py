"""What the page says about rows that the model had not seen, against counts by hand."""

import numpy as np
import pandas
import pytest

from bayesify.serving.judged import Group, Judged
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.fitted import HeldOut

NUM = 90


@pytest.mark.parametrize("kind", [BayesianRegressor, BayesianClassifier])
def test_out_of_fold_predictions_are_in_the_order_of_the_rows(kind):
    """With copies, which are trained as one row; scores of the report are those of these predictions."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM, 2))
    x[60:] = x[:30]
    y = x[:, 0] if kind is BayesianRegressor else np.where(x[:, 0] > 0, "b", "a")
    model = kind(epochs=60, random_state=0).fit(x, y)
    held = model.fitted_.held_out
    scores = model.choices_["out_of_fold"]
    if kind is BayesianClassifier:
        np.testing.assert_array_equal(held.values, x[:, 0] > 0)
        assert (held.probs.argmax(1) == held.values).mean() == pytest.approx(scores["accuracy"])
        return
    np.testing.assert_array_equal(held.values, y)
    np.testing.assert_array_equal(held.mean[60:], held.mean[:30])
    assert np.sqrt(np.square(held.mean - y).mean()) == pytest.approx(scores["rmse"])
    assert (held.upper - held.lower).mean() == pytest.approx(scores["width_90"])
    assert (held.centrality <= 0.9).mean() == pytest.approx(scores["coverage_90"])


def test_groups_of_numbers():
    values = np.arange(NUM, dtype=float)
    width = np.where(values < 30, 2.0, 4.0)
    mean = values + np.where(np.arange(NUM) % 3 == 0, 10.0, 0.5)  # every third row is outside
    held = HeldOut(values, mean, mean - width / 2, mean + width / 2, np.zeros(NUM))
    towns = pandas.DataFrame({"town": ["a"] * 50 + ["b"] * 25 + [None] * 15})
    judged = Judged(held, towns)
    low, middle, high, first, second = judged.groups(["town"])
    assert (first.name, first.num_rows, second.name, second.num_rows) == ("town = a", 50, "town = b", 25)
    assert first.coverage == pytest.approx(33 / 50)
    assert first.size == pytest.approx((30 * 2 + 20 * 4) / 50)
    assert [group.num_rows for group in (low, middle, high)] == [30, 30, 30]
    assert low.name.startswith("predicted up to ")
    assert judged.confusion([]) == ()
    assert Group("x", 100, 0.9, 1.0).error == pytest.approx(np.sqrt(0.9 * 0.1 / 100), rel=0.05)
    assert Group("x", 100, 1.0, 1.0).error > 0


def test_groups_of_classes():
    codes = np.repeat([0, 1], [60, 30])
    probs = np.where(np.arange(NUM)[:, None] < 70, [[0.95, 0.05]], [[0.3, 0.7]])
    judged = Judged(HeldOut(codes, probs=probs), pandas.DataFrame(index=range(NUM)), ["no", "yes"])
    assert judged.confusion(["no", "yes"]) == ((60, 0), (10, 20))
    assert judged.confusion(["yes", "no"]) == ((20, 10), (0, 60))
    first, second = judged.groups([])
    assert first == Group("predicted no", 70, pytest.approx(60 / 70), pytest.approx(60 / 70))
    assert second == Group("predicted yes", 20, 1.0, 1.0)
    assert "stated confidence" in judged.figure("kind")
