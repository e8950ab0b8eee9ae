"""`bayesify fit --update`: a folder with more rows is the model of all rows, and the old one until that is complete."""

import os
import re

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.serving import ModelFolder, fit_table
from bayesify.serving.command import LOCK
from bayesify.serving.folder import pack_rows, unpack_rows
from bayesify.serving.updating import like_training
from bayesify.storage.locks import locked
from bayesify.tables.columns import kind_of
from bayesify.tables.files import Reading, read_table

OPTIONS = {"method": "point", "epochs": 4}


def table(seed=0, rows=60, towns=("007", "north", "east")):
    generator = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "town": generator.choice(towns, rows),
            "area": generator.integers(20, 120, rows),
            "sold": pandas.date_range("2020-01-13", periods=rows).strftime("%d/%m/%Y"),
            "note": [f"remark {seed} {row}" for row in range(rows)],
        }
    )
    frame["price"] = 1000.5 * frame["area"] + generator.normal(0, 3000, rows)
    frame.loc[3, "town"] = None
    return frame


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"\s+", " ", done.output)


@pytest.fixture
def folder(tmp_path, request):
    frame = table()
    frame.to_csv(tmp_path / "old.csv", index=False)
    found = read_table(tmp_path / "old.csv")[0]
    fit_table(found, "price", name="old.csv", keep_rows=request.param, **OPTIONS).write(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("folder", [True, False], indirect=True)
def test_an_updated_folder_is_the_model_of_all_rows(folder, tmp_path):
    old, new = table(), table(1, towns=("west", "north"))  # with a new text, and an empty number
    new = new.astype({"area": float})
    new.loc[5, "area"] = np.nan
    every = pandas.concat([old, new], ignore_index=True)
    kept = bool(ModelFolder.read(folder).rows)
    (new if kept else every).to_csv(tmp_path / "more.csv", index=False)
    code, output = run("fit", tmp_path / "more.csv", "--update", folder)
    assert code == 0, output
    assert "Column 'note' is not used." in output
    every.drop(columns="note").to_csv(tmp_path / "all.csv", index=False)
    fresh = fit_table(read_table(tmp_path / "all.csv")[0], "price", **OPTIONS)
    updated = ModelFolder.read(folder)
    assert updated.about.num_rows == 120
    assert updated.about.fingerprint == fresh.about.fingerprint
    assert updated.about.table == ("old.csv and more.csv" if kept else "old.csv")
    assert "west" in next(column for column in updated.about.columns if column.name == "town").texts
    rows = every.drop(columns=["note", "price"])
    np.testing.assert_array_equal(updated.estimator.predict(rows), fresh.estimator.predict(rows))
    assert bool(updated.rows) == kept  # as before
    assert "already stores" not in output
    if kept:  # and once more, from the rows that it holds now
        code, output = run("fit", tmp_path / "more.csv", "--update", folder)
        assert (code, ModelFolder.read(folder).about.num_rows) == (0, 180)
        assert "The folder already stores 60 of the 60 rows of more.csv, and these rows now count twice." in output
        pandas.concat([old[:20], table(2, rows=19)]).to_csv(tmp_path / "half.csv", index=False)
        assert (
            "already stores 20 of the 39 rows of half.csv" in run("fit", tmp_path / "half.csv", "--update", folder)[1]
        )
        pandas.concat([old[:20], table(3, rows=21)]).to_csv(tmp_path / "fewer.csv", index=False)
        assert "already stores" not in run("fit", tmp_path / "fewer.csv", "--update", folder)[1]


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_what_does_not_fit_leaves_the_folder_as_it_was(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = table(1)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.drop(columns="area").to_csv(tmp_path / "less.csv", index=False)
    new.assign(area="much").to_csv(tmp_path / "texts.csv", index=False)
    for words, said in (
        (["less.csv"], "less.csv: column 'area', which"),
        (["texts.csv"], "texts.csv: column 'area' holds texts, but it held numbers when"),
        (["new.csv", "--target", "price"], "--target: this option cannot be combined with --update"),
        (["new.csv", "--method", "laplace"], "--method: this option cannot be combined with --update"),
    ):
        code, output = run("fit", tmp_path / words[0], *words[1:], "--update", folder)
        assert (code, said in output) == (2, True), output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("folder", [False], indirect=True)
def test_without_its_rows_a_folder_needs_them_in_the_table(folder, tmp_path):
    assert not ModelFolder.read(folder).rows
    table(1).to_csv(tmp_path / "new.csv", index=False)
    code, output = run("fit", tmp_path / "new.csv", "--update", folder)
    assert (code, "does not store its 60 training rows" in output, "--keep-rows" in output) == (2, True, True), output
    code, output = run("fit", tmp_path / "new.csv", "--update", tmp_path / "nowhere")
    assert (code, "there is no such folder" in output) == (2, True), output


CELLS = {
    "marks": ["none", "NA", "x", None],
    "empty": ["", "x"],
    "spaces": [" a", "a", "a "],
    "codes": ["01", "x", "y"],
    "words": ["inf", "True", "y"],
    "lines": ['he said "x"', "a,b;c", "line\nbreak", "line\r\u2028end"],
    "truths": [True, False, None],
    "wholes": [2**53 + 1, 2**53 + 3],
    "floats": [0.1 + 0.2, 1e-17, np.nan, float(np.float32(0.1))],
    "dates": list(pandas.to_datetime(["2020-02-01 00:00:00", "2020-03-04 05:06:07", None])),
    "zones": list(pandas.to_datetime(["2020-02-01 03:00+02:00", "2020-03-04 05:06+02:00"])),
}


@pytest.mark.parametrize("name", CELLS)
def test_kept_rows_are_read_back_as_they_were(tmp_path, name):
    """Whatever stands in a cell, as Parquet and spreadsheets may hold it; texts that mean nothing in a CSV are texts here."""
    frame = pandas.DataFrame({name: [CELLS[name][row % len(CELLS[name])] for row in range(24)], " a,b ": range(24)})
    found = unpack_rows(pack_rows(frame))
    assert list(found.columns) == list(frame.columns)
    expected = frame.astype({name: str}) if name in ("dates", "zones") else frame
    for column in frame.columns:
        empty = frame[column].isna()
        assert found[column].isna().tolist() == empty.tolist()
        assert found[column][~empty].tolist() == expected[column][~empty].tolist()
    assert kind_of(name, found[name]) == kind_of(name, frame[name])


def test_classes_called_none_stay_in_an_updated_model(tmp_path):
    """Rows of a class whose name stands for an empty cell in a CSV; labels of a second table are texts as in the first one."""
    rows = 90
    frame = pandas.DataFrame({"a": np.arange(rows) % 7, "kind": np.resize(["none", "007", "east"], rows)})
    fit_table(frame, "kind", keep_rows=True, **OPTIONS).write(tmp_path / "model")
    pandas.DataFrame({"a": [1, 2, 3], "kind": ["007"] * 3}).to_csv(tmp_path / "new.csv", index=False)
    code, output = run("fit", tmp_path / "new.csv", "--update", tmp_path / "model")
    assert code == 0, output
    updated = ModelFolder.read(tmp_path / "model")
    assert updated.about.num_rows == 93
    assert updated.estimator.classes_.tolist() == ["007", "east", "none"]
    code, output = run("predict", tmp_path / "model", tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert (code, "did not occur in training" in output) == (0, False), output


@pytest.mark.parametrize("labels", [(1, 2), (True, False)])
def test_classes_that_are_no_texts_may_be_written_in_another_way(labels):
    about = fit_table(
        pandas.DataFrame({"a": range(40), "kind": np.resize(labels, 40)}), "kind", task="classification", **OPTIONS
    ).about
    assert like_training(about, Reading()).texts == ()


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
@pytest.mark.parametrize("folder", [True], indirect=True)
def test_a_second_update_at_once_is_refused(folder, tmp_path):
    """The second would be trained without the rows of the first, and replace it."""
    table(1).to_csv(tmp_path / "new.csv", index=False)
    with locked(folder / LOCK):
        code, output = run("fit", tmp_path / "new.csv", "--update", folder)
    assert (code, "is in use by process" in output, "old contents are still there" in output) == (1, True, True), output
    assert ModelFolder.read(folder).about.num_rows == 60
    assert run("fit", tmp_path / "new.csv", "--update", folder)[0] == 0
    assert not (folder / LOCK).exists()
