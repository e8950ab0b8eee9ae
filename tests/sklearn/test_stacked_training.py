"""Networks that an estimator trains together are those that it trains one by one, and the start that it gives them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

from bayesify.likelihoods import Categorical, Gaussian
from bayesify.methods import METHODS
from bayesify.predictive.base import Outputs
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.networks import NetworkShape
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.rows import Rows, stacked
from bayesify.sklearn.settings import Settings
from bayesify.sklearn.settling import recalibrate_by_leverage, settle
from bayesify.sklearn.training import Evidence, Start, train_methods


def make_network(num_inputs: int, hidden: tuple[int, ...], num_outputs: int = 1, seed: int = 0) -> nn.Module:
    return NetworkShape(num_inputs, hidden, "tanh", num_outputs).make(seed)


def make(method: str, alike: bool = False, classes: bool = False) -> list[Start]:
    """Three tables with different rows, priors, noise and seeds, and unless `alike` different numbers of rows, and weights."""
    starts = []
    for index in range(3):
        random = np.random.default_rng(index)
        x = random.normal(size=(20 if alike else 20 + index, 2))
        weights = np.ones(len(x)) if alike else 1.0 + random.random(len(x))
        y = (x[:, 0] > 0).astype(np.int64) if classes else x[:, :1] + 0.1 * random.normal(size=(len(x), 1))
        likelihood = Categorical() if classes else Gaussian(0.1 * (index + 1)).double()
        settings = Settings(METHODS[method], prior_scale=1.0 + index, epochs=3, seed=index)
        starts.append(Start(make_network(2, (5,), 1 + classes, index), likelihood, Rows(x, y, weights), settings))
    return starts


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("method", "alike", "tolerance"),
    [
        ("point", False, 1e-5),
        ("mean_field", False, 1e-5),
        ("rank_one", False, 1e-5),
        ("ensemble", False, 1e-5),
        ("global_inducing", False, 1e-12),
        ("mean_field", True, 1e-9),
        ("full_covariance", True, 1e-9),
        ("inducing", True, 1e-9),
        ("global_inducing", True, 1e-9),
        ("walsh_hadamard", True, 1e-9),
        ("laplace", False, 1e-5),
        ("subnetwork", True, 1e-9),
        ("swag", True, 1e-9),
        ("deep_gp", True, 1e-4),
        ("deep_gp", False, 0.0),
        ("vogn", True, 0.0),
    ],
)
def test_together_as_one_by_one(method: str, alike: bool, tolerance: float) -> None:
    """1e-5 where Adam's epsilon of 1e-8 stands beside gradients whose scale differs by the number of rows; global inducing inputs
    of different number are not stacked. 1e-4 for deep Gaussian processes: rows that differ by 1e-15 of
    themselves already change what they learn by 2e-5, since kernel matrices of rows close together are badly conditioned."""
    check_together(method, alike, tolerance)


@pytest.mark.parametrize(("method", "tolerance"), [("laplace", 1e-9), ("swag", 1e-9), ("deep_gp", 1e-4)])
def test_classes_together_as_one_by_one(method: str, tolerance: float) -> None:
    check_together(method, True, tolerance, classes=True)


def check_together(method: str, alike: bool, tolerance: float, classes: bool = False) -> None:
    together = train_methods(make(method, alike, classes))
    for mine, start in zip(together, make(method, alike, classes), strict=True):
        (plain,) = train_methods([start])
        assert getattr(mine, "training", False) == getattr(plain, "training", False)
        found, wanted = (
            model.state_dict() if isinstance(model, nn.Module) else model.state() for model in (mine, plain)
        )
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["auto", "laplace", "mean_field", "temperature_scaled"])
def test_estimators_together_as_one_by_one(method: str) -> None:
    """From noise that is settled to recalibrated quantiles. The tolerance is that of the plain networks above."""
    tables = [(curve(40 + index, 0.2).x, curve(40 + index, 0.2).y[:, 0]) for index in range(2)]
    parameters = {"hidden": (5,), "epochs": 4}
    numbers = [BayesianRegressor(method, random_state=seed, **parameters) for seed in (0, 1)]
    for one, (x, y) in zip(BayesianRegressor.fit_several(numbers, tables), tables, strict=True):
        alone = clone(one).fit(x, y)
        np.testing.assert_allclose(one.predict_quantiles(x), alone.predict_quantiles(x), rtol=1e-3, atol=1e-3)
    labels = [(x, y > 0) for x, y in tables]
    classes = [BayesianClassifier(method, random_state=seed, **parameters) for seed in (0, 1)]
    for other, (x, label) in zip(BayesianClassifier.fit_several(classes, labels), labels, strict=True):
        np.testing.assert_allclose(other.predict_proba(x), clone(other).fit(x, label).predict_proba(x), atol=1e-4)


def test_padded_rows_have_no_weight() -> None:
    rows = [start.rows for start in make("point")]
    batch = stacked(rows)
    assert batch.x.shape == (3, 22, 2)
    assert len(batch) == 22
    assert batch.weights is not None
    assert batch.weights[0, 20:].tolist() == [0, 0]
    assert torch.equal(batch.weights[2], torch.from_numpy(rows[2].weights))


def curve(num_rows: int, noise: float) -> Rows:
    """Rows of a curve of variance 1 with noise of a given variance."""
    random = np.random.default_rng(0)
    x = random.uniform(-1.7, 1.7, (num_rows, 2))
    y = x[:, :1] + np.sin(2 * x[:, 1:])
    return Rows(x, y / y.std() + math.sqrt(noise) * random.normal(size=y.shape), np.ones(num_rows))


def settled(net: nn.Module, rows: Rows, **settings: Any) -> Start:
    return settle([Start(net, Gaussian(1.0), rows, Settings(METHODS["laplace"], **settings))])[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("noise", "epochs"), [(0.01, 400), (0.5, 200)])
def test_noise_is_settled(noise: float, epochs: int) -> None:
    """Within a factor of 2: 120 rows leave 13 % by themselves, and a short training some of the curve."""
    start = settled(make_network(2, (20,)), curve(120, noise), epochs=epochs)
    assert isinstance(start.likelihood, Gaussian)
    assert 0.5 * noise < float(start.likelihood.noise.detach()) < 2 * noise


@pytest.mark.slow
def test_more_weights_than_rows_do_not_take_noise_for_signal() -> None:
    """From little noise alone 120 rows of noise in 12 columns are settled at 0.4; the evidence knows better."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 12)), random.normal(size=(120, 1))
    start = settled(make_network(12, (50,)), Rows(x, y, np.ones(120)), epochs=300)
    assert isinstance(start.likelihood, Gaussian)
    assert float(start.likelihood.noise.detach()) > 0.5


def test_leverage_counts_the_fitted_parameters() -> None:
    """Of a linear network under a wide prior h is the hat matrix of least squares with an intercept, and the noise what these leave
    over the rows less the parameters."""
    rows = curve(40, 0.5)
    start = settled(make_network(2, ()), rows, prior_scale=100.0, epochs=150)
    design = np.column_stack((rows.x, np.ones(40)))
    hat = np.diag(design @ np.linalg.solve(design.T @ design, design.T))
    assert start.evidence is not None
    np.testing.assert_allclose(
        start.evidence.leverage[:, 0].numpy(), hat, rtol=0.02
    )  # the prior is not infinitely wide
    left = rows.y - design @ np.linalg.lstsq(design, rows.y, rcond=None)[0]
    assert isinstance(start.likelihood, Gaussian)
    assert float(start.likelihood.noise.detach()) == pytest.approx((left**2).sum() / (40 - 3), rel=0.02)


def test_recalibration_sees_rows_as_left_out() -> None:
    """Least squares: probabilities of targets are those of a fit without the row, which standard deviations away they are."""
    rows = curve(90, 0.5)
    x, y, _ = rows.tensors()
    design = torch.cat((x, torch.ones(90, 1, dtype=torch.float64)), 1)
    inverse = torch.linalg.inv(design.T @ design)
    noise, hat = 0.4, (design @ inverse * design).sum(-1, keepdim=True)
    mean = design @ (inverse @ design.T @ y)

    gaussian = OutputGaussian(mean, (noise * hat).unsqueeze(-1), seed=0)
    found = recalibrate_by_leverage(
        Evidence(rows, hat, torch.zeros_like(y)), Gaussian(noise).double().closed_form(gaussian)
    )
    scores = []
    for row in range(90):
        kept = torch.arange(90) != row
        part = torch.linalg.inv(design[kept].T @ design[kept])
        error = y[row] - design[row] @ (part @ design[kept].T @ y[kept])
        scores.append(float(error / (noise * (1 + design[row] @ part @ design[row])).sqrt()))
    places = torch.special.ndtr(torch.tensor(scores, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found.said, Recalibration.of(places, np.ones(90)).said, atol=1e-6)


def test_a_method_that_holds_less_of_its_targets_than_its_start_is_not_widened_for_it():
    torch.manual_seed(0)
    x, noise = torch.randn(100, 1, dtype=torch.float64), torch.randn(100, 1, dtype=torch.float64)
    rows = Rows(x.numpy(), noise.numpy(), np.ones(100))
    leverage = torch.full((100, 1), 0.6, dtype=torch.float64)
    evidence = Evidence(rows, leverage, 0.4 * noise)

    def recalibration(share: float):
        """Of a method of the right noise, which has fitted a share of each target."""
        likelihood = Gaussian(1.0, learn=False).double()
        return recalibrate_by_leverage(evidence, likelihood.predictive(Outputs(kept=share * noise[None])))

    assert np.std(recalibration(0.0).said) < 1.15 * np.std(recalibration(0.0).seen)  # nothing fitted: as it is
    assert np.allclose(
        recalibration(0.0).said, recalibration(0.6).said, atol=0.05
    )  # residuals of the start: by 1 / (1 - h)
