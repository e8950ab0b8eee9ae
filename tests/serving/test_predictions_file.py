"""The file that `predict` writes: the dialect of the table, and columns by which its rows are found again."""

import csv
from dataclasses import replace

import numpy as np
import pandas
import pytest

from bayesify.serving import fit_table, predict_table, sources, update_table
from bayesify.serving.fitting import Scored
from bayesify.serving.questions import Questions

SCORED, NUM = Scored({}, "no rows"), 40


def table(seed=0):
    generator = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "house_id": [f"00{place}" for place in range(NUM)],
            "area": generator.uniform(20, 120, NUM).round(1),
            "price": 0.0,
            "visit": 1000 + np.arange(NUM),
            "note": [f"text {place} " + "long " * 20 for place in range(NUM)],
            "town": generator.choice(["north", "south"], NUM),
        }
    )
    frame["price"] = (3 * frame["area"]).round(2)
    return frame


@pytest.fixture(scope="module")
def model():
    options = {"method": "point", "epochs": 20, "scored": SCORED, "keep_rows": True}
    return fit_table(table(), "price", ignore=("visit", "note"), **options)


def lines(path, separator=","):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=separator))


@pytest.mark.parametrize("rows", [1000, 7])
@pytest.mark.parametrize(
    ("separator", "decimal"), [(",", "."), (";", ","), (";", "."), ("\t", "."), ("\t", ","), (",", ",")]
)
def test_the_file_has_the_dialect_of_the_table(model, tmp_path, monkeypatch, separator, decimal, rows):
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 0 if rows == 7 else 1 << 20)
    new, plain, out = (tmp_path / name for name in ("new.csv", "plain.csv", "out.csv"))
    table(1).to_csv(new, index=False)
    predict_table(model, new, plain)
    table(1).to_csv(new, index=False, sep=separator, decimal=decimal)
    about = replace(model.about, commas=("area", "price") if decimal == "," and separator != ";" else ())
    predict_table(replace(model, about=about), new, out, rows=rows, asked=Questions(quantiles=[0.1], above=[100.0]))
    found = pandas.read_csv(out, sep=separator, decimal=decimal, dtype={"house_id": str})
    expected = pandas.read_csv(plain, dtype={"house_id": str})
    assert found.dtypes[["prediction", "std", "quantile_0.1", "above_100"]].eq("float64").all()
    pandas.testing.assert_frame_equal(found[expected.columns], expected)
    assert found["house_id"].tolist() == table(1)["house_id"].tolist()  # with leading zeros


def test_columns_that_identified_the_training_rows_are_copied(model, tmp_path):
    assert model.about.identifiers == ("house_id", "visit")  # neither long texts, nor a column with repetitions
    new = table(1).sample(frac=1, random_state=0).drop(columns="price")
    new["house_id"] = new["house_id"].where(new["house_id"] != "003", "=3").where(new["house_id"] != "004")
    new.to_csv(tmp_path / "new.csv", index=False)
    outcome = predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv")
    found = lines(tmp_path / "out.csv")
    assert list(found[0])[:3] == ["house_id", "visit", "prediction"]
    assert [row["visit"] for row in found] == list(map(str, new["visit"]))
    assert [row["house_id"] for row in found] == new["house_id"].replace("=3", "'=3").fillna("").tolist()
    assert outcome.notes == ("Column 'note' is not used.",)


@pytest.mark.parametrize("rows", [1000, 7])
def test_otherwise_rows_are_numbered(model, tmp_path, rows):
    new = table(1).drop(columns=["house_id", "visit", "price"])
    new.to_csv(tmp_path / "new.csv", index=False)
    predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv", rows=rows)
    assert [row["row"] for row in lines(tmp_path / "out.csv")] == [str(row) for row in range(1, NUM + 1)]


def test_a_column_of_the_file_is_not_replaced_by_an_identifier_of_its_name(model, tmp_path):
    named = replace(model, about=replace(model.about, identifiers=("std",)))
    table(1).assign(std="other").to_csv(tmp_path / "new.csv", index=False)
    predict_table(named, tmp_path / "new.csv", tmp_path / "out.csv")
    found = lines(tmp_path / "out.csv")
    assert list(found[0]) == ["row", "prediction", "lower", "upper", "std", "unusual"]
    assert all(float(row["std"]) > 0 for row in found)


def test_an_updated_model_keeps_its_identifiers(model, tmp_path):
    model.write(tmp_path / "model")
    assert update_table(tmp_path / "model", table(2)).about.identifiers == ("house_id", "visit")


def test_a_decimal_comma_is_reported_once(model, tmp_path):
    european = fit_table(table(), "price", method="point", epochs=5, scored=SCORED)
    european = replace(european, about=replace(european.about, commas=("area", "price")))
    new = table(1).assign(area=lambda frame: frame["area"].map("{:.1f}".format).str.replace(".", ","))
    new.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    about_numbers = [
        note
        for note in predict_table(european, tmp_path / "new.csv", tmp_path / "out.csv").notes
        if "decimal comma" in note or "holds numbers" in note
    ]
    assert len(about_numbers) == 1
    new["area"] = [f"1.{place:03},5" for place in range(NUM)]  # needs a note of its own
    new.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    outcome = predict_table(european, tmp_path / "new.csv", tmp_path / "out.csv")
    assert any("'1.000,5', which was read as 1000.5" in note for note in outcome.notes), outcome.notes


def test_probabilities_are_never_certain(model, tmp_path):
    table(1).to_csv(tmp_path / "new.csv", index=False)
    asked = Questions(above=[-1e9, 1e9], below=[-1e9, 1e9])
    outcome = predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv", asked=asked)
    for row in lines(tmp_path / "out.csv"):
        assert row["above_-1000000000"] == row["below_1000000000"] == "0.999999"
        assert row["above_1000000000"] == row["below_-1000000000"] == "1e-06"
    note = "Read probabilities below 0.024 as less than 0.024, and probabilities above 0.976 as more than 0.976"
    assert sum(text.startswith(note) for text in outcome.notes) == 1
    guess = float(lines(tmp_path / "out.csv")[0]["prediction"])
    table(1)[:1].to_csv(tmp_path / "new.csv", index=False)
    asked = Questions(above=[guess], quantiles=[0.001])
    outcome = predict_table(model, tmp_path / "new.csv", tmp_path / "out.csv", asked=asked)
    assert not any(text.startswith("Read probabilities") for text in outcome.notes)
