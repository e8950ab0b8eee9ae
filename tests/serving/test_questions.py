"""What is asked of `bayesify predict`: quantiles, limits, decisions by costs, reasons, and columns that have moved."""

import csv
import re
import subprocess
import sys

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.serving import ModelFolder, fit_table
from bayesify.serving.about import About
from bayesify.serving.drift import Drift
from bayesify.serving.fitting import Scored, describe
from bayesify.serving.questions import Costs

NUM = 120
SCORED = Scored({}, "no rows")
CLASSES = ["a:b", "calm", "wild, very"]


def table(seed=0, rows=NUM):
    generator = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "area": generator.uniform(20, 120, rows).round(1),
            "town": generator.choice(["north", "south", "east"], rows),
            "sold": pandas.date_range("2020-01-01", periods=rows).strftime("%d/%m/%Y"),
        }
    )
    frame["price"] = 1000 * frame["area"] + generator.normal(0, 3000, rows)
    frame["kind"] = np.array(CLASSES)[np.digitize(frame["area"], [50, 80])]
    return frame


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for target, other in (("price", "kind"), ("kind", "price")):
        fit_table(table().drop(columns=other), target, method="point", epochs=40, scored=SCORED).write(folder / target)
    return folder


@pytest.fixture
def predict(folders, tmp_path):
    def run(target, frame, *options):
        frame.to_csv(tmp_path / "new.csv", index=False)
        words = ["predict", folders / target, tmp_path / "new.csv", "--out", tmp_path / "out.csv", *options]
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        rows = []
        if not done.exit_code:
            with (tmp_path / "out.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
        return done, rows

    return run


def column(rows, name):
    return np.array([float(row[name]) for row in rows])


def test_quantiles_and_limits_are_those_of_the_predictive(folders, predict):
    new = table(1).drop(columns=["price", "kind"])
    done, rows = predict(
        "price", new, "--quantiles", "0.1,0.5", "--above", "70000", "--above", "80000.5", "--below", "70000"
    )
    assert done.exit_code == 0, done.output
    names = ["quantile_0.1", "quantile_0.5", "above_70000", "above_80000.5", "below_70000"]
    assert list(rows[0]) == ["row", "prediction", "lower", "upper", "std", "unusual", *names]
    mean, std = (column(rows, name) for name in ("prediction", "std"))
    estimator = ModelFolder.read(str(folders / "price")).estimator
    tenth, half = estimator.predict_quantiles(new, [0.1, 0.5])
    np.testing.assert_allclose(column(rows, "quantile_0.1"), tenth, rtol=1e-5)
    np.testing.assert_allclose(column(rows, "quantile_0.5"), half, rtol=1e-5)
    above, below = column(rows, "above_70000"), column(rows, "below_70000")
    np.testing.assert_allclose(above + below, 1, atol=1e-5)  # no atom at the limit
    assert ((above > 0.5) == (half > 70000)).all()
    assert (above >= column(rows, "above_80000.5")).all()
    assert ((above < 0.05) == (estimator.predict_quantiles(new, [0.95])[0] < 70000)).all()
    assert (std > 0).all()
    assert np.isfinite(mean).all()


def test_decisions_have_the_least_expected_cost(predict, tmp_path):
    new = table(1).drop(columns=["price", "kind"])
    done, rows = predict("kind", new, "--costs", "wild, very:calm=1000")
    assert (done.exit_code, "is not a class" in done.output) == (
        2,
        True,
    )  # a comma separates entries: such classes need a file
    costs = pandas.DataFrame({"truth": CLASSES[::-1], "calm": [1000, 0, 3], "ask": [5, 5, 5]})
    costs.to_csv(tmp_path / "costs.csv", index=False)
    done, rows = predict("kind", new, "--costs", tmp_path / "costs.csv")
    assert done.exit_code == 0, done.output
    probs = np.column_stack([column(rows, f"probability_{label}") for label in CLASSES])
    expected = probs @ np.array([[3, 5], [0, 5], [1000, 5]])
    np.testing.assert_allclose(column(rows, "expected_cost"), expected.min(1), rtol=1e-4)
    assert [row["decision"] for row in rows] == np.array(["calm", "ask"])[expected.argmin(1)].tolist()
    made = Costs.of("a:b:calm=7, calm:a:b=2.5", CLASSES)
    assert made.table.tolist() == [[0, 7, 1], [2.5, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("price", ["--quantiles", "0.5,1.2"], "--quantiles 1.2: give a number between 0 and 1"),
        ("price", ["--quantiles", "half"], "--quantiles half: this is not a number"),
        ("price", ["--above", "nan"], "--above nan: this is not a number"),
        (
            "price",
            ["--costs", "a=1"],
            "--costs: this option is for models that predict classes, but 'price' holds numbers",
        ),
        ("price", ["--level", "90"], "--level 90: give a number between 0 and 1"),
        ("kind", ["--above", "3"], "--above: this option is for models that predict numbers, but 'kind' holds classes"),
        ("kind", ["--quantiles", "0.5"], "--quantiles: this option is for models that predict numbers"),
        ("kind", ["--costs", "calm:wlid, very=3"], "give a file; 'wlid' is not a class; known: a:b, calm"),
        ("kind", ["--costs", "calm:a:b=much"], "--costs much: this is not a number"),
        ("kind", ["--costs", "nowhere.csv"], "--costs nowhere.csv: this is neither a file nor a cost such as"),
    ],
)
def test_bad_questions_say_what_is_wrong(predict, target, options, words):
    done, _ = predict(target, table(1, 30), *options)
    assert done.exit_code == 2
    assert words in re.sub(r"\s+", " ", done.output)


def test_wrong_options_are_refused_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds, and a typing error needs none of it."""
    (tmp_path / "new.csv").write_text("area\n1\n")
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom bayesify.cli import app\n"
        "for options in (['--quantiles', '1.5'], ['--above', 'much'], ['--below', 'nan'], ['--level', '90']):\n"
        f"    done = CliRunner().invoke(app, ['predict', {str(tmp_path)!r}, {str(tmp_path / 'new.csv')!r}, *options])\n"
        "    assert done.exit_code == 2 and options[0] in done.output, done.output\n"
        "    assert 'torch' not in sys.modules, options\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_of_costs_needs_every_class(tmp_path):
    pandas.DataFrame({"truth": CLASSES[:2], "calm": [1, 2]}).to_csv(tmp_path / "costs.csv", index=False)
    with pytest.raises(ValueError, match="there is no row for the class 'wild, very'"):
        Costs.of(str(tmp_path / "costs.csv"), CLASSES)


@pytest.mark.parametrize("target", ["price", "kind"])
def test_reasons_stand_behind_each_row(predict, target):
    new = table(1, 30).drop(columns=["price", "kind"])
    new.loc[0, "area"], new.loc[1, "town"] = 5000, "=west"
    done, rows = predict(target, new, "--explain")
    assert done.exit_code == 0, done.output
    assert "Reasons compare each row with a typical row (area=" in done.output
    assert list(rows[0])[-3:] == ["moved_by", "widened_by" if target == "price" else "unsure_by", "why_unusual"]
    assert re.search(r"area=5000 is more than [\d.]+ standard deviations away", rows[0]["why_unusual"])
    assert "town==west is a text that did not occur in training" in rows[1]["why_unusual"]
    assert [row["unusual"] == "True" for row in rows] == [bool(row["why_unusual"]) for row in rows]
    assert sum(row["moved_by"].startswith("area=") for row in rows) > 20


def test_columns_that_have_moved_are_named_and_others_are_not(predict):
    done, _ = predict("price", table(1))
    assert "has moved" not in done.output
    assert "Column 'sold': dates such as 13/01/2020 were read with the day first, as in training." in done.output
    new = table(1)
    new["area"] += 50
    new["town"] = "east"
    new.loc[:40, "sold"] = None
    done, _ = predict("price", new)
    text = re.sub(r"\s+", " ", done.output)
    assert re.search(
        r"Column 'area' differs from training by 0\.[3456]\d: \d+ % of its cells are above [\d.]+, compared with \d+ % in",
        text,
    )
    assert re.search(
        r"Column 'town' differs from training by 0\.\d\d: 100 % of its cells are 'east', compared with \d\d % in training",
        text,
    )
    assert re.search(
        r"Column 'sold' differs from training by 0\.34: 34 % of its cells are empty, compared with 0 % in training",
        text,
    )


def test_long_texts_with_one_beginning_have_not_moved():
    """The folder keeps the beginnings of texts, so that texts with the same beginning count together in both tables."""
    cells = pandas.Series(np.resize([100 * "q" + "1", 100 * "q" + "2", "z"], 99))
    column = describe("c", cells)
    assert (column.texts, column.num_different) == ((80 * "q", "z"), 3)
    np.testing.assert_allclose(column.shares, (2 / 3, 1 / 3))
    drift = Drift(About("t", "y", "regression", 99, "", (column,), column, {}, {}, ""), ())
    drift.add(pandas.DataFrame({"c": cells}))
    assert drift.moved() == ()


def test_a_column_keeps_its_shares():
    found = describe("n", pandas.Series([1.0, 1.0, 2.0, 5.0, np.nan, np.inf]))
    assert (found.knots, found.shares, found.num_missing) == ((1.0, 2.0, 5.0), (0.5, 0.75, 1.0), 1)
    found = describe("t", pandas.Series(["a", "b", "a", None]))
    assert (found.texts, found.shares) == (("a", "b"), (2 / 3, 1 / 3))
