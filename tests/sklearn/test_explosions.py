"""Targets with zeros and heavy tails: the hurdle is offered, means are bounded, and choices that fail are given up aloud."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("pandas")

import torch

from bayesify import likelihoods
from bayesify.predictive.base import Outputs
from bayesify.predictive.transformed import TargetTransform, TransformedPredictive
from bayesify.sklearn import BayesianRegressor, recipe
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.settings import Settings
from bayesify.sklearn.units import TargetUnits
from benchmarks import stress

QUICK = {"epochs": 30, "learning_rate": 0.03, "hidden": (16,), "random_state": 0}


def amounts(rows=200):
    """Zero in 60 % of rows on average, by the first input; log-normal amounts by the second."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 2))
    zero = draw.random(rows) < 1 / (1 + np.exp(-0.5 - 2 * x[:, 0]))
    return x, np.where(zero, 0.0, np.exp(5 + x[:, 1] + 0.5 * draw.normal(size=rows)))


def test_amounts_with_zeros_have_a_hurdle():
    """Probabilities of zero at both ends against the exact 0.93 and 0.18; 200 rows leave a standard error of about 0.05."""
    x, y = amounts()
    model = BayesianRegressor(**QUICK).fit(x, y)
    assert model.choices_["likelihood"] == "hurdle"
    ends = np.array([[1.0, 0.0], [-1.0, 0.0]])
    zero = model.predictive(ends).cdf(torch.zeros(2, 1, dtype=torch.float64))[:, 0].numpy()
    np.testing.assert_allclose(zero, [0.924, 0.182], atol=5 * 0.05)
    assert zero[0] > 0.75 > 0.4 > zero[1]
    lower, upper = model.predict_interval(ends, 0.5)
    assert lower[0] == upper[0] == 0.0 < upper[1]
    with pytest.raises(ValueError, match="likelihood='hurdle' is for amounts of at least 0, but a target is -1"):
        BayesianRegressor(likelihood="hurdle", **QUICK).fit(x, y - 1)
    with pytest.raises(
        ValueError,
        match="target_transform='log1p' does not work with likelihood='hurdle'; amounts need target_transform='none'",
    ):
        BayesianRegressor(likelihood="hurdle", target_transform="log1p", **QUICK).fit(x, y)


def test_zeros_are_as_frequent_as_a_distribution_without_hurdle_says():
    """P(Y <= y) minus a random share of P(Y = y) is at most 0.1 in a tenth of new rows. 5 errors are 0.061: 600 rows fit the map.

    Without random shares in the out-of-fold probabilities of zeros, it would be in a quarter of the rows.
    """
    x, y = amounts(2600)
    model = BayesianRegressor(likelihood="heteroscedastic_gaussian", target_transform="sqrt", **QUICK)
    found, new = model.fit(x[:600], y[:600]).predictive(x[600:]), torch.from_numpy(y[600:, None])
    below, at = found.below(new)[:, 0].numpy(), found.cdf(new)[:, 0].numpy()
    place = below + (at - below) * np.random.default_rng(1).random(2000)
    assert np.mean(place <= 0.1) == pytest.approx(0.1, abs=5 * np.sqrt(0.1 * 0.9 / 600))


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", [1, 13])
@pytest.mark.filterwarnings("ignore:BayesianRegressor")
def test_no_mean_explodes(seed):
    """Two tables of the stress benchmark, which has 200."""
    _, frame, y, new, new_y = stress.simulate(seed)
    model = BayesianRegressor(**QUICK).fit(frame, y)
    assert stress.score(model, new, new_y, y)["exploded"] == 0


@pytest.mark.filterwarnings("ignore:BayesianRegressor")
def test_the_interval_of_nearly_equal_targets_does_not_explode():
    """77 of 82 targets are 7. An upper end was 19,941, and the CRPS was 8.4 times the CRPS of one guess for all rows."""
    _, frame, y, new, _ = stress.simulate(176)
    model = BayesianRegressor(likelihood="student_t", target_transform="log", **QUICK).fit(frame, y)
    assert model.predict_interval(new)[1].max() <= y.max() ** 2 / y.min() * (1 + 1e-9)
    assert model.predict_quantiles(new, [1 - 1e-9]).max() <= y.max() ** 2 / y.min() * (1 + 1e-9)


@pytest.mark.parametrize("name", ["log", "log1p"])
def test_means_lie_inside_what_quantiles_allow(name):
    """A Gaussian of log y with a deviation of 8 has the mean exp(32); no data tell that."""
    law = likelihoods.HeteroscedasticGaussian().double()
    inner = law.predictive(Outputs(kept=torch.tensor([[[0.0, 2 * np.log(8.0)], [0.0, 0.0]]], dtype=torch.float64)))
    one = torch.ones(1, dtype=torch.float64)
    plain = TransformedPredictive(inner, TargetTransform.scaled(name, 0 * one, one))
    assert bool((plain.mean <= plain.quantile(0.9996)).all())
    if name == "log":
        assert float(plain.mean[1]) == pytest.approx(np.exp(0.5), rel=1e-3)
    units = replace(TargetUnits(name, np.zeros(1), np.ones(1)), floor=0.0, ceiling=30.0)
    found = units.predictive(inner)
    assert float(found.mean[0]) < 30.0
    assert float(found.mean[1]) == pytest.approx(float(plain.mean[1]), rel=2e-2)
    again = TargetUnits.restore({key: value for key, value in units.config().items() if key != "ceiling"})
    assert again.ceiling is None
    torch.testing.assert_close(units.predictive(inner).quantile(0.999), again.predictive(inner).quantile(0.999))


@pytest.mark.thin(2)
@pytest.mark.parametrize("num_failed", [1, 2])
def test_choices_that_fail_are_given_up_aloud(num_failed, monkeypatch):
    """The final score of the first choice, or of the first two, is a million times what the trial promised."""
    train, calls = recipe._train_candidates, []

    def explode(rows, pairs, settings, *, brief=False):
        found = train(rows, pairs, settings, brief=brief)
        calls.append(brief)
        return [replace(one, score=1e6) for one in found] if 1 <= calls.count(False) <= num_failed else found

    monkeypatch.setattr(recipe, "_train_candidates", explode)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 2))
    with pytest.warns(
        UserWarning, match="BayesianRegressor: These likelihoods failed on held-out rows: .*1e.06.* The model uses"
    ):
        model = BayesianRegressor(**QUICK).fit(x, x[:, 0] + 0.1 * draw.normal(size=120))
    assert model.choices_["left_out"][0].startswith("These likelihoods failed")
    assert model.choices_["out_of_fold_score"] < 1e3
    assert (model.choices_["categories"] == "nothing") == (num_failed == 2)
    assert (np.ptp(model.predict(x)) < 1e-9) == (num_failed == 2)


def test_one_guess_for_all_rows_is_scored_as_predictions_are():
    """Against quantiles of repeated rows."""
    draw = np.random.default_rng(0)
    y, weights = draw.gamma(1.0, size=(50, 1)), draw.integers(1, 4, 50).astype(float)
    many = np.repeat(y[:, 0], weights.astype(int))
    levels = np.array(recipe.PINBALL_LEVELS)[:, None]
    error = many - np.quantile(many, levels, method="inverted_cdf").reshape(-1, 1)
    exact = 2 * np.maximum(levels * error, (levels - 1) * error).mean()
    assert recipe._constant_score(recipe.Rows(np.zeros((50, 1)), y, weights)) == pytest.approx(exact, rel=1e-12)


def test_amounts_in_whole_units_are_no_counts_because_of_their_zeros():
    draw = np.random.default_rng(0)
    settings = SimpleNamespace(likelihood="auto", transform="auto", method=None, noise=None, num_classes=0)

    def tried(y):
        rows = Rows(np.zeros((len(y), 1)), y[:, None], np.ones(len(y)))
        return {name for name, _ in recipe.list_candidates(rows, settings)}

    incomes = np.where(draw.random(400) < 0.45, 0.0, 1000.0 * draw.integers(5, 90, 400))
    assert "hurdle" in tried(incomes)
    assert not set(recipe.COUNT_LIKELIHOODS) & tried(incomes)
    visits = np.where(draw.random(400) < 0.45, 0.0, draw.poisson(3.0, 400))
    assert set(recipe.COUNT_LIKELIHOODS) <= tried(visits)
    assert "hurdle" not in tried(visits)


def test_tiny_tables_choose_by_the_distribution_of_all_targets():
    """The score before training is the CRPS of a log-normal with the targets' own moments, and no network is trained for it."""
    y = np.exp(np.random.default_rng(0).normal(1.0, 1.5, (40, 1)))
    rows, settings = Rows(np.zeros((40, 1)), y, np.ones(40)), Settings()
    logs, levels = np.log(y[:, 0]), np.array(recipe.PINBALL_LEVELS)[:, None]
    error = y[:, 0] - np.exp(logs.mean() + logs.std() * torch.special.ndtri(torch.from_numpy(levels)).numpy())
    exact = 2 * np.maximum(levels * error, (levels - 1) * error).mean()
    pairs, tried = recipe._rank_pairs(rows, settings)
    assert pairs[0] == ("heteroscedastic_gaussian", "log")
    assert {name for name, _ in pairs} == {"heteroscedastic_gaussian"}
    assert tried["heteroscedastic_gaussian, log"] == pytest.approx(exact, rel=1e-5)  # outputs are float32
    many = Rows(*(np.repeat(part, 2, axis=0) for part in (rows.x, y, rows.weights)))
    assert {name for name, _ in recipe.list_candidates(many, settings)} == set(recipe.REAL_LIKELIHOODS)
