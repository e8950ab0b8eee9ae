"""Conformal thresholds, paired tests and scores against exact answers."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify.compare import conformal
from bayesify.compare.paired import adjusted, paired_difference
from bayesify.compare.plots import _label as axis_label
from bayesify.compare.scores import POINTS, score_classification, score_regression
from bayesify.compare.summary import Column, cell, show, significant, summarize
from bayesify.compare.verdict import judge
from bayesify.likelihoods import Categorical, Gaussian
from bayesify.predictive.base import Outputs


@pytest.mark.parametrize("level", [0.5, 0.75, 0.9])
def test_coverage_is_exact_over_all_orders(level):
    """Of n + 1 exchangeable rows, each is the new one equally often: coverage is ceil((n + 1) level) / (n + 1)."""
    scores = np.array([0.1, 0.7, 0.3, 2.0, 1.1])
    held = []
    for new in range(len(scores)):
        others = np.delete(scores, new)
        held.append(scores[new] <= conformal.threshold(others, level))
    assert np.mean(held) == math.ceil(len(scores) * level) / len(scores)


@pytest.mark.parametrize(
    ("rows", "level", "known"), [(8, 0.9, False), (9, 0.9, True), (18, 0.95, False), (19, 0.95, True)]
)
def test_too_few_rows_for_a_level(rows, level, known):
    assert math.isfinite(conformal.threshold(np.arange(rows, dtype=float), level)) == known


def test_interval_factor_is_a_quantile_of_standardized_residuals():
    y, mean, std = np.arange(1.0, 20.0), np.zeros(19), np.full(19, 2.0)
    assert conformal.interval_factor(y, mean, std, 0.9) == 18 / 2
    assert conformal.interval_factor(y, mean, std, 0.5) == 10 / 2


def test_sets_of_classes():
    probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.34, 0.33, 0.33]])
    assert conformal.credible_sets(probs, 0.9).tolist() == [[True, True, False], [True, True, True], [True, True, True]]
    assert conformal.credible_sets(probs, 0.5).sum(1).tolist() == [1, 1, 2]
    assert conformal.bounded_sets(probs, 0.25).tolist() == [
        [True, True, False],
        [False, False, True],
        [True, True, True],
    ]
    assert conformal.bounded_sets(probs, 0.9).sum(1).tolist() == [1, 1, 1]
    labels = np.zeros(19, int)
    rows = np.column_stack((np.linspace(0.05, 0.95, 19), np.linspace(0.95, 0.05, 19)))
    assert conformal.probability_bound(rows, labels, 0.9) == pytest.approx(0.1)  # 18 of 19 rows have at least that
    assert conformal.probability_bound(rows[:5], labels[:5], 0.9) == -math.inf


def test_paired_difference_is_the_t_test_where_splits_are_independent():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=8), generator.normal(0.5, size=8)
    found = paired_difference(first.tolist(), second.tolist(), 0.0)
    assert found.p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert found.mean == pytest.approx((first - second).mean())
    corrected = paired_difference(first.tolist(), second.tolist(), 0.25)
    assert corrected.error == pytest.approx(found.error * math.sqrt(1 + 8 * 0.25))


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
    assert curves["rejection"] == pytest.approx([math.sqrt(np.mean(y**2))] * POINTS)  # equally certain everywhere
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


# -- table and verdict -------------------------------------------------------------------------------------------------


def result(nll, seconds=1.0, cover=0.9, error=None, fall=False, parameters=10):
    if error is not None:
        return {"error": error}
    scores = {"nll": nll, "rmse": nll, "crps": nll, "calibration": 0.02}
    for name in ("50", "90", "95"):
        scores |= {f"coverage_{name}": cover, f"width_{name}": 2.0}
        scores |= {f"conformal_coverage_{name}": 0.9, f"conformal_width_{name}": 1.5}
    return {
        "scores": scores,
        "curves": {"rejection": np.linspace(1.0, 0.5 if fall else 1.0, POINTS).tolist()},
        "times": {"train_seconds": seconds, "tune_seconds": 0.0, "predict_ms": 1.0},
        "parameters": parameters,
        "bytes": 2000,
        "rows": {"fit": 80, "test": 20},
    }


def results(**methods):
    found = {}
    for name, values in methods.items():
        for split, value in enumerate(values):
            found[name, split] = result(value) if isinstance(value, float) else value
    return found


BASELINES = ("point", "temperature_scaled")


def test_methods_are_ranked_on_common_splits_and_failures_come_last():
    found = results(
        point=[1.0, 1.1, 1.2],
        temperature_scaled=[0.9, 1.0, 1.15],
        laplace=[0.5, 0.62, 0.7],
        swag=[0.1, result(0, error="bad")],
    )
    summary = summarize(found, ["point", "temperature_scaled", "swag", "laplace"], "regression", BASELINES)
    assert [row.name for row in summary.rows] == ["laplace", "temperature_scaled", "point", "swag"]
    assert summary.splits == (0, 1, 2)
    assert summary.rows[-1].failure == "failed on 1 of 2 splits, such as split 2: bad"
    assert summary.best.means["nll"] == pytest.approx(np.mean([0.5, 0.62, 0.7]))
    assert summary.best.errors["nll"] == pytest.approx(np.std([0.5, 0.62, 0.7], ddof=1) / math.sqrt(3))
    assert summary.against["point"].mean == pytest.approx(np.mean([0.5, 0.48, 0.5]))
    assert summary.row("point").clearly_behind


def test_interrupted_methods_are_ranked_on_what_all_have():
    found = results(point=[1.0, 9.0], laplace=[2.0])
    summary = summarize(found, ["point", "laplace"], "regression", BASELINES)
    assert summary.splits == (0,)
    assert summary.best.name == "point"
    verdict = judge(summary, found, "y")
    assert verdict.certainty == "untested"
    assert verdict.headline == "A plain network did best, on a single split: no Bayesian method predicted better there."


def test_a_clear_verdict():
    better = [result(value, cover=0.7, fall=True, parameters=100) for value in (0.5, 0.52, 0.51)]
    found = results(
        point=[1.0, 1.02, 1.0], temperature_scaled=[0.9, 0.93, 0.9], laplace=better, swag=[0.51, 0.51, 0.52]
    )
    summary = summarize(found, ["point", "temperature_scaled", "laplace", "swag"], "regression", BASELINES)
    verdict = judge(summary, found, "price")
    text = " ".join(verdict.sentences)
    assert verdict.headline == "Use Laplace."
    assert verdict.certainty == "clear"
    assert "Against a plain (deterministic) network: NLL lower by 0.497 nats, a clear difference" in text
    assert "cannot tell 1 other method from it: SWAG. Of these SWAG has 10 times fewer parameters." in text
    assert "2.00 wide in price" in text
    assert "held the truth in 70 % of test rows, too narrow: it is too sure" in text
    assert "1.50 wide and held it in 90 %" in text
    assert "falls from 1.00" in text


@pytest.mark.parametrize("seconds", [1e-9, 0.4, 1e4])
def test_measured_seconds_change_no_word(seconds):
    """They differ from run to run; the verdict of the same scores does not."""
    found = results(
        point=[1.0, 1.02, 1.0],
        laplace=[result(value, seconds=seconds) for value in (0.5, 0.52, 0.51)],
        swag=[0.51, 0.51, 0.52],
    )
    told = results(point=[1.0, 1.02, 1.0], laplace=[0.5, 0.52, 0.51], swag=[0.51, 0.51, 0.52])
    names = ["point", "laplace", "swag"]
    verdicts = [judge(summarize(each, names, "regression", BASELINES), each, "y") for each in (found, told)]
    assert verdicts[0] == verdicts[1]


def test_coverage_of_few_rows_is_not_called_wrong():
    """18 or 20 of 20 rows are as likely as not under 90 %; 95 % of a thousand are not."""
    for cover, test, words in ((1.0, 20, "about right"), (0.95, 1000, "wider than needed"), (0.7, 20, "too narrow")):
        entry = result(0.5, cover=cover)
        entry["rows"]["test"] = test
        found = results(point=[entry])
        sentences = judge(summarize(found, ["point"], "regression", BASELINES), found, "y").sentences
        assert any(f"held the truth in {100 * cover:.0f} % of test rows, {words}" in each for each in sentences)


def test_the_verdict_says_whether_rows_of_another_kind_are_noticed():
    entries = {name: result(nll) | {"ood": {"auroc_variance": auroc}} for name, nll, auroc in (
        ("point", 0.5, 0.5), ("laplace", 0.6, 0.97))}  # fmt: skip
    found = results(**{name: [entry] for name, entry in entries.items()})
    last = judge(summarize(found, ["point", "laplace"], "regression", BASELINES), found, "y").sentences[-1]
    assert last.startswith("It does not detect out-of-distribution rows")
    assert last.endswith("in 50 of 100 pairs (50 are chance). Laplace does, in 97 of 100.")
    entries["point"]["ood"]["auroc_variance"] = 0.9
    last = judge(summarize(found, ["point", "laplace"], "regression", BASELINES), found, "y").sentences[-1]
    assert last.startswith("It detects out-of-distribution rows")
    assert last.endswith("in 90 of 100 pairs (50 are chance).")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5, "2.5"), (5000, "5000"), (12_500, "12.5k"), (250_000, "250k"), (3e6, "3M"), (2e-4, "2e-4"), (-2.5e9, "-2.5e9")],
)  # fmt: skip
def test_labels_of_axes_are_short(value, text):
    assert axis_label(value, False) == text


def test_small_p_values_read_well():
    found = results(point=[1.0, 1.0001, 1.0], temperature_scaled=[0.9, 0.9, 0.9001], laplace=[0.5, 0.5, 0.5001])
    summary = summarize(found, ["point", "temperature_scaled", "laplace"], "regression", BASELINES)
    assert "a clear difference (paired test, p < 0.001)" in judge(summary, found, "y").sentences[1]


def test_an_open_verdict_and_a_plain_winner():
    found = results(point=[1.0, 1.5, 0.9], temperature_scaled=[1.1, 1.4, 0.95], laplace=[0.9, 1.6, 0.7])
    summary = summarize(found, ["point", "temperature_scaled", "laplace"], "regression", BASELINES)
    verdict = judge(summary, found, "y")
    assert verdict.certainty == "open"
    assert verdict.headline == "Laplace did best, but not clearly better than a plain network."
    found = results(point=[1.0, 1.1], temperature_scaled=[1.2, 1.2], laplace=[1.3, 1.4])
    summary = summarize(found, ["point", "temperature_scaled", "laplace"], "regression", BASELINES)
    assert judge(summary, found, "y").headline == "Use a plain network: no Bayesian method predicted better here."
    assert judge(summarize({}, ["point"], "regression", BASELINES), {}, "y") is None


def test_numbers_as_text():
    assert [significant(value) for value in (0, 1234.5, 12.345, 0.012345, 1e-9, 3e12)] == [
        "0", "1,234", "12.3", "0.0123", "1.00e-09", "3.00e+12",
    ]  # fmt: skip
    assert show(None, Column("a", "A")) == "–"
    assert show(0.123, Column("a", "A", "%", 100, 1)) == "12.3"
    summary = summarize(results(point=[1.0, 1.2]), ["point"], "regression", BASELINES)
    assert cell(summary.best, Column("nll", "NLL", "", 1, 3)) == "1.100 ± 0.100"


def test_every_pair_of_ranks_is_tested_against_the_best_only():
    values = {name: [float(place), place + 0.1] for place, name in enumerate(("laplace", "swag", "point"))}
    summary = summarize(results(**values), list(values), "regression", BASELINES)
    assert [row.behind is None for row in summary.rows] == [True, False, False]
    assert all(a.means["nll"] <= b.means["nll"] for a, b in itertools.pairwise(summary.rows))
