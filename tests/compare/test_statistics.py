"""Paired tests and scores against exact answers."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify.compare.explanation import importance
from bayesify.compare.scores import NUM_POINTS, score_classification, score_regression
from bayesify.compare.summary import Column, MethodRow, adjusted, cell, paired_difference, show, significant
from bayesify.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from bayesify.predictive.base import Outputs
from bayesify.serving.plots import _label as axis_label
from bayesify.tables.columns import Features
from bayesify.tables.preparation import Preparation


def test_paired_difference_is_the_t_test_where_splits_are_independent():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=8), generator.normal(0.5, size=8)
    found = paired_difference(first.tolist(), second.tolist(), 0.0)
    assert found.p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert found.mean == pytest.approx((first - second).mean())
    corrected = paired_difference(first.tolist(), second.tolist(), 0.25)
    assert corrected.error == pytest.approx(found.error * math.sqrt(1 + 8 * 0.25))


def test_rows_of_splits_count_where_trainings_are_alike():
    """Without an effect of the split it is the t-test over rows; where rows are all alike, that over splits."""
    generator = np.random.default_rng(3)
    rows = [generator.normal(0.2, 1.0, 50) for _ in range(4)]
    alike = [row - row.mean() + 0.2 for row in rows]
    found = paired_difference([0.2] * 4, [0.0] * 4, 0.25, alike, 200)
    error = math.sqrt(sum(np.square(row - 0.2).sum() for row in alike) / 196 / 200)
    assert found.error == pytest.approx(error)
    assert found.p == pytest.approx(2 * stats.t.sf(0.2 / error, 199))
    means = [0.1, 0.3, 0.25, 0.15]
    constant = [np.full(50, mean) for mean in means]
    plain = paired_difference(means, [0.0] * 4, 0.25)
    known = paired_difference(means, [0.0] * 4, 0.25, constant, 200)
    assert (known.error, known.p) == pytest.approx((plain.error, plain.p))


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_no_difference_is_rarely_called_one(spread):
    """Of 400 comparisons without a difference, 5 % are called clear: at most 8.3 % by chance (3 standard errors)."""
    generator = np.random.default_rng(4)
    called = 0
    for _ in range(400):
        rows = [generator.normal(0, 1, 40) + generator.normal(0, spread) for _ in range(5)]
        called += paired_difference([row.mean() for row in rows], [0.0] * 5, 0.0, rows, 200).p < 0.05
    assert called / 400 <= 0.083


def test_paired_difference_without_spread_or_with_one_split():
    assert paired_difference([1.0, 1.0], [1.0, 1.0], 0.1).p == 1
    assert paired_difference([2.0, 2.0], [1.0, 1.0], 0.1).p == 0
    assert math.isnan(paired_difference([1.0], [2.0], 0.1).p)
    with pytest.raises(ValueError, match="same splits"):
        paired_difference([1.0], [1.0, 2.0], 0.1)


def test_adjusted_p_values():
    values = {"a": 0.01, "b": 0.04, "c": 0.03, "e": 0.5}
    found = adjusted({**values, "d": math.nan})
    assert math.isnan(found.pop("d"))
    assert list(found.values()) == pytest.approx(stats.false_discovery_control(list(values.values())).tolist())


def gaussian(mean, noise):
    return Gaussian(noise, learn=False).double().predictive(Outputs(torch.as_tensor(mean).reshape(1, -1, 1)))


def test_scores_of_a_regression_whose_answer_is_known():
    """Standard normal targets at their quantiles, predicted as such: every coverage is what it states."""
    n = 2000
    y = stats.norm.ppf((np.arange(n) + 0.5) / n)
    scores, curves = score_regression(gaussian(np.zeros(n), 1.0), y, gaussian(np.zeros(n), 4.0), y)
    assert scores["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5 * np.mean(y**2))
    for level in (0.5, 0.9, 0.95):
        name = f"{100 * level:.0f}"
        assert scores[f"coverage_{name}"] == pytest.approx(level, abs=1 / n)
        assert scores[f"width_{name}"] == pytest.approx(2 * stats.norm.ppf((1 + level) / 2))
        # Calibration rows were predicted twice as wide, so the factor is half a quantile and intervals are half as wide.
        assert scores[f"conformal_width_{name}"] == pytest.approx(stats.norm.ppf((1 + level) / 2), abs=0.01)
    assert scores["calibration"] < 1e-3
    assert curves["rejection"] == pytest.approx([math.sqrt(np.mean(y**2))] * NUM_POINTS)  # equally certain everywhere
    assert curves["sharpness"] == pytest.approx([1.0] * 5)


def test_scores_of_a_classification_whose_answer_is_known():
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], dtype=torch.float64))
    predictive = Categorical().predictive(Outputs(logits.unsqueeze(0)))
    labels = np.array([0, 1, 1, 0])
    scores, curves = score_classification(predictive, labels, predictive, labels)
    assert scores["accuracy"] == 0.75
    assert scores["nll"] == pytest.approx(-np.mean(np.log([0.9, 0.4, 0.8, 0.7])))
    assert (scores["coverage_50"], scores["width_50"]) == (0.75, 1.0)
    assert (scores["coverage_90"], scores["width_90"]) == (1.0, 1.75)
    assert scores["conformal_coverage_90"] is None  # four rows are too few
    assert curves["rejection"][0] == 0.75
    assert curves["rejection"][-1] == 1.0
    assert sum(curves["count"]) == 4


def test_scores_that_are_not_finite_are_refused():
    y = np.array([0.0, 1e200])
    with pytest.raises(ValueError, match="on the test rows"):
        score_regression(gaussian(np.zeros(2), 1e-8), y, gaussian(np.zeros(2), 1.0), y)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5, "2.5"), (5000, "5000"), (12_500, "12.5k"), (250_000, "250k"), (3e6, "3M"), (2e-4, "2e-4"), (-2.5e9, "-2.5e9")],
)  # fmt: skip
def test_labels_of_axes_are_short(value, text):
    assert axis_label(value, False) == text


def test_numbers_as_text():
    assert [significant(value) for value in (0, 1234.5, 12.345, 0.012345, 1e-9, 3e12)] == [
        "0", "1,234", "12.3", "0.0123", "1.00e-09", "3.00e+12",
    ]  # fmt: skip
    assert show(None, Column("a", "A")) == "–"
    assert show(0.123, Column("a", "A", "%", 100, 1)) == "12.3"
    row = MethodRow("point", "Plain network", (0, 1), {"nll": 1.1}, {"nll": 0.1})
    assert cell(row, Column("nll", "NLL", "", 1, 3)) == "1.100 ± 0.100"


def test_a_column_of_the_noise_shows_in_crps_and_coverage_and_not_in_the_error():
    """The prediction is the true distribution; shuffling the spread triples it in one half and divides it in the other."""
    generator, rows = np.random.default_rng(0), np.arange(2_000)
    x = np.column_stack([generator.normal(size=2_000), generator.integers(0, 2, 2_000), generator.normal(size=2_000)])
    y = x[:, 0] + 0.1 * 3 ** x[:, 1] * generator.normal(size=2_000)
    names = ("mean", "noise", "unused")
    features = Features(x, names, np.empty((2_000, 0), dtype=np.int64), (), (), sources=names)

    def predict(inputs):
        outputs = torch.from_numpy(np.column_stack([inputs[:, 0], 2 * np.log(0.1 * 3 ** inputs[:, 1])]))
        return HeteroscedasticGaussian().double().predictive(Outputs(kept=outputs[None]))

    found = importance(predict, Preparation.of(features, rows), features, rows, y, 0)
    assert list(found) == ["mean", "noise", "unused"]
    assert found["unused"] == {"loss": 0.0, "error": 0.0, "coverage": 0.0}
    assert found["noise"]["error"] == 0
    # Exact, with half of the rows at another spread: E crps = sqrt(2 (s^2 + t^2) / pi) - s / sqrt(pi) for spread s and truth t; a
    # third of the width holds 42 %, three times the width 100 %. The tolerances are 3 standard errors of 200 rows.
    assert found["noise"]["loss"] == pytest.approx(0.118, abs=0.08)
    assert found["noise"]["coverage"] == pytest.approx(-0.096, abs=0.06)


def test_importance_of_columns_for_classes():
    x = np.random.default_rng(0).normal(size=(150, 2))
    features = Features(x, ("a", "b"), np.empty((150, 0), dtype=np.int64), (), (), sources=("a", "b"))

    def predict(inputs):
        return Categorical().predictive(
            Outputs(kept=torch.from_numpy(np.column_stack([inputs[:, 0], -inputs[:, 0]]))[None])
        )

    rows, labels = np.arange(150), (x[:, 0] < 0).astype(np.int64)
    found = importance(predict, Preparation.of(features, rows), features, rows, labels, 0)
    assert found["b"] == {"loss": 0.0, "error": 0.0, "coverage": 0.0}
    assert found["a"]["error"] == pytest.approx(0.5, abs=0.15)
    assert found["a"]["loss"] > 0.3
