"""Linear networks under a fixed prior and noise have a posterior in closed form."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")

from sklearn.linear_model import Ridge

from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn import BayesianRegressor
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.units import UnitsPredictive
from bayesify.tables.encoding import Encoding

SCALE, NOISE = 1.5, 4.0


def problem():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) * [1.0, 5.0, 0.1] + [0.0, 10.0, -3.0]
    return x, x @ [1.0, -0.5, 20.0] + 3.0 + 2.0 * rng.normal(size=60), rng.normal(size=(9, 3)) * 3


def exact(x, y, x_test, weights=None):
    """Mean and variance of y at new inputs, by inverting the precision of standardized data with a column of ones."""
    weights = np.ones(len(x)) if weights is None else weights
    units, targets = Encoding.scaled(x, weights), Encoding.scaled(y[:, None], weights)
    (shift,), (scale,) = targets.mean, targets.std
    phi, phi_test = (np.column_stack((units(values), np.ones(len(values)))) for values in (x, x_test))
    noise, prior_precision = NOISE / scale**2, x.shape[1] / SCALE**2
    covariance = np.linalg.inv(phi.T @ (weights[:, None] * phi) / noise + prior_precision * np.eye(phi.shape[1]))
    mean = covariance @ phi.T @ (weights * (y - shift) / scale) / noise
    ridge = Ridge(alpha=prior_precision * noise, fit_intercept=False).fit(phi, (y - shift) / scale, weights)
    np.testing.assert_allclose(mean, ridge.coef_, atol=1e-10)
    variance = np.einsum("bi,ij,bj->b", phi_test, covariance, phi_test) + noise
    return shift + scale * phi_test @ mean, scale**2 * variance


@pytest.mark.thin(2)
@pytest.mark.parametrize("weighted", [False, True])
def test_laplace_of_a_linear_network_is_bayesian_linear_regression(weighted):
    """The covariance is exact; the mean is where Adam stops, 2e-8 of a standard deviation from the optimum here."""
    x, y, x_test = problem()
    weights = np.random.default_rng(1).uniform(0, 3, len(x)) if weighted else None
    model = BayesianRegressor("laplace", (), prior_scale=SCALE, noise=NOISE, random_state=0, epochs=280)
    mean, std = model.fit(x, y, weights).predict(x_test, return_std=True)
    expected, variance = exact(x, y, x_test, weights)
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=1e-6)
    np.testing.assert_allclose((mean - expected) / np.sqrt(variance), 0, atol=1e-4)


@pytest.mark.slow
def test_full_covariance_of_a_linear_network_is_near_it():
    """Draws of the gradient leave the bound's optimum uncertain: a twentieth of a standard deviation, a tenth of the deviation.

    The prediction's mean over 4,000 draws has a standard error of 1/63 of the epistemic deviation, less than the noise's.
    """
    x, y, x_test = problem()
    model = BayesianRegressor(
        "full_covariance", (), prior_scale=SCALE, noise=NOISE, random_state=0, epochs=250, prediction_draws=4000
    )
    mean, std = model.fit(x, y).predict(x_test, return_std=True)
    expected, variance = exact(x, y, x_test)
    np.testing.assert_allclose((mean - expected) / np.sqrt(variance), 0, atol=0.1)
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=0.1)


def test_scaled_predictive_is_that_of_the_scaled_gaussians():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(7, 5, 2, generator=generator, dtype=torch.float64)
    noise = torch.tensor([0.3, 0.8], dtype=torch.float64)
    shift, scale = torch.tensor([3.0, -1.0]).double(), torch.tensor([2.0, 0.5]).double()
    scaled = UnitsPredictive(RegressionPredictive(Outputs(kept=f), lambda f: (f, noise)), shift, scale)
    direct = RegressionPredictive(Outputs(kept=shift + scale * f), lambda f: (f, noise * scale**2))
    y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    for name in ("mean", "std", "variance", "epistemic", "aleatoric", "outputs"):
        torch.testing.assert_close(getattr(scaled, name), getattr(direct, name))
    for name in ("log_prob", "cdf", "crps"):
        torch.testing.assert_close(getattr(scaled, name)(y), getattr(direct, name)(y))
    torch.testing.assert_close(scaled.quantile([0.1, 0.7]), direct.quantile([0.1, 0.7]))
    torch.testing.assert_close(scaled.interval(0.8), direct.interval(0.8))


def test_merged_rows_stand_for_their_copies():
    rng = np.random.default_rng(0)
    x, y, weights = rng.normal(size=(6, 2)), rng.normal(size=(6, 1)), np.array([3, 2, 1, 2, 1, 4.0])
    order = rng.permutation(13)
    copies = Rows(*(part.repeat(weights.astype(int), axis=0)[order] for part in (x, y, np.ones(6))))
    merged, other = copies.merged(), Rows(x, y, weights).merged()
    for one, two in ((merged.x, other.x), (merged.y, other.y), (merged.weights, other.weights)):
        np.testing.assert_array_equal(one, two)


def test_thinned_rows_stand_for_all():
    """A row is kept in proportion to its weight: n = 2000 draws of 10 of 100 rows, half of which weigh three times as much.

    The expected share of heavy rows is below 3/4, which is for draws with replacement, and above 0.7.
    """
    weights = np.where(np.arange(100) < 50, 3.0, 1.0)
    rows = Rows(np.arange(100.0)[:, None], np.zeros((100, 1)), weights)
    share = np.mean([(rows.thinned(10, seed).x < 50).mean() for seed in range(2000)])
    error = np.sqrt(0.25 * 0.75 / 20000)
    assert 0.7 < share < 0.75 + 5 * error
    assert rows.thinned(10, 0).num_data == pytest.approx(200)
