"""scikit-learn's own checks of its estimators, all of them: with defaults, and by a method's name."""

import pytest

pytest.importorskip("sklearn", minversion="1.7")

from sklearn.utils.estimator_checks import check_estimator

from bayesify.sklearn import BayesianClassifier, BayesianRegressor

SMALL = {"hidden": (10,), "epochs": 100, "learning_rate": 0.05, "num_draws": 2, "prediction_draws": 20}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute each on a free core; the default limit is for tests of seconds
@pytest.mark.parametrize(
    "estimator",
    [BayesianRegressor(), BayesianClassifier(), BayesianRegressor("laplace", **SMALL)],
    ids=["regressor", "classifier", "recipe"],
)
@pytest.mark.filterwarnings("ignore")
def test_all_checks_pass(estimator):
    results = check_estimator(estimator, on_skip=None, on_fail=None)
    assert {entry["check_name"]: str(entry["exception"]) for entry in results if entry["status"] == "failed"} == {}
    assert {entry["status"] for entry in results} <= {"passed", "skipped"}
    assert sum(entry["status"] == "passed" for entry in results) > 45
