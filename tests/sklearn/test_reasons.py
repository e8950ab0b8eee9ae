"""`explain`: contributions of columns against exact terms and enumerated Shapley values, and why rows are unusual."""

import itertools
import math
import re

import numpy as np
import pandas
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")

from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.fitted import FittedTable
from bayesify.sklearn.reasons import MAX_GROUPS, Groups, _contributions

NUM = 60


def numbers(columns=4, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(NUM, columns)) * (1 + np.arange(columns)) + 10


def linear(columns, mean, noise):
    """A linear network with given weights for scaled mean and log-spread, and what one unit of each column adds to the mean."""
    x = numbers(columns)
    y = x[:, 0] + np.random.default_rng(1).normal(size=NUM)
    options = {"hidden": (), "likelihood": "heteroscedastic_gaussian", "epochs": 1, "random_state": 0}
    model = BayesianRegressor("point", **options).fit(x, y)
    with torch.no_grad():
        weights = dict(model.model_.named_parameters())["posteriors.0.value.0/weight"]
        weights.copy_(torch.tensor([mean, noise]))
    return model, model.fitted_.units.scale[0] * np.array(mean) / model.fitted_.encoding.std


def test_contributions_to_an_additive_model_are_its_terms_and_noise_shows_in_the_width_alone():
    model, slope = linear(4, [0.5, -2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0])
    x = numbers(seed=2)
    found = model.explain(x)
    typical = np.array([float(found.typical[name]) for name in found.columns])
    np.testing.assert_allclose(found.moves, (x - typical) * slope, rtol=1e-4, atol=1e-4)  # `typical` has six digits
    lower, upper = model.predict_interval(x)
    np.testing.assert_allclose(found.typical_value + found.moves.sum(1), model.predict(x), rtol=1e-6)
    np.testing.assert_allclose(found.typical_width + found.widens.sum(1), upper - lower, rtol=1e-6)
    assert not found.moves[:, 2:].any()
    assert found.widens[:, 2].all()
    assert not found.widens[:, [0, 1, 3]].any()
    told = found.told("widens")  # x2 narrows the interval of some rows, which have no reason for a wide one
    assert {text.split("=")[0] for text in told} == {"x2", ""}
    assert [bool(text) for text in told] == (found.widens[:, 2] > 0).tolist()


def test_pairs_of_columns_share_what_they_do_together_as_shapley_values_do():
    """By enumeration of all orders; contributions add up for any function."""
    x, typical = numbers(5)[:7], np.full(5, 10.0)
    groups = Groups(tuple("abcd"), np.array([0, 1, 1, 2, 3]), (False,) * 4)

    def pairs(x):
        return (x[:, 0] * x[:, 2] + x[:, 1] ** 2 * x[:, 3] + np.exp(x[:, 4] / 10))[:, None]

    def value(function, own):
        return function(np.where(np.isin(groups.places, own), x, typical))[:, 0]

    def shapley(column):
        orders = [(order, order.index(column)) for order in itertools.permutations(range(4))]
        steps = (value(pairs, order[: at + 1]) - value(pairs, order[:at]) for order, at in orders)
        return sum(steps) / math.factorial(4)

    rank = np.broadcast_to(np.arange(4), (7, 4))
    each, _, _ = _contributions(pairs, rank, groups, x, typical, pairs(typical[None]))
    np.testing.assert_allclose(each[..., 0], np.column_stack([shapley(column) for column in range(4)]), rtol=1e-9)

    def joined(x):
        return x.prod(1, keepdims=True)

    each, _, _ = _contributions(joined, rank, groups, x, typical, joined(typical[None]))
    np.testing.assert_allclose(each.sum((1, 2)), value(joined, range(4)) - 1e5, rtol=1e-9)


def test_a_wide_table_costs_twenty_predictions_and_names_the_columns_of_each_row(monkeypatch):
    columns = 3 * MAX_GROUPS
    slopes = [0.01] * columns
    model, _ = linear(columns, slopes, [0.0] * columns)
    x = np.repeat(numbers(columns)[:1], 200, axis=0)
    x[np.arange(200), np.arange(200) % columns] += 500  # each row is odd in another column
    counted = []
    plain = FittedTable.predict_scaled
    monkeypatch.setattr(
        FittedTable,
        "predict_scaled",
        lambda self, inputs, draws: counted.append(len(inputs)) or plain(self, inputs, draws),
    )
    found = model.explain(x)
    assert sum(counted) <= 20 * len(x) + 32 * columns  # and what ranks the columns, once for a call
    strongest = np.nan_to_num(found.moves).argmax(1)
    np.testing.assert_array_equal(strongest, np.arange(200) % columns)
    assert (np.isfinite(found.moves).sum(1) == MAX_GROUPS - 1).all()
    total = found.typical_value[0] + np.nansum(found.moves, 1) + found.others_move
    np.testing.assert_allclose(total, model.predict(x), rtol=1e-6)
    counted.clear()
    narrow = linear(MAX_GROUPS, slopes[:MAX_GROUPS], [0.0] * MAX_GROUPS)[0]
    counted.clear()
    narrow.explain(x[:, :MAX_GROUPS])
    assert sum(counted) <= 20 * len(x)


def frame(seed=0):
    generator = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "area": generator.uniform(20, 120, NUM),
            "town": generator.choice(["north", "south"], NUM, p=[0.7, 0.3]),
            "sold": pandas.date_range("2020-01-01", periods=NUM),
            "rooms": np.where(np.arange(NUM) % 9 == 0, np.nan, generator.integers(1, 6, NUM)),
        }
    )


@pytest.mark.parametrize("kind", [BayesianRegressor, BayesianClassifier])
def test_reasons_name_the_column_that_is_odd_and_do_not_depend_on_other_rows(kind):
    y = frame()["area"] if kind is BayesianRegressor else np.where(frame()["area"] > 70, "large", "small")
    model = kind("ensemble", hidden=(8,), epochs=20, random_state=0).fit(frame(), y)
    new = frame(1).iloc[:6].reset_index(drop=True)
    new.loc[1, "area"] = 500.0
    new.loc[2, "town"] = "west"
    new.loc[3, "area"] = np.nan
    new.loc[4, "sold"] = pandas.Timestamp("2031-01-01")
    with pytest.warns(UserWarning, match="are empty"):
        found = model.explain(new)
    with pytest.warns(UserWarning, match="are empty"):
        flags = model.unusual(new)
    assert [bool(reason) for reason in found.unusual] == flags.tolist()
    assert re.search(r"area=500 is more than [\d.]+ standard deviations away", found.unusual[1])
    assert "town=west is a text that did not occur in training" in found.unusual[2]
    assert "area is empty, but it was never empty in training" in found.unusual[3]
    assert "sold=2031-01-01 is more than" in found.unusual[4]
    assert found.typical["town"] == "north"
    assert found.typical["sold"] in set(map(str, frame()["sold"].dt.date[29:31]))
    alone = model.explain(new.iloc[:1])
    np.testing.assert_allclose(alone.moves, found.moves[:1], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(alone.widens, found.widens[:1], rtol=1e-6, atol=1e-9)
    assert found.told()[0]


def test_targets_in_columns_have_contributions_each():
    x = numbers()
    model = BayesianRegressor("point", (4,), epochs=2, random_state=0).fit(x, x[:, :2])
    found = model.explain(x[:5])
    assert found.moves.shape == found.widens.shape == (5, 4, 2)
    np.testing.assert_allclose(found.typical_value + found.moves.sum(1), model.predict(x[:5]), rtol=1e-6)
    with pytest.raises(ValueError, match="2 targets"):
        found.told()


def test_rows_of_a_frame_that_may_not_be_written_to_are_explained():
    x = pandas.DataFrame(numbers(3), columns=list("abc"))
    model = BayesianRegressor("point", hidden=(), epochs=1, random_state=0).fit(x, x["a"])
    few = x[:2]
    few.to_numpy().flags.writeable = False
    assert model.explain(few).moves.shape == (2, 3)
    assert model.unusual(few).shape == (2,)
