"""Columns as numbers: kinds, what is left out, and statistics of the training rows alone."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pandas
import pytest

from bayesify.sklearn.units import TargetUnits
from bayesify.tables.columns import Features, read_features
from bayesify.tables.encoding import Encoding
from bayesify.tables.errors import InputError
from bayesify.tables.level_means import class_scores, cross_fitted, level_means, normal_scores
from bayesify.tables.preparation import MAX_FEW_LEVELS, MAX_RANGES_OUTSIDE, Preparation
from bayesify.tables.targets import read_target

ROWS = 40


def table(**columns):
    return pandas.DataFrame(columns)


def test_kinds_of_columns():
    frame = table(
        number=np.arange(ROWS) * 0.5,
        quoted=[str(value) for value in range(ROWS)],
        truth=[True, False] * (ROWS // 2),
        text=["a", "b", None, "c"] * (ROWS // 4),
        constant=[3.0] * ROWS,
        empty=[None] * ROWS,
        customer_id=np.arange(ROWS),
    )
    features = read_features(frame)
    assert features.number_names == ("number", "quoted", "truth")
    assert features.code_names == ("text",)
    assert features.levels == (("a", "b", "c"),)
    assert features.codes[:4, 0].tolist() == [0, 1, -1, 2]
    assert [note.split("'")[1] for note in features.notes] == ["constant", "empty", "customer_id"]


def test_free_text_is_left_out():
    frame = table(x=np.arange(80.0), comment=[f"remark {index}" for index in range(80)])
    features = read_features(frame)
    assert features.code_names == ()
    assert "a different text in every row" in features.notes[0]
    twice = read_features(table(x=np.arange(160.0), comment=[f"remark {index % 90}" for index in range(160)]))
    assert "90 different texts in 160 rows" in twice.notes[0]
    few = read_features(table(x=np.arange(24.0), comment=[f"remark {index}" for index in range(24)]))
    assert few.code_names == ()


@pytest.mark.parametrize(
    ("cells", "what", "row"),
    [(["1", "2", "three", "4"], "numbers", 3), (["2020-01-01", "2020-02-03", "soon", None], "dates", 3)],
)
def test_text_among_numbers_or_dates_is_refused_with_its_row(cells, what, row):
    wrong = cells[2]
    with pytest.raises(
        InputError, match=f"column 'age' holds {what}, but row {row} below the header has '{wrong}' .*--ignore age"
    ):
        read_features(table(age=cells, other=[1.0, 2.0, 3.0, 4.0]))


def test_dates_become_days_and_points_on_circles():
    frame = table(when=["2000-01-02 06:00", "2000-01-03 18:00", "2001-01-01", None])
    features = read_features(frame)
    assert features.num_columns == 1
    assert features.number_names[0] == "when (days)"
    np.testing.assert_allclose(features.numbers[:, 0], [1.25, 2.75, 366.0, np.nan])
    hour = dict(zip(features.number_names, features.numbers.T, strict=True))
    np.testing.assert_allclose(hour["when (hour, sine)"], [1.0, -1.0, 0.0, np.nan], atol=1e-12)


def test_days_come_first_where_a_thirteenth_month_says_so():
    features = read_features(table(when=["03.01.2000", "23.01.2000"]))
    np.testing.assert_allclose(features.numbers[:, 0], [2.0, 22.0])


def test_the_order_of_day_and_month_is_decided_once():
    first = read_features(table(when=["03/01/2000", "23/01/2000"]))
    assert first.day_first == ("when",)
    for cells in (["04/02/2000"], ["2000-02-04"], ["4 Feb 2000"], ["04/02/2000", "2000-02-04"]):
        again = read_features(table(when=cells), like=Features.restore(first.config()))
        assert set(again.numbers[:, 0]) == {34.0}
    with pytest.raises(InputError, match="'when' holds '01/23/2000', but in the training rows the day"):
        read_features(table(when=["01/23/2000"]), like=first)
    with pytest.raises(InputError, match="'23/01/2000', with the day first, and '01/23/2000', with the month first"):
        read_features(table(when=["23/01/2000", "01/23/2000"]))
    (note,) = read_features(table(when=["03/01/2000", "04/01/2000"])).notes
    assert note == "Column 'when': dates such as 03/01/2000 were read with the month first; no cell shows the order."


def test_infinite_numbers_count_as_missing():
    features = read_features(table(x=[1.0, np.inf, 3.0]))
    assert np.isnan(features.numbers[1, 0])
    assert "1 infinite" in features.notes[0]


def test_nothing_left_to_predict_from():
    with pytest.raises(InputError, match="no usable column is left"):
        read_features(table(a=[1.0] * 5, b=["x"] * 5))


@pytest.mark.parametrize("cell", [[1, 2], b"raw", {"k": 1}])
def test_cells_that_are_no_values_are_refused(cell):
    with pytest.raises(InputError, match="--ignore odd"):
        read_features(table(odd=[cell, cell], x=[1.0, 2.0]))


def test_a_second_table_has_the_columns_of_the_first():
    first = read_features(
        table(x=[1.0, 2.0, 3.0], kind=["a", "b", "a"], when=["2020-01-01", "2020-05-05", "2021-01-01"])
    )
    second = read_features(table(when=["2022-01-01"], kind=["new"], x=[9], more=[1]), like=first)
    assert second.number_names == first.number_names
    assert second.codes.tolist() == [[-2]]
    assert second.numbers[0, 0] == 9
    with pytest.raises(InputError, match="'kind' is missing"):
        read_features(table(x=[1.0], when=["2022-01-01"]), like=first)
    with pytest.raises(InputError, match="'x' holds texts, but the training rows have numbers"):
        read_features(table(x=["a"], kind=["a"], when=["2022-01-01"]), like=first)


def test_statistics_come_from_training_rows_alone():
    numbers = np.array([1.0, 3.0, np.nan, 5.0, 1000.0, np.nan])
    kind = ["a", "a", "a", "b", "c", None]
    features = read_features(table(x=numbers, kind=kind, y=[0.0, 0.0, 0.0, 0.0, 7.0, 8.0]))
    train = np.arange(4)
    prepared = Preparation.of(features, train)
    inputs = prepared(features, np.arange(6))
    # x, its mark, level a, other levels; y is constant over training rows, b occurs once and so has no input of its own.
    assert inputs.shape == (6, 4)
    assert inputs[:, 0].tolist() == [1.0, 3.0, 3.0, 5.0, 5.0 + MAX_RANGES_OUTSIDE * 4.0, 3.0]
    assert inputs[:, 1].tolist() == [0, 0, 1, 0, 0, 1]
    assert inputs[:, 2].tolist() == [1, 1, 1, 0, 0, 0]
    assert inputs[:, 3].tolist() == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(("cells", "count"), [(2**24, 30), (122 * 25, 25), (1, MAX_FEW_LEVELS)])
def test_only_frequent_levels_have_inputs_of_their_own(cells, count, monkeypatch):
    """Thirty levels of four rows, two of one row; fewer where their numbers would not fit."""
    monkeypatch.setattr("bayesify.tables.preparation.MAX_LEVEL_CELLS", cells)
    kind = [*(f"level {index}" for index in range(30) for _ in range(4)), "rare", "rarer"]
    features = read_features(table(kind=kind))
    rows = np.arange(len(kind))
    prepared = Preparation.of(features, rows)
    inputs = prepared(features, rows)
    assert inputs.shape[1] == count + 1
    assert (inputs.sum(1) == 1).all()
    (note,) = prepared.pooled(features, rows, np.ones(len(rows)))
    assert note.startswith(f"Column 'kind': {32 - count} of its 32 different texts are rare")
    assert prepared.unseen(replace(features, codes=np.array([[-2], [3]]), numbers=np.empty((2, 0)))).tolist() == [1, 0]


def test_means_of_levels_are_those_of_a_random_intercept():
    """Against the posterior mean by the dense covariance, with variances of the balanced analysis of variance."""
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(8), 5)
    scores = rng.normal(size=8)[codes] + rng.normal(size=40)
    scores -= scores.mean()
    by_level = scores.reshape(8, 5)
    within = by_level.var(1, ddof=1).mean()
    between = by_level.mean(1).var(ddof=1) - within / 5
    one = (codes[:, None] == np.arange(9)).astype(float)
    exact = between * one.T @ np.linalg.solve(between * one @ one.T + within * np.eye(40), scores)
    found = level_means(codes, scores[:, None], np.ones(40), 8)
    np.testing.assert_allclose(found[:, 0], exact, rtol=1e-10)
    assert found[8] == 0  # no cell is empty


def test_no_row_sees_its_own_target():
    rng = np.random.default_rng(0)
    codes, scores, ones = rng.integers(-1, 6, 60), rng.normal(size=(60, 1)), np.ones(60)
    before, moved = cross_fitted(codes, scores, ones, 6), 0
    for row in range(60):
        other = scores.copy()
        other[row] += 3
        after = cross_fitted(codes, other, ones, 6)
        assert after[row] == before[row]
        moved += int((after != before).sum())
    assert moved > 60


def test_scores_of_targets():
    y = np.array([[3.0], [1.0], [1.0], [1e9]])
    found = normal_scores(y, np.ones(4))[:, 0]
    raw = np.array([NormalDist().inv_cdf(share) for share in (0.625, 0.25, 0.25, 0.875)])
    np.testing.assert_allclose(found, raw - raw.mean(), rtol=1e-12)
    assert class_scores(np.array(["b", "a", "b", "b"]), np.ones(4)).tolist() == [[0.25], [-0.75], [0.25], [0.25]]
    many = class_scores(np.arange(40) % 12, np.ones(40))
    assert many.shape == (40, 10)
    np.testing.assert_allclose(many.sum(0), 0, atol=1e-12)


def test_rows_without_any_input_that_varies():
    features = read_features(table(x=[1.0, 1.0, 1.0, 2.0]))
    assert Preparation.of(features, np.arange(3))(features, np.arange(4)).tolist() == [[0.0]] * 4


@pytest.mark.parametrize("scale", [1e300, -1e160, 1e-170, 1e-300])
def test_numbers_that_cannot_be_squared_are_refused(scale):
    values = np.arange(1.0, 41.0) * scale
    table = pandas.DataFrame({"a": values, "c": np.arange(40.0)})
    unit = "larger" if abs(scale) > 1 else "smaller"
    with pytest.raises(InputError, match=rf"column 'a' holds .*; write the numbers in a {unit} unit"):
        read_features(table)
    with pytest.raises(InputError, match=rf"the target 'a' holds .*; write the numbers in a {unit} unit"):
        read_target(table["a"])
    with pytest.raises(InputError, match=rf"input 0, counted from 0, holds .*; write the numbers in a {unit} unit"):
        Encoding.scaled(values[:, None], np.ones(40))
    with pytest.raises(InputError, match=rf"the target holds .*; write the numbers in a {unit} unit"):
        TargetUnits.of(values[:, None], np.ones(40), "none")


TOO_MANY_CLASSES = {
    "free text": (
        [f"a sentence about matter {i}" for i in range(150)],
        "like free text: 150 values occur only once; give another",
    ),
    "identifiers": (
        [f"k{i}" for i in range(150)],
        "like names or identifiers: 150 values occur only once; give another column",
    ),
    "towns": (
        [f"town {i}" for i in range(150)] * 4,
        "a category with many values, of 4 rows each on average; merge rare values",
    ),
    "numbers": ([str(i / 2) for i in range(150)], "holds numbers; use --task regression"),
}


@pytest.mark.parametrize("kind", TOO_MANY_CLASSES)
def test_a_target_with_too_many_classes_says_what_it_looks_like(kind):
    cells, looks = TOO_MANY_CLASSES[kind]
    with pytest.raises(InputError) as error:
        read_target(pandas.Series(cells, name="y"), task="classification")
    start = f"the target 'y' has 150 different values in {len(cells)} rows, such as "
    assert str(error.value).startswith(start)
    assert ", but a classification may have at most 100 classes. It " in str(error.value)
    assert looks in str(error.value)


def test_a_long_text_is_quoted_in_part():
    with pytest.raises(InputError, match=r"such as 'x{40}\.\.\.', but"):
        read_target(pandas.Series(["x" * 60 + str(i) for i in range(150)], name="y"))


def test_a_soft_limit_holds_far_away():
    encoding = replace(Encoding.scaled(np.arange(5.0)[:, None], np.ones(5)), soft_limit=True)
    np.testing.assert_allclose(encoding(np.array([[1e300], [-1e200], [1e6]])), [[3], [-3], [3]], rtol=1e-9)
