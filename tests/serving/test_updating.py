"""`bayesify fit --update`: a folder with more rows is the model of all rows, and the old one until that is complete."""

import re

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.serving import ModelFolder, fit_table
from bayesify.serving.folder import ROWS, read_about
from bayesify.tables.files import read_table

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
    kept = (folder / ROWS).exists()
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
    assert (folder / ROWS).exists() == kept  # as before
    if kept:  # and once more, from the rows that it holds now
        assert run("fit", tmp_path / "more.csv", "--update", folder)[0] == 0
        assert read_about(folder).num_rows == 180


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_what_does_not_fit_leaves_the_folder_as_it_was(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = table(1)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.drop(columns="area").to_csv(tmp_path / "less.csv", index=False)
    new.assign(area="much").to_csv(tmp_path / "texts.csv", index=False)
    for words, said in (
        (["less.csv"], "less.csv: column 'area' of"),
        (["texts.csv"], "texts.csv: column 'area' holds texts, but it held numbers when"),
        (["new.csv", "--target", "price"], "--target: --update takes this setting from"),
        (["new.csv", "--method", "laplace"], "--method: --update takes this setting from"),
    ):
        code, output = run("fit", tmp_path / words[0], *words[1:], "--update", folder)
        assert (code, said in output) == (2, True), output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / ROWS).write_bytes(b"other")
    code, output = run("fit", tmp_path / "new.csv", "--update", folder)
    assert (code, "the file is missing or belongs to another model" in output) == (2, True), output


@pytest.mark.parametrize("folder", [False], indirect=True)
def test_without_its_rows_a_folder_needs_them_in_the_table(folder, tmp_path):
    assert not (folder / ROWS).exists()
    table(1).to_csv(tmp_path / "new.csv", index=False)
    code, output = run("fit", tmp_path / "new.csv", "--update", folder)
    assert (code, "does not store its 60 training rows" in output, "--keep-rows" in output) == (2, True, True), output
    code, output = run("fit", tmp_path / "new.csv", "--update", tmp_path / "nowhere")
    assert (code, "there is no such folder" in output) == (2, True), output
