"""Linear models among the choices of the default method: chosen if and only if the target is linear in its inputs."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("scipy")

from bayesify.sklearn import BayesianRegressor, recipe
from bayesify.sklearn.settings import Settings

OPTIONS = {"likelihood": "heteroscedastic_gaussian", "target_transform": "none", "random_state": 0}


def table(bend, rows):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 4))
    signal = x @ [2.0, -1.0, 0.5, 0.0] + bend * np.abs(x[:, 3])
    return x, signal, signal + 0.5 * draw.normal(size=rows)


def test_a_linear_target_is_predicted_as_by_least_squares():
    """The error of the mean is at most 1.3 times the error of least squares, the best linear unbiased estimate."""
    x, signal, y = table(0.0, 1100)
    model = BayesianRegressor(**OPTIONS).fit(x[:100], y[:100])
    ones = np.ones((1100, 1))
    known = np.column_stack((x, ones)) @ np.linalg.lstsq(np.column_stack((x, ones))[:100], y[:100], rcond=None)[0]
    errors = [np.sqrt(np.mean(np.square(found - signal[100:]))) for found in (model.predict(x[100:]), known[100:])]
    assert model.choices_["hidden"] == ()
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.slow
def test_a_target_with_a_kink_keeps_its_networks():
    x, _, y = table(3.0, 100)
    assert BayesianRegressor(**OPTIONS).fit(x, y).choices_["hidden"] == recipe.HIDDEN


def test_linear_models_need_a_better_trial_and_respect_the_given_layers(monkeypatch):
    """A trial that linear models lose ends the search before any further training."""
    x, _, y = table(3.0, 100)
    runs = []
    train = recipe._train_candidates

    def note(rows, pairs, settings, *, brief=False):
        runs.append((settings.linear, brief))
        return train(rows, pairs, settings, brief=brief)

    monkeypatch.setattr(recipe, "_train_candidates", note)
    short = {**OPTIONS, "likelihood": "auto", "epochs": 40}
    model = BayesianRegressor(**short).fit(x, y)
    assert (True, True) in runs
    assert (True, False) not in runs
    assert any(name.startswith("linear, ") for name in model.choices_["tried"])
    runs.clear()
    BayesianRegressor(hidden=(8,), **short).fit(x, y)
    assert not any(linear for linear, _ in runs)


def test_linear_models_get_scaled_numbers_without_a_limit():
    rows = recipe.Rows(np.array([[-100.0], [1.0], [99.0]]), np.zeros((3, 1)), np.ones(3))
    encode = recipe.encode_inputs(rows, Settings(linear=True))
    assert encode(np.array([[1000.0]])) == pytest.approx(1000 / rows.x.std())
