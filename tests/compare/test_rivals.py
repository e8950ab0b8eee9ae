"""The mean, a linear model and boosted trees: what they predict, and that their stated errors are right."""

import numpy as np
import pytest
import torch

from bayesify.compare import Question
from bayesify.compare.models import SplitRows, fit_splits, installed, train_rival
from bayesify.compare.scores import score_classification, score_regression


def line(rows, seed, noise=1.0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 3))
    return x, 2 * x[:, 0] - x[:, 1] + generator.normal(0, noise, rows)


def scores_of(name, train, test):
    model = train_rival(name, SplitRows(*train, 0, 0)).predict
    return score_regression(model(test[0]), test[1], model(test[0]), test[1])[0]


@pytest.mark.slow
def test_a_linear_truth():
    """Noise 1 and slopes (2, -1, 0): the linear model errs by 1, the constant by the targets' deviation, root of 6."""
    train, test = line(400, 0), line(2000, 1)
    found = {name: scores_of(name, train, test) for name in ("constant", "linear", "boosted_trees")}
    assert found["constant"]["rmse"] == pytest.approx(np.sqrt(6), rel=0.05)
    assert found["linear"]["rmse"] == pytest.approx(1.0, rel=0.05)
    assert 1.0 < found["boosted_trees"]["rmse"] < 1.5
    assert found["linear"]["nll"] == pytest.approx(0.5 * np.log(2 * np.pi) + 0.5, abs=0.06)
    for scores in found.values():
        for level in (50, 90, 95):
            assert scores[f"coverage_{level}"] == pytest.approx(
                level / 100, abs=0.06
            )  # residuals of 400 rows: 2.5 % at 50


def test_a_positive_target_of_many_orders_is_fitted_by_its_logarithm():
    x, y = line(400, 0, 0.3)
    far_x, far_y = line(2000, 1, 0.3)
    model = train_rival("linear", SplitRows(x, np.exp(3 * y), 0, 0)).predict
    predictive = model(far_x)
    lower, upper = (end.reshape(-1).numpy() for end in predictive.interval(0.9))
    truth = np.exp(3 * far_y)
    assert lower.min() > 0
    assert np.mean((lower <= truth) & (truth <= upper)) == pytest.approx(0.9, abs=0.05)


def test_more_columns_than_rows():
    """Lasso finds the one column of 300 that matters, where the mean errs by 2."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 300))
    y = 2 * x[:, 7] + generator.normal(0, 0.3, 80)
    model = train_rival("linear", SplitRows(x[:60], y[:60], 0, 0)).predict
    assert float(np.abs(model(x[60:]).mean.reshape(-1).numpy() - y[60:]).mean()) < 0.8


@pytest.mark.parametrize("name", ["constant", "linear", "boosted_trees", *installed()])
def test_classes(name):
    x, y = line(300, 0)
    labels = np.digitize(y, [-1, 1])
    model = train_rival(name, SplitRows(x[:200], labels[:200], 4, 0)).predict  # the last class has no row
    probs = model(x[200:]).class_probs
    assert probs.shape == (100, 4)
    assert torch.allclose(probs.sum(1), torch.ones(100, dtype=torch.float64))
    assert probs.min() > 0
    scores, curves = score_classification(model(x[200:]), labels[200:], model(x[200:]), labels[200:])
    assert scores["accuracy"] > (0.3 if name == "constant" else 0.6)
    assert sum(curves["confusion"]) == 100


def test_a_class_that_no_training_row_has():
    x, y = line(60, 0)
    (found,) = fit_splits("point", [SplitRows(x, 2 * (y > 0).astype(int), 3, 0)], "quick")
    probs = found.predict(x).class_probs
    assert probs.shape == (60, 3)
    assert probs[:, 1].tolist() == pytest.approx([1 / 183] * 60)  # one row in 61 stands for what was not seen
    assert "auto" in Question("t.csv").chosen()


def test_the_same_seed_gives_the_same_model():
    x, y = line(100, 0)
    first, second = (train_rival("boosted_trees", SplitRows(x, y, 0, 5)).predict(x).mean for _ in range(2))
    assert torch.equal(first, second)
