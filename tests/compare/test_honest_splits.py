"""Copies, groups, times and columns that hold the target: what would make scores look better than they are."""

import itertools

import numpy as np
import pandas
import pytest

from bayesify.compare.compared_table import read_compared_table
from bayesify.compare.leakage import find_copies
from bayesify.compare.question import Question
from bayesify.compare.splits import count_folds, make_parts
from bayesify.tables.columns import read_features
from bayesify.tables.errors import InputError


def table_of(frame, tmp_path, target="y", **options):
    frame.to_csv(tmp_path / "t.csv", index=False)
    return read_compared_table(Question(str(tmp_path / "t.csv"), target=target, max_rows=10_000, seed=0, **options))


def noise(rows, columns=4, seed=0):
    return pandas.DataFrame(
        np.random.default_rng(seed).normal(size=(rows, columns)), columns=[f"x{index}" for index in range(columns)]
    )


def sides(table, split):
    parts = table.parts(split, 0)
    return np.concatenate((parts.fit, parts.calibration)), parts.test


def test_folds_share_no_test_row_and_test_every_row():
    values = np.arange(103.0)
    tested = [make_parts(values, index, 0, classes=False).test for index in range(5)]
    assert sorted(np.concatenate(tested).tolist()) == list(range(103))
    again = make_parts(values, 5, 0, classes=False).test  # the first fold of another repetition
    assert not any(np.array_equal(again, test) for test in tested)
    assert count_folds(1999) == 5
    assert count_folds(2000) == 10


@pytest.mark.parametrize("jitter", [0.0, 1e-5])
def test_duplicates_are_kept_on_one_side_and_reported(tmp_path, jitter):
    """Pure noise, each row six times: no test row has a copy among the rows to learn from."""
    frame = pandas.concat([noise(80, 5)] * 6, ignore_index=True)
    frame += jitter * np.random.default_rng(1).normal(size=frame.shape)
    frame = frame.rename(columns={"x4": "y"})
    table = table_of(frame.sample(frac=1, random_state=0), tmp_path)
    assert "400 of 480 rows are copies or near-copies of other rows" in table.cautions[0]
    for split in range(5):
        known, test = sides(table, split)
        distances = np.abs(table.features.numbers[test][:, None] - table.features.numbers[known]).max(-1)
        assert distances.min() > 0.01
        assert 60 < len(test) < 130


def test_rows_of_few_coarse_columns_are_equal_by_chance():
    generator = np.random.default_rng(0)
    coarse = pandas.DataFrame(
        {"class": generator.choice(["1", "2", "3"], 500), "sex": generator.choice(["m", "f"], 500)}
    )
    assert find_copies(read_features(coarse)) is None
    assert find_copies(read_features(noise(500))) is None
    one = pandas.DataFrame({"x": generator.normal(size=2000).round(3)})
    assert find_copies(read_features(one)) is None
    copied = pandas.concat([noise(100), noise(100)[:7]], ignore_index=True)
    groups = find_copies(read_features(copied))
    assert len(np.unique(groups)) == 100
    assert (groups[:7] == groups[100:]).all()


def test_missing_cells_and_categories_count_when_rows_are_compared():
    frame = noise(60)
    frame["kind"] = np.resize(["a", "b", "c"], 60)
    other = frame[:5].copy()
    other["kind"] = ["b", "c", "a", "b", "c"]
    holes = frame[5:10].copy()
    holes["x0"] = np.nan
    assert find_copies(read_features(pandas.concat([frame, other, holes], ignore_index=True))) is None


def test_a_column_that_gives_the_target_away_is_named(tmp_path):
    frame = noise(120)
    frame["y"] = frame["x0"] + np.random.default_rng(1).normal(size=120)
    assert table_of(frame, tmp_path).cautions == ()
    frame["after"] = 2.5 * frame["y"] + 1
    caution = table_of(frame, tmp_path).cautions[0]
    assert caution.startswith("Column 'after' alone predicts 100.0 % of the variation of y")
    assert caution.endswith("leave the column out with --ignore after.")
    assert table_of(frame, tmp_path, ignore=["after"]).cautions == ()
    frame["label"] = np.where(frame["y"] > 0, "up", "down")
    caution = table_of(frame.drop(columns="y"), tmp_path, "label").cautions[0]
    assert caution.startswith("Column 'after' alone predicts 100.0 % of the labels")
    frame["code"] = frame["label"].map({"up": "k1", "down": "k2"})
    assert "'code'" in table_of(frame.drop(columns=["y", "after"]), tmp_path, "label").cautions[0]


def test_groups_stay_together_and_are_no_input(tmp_path):
    frame = noise(300)
    frame["patient"] = np.repeat([f"p{index}" for index in range(60)], 5)
    frame["y"] = frame["x0"]
    table = table_of(frame, tmp_path, group="patient")
    assert "patient" not in table.features.code_names
    assert any("Rows with the same patient (60 different values)" in note for note in table.notes)
    for split in range(5):
        known, test = sides(table, split)
        assert not set(table.groups[known]) & set(table.groups[test])
        assert len(test) == 60
        parts = table.parts(split, 0)
        assert not set(table.groups[parts.fit]) & set(table.groups[parts.calibration])


def test_few_and_uneven_groups():
    values = np.random.default_rng(0).normal(size=200)
    for sizes in ([100, 40, 30, 20, 10], [150, *[10] * 5], [196, 1, 1, 1, 1]):
        groups = np.repeat(np.arange(len(sizes)), sizes)
        for split in range(7):
            parts = make_parts(values, split, 0, classes=False, groups=groups)
            owners = [set(groups[rows]) for rows in vars(parts).values()]
            assert all(owners)
            assert sum(map(len, owners)) == len(sizes)
    with pytest.raises(InputError, match="4 different groups of rows; splits need at least 5"):
        make_parts(values, 0, 0, classes=False, groups=np.arange(200) % 4)


def test_time_trains_on_earlier_rows_and_tests_on_later_ones(tmp_path):
    frame = noise(200)
    days = pandas.date_range("2020-01-01", periods=200)
    frame["day"], frame["y"] = days.strftime("%Y-%m-%d"), frame["x0"]
    mixed = frame.sample(frac=1, random_state=3)
    table = table_of(mixed, tmp_path, time="day")
    tested = []
    for split in range(5):
        parts = table.parts(split, 0)
        stretches = [table.times[rows] for rows in (parts.fit, parts.calibration, parts.test)]
        assert all(a.max() < b.min() for a, b in itertools.pairwise(stretches))
        tested += parts.test.tolist()
    assert len(tested) == len(set(tested)) == 100
    with pytest.raises(InputError, match="only 5 splits by time"):
        table.parts(5, 0)
    assert not any("--time" in caution for caution in table.cautions)
    # Rows of the same day are on the same side.
    frame["day"] = np.repeat(days[:20].strftime("%Y-%m-%d"), 10)
    table = table_of(frame, tmp_path, time="day")
    parts = table.parts(2, 0)
    assert table.times[parts.calibration].max() < table.times[parts.test].min()


def test_rows_in_the_order_of_dates_get_a_hint(tmp_path):
    frame = noise(100)
    frame["day"] = pandas.date_range("2020-01-01", periods=100).strftime("%Y-%m-%d")
    frame["y"] = frame["x0"] + np.random.default_rng(1).normal(size=100)
    hint = table_of(frame, tmp_path).cautions[-1]
    assert hint.startswith("The rows are in the order of 'day' but were split at random")
    assert hint.endswith("use --time day to measure them.")
    assert not table_of(frame.sample(frac=1, random_state=1), tmp_path).cautions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "x9"}, "--group x9: t.csv has no such column; did you mean 'x"),
        ({"time": "y"}, "--time y: this is the target"),
        ({"time": "x0", "group": "x1"}, "--group and --time cannot be combined; give only one of them"),
        ({"time": "name"}, "'name' holds texts; a time must be a date or a number"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    frame = noise(40)
    frame["y"], frame["name"] = frame["x0"], np.resize(["a", "b"], 40)
    with pytest.raises(InputError, match=message):
        table_of(frame, tmp_path, **options)
