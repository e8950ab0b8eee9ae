"""`bayesify fit` and `bayesify predict`: from a table with text, dates and empty cells to a CSV, by way of a folder."""

import csv
import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.serving import ModelFolder, fit_table, predict_table, sources
from bayesify.serving.card import render_card
from bayesify.serving.fitting import Scored
from bayesify.serving.folder import ABOUT, CARD, FIGURE, MODEL
from bayesify.sklearn import BayesianRegressor
from bayesify.sklearn.scores import Scores
from bayesify.storage import tensor_files
from bayesify.tables.errors import InputError
from bayesify.tables.files import read_table
from bayesify.tables.written_numbers import shown, significant

NUM = 90
SCORED = Scored({"rmse": 1.0}, "no rows")
"""Where no test reads the scores: the table is not split to train on its parts."""


def table(seed=0, rows=NUM):
    """Numbers, text, dates and a price that they make; some cells are empty."""
    generator = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "area": generator.uniform(20, 120, rows).round(1),
            "town": generator.choice(["north, upper", "south\nlower", "east"], rows),
            "sold": pandas.date_range("2020-01-01", periods=rows).strftime("%Y-%m-%d"),
            "note": [f"remark {index}" for index in range(rows)],
        }
    )
    frame["price"] = 1000 * frame["area"] + 5000 * (frame["town"] == "east") + generator.normal(0, 3000, rows)
    frame["kind"] = np.where(frame["price"] > frame["price"].median(), "=1+1", "cheap")
    frame.loc[3, "area"] = np.nan
    frame.loc[5, "town"] = None
    return frame


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regression")
    table().drop(columns="kind").to_csv(folder / "houses.csv", index=False)
    model = fit_table(table().drop(columns="kind"), "price", name="houses.csv", method="point", epochs=40)
    model.write(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes") / "model"
    fit_table(table().drop(columns="price"), "kind", method="point", epochs=40).write(folder)
    return folder


@pytest.fixture
def new(tmp_path):
    path = tmp_path / "new.csv"
    table(1).to_csv(path, index=False)
    return path


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


# -- the folder --------------------------------------------------------------------------------------------------------


def test_three_commands_from_a_table_to_a_csv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bayesify.sklearn.settings.Settings.count_epochs", lambda settings, batches: 40)
    table().drop(columns="kind").to_csv("houses.csv", index=False)
    made = run("fit", "houses.csv", "--target", "price", "--method", "point")
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-1] == str(tmp_path / "bayesify-model-houses")
    assert "bayesify predict bayesify-model-houses new.csv" in made.stdout
    assert "was left out" in made.stdout
    table(1).drop(columns=["price", "kind"]).to_csv("new.csv", index=False)
    done = run("predict", "bayesify-model-houses", "new.csv")
    assert done.exit_code == 0, done.output
    assert Path(done.stdout.splitlines()[-1]) == tmp_path / "new-predictions.csv"
    assert "Scores" not in done.stdout
    assert "replaced" not in done.stderr
    found = rows_of("new-predictions.csv")
    assert (
        "new-predictions.csv existed already and was replaced"
        in run("predict", "bayesify-model-houses", "new.csv").stderr
    )
    assert list(found[0]) == ["note", "prediction", "lower", "upper", "std", "unusual"]
    guess, truth = np.array([float(row["prediction"]) for row in found]), table(1)["price"].to_numpy()
    assert np.corrcoef(guess, truth)[0, 1] > 0.9
    again = run("fit", "houses.csv", "--target", "price", "--method", "point")
    assert again.exit_code == 2
    assert "--force" in again.output


def test_the_folder_holds_plain_data(regression):
    assert sorted(path.name for path in regression.iterdir()) == sorted([MODEL, ABOUT, CARD, FIGURE])
    about = json.loads((regression / ABOUT).read_text())
    assert about["target"] == "price"
    content = (regression / MODEL).read_bytes()
    size = int.from_bytes(content[:8], "little")
    json.loads(content[8 : 8 + size])  # safetensors: a header of JSON, then numbers
    assert (
        b"remark 7" not in content + (regression / ABOUT).read_bytes()
    )  # a column of texts that is not used stays private


def test_the_card_says_what_it_is_and_is_not(regression):
    card = (regression / CARD).read_text()
    about = json.loads((regression / ABOUT).read_text())
    assert about["fingerprint"] in card
    assert "rows that were held out of a first training run" in card
    assert "| share of rows whose true value is inside their 90 % interval |" in card
    for term in (
        "90 % interval of a row is the range",
        "CRPS, the absolute error of",
    ):
        assert card.count(term) == 1  # each term is explained once
    area = table()["area"]
    assert f"| area | number | {shown(float(area.min()))} to {shown(float(area.max()))} | 1 |" in card
    assert "3 different texts: " in card
    assert "2020-01-01 to 2020-03-30" in card
    assert f"]({FIGURE})" in card
    assert "true price" in (regression / FIGURE).read_text()
    assert "## What the model is not for" in card
    assert "Column 'note' was left out" in card


def test_the_card_says_whether_networks_or_linear_models_were_chosen(regression):
    about = ModelFolder.read(regression).about
    made = {
        "method": "auto",
        "members": 5,
        "likelihood": "student_t",
        "transform": "none",
        "categories": "",
        "hidden": [],
    }
    linear = (
        "an ensemble of 5 linear models, because they predicted held-out rows better than networks, whose predictions"
    )
    for changed, words in (
        ({}, linear),
        ({"hidden": [64, 64]}, "an ensemble of 5 networks, whose predictions"),
        ({"categories": "nothing"}, "an ensemble of 5 networks, whose predictions"),
    ):
        assert words in render_card(replace(about, choices=made | changed))


def test_the_fingerprint_is_of_the_rows(regression):
    first = ModelFolder.read(regression).about.fingerprint
    other = table().drop(columns="kind")
    other.loc[0, "area"] += 1
    assert fit_table(other, "price", method="point", epochs=1, scored=SCORED).about.fingerprint != first


def test_another_version_says_so(regression, new, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    model = ModelFolder.read(regression)
    replace(model, about=replace(model.about, version="0.0.9")).write(copy)
    done = run("predict", copy, new, "--out", tmp_path / "out.csv")
    assert (done.exit_code, "was written by bayesify 0.0.9" in done.output) == (0, True), done.output
    header, tensors = tensor_files.read(copy / MODEL, "model")
    about = header["folder"]["about"]
    for own in ([], {}, {"about": 3}, {"about": about}, {"about": about | {"columns": 3}, "rows": {"$tensor": "none"}}):
        tensor_files.write(copy / MODEL, "model", header | {"folder": own}, tensors)
        done = run("predict", copy, new, "--out", tmp_path / "out.csv")
        assert (done.exit_code, "the file cannot be read" in done.output) == (2, True), done.output
    (copy / MODEL).write_bytes((copy / MODEL).read_bytes()[:-100])
    assert run("predict", copy, new, "--out", tmp_path / "out.csv").exit_code == 2
    (copy / MODEL).unlink()
    assert f"has no {MODEL}" in run("predict", copy, new).output


# -- predictions -------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_estimator_in_order(regression, new, tmp_path):
    out = tmp_path / "out.csv"
    done = run("predict", regression, new, "--out", out, "--level", "0.8")
    assert done.exit_code == 0, done.output
    estimator, found = ModelFolder.read(regression).estimator, rows_of(out)
    frame = pandas.read_csv(new)
    mean, std = estimator.predict(frame, return_std=True)
    lower, upper = estimator.predict_interval(frame, 0.8)
    for name, values in (("prediction", mean), ("std", std), ("lower", lower), ("upper", upper)):
        np.testing.assert_allclose([float(row[name]) for row in found], values, rtol=1e-5)
    assert [row["unusual"] for row in found] == [str(flag) for flag in estimator.unusual(frame, 1.01 / (NUM + 1))]


def test_a_target_in_the_table_is_scored(regression, new, tmp_path):
    done = run("predict", regression, new, "--out", tmp_path / "out.csv")
    assert f"Scores on {NUM} rows with price" in done.stdout
    found, truth = rows_of(tmp_path / "out.csv"), pandas.read_csv(new)["price"].to_numpy()
    inside = [float(row["lower"]) <= value <= float(row["upper"]) for row, value in zip(found, truth, strict=True)]
    assert (
        f"{significant(np.mean(inside))}  share of rows whose true value is inside their 90 % interval" in done.stdout
    )
    rmse = np.sqrt(np.mean([(float(row["prediction"]) - value) ** 2 for row, value in zip(found, truth, strict=True)]))
    assert f"  {significant(rmse)}  typical error (root mean squared error)" in done.stdout


def test_classes_have_probabilities_and_formulas_are_quoted(classes, new, tmp_path):
    done = run("predict", classes, new, "--out", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    found = rows_of(tmp_path / "out.csv")
    assert list(found[0])[-4:] == ["prediction", "probability_=1+1", "probability_cheap", "unusual"]
    assert {row["prediction"] for row in found} == {"'=1+1", "cheap"}
    for row in found:
        probs = {"'=1+1": float(row["probability_=1+1"]), "cheap": float(row["probability_cheap"])}
        assert sum(probs.values()) == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == max(probs, key=probs.__getitem__)
    truth = pandas.read_csv(new)["kind"]
    right = np.mean([row["prediction"].lstrip("'") == label for row, label in zip(found, truth, strict=True)])
    assert f"{significant(right)}  share of rows whose predicted class is right" in done.stdout


def test_columns_in_another_order_others_and_texts_never_seen(regression, tmp_path):
    frame = table(1)
    frame.loc[2, "town"] = "west"
    frame.loc[7, "area"] = 5000.0
    plain, mixed = tmp_path / "plain.csv", tmp_path / "mixed.csv"
    frame.to_csv(plain, index=False)
    frame.assign(extra=1)[["extra", "town", "sold", "area", "note"]].to_csv(mixed, index=False)
    for path in (plain, mixed):
        done = run("predict", regression, path, "--out", path.with_suffix(".out"))
        assert done.exit_code == 0, done.output
    assert "Column 'extra' is not used." in done.stdout
    assert "Warning: column 'town': 1 cell holds a text that did not occur in training, such as 'west'." in done.stderr
    assert rows_of(plain.with_suffix(".out")) == rows_of(mixed.with_suffix(".out"))
    unusual = [index for index, row in enumerate(rows_of(plain.with_suffix(".out"))) if row["unusual"] == "True"]
    assert {2, 7} <= set(unusual) < set(range(NUM))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.drop(columns="sold"), "column 'sold' is missing, and the model needs it"),
        (lambda frame: frame.rename(columns={"sold": "Sold"}), "the table has a column 'Sold', which you may"),
        (lambda frame: frame.drop(columns=["area", "town", "sold"]), "has none of the columns that the model needs"),
        (lambda frame: frame.assign(price="dear"), "the target 'price' cannot be scored because it holds texts"),
        (lambda frame: frame.assign(area="large"), "'area'"),
        (lambda frame: frame.assign(sold="soon"), "'sold'"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_no_file(regression, tmp_path, change, said):
    change(table(1)).to_csv(tmp_path / "new.csv", index=False)
    done = run("predict", regression, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert (done.exit_code, said in done.output, "new.csv" in done.output) == (2, True, True), done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv"]


def test_empty_cells_are_taken_where_training_had_numbers_alone(tmp_path):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(generator.normal(size=(60, 3)), columns=list("abc"))
    frame["y"] = frame.sum(axis=1)
    model = fit_table(frame, "y", method="point", epochs=20, scored=SCORED)
    frame.loc[0, "a"] = np.nan
    frame[["c", "a", "b"]].to_csv(tmp_path / "new.csv", index=False)
    outcome = predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv")
    assert outcome.num_rows == 60
    assert [words for words in outcome.warnings if "1 cells of 'a' are empty, but none was empty in training" in words]


def test_arguments_of_predict(regression, new, tmp_path):
    done = run("predict", regression, new, "--out", tmp_path / "out.csv", "--level", "1.5")
    assert (done.exit_code, "--level 1.5" in done.output) == (2, True)
    done = run("predict", regression, new, "--out", new)
    assert (done.exit_code, "is the table whose rows are predicted" in done.output) == (2, True)
    done = run("predict", regression, new, "--out", tmp_path / "no" / "out.csv")
    assert (done.exit_code, "cannot be written" in done.output) == (1, True)
    for folder, said in ((tmp_path / "none", "there is no such"), (new, "is a file"), (tmp_path, f"has no {MODEL}")):
        done = run("predict", folder, new)
        assert (done.exit_code, said in done.output) == (2, True), done.output


def test_arguments_of_fit(tmp_path):
    path = tmp_path / "houses.csv"
    table().to_csv(path, index=False)
    for words, said in (
        (["--target", "prize"], "did you mean 'price'?"),
        (["--target", "PRIZE"], "did you mean 'price'?"),
        ([], "say with --target which column to predict"),
        (["--target", "price", "--method", "ensembel"], "did you mean 'ensemble'?"),
        (["--target", "price", "--ignore", "ara"], "did you mean 'area'?"),
        (["--target", "sold"], "holds dates"),
    ):
        done = run("fit", path, *words, "--out", tmp_path / "model")
        assert (done.exit_code, said in done.output) == (2, True), done.output
    # A misspelled target is reported before a folder that is there, so that nobody is told to replace a good model.
    assert "did you mean 'price'?" in run("fit", path, "--target", "prize", "--out", tmp_path).output
    assert "already exists" in run("fit", path, "--target", "price", "--out", tmp_path).output
    table(rows=10).to_csv(path, index=False)
    assert "at least 20" in run("fit", path, "--target", "price", "--out", tmp_path / "model").output
    assert not (tmp_path / "model").exists()


def test_a_column_that_is_not_there_counts_as_empty_where_training_had_empty_cells(regression, tmp_path):
    frame = table(1)
    frame.drop(columns="area").to_csv(tmp_path / "absent.csv", index=False)
    frame.assign(area=np.nan).to_csv(tmp_path / "empty.csv", index=False)
    for name in ("absent", "empty"):
        done = run("predict", regression, tmp_path / f"{name}.csv", "--out", tmp_path / f"{name}.out")
        assert done.exit_code == 0, done.output
        assert ("Warning: column 'area' is missing; all its cells count as empty" in done.stderr) == (name == "absent")
    assert rows_of(tmp_path / "absent.out") == rows_of(tmp_path / "empty.out")


@pytest.mark.parametrize(("name", "hinted"), [("AREA", True), ("arrea", True), ("aera", True), ("weight", False)])
def test_a_missing_column_that_may_have_another_name_in_the_table(regression, tmp_path, name, hinted):
    table(1).rename(columns={"area": name}).to_csv(tmp_path / "new.csv", index=False)
    done = run("predict", regression, tmp_path / "new.csv", "--out", tmp_path / "new.out")
    assert (done.exit_code, "Warning: column 'area' is missing" in done.stderr) == (0, True), done.output
    assert (f"scores; the table has a column {name!r}, which you may want to rename." in done.stderr) == hinted
    assert ("may want to rename" in done.stderr) == hinted


def test_a_single_row_is_predicted_as_among_others(regression, tmp_path):
    """Its date has a season and a weekday, though they do not vary in a table of one row."""
    table(1).to_csv(tmp_path / "all.csv", index=False)
    table(1).iloc[[9]].to_csv(tmp_path / "one.csv", index=False)
    model = ModelFolder.read(regression)
    for name in ("all", "one"):
        predict_table(model, tmp_path / f"{name}.csv", tmp_path / f"{name}.out")
    assert rows_of(tmp_path / "one.out") == rows_of(tmp_path / "all.out")[9:10]


def test_texts_stay_texts_in_every_part(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"code": generator.choice(["007", "12", "A1", "B2", "C3"], 120), "x": generator.normal(size=120)}
    )
    frame["y"] = 5.0 * (frame["code"] == "007") + 2.0 * (frame["code"] == "12") + 0.1 * frame["x"]
    model = fit_table(frame, "y", method="point", epochs=60, noise=0.01, scored=SCORED)
    new = pandas.DataFrame({"code": ["A1", "007", "12", None], "x": [0.0, 0.0, 0.0, 0.0]})
    new.to_csv(tmp_path / "new.csv", index=False)
    predict_table(model, tmp_path / "new.csv", tmp_path / "whole.csv")
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
    predict_table(model, tmp_path / "new.csv", tmp_path / "parts.csv", rows=1)
    assert rows_of(tmp_path / "whole.csv") == rows_of(tmp_path / "parts.csv")
    found = [float(row["prediction"]) for row in rows_of(tmp_path / "parts.csv")]
    assert found[:3] == pytest.approx([0, 5, 2], abs=0.7)


@pytest.mark.parametrize("separator", [";", ","])
def test_decimal_commas_are_those_of_training_in_every_part(tmp_path, monkeypatch, separator):
    generator = np.random.default_rng(0)
    x, z = np.append(generator.uniform(0, 9999, 119), 1234.0), generator.normal(size=120)
    written = [f"{value:,.1f}".translate(str.maketrans(",.", ".,")) for value in x]  # 1.234,5
    frame = pandas.DataFrame({"x": written, "z": z, "y": x + z})
    frame.to_csv(tmp_path / "train.csv", index=False, sep=separator, decimal="," if separator == ";" else ".")
    read, notes = read_table(tmp_path / "train.csv")
    model = fit_table(read, "y", method="point", epochs=30, learning_rate=0.03, noise=1e4, notes=notes, scored=SCORED)
    assert "x" in model.about.commas
    for cell in ("1.234,0", "1.234", "1234"):
        quoted = f'"{cell}"'
        (tmp_path / "new.csv").write_text(f"x{separator}z\n{quoted}{separator}0\n5000{separator}0\n")
        monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
        predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv", rows=1)
        found = pandas.read_csv(tmp_path / "out.csv", sep=separator, decimal="," if separator == ";" else ".")
        assert found["prediction"][0] == pytest.approx(1234, abs=400)  # with the decimal mark of the target


@pytest.mark.parametrize(("day_first", "shown_as"), [(True, "%d/%m/%Y"), (False, "%m/%d/%Y")])
def test_the_order_of_day_and_month_is_that_of_training_in_every_part(tmp_path, monkeypatch, day_first, shown_as):
    days = pandas.date_range("2020-01-01", periods=240)
    frame = pandas.DataFrame({"sold": days.strftime(shown_as), "y": days.day_of_year.astype(float)})
    model = fit_table(frame, "y", method="point", epochs=60, learning_rate=0.03, noise=25.0, scored=SCORED)
    assert "2020-01-01 to 2020-08-27" in render_card(model.about)
    some = frame.iloc[[2, 40, 100, 34, 160]]  # 3 January to 9 June, days that can all be read either way
    some.to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
    predict_table(model, tmp_path / "new.csv", tmp_path / "parts.csv", rows=1)
    found = [float(row["prediction"]) for row in rows_of(tmp_path / "parts.csv")]
    assert found == pytest.approx(some["y"].tolist(), abs=20)
    days[[2, 40, 100, 34, 160]].strftime("%Y-%m-%d").to_frame(name="sold").to_csv(tmp_path / "iso.csv", index=False)
    predict_table(model, tmp_path / "iso.csv", tmp_path / "iso.out", rows=2)
    assert rows_of(tmp_path / "iso.out") == rows_of(tmp_path / "parts.csv")
    some.assign(sold="01/23/2020" if day_first else "23/01/2020").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match=r"'sold' holds '.*23.*', .*comes first; write dates in the same order"):
        predict_table(model, tmp_path / "new.csv", tmp_path / "parts.csv")


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_parts_give_the_file_of_the_whole(regression, tmp_path, monkeypatch, kind):
    frame = table(2)
    path = tmp_path / f"new.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False, lineterminator="\r\n")
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    model = ModelFolder.read(regression)
    whole = predict_table(model, path, tmp_path / "whole.csv")
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
    parts = [len(part) for _, part, _ in sources.read_parts(path, 7)]
    assert (sum(parts), max(parts)) == (NUM, 7)
    some = predict_table(model, path, tmp_path / "parts.csv", rows=7)
    assert rows_of(tmp_path / "whole.csv") == rows_of(tmp_path / "parts.csv")
    assert (whole.num_rows, whole.num_unusual) == (some.num_rows, some.num_unusual) == (NUM, whole.num_unusual)
    assert some.scores.means() == pytest.approx(whole.scores.means())


def test_a_part_that_does_not_fit_says_where_it_is(regression, tmp_path, monkeypatch):
    frame = table(2).astype(object)
    frame.loc[50:, "area"] = "large"
    frame.to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
    said = r"^new.csv: column 'area' holds numbers, but row 51 below the header has 'large' \(40 of 89 cells hold no number\)"
    with pytest.raises(InputError, match=said):
        predict_table(ModelFolder.read(regression), tmp_path / "new.csv", tmp_path / "out.csv", rows=50)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    path, held = tmp_path / "new.csv", 0
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0)
    path.write_text("area,town,only_here\n" + "12.5,north,2020-01-01\n" * 600)
    for first, _, _ in sources.read_parts(path, 50):
        if first == 550:  # the last part
            frames = [thing for thing in gc.get_objects() if issubclass(type(thing), pandas.DataFrame)]
            held = sum(len(frame) for frame in frames if "only_here" in frame)
    assert 50 <= held <= 150  # the last part and its copies


def test_scores_add_up():
    probs, labels = np.array([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]]), np.array(["a", "b", "new"])
    whole = Scores.of_classes(probs, ["a", "b"], labels)
    parts = sum((Scores.of_classes(probs[[row]], ["a", "b"], labels[[row]]) for row in range(3)), Scores())
    assert whole.means() == pytest.approx(parts.means())
    assert whole.means() == pytest.approx({"accuracy": 2 / 3, "log_loss": -(np.log(0.9) + np.log(0.7)) / 2})
    assert (whole.unknown, parts.unknown) == (1, 1)


def test_a_mark_of_empty_cells_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = table().drop(columns="kind").astype({"area": object, "price": object})
    frame.loc[[7, 9], "area"] = "k.A."
    frame.to_csv("houses.csv", index=False)
    done = run("fit", "houses.csv", "--target", "price")
    said = re.sub(r"\s+", " ", done.output)
    assert (
        done.exit_code,
        "read them as empty with --missing k.A., or leave the column out with --ignore area" in said,
    ) == (2, True)
    frame.loc[7, "price"] = "k. A."
    frame.to_csv("houses.csv", index=False)
    assert "--missing 'k. A.'" in run("fit", "houses.csv", "--target", "price").output
    with pytest.raises(
        ValueError, match=r"fix these cells or leave them blank, read them as empty, or leave the column out$"
    ):
        BayesianRegressor().fit(frame[["area", "town"]], np.arange(NUM))
