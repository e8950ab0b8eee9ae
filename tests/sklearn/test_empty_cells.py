"""Rows with empty cells: their distributions are as wide as out-of-fold predictions of such rows require."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("pandas")
pytest.importorskip("scipy")

import pandas
from scipy import stats

import bayesify
from bayesify.sklearn import BayesianRegressor, recipe
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.empty_cells import EmptyCells, is_empty
from bayesify.sklearn.recalibration import PRIOR_ROWS

ROWS = 400


def normal_scores(rows, factor):
    return stats.norm.cdf(factor * stats.norm.ppf((np.arange(rows) + 0.5) / rows))


def test_the_factor_of_a_column_is_the_spread_of_its_rows():
    """The scores of 1,000 rows are twice as wide as stated, so that the factor is 2, shrunk by 30 rows of weight to 1."""
    marked = np.arange(1300) < 1000
    inputs = np.column_stack((np.ones(1300), marked, ~marked)).astype(float)
    u = np.concatenate((normal_scores(1000, 2.0), normal_scores(300, 0.5)))
    found = EmptyCells.of((1, 2), inputs, u, np.ones(1300))
    assert found == EmptyCells((1,), (pytest.approx(1 + 1000 / (1000 + PRIOR_ROWS), rel=1e-3),))
    assert found(inputs)[:, 0].tolist() == [found.factors[0] if own else 1.0 for own in marked]
    assert found(inputs[1000:]) is None
    assert EmptyCells()(inputs) is None


def test_rows_with_several_empty_cells_take_the_largest_factor():
    found = EmptyCells((0, 2), (1.5, 3.0))
    assert found(np.array([[1.0, 9.0, 1.0], [1.0, 9.0, 0.0], [0.0, 9.0, 0.0]]))[:, 0].tolist() == [3.0, 1.5, 1.0]


def test_rows_with_empty_cells_do_not_widen_the_others():
    """Complete rows are stated exactly, so that their map is the identity although other rows are three times as wide."""
    x = (np.arange(1000) < 300).astype(float)[:, None]
    u = np.concatenate((normal_scores(300, 3.0), normal_scores(700, 1.0)))
    rows = recipe.Rows(x, np.zeros((1000, 1)), np.ones(1000))
    found, empty = recipe._recalibrate(u, rows, (0,))
    assert found.said == pytest.approx(found.seen, abs=0.01)
    assert empty.factors[0] == pytest.approx(1 + 2 * 300 / 330, rel=0.01)
    rare = recipe.Rows((np.arange(1000) < 10).astype(float)[:, None], rows.y, rows.weights)
    assert recipe._recalibrate(u, rare, (0,)) == (recipe.Recalibration.of(u, rows.weights), EmptyCells())


def test_an_unknown_number_that_matters_gives_wide_intervals(tmp_path):
    """The target is age plus noise of 0.2, and a fifth of the ages are empty; new rows, 5 standard errors."""
    draw = np.random.default_rng(0)
    age, other = draw.normal(size=(2, ROWS + 2000))
    y = age + 0.2 * draw.normal(size=ROWS + 2000)
    age[draw.random(ROWS + 2000) < 0.2] = np.nan
    frame = pandas.DataFrame({"age": age, "other": other})
    options = {"likelihood": "heteroscedastic_gaussian", "target_transform": "none", "hidden": (16,), "epochs": 60}
    model = BayesianRegressor(**options, random_state=0).fit(frame[:ROWS], y[:ROWS])
    new, empty = frame[ROWS:], np.isnan(age[ROWS:])
    lower, upper = model.predict_interval(new)
    inside = ((lower <= y[ROWS:]) & (y[ROWS:] <= upper))[empty].mean()
    errors = np.sqrt(0.09 / empty.sum() + 0.09 / np.isnan(age[:ROWS]).sum())  # of the new rows and of the factor
    assert model.fitted_.empty.factors[0] > 1.2  # 60 steps teach the network too little about empty cells
    assert inside > 0.9 - 5 * errors
    bayesify.save(model, tmp_path / "model.safetensors")
    again = bayesify.load(tmp_path / "model.safetensors")
    assert again.fitted_.empty == model.fitted_.empty
    note = f"{model.fitted_.empty.factors[0]:.2f} times for 'age'."
    assert [text.endswith(note) for text in again.choices_["left_out"]] == [True]
    assert np.array_equal(again.predict_interval(new)[1], upper)


def test_an_unknown_text_that_matters_gives_wide_intervals(tmp_path):
    """Each of 12 texts has its own effect, and a fifth of the texts are empty; new rows, 5 standard errors."""
    draw = np.random.default_rng(0)
    codes, other = draw.integers(12, size=ROWS + 2000), draw.normal(size=ROWS + 2000)
    y = np.linspace(-2, 2, 12)[codes] + 0.2 * draw.normal(size=ROWS + 2000)
    kind = np.array(list("abcdefghijkl"), dtype=object)[codes]
    kind[draw.random(ROWS + 2000) < 0.2] = None
    frame = pandas.DataFrame({"other": other, "kind": kind})
    options = {"likelihood": "heteroscedastic_gaussian", "target_transform": "none", "hidden": (16,), "epochs": 60}
    model = BayesianRegressor(**options, random_state=0).fit(frame[:ROWS], y[:ROWS])
    new, empty = frame[ROWS:], frame["kind"].isna().to_numpy()
    lower, upper = model.predict_interval(new)
    inside = ((lower <= y[ROWS:]) & (y[ROWS:] <= upper))[empty[ROWS:]].mean()
    errors = np.sqrt(0.09 / empty[ROWS:].sum() + 0.09 / empty[:ROWS].sum())  # of the new rows and of the factor
    assert model.fitted_.empty.factors[0] > 1.2
    assert inside > 0.9 - 5 * errors
    bayesify.save(model, tmp_path / "model.safetensors")
    again = bayesify.load(tmp_path / "model.safetensors")
    assert again.fitted_.empty == model.fitted_.empty
    note = f"{model.fitted_.empty.factors[0]:.2f} times for 'kind'."
    assert [text.endswith(note) for text in again.choices_["left_out"]] == [True]
    assert np.array_equal(again.predict_interval(new)[1], upper)


def test_empty_texts_are_found_among_the_inputs():
    """Column "rare" has only the input of rare texts, "whole" has no empty cell, and "one" has a single text."""
    columns = {
        "age": [np.nan, *range(39)],
        "whole": ["a", "b"] * 20,
        "kind": [None, *["a", "b", "c"] * 13],
        "rare": [None, None, *(f"text {row // 2}" for row in range(38))],
        "one": ["a"] * 37 + [None] * 3,
    }
    learned, inputs = Columns.learn(pandas.DataFrame(columns), "test", None, None, lambda y, weights: y)
    preparation = learned.preparation
    names = preparation.owners(learned.schema)
    assert [{names[place] for place in own} for own in preparation.text_marks] == [{"kind"}, {"rare"}, {"one"}]
    for own, name in zip(preparation.text_marks, ("kind", "rare", "one"), strict=True):
        assert is_empty(inputs, own).tolist() == [text is None for text in columns[name]]
    both = EmptyCells.of(
        (*preparation.marks, *preparation.text_marks), np.tile(inputs, (30, 1)), normal_scores(1200, 2.0), np.ones(1200)
    )
    assert both.note(learned).count(" times for ") == len(both.factors) == len(both.places) + len(both.texts)


def test_the_note_names_the_columns_in_which_a_cell_is_empty():
    frame = pandas.DataFrame({"kind": list("ab") * 10, "age": [np.nan, *range(19)], "size": [*range(19), np.nan]})
    columns, inputs = Columns.learn(frame, "test", None, None, lambda y, weights: y)
    places = columns.preparation.marks
    assert inputs[:, places].sum(0).tolist() == [1.0, 1.0]
    assert EmptyCells().note(columns) == EmptyCells(places, (1.5, 2.0)).note(None) == ""
    note = EmptyCells(places, (1.5, 2.0)).note(columns)
    assert note.endswith("had larger errors: 1.50 times for 'age', 2.00 times for 'size'.")


def test_the_note_names_a_column_with_several_inputs_once():
    """A column with dates has several inputs, and each of them has its own mark of empty cells."""
    sold = pandas.date_range("2020-01-01", periods=20, freq="37D").to_series(index=range(20))
    sold[[3, 4]] = pandas.NaT
    columns, _ = Columns.learn(
        pandas.DataFrame({"sold": sold, "age": [np.nan, *range(19)]}), "test", None, None, lambda y, weights: y
    )
    places, names = columns.preparation.marks, columns.preparation.owners(columns.schema)
    assert [names[place] for place in places].count("sold") > 1
    factors = [1.5 if names[place] == "age" else 1.1 + 0.1 * index for index, place in enumerate(places)]
    widest = max(factor for factor, place in zip(factors, places, strict=True) if names[place] == "sold")
    note = EmptyCells(places, tuple(factors)).note(columns)
    assert sorted(note.rpartition(": ")[2].removesuffix(".").split(", ")) == sorted(
        [f"{widest:.2f} times for 'sold'", "1.50 times for 'age'"]
    )
