"""Integer options of every method: small values either work or are refused with the name of the option and a remedy."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from bayesify.methods import METHODS
from bayesify.sklearn import BayesianClassifier, BayesianRegressor

X = np.random.default_rng(0).normal(size=(16, 2))


def integer_options() -> list[tuple[str, str]]:
    found = [("auto", "members")]
    for name, method in METHODS.items():
        made = inspect.signature(method.fit or method.posterior)  # type: ignore[arg-type]
        for option in made.parameters.values():
            words, several = str(option.annotation), ("list", "tuple", "Sequence")
            is_count = re.search(r"\bint\b", words) and not any(word in words for word in several)
            if is_count and option.name != "memory":
                found.append((name, option.name))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("method", "option"), integer_options())
def test_small_values_work_or_are_refused(method: str, option: str) -> None:
    """-1 is always refused, and 2 always works."""
    for value in (-1, 0, 1, 2):
        kind = BayesianClassifier if value == 2 else BayesianRegressor
        model = kind(method=method, method_options={option: value}, hidden=(3,), epochs=1, random_state=0)
        refused = ""
        try:
            model.fit(X, X[:, 0] > 0 if value == 2 else X[:, 0])
        except ValueError as error:
            refused = str(error)
        if refused:
            assert value < 2
            assert f": {option}={value}; give an integer" in refused or (method, option) == ("subnetwork", "size")
        else:
            assert value >= 0
            assert np.isfinite(model.predict(X)).all()


def test_options_of_every_method_are_found() -> None:
    assert {"auto", "ensemble", "inducing", "swag", "hmc", "deep_gp", "subnetwork"} <= {
        name for name, _ in integer_options()
    }


@pytest.mark.parametrize("value", [1, 2.0, "3", True])
def test_the_default_method_needs_two_members(value: object) -> None:
    model = BayesianRegressor(method_options={"members": value})
    with pytest.raises(
        ValueError, match=rf"members={value!r}; give an integer of at least 2, .* choose method='point'"
    ):
        model.fit(X, X[:, 0])
