"""Predictions in the targets' units, against distributions that are known: transforms, recalibration, floors."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("scipy")

from scipy import integrate, stats

from bayesify.likelihoods import HeteroscedasticGaussian
from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn.recalibration import Recalibration, ensemble_places
from bayesify.sklearn.units import UnitsPredictive

LEVELS = [0.01, 0.05, 0.5, 0.9, 0.99]


def gaussian(mean, std, rows=1):
    """A standard predictive of one draw: N(mean, std^2) for each row."""
    outputs = torch.full((1, rows, 1), mean, dtype=torch.float64)
    return RegressionPredictive(Outputs(kept=outputs), lambda f: (f, torch.full_like(f, std**2)))


def units(transform="none", recalibration=None, floor=-math.inf, shift=1.5, scale=0.4):
    shift, scale = torch.tensor([shift], dtype=torch.float64), torch.tensor([scale], dtype=torch.float64)
    return UnitsPredictive(gaussian(0.3, 0.8), shift, scale, transform, recalibration, floor)


def test_the_log_of_a_target_is_lognormal():
    found, exact = units("log"), stats.lognorm(s=0.32, scale=np.exp(1.5 + 0.4 * 0.3))
    y = torch.tensor([[3.0]], dtype=torch.float64)
    assert found.quantile(LEVELS).flatten().numpy() == pytest.approx(exact.ppf(LEVELS), rel=1e-9)
    assert float(found.log_prob(y)) == pytest.approx(exact.logpdf(3.0), rel=1e-9)
    assert float(found.cdf(y)) == pytest.approx(exact.cdf(3.0), rel=1e-9)
    assert float(found.mean) == pytest.approx(exact.mean(), rel=1e-5)
    assert float(found.variance) == pytest.approx(exact.var(), rel=1e-3)
    assert float(found.crps(y)) == pytest.approx(_crps(exact, 3.0), rel=1e-3)
    assert float(found.cdf(-y)) == 0.0


def _crps(exact, y):
    grid = np.linspace(1e-6, 30, 400_001)
    return float(integrate.trapezoid(np.square(exact.cdf(grid) - (grid >= y)), grid))


def test_recalibration_gives_the_quantiles_that_were_seen():
    """Said to be N(0, 1) where N(0.5, 2^2) is true: corrected quantiles are those of the truth, 20,000 rows."""
    said, true = stats.norm(0, 1), stats.norm(0.5, 2)
    u = said.cdf(true.rvs(20_000, random_state=0))
    map_ = Recalibration.of(u, np.ones(20_000))
    one = torch.ones(1, dtype=torch.float64)
    found, on_a_grid = (UnitsPredictive(gaussian(0.0, 1.0, rows), 0 * one, one, "none", map_) for rows in (1, 1001))
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    spread = [np.sqrt(q * (1 - q) / 20_000) / true.pdf(true.ppf(q)) for q in levels]
    assert np.all(np.abs(found.quantile(levels).flatten().numpy() - true.ppf(levels)) < 5 * np.array(spread) + 0.02)
    grid = torch.linspace(-9, 10, 1001, dtype=torch.float64)
    density = on_a_grid.log_prob(grid[:, None]).exp()
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1, abs=0.01)
    assert map_(torch.tensor(map_.inverse(levels), dtype=torch.float64)).tolist() == pytest.approx(levels)


def test_few_rows_are_not_recalibrated():
    assert Recalibration.of(np.linspace(0.4, 0.6, 20), np.ones(20)).said == ()


def test_what_lies_below_a_floor_is_put_there():
    found = units(floor=1.2)
    assert float(found.quantile(0.001)) == 1.2
    assert float(found.cdf(torch.tensor([[1.1]], dtype=torch.float64))) == 0.0


@pytest.mark.parametrize("transform", ["none", "sqrt", "log1p"])
def test_a_floor_holds_the_probability_of_what_lies_below(transform):
    """Density above the floor and the atom at it add up to one; at the floor `log_prob` is finite and the atom's."""
    found = units(transform, floor=0.0, shift=0.2, scale=1.0)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    atom = float(found.log_prob(zero).exp())
    assert atom == pytest.approx(float(found.cdf(zero)))
    assert atom == pytest.approx(stats.norm(0.5, 0.8).cdf(0.0), rel=1e-6)
    root = torch.linspace(1e-4, 8, 20_001, dtype=torch.float64)  # y = root^2: the density of a square has a pole at 0
    outputs = torch.full((1, len(root), 1), 0.3, dtype=torch.float64)
    inner = RegressionPredictive(Outputs(kept=outputs), lambda f: (f, torch.full_like(f, 0.64)))
    one = torch.ones(1, dtype=torch.float64)
    every = UnitsPredictive(inner, 0.2 * one, one, transform, floor=0.0)
    density = every.log_prob(root.square().unsqueeze(1)).exp() * 2 * root
    assert float(torch.trapezoid(density, root)) + atom == pytest.approx(1, abs=2e-3)


def test_places_of_an_ensemble_are_those_of_rows_that_no_member_has_seen():
    """Noise 1 and members that err by N(0, 1) each: without any pull to the targets both bounds are right, and the mixture's places
    have the distribution of an ensemble's on new rows; 20,000 rows: a standard error of 0.004, and some dependence."""
    draw = np.random.default_rng(0)
    outputs = torch.from_numpy(np.stack((draw.normal(size=(5, 20_000)), np.zeros((5, 20_000))), -1))
    z = torch.from_numpy(draw.normal(size=(20_000, 1)))
    holder = draw.integers(5, size=20_000)
    found = ensemble_places(HeteroscedasticGaussian().double(), outputs, holder, z, np.ones(20_000))
    exact = stats.norm.cdf(z[:, 0].numpy() - outputs[..., 0].numpy()).mean(0)
    alone = stats.norm.cdf(z[:, 0].numpy() - outputs[holder, np.arange(20_000), 0].numpy())
    for level in (0.05, 0.25, 0.75, 0.95):
        assert np.quantile(found, level) == pytest.approx(np.quantile(exact, level), abs=0.015)
        assert abs(np.quantile(alone, level) - np.quantile(exact, level)) > 0.04


def test_few_rows_widen_as_a_prediction_interval_does():
    """With scores of scale 1, the classical interval of the next number; with wider scores, their clipped scale times it."""
    levels = [0.025, 0.05, 0.5, 0.95, 0.975]
    scores = np.linspace(-1, 1, 20)
    classical = stats.t.ppf(levels, 19) * np.sqrt(1 + 1 / 20)
    for factor in (0.5, 3.0):
        found = Recalibration.of_few(stats.norm.cdf(factor * scores), np.ones(20))
        square = (30 + np.minimum((factor * scores) ** 2, 2.5**2).sum()) / 50
        expected = stats.norm.cdf(max(1.0, square) ** 0.5 * classical)
        np.testing.assert_allclose(found.inverse(levels), expected, rtol=1e-9)
    weighted = Recalibration.of_few(stats.norm.cdf(scores[:2]), np.array([2.0, 3.0]))
    assert weighted == Recalibration.of_few(stats.norm.cdf(scores[[0, 0, 1, 1, 1]]), np.ones(5))


@pytest.mark.parametrize("mean", [0.3, 5.0, -5.0])
def test_quantiles_end_one_range_beyond_the_targets_or_the_median(mean):
    """Targets z from -1 to 2 allow quantiles from -4 to 5, or up to 3 away from a median outside of the targets."""
    one = torch.ones(1, dtype=torch.float64)
    found = UnitsPredictive(gaussian(mean, 5.0), 0 * one, one, "log", extremes=(-1.0, 2.0))
    low, middle, high = (float(found.quantile(level).log()) for level in (1e-6, 0.5, 1 - 1e-6))
    assert middle == pytest.approx(mean, abs=1e-9)
    assert low == pytest.approx(min(mean, -1.0) - 3.0, abs=1e-9)
    assert high == pytest.approx(max(mean, 2.0) + 3.0, abs=1e-9)
    plain = UnitsPredictive(gaussian(mean, 0.2), 0 * one, one, "log")
    near = UnitsPredictive(gaussian(mean, 0.2), 0 * one, one, "log", extremes=(-1.0, 2.0))
    assert torch.equal(near.quantile(LEVELS), plain.quantile(LEVELS))
    same = UnitsPredictive(gaussian(mean, 0.2), 0 * one, one, "log", extremes=(1.0, 1.0))
    assert torch.equal(same.quantile(LEVELS), plain.quantile(LEVELS))
