import warnings
from collections.abc import Callable
from typing import Any

import pytest
from sklearn import model_selection

import bayesify
from bayesify.sklearn.estimator import BayesianEstimator
from bayesify.sklearn.settings import EFFORTS, Effort

LONGEST = 3
"""Epochs of a training that is only to run."""


@pytest.fixture
def trainings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How long a page or an example trains: a few epochs ("brief"), or as it is written there ("whole").

    Returns: The names with which its code begins: a `range` that is as short, for loops of its own.
    """
    if request.param == "brief":
        monkeypatch.setattr(bayesify, "fit", briefly(bayesify.fit))
        monkeypatch.setattr(BayesianEstimator, "__setattr__", with_few_epochs)
        for effort in EFFORTS:
            monkeypatch.setitem(EFFORTS, effort, Effort(4, 4, 4, 1, 2, 30, 2))
        monkeypatch.setattr("bayesify.sklearn.settling.MAX_ROUNDS", 1)
        monkeypatch.setattr("bayesify.sklearn.settling.DOUBTFUL_LEVERAGE", 1.0)
        monkeypatch.setattr(model_selection, "cross_validate", in_two_folds(model_selection.cross_validate))
        # A network after three steps has no best prior precision.
        warnings.filterwarnings("ignore", "tune_prior_precision")
        return {"range": lambda *given: range(*given)[:LONGEST]}
    return {}


def with_few_epochs(estimator: BayesianEstimator, name: str, value: Any) -> None:
    object.__setattr__(estimator, name, LONGEST if name == "epochs" and value is not None else value)


def in_two_folds(validate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: validate(*args, **{**options, "cv": 2})


def briefly(fit: Callable[..., Any]) -> Callable[..., Any]:
    def brief(*args: Any, **options: Any) -> Any:
        for key in options.keys() & {"epochs", "map_epochs"}:
            options[key] = min(options[key], LONGEST)
        return fit(*args, **options)

    return brief
