"""The target's task, and rows in four parts."""

import numpy as np
import pandas
import pytest

from bayesify.compare import comparison, contestants
from bayesify.compare.question import Question
from bayesify.compare.splits import make_parts
from bayesify.tables.errors import InputError
from bayesify.tables.targets import find_column, read_target


def series(values, name="y"):
    return pandas.Series(values, name=name)


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (np.linspace(0, 1, 50), "regression"),
        (np.arange(50), "regression"),
        ([0, 1] * 25, "classification"),
        ([0.0, 1.0, 2.0] * 10, "classification"),
        ([0.5, 1.5] * 25, "regression"),
        (["yes", "no"] * 25, "classification"),
        ([True, False] * 25, "classification"),
        (["1", "2", "3.5", "7"] * 12, "regression"),
    ],
)
def test_the_task_is_detected(values, task):
    target = read_target(series(values))
    assert target.task == task
    assert f"({task})" in target.notes[0]
    assert ("--task" in target.notes[0]) == (values[0] != "yes")  # texts can be nothing else


def test_labels_are_sorted_as_numbers_where_they_are_numbers():
    target = read_target(series([10.0, 9.0, 2.0] * 8), "classification")
    assert target.classes == ("2", "9", "10")
    assert target.values[:3].tolist() == [2, 1, 0]


def test_rows_without_a_target_and_rare_classes_are_left_out():
    target = read_target(series(["a"] * 10 + ["b"] * 10 + [None] * 3 + ["c"] * 2))
    assert target.classes == ("a", "b")
    assert target.rows.tolist() == list(range(20))
    assert any(note.startswith("3 rows without") for note in target.notes)
    assert any("2 rows were left out, because their class has fewer than 5 rows: 'c'" in note for note in target.notes)


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        (["a"] * 30, None, "'a' in every row; a classification needs"),
        ([2.5] * 30, None, "2.5 in every row"),
        ([None] * 30, None, "empty in every row"),
        (["1", "2", "x", "4"] * 8, None, "the target: column 'y' holds numbers, but row 3 below the header has 'x'"),
        (["2020-01-01", "2021-01-01"] * 10, None, "holds dates"),
        (["a", "b"] * 10, "regression", "holds texts"),
        ([str(index) + "x" for index in range(200)], None, "200 different values"),
        (["a"] * 20 + ["b"] * 3, None, "fewer than two classes"),
    ],
)
def test_targets_that_cannot_be_predicted(values, task, message):
    with pytest.raises(InputError, match=message):
        read_target(series(values), task)


def test_a_missing_target_column_is_met_with_the_nearest():
    frame = pandas.DataFrame({"price": [1], "size": [2]})
    for name, message in (
        ("prise", "did you mean 'price'"),
        ("Price", "did you mean 'price'"),
        ("zzz", "known: price, size"),
        (None, "which column to predict; the columns are price, size"),
    ):
        with pytest.raises(InputError, match=message):
            find_column(frame, name, "houses.csv")
    with pytest.raises(InputError, match="only column"):
        find_column(frame[["price"]], "price", "houses.csv")


@pytest.mark.parametrize("rows", [30, 500, 5000])
@pytest.mark.parametrize("classes", [False, True])
def test_parts_are_disjoint_whole_and_depend_on_seed_and_number_alone(rows, classes):
    values = np.random.default_rng(0).integers(0, 3, rows)
    parts = make_parts(values, 2, 7, classes=classes)
    together = np.concatenate([parts.fit, parts.calibration, parts.test])
    assert np.array_equal(np.sort(together), np.arange(rows))
    assert len(parts.fit) > 0.5 * rows
    assert len(parts.calibration) >= 3
    again = make_parts(values, 2, 7, classes=classes)
    assert all(np.array_equal(getattr(parts, name), getattr(again, name)) for name in vars(parts))
    other = make_parts(values, 3, 7, classes=classes)
    assert not np.array_equal(parts.test, other.test)


def test_classes_have_their_shares_in_every_part_and_all_are_trained_on():
    values = np.repeat([0, 1, 2], [300, 95, 5])
    for index in range(20):
        parts = make_parts(values, index, 0, classes=True)
        assert set(values[parts.fit]) == {0, 1, 2}
        share = np.mean(values[parts.test] == 0)
        assert abs(share - 0.75) < 0.03  # of 80 rows; dealing leaves at most a row or two of slack for each class


def test_standard_splits_keep_their_test_rows():
    values = np.linspace(0, 1, 100)
    train, test = np.arange(90), np.arange(90, 100)
    parts = make_parts(values, 0, 3, classes=False, standard=[(train, test)])
    assert np.array_equal(parts.test, test)
    assert set(parts.fit) | set(parts.calibration) == set(train)


def test_too_few_rows():
    with pytest.raises(InputError, match=r"19 rows .* at least 20"):
        make_parts(np.arange(19.0), 0, 0, classes=False)


def test_rivals_run_first_and_then_the_longest_runs():
    """A report needs the rivals, and two workers end together only if the last runs are short."""
    names = list(comparison._order_jobs(Question("t.csv", "y").chosen(), 5))
    assert names[:3] == ["constant", "linear", "boosted_trees"]
    rest = [name for name in names if name not in contestants.RIVALS]
    assert rest[:6] == ["inducing", *(f"auto-{split}" for split in range(5))]
    assert {"point", "laplace"} <= set(rest[6:])
