"""A model folder is one model: files of two are refused, a write that fails keeps the old one, readers never see a half."""

import errno
import json
import multiprocessing
import os

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.serving import ModelFolder, fit_table
from bayesify.serving.fitting import Scored
from bayesify.serving.folder import ABOUT, CARD, MODEL
from bayesify.storage import load, tensor_files
from bayesify.storage.save_load import contents_of
from bayesify.tables.errors import InputError

SCORED = Scored({"rmse": 1.0}, "no rows")
"""No test reads the scores: tables are not split to train on their parts."""
posix = pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")


def table(slope):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": generator.normal(size=40), "c": generator.choice(["x", "y"], 40)})
    return frame.assign(price=slope * frame["a"])


@pytest.fixture(scope="module")
def models():
    """Two models of one kind of table, as two versions of one table give them."""
    return [
        fit_table(table(slope), "price", name=f"t{slope}.csv", method="point", epochs=5, scored=SCORED)
        for slope in (1, -9)
    ]


def predicted(model):
    return float(model.estimator.predict(table(1).astype({"a": object})[:1])[0])


def is_whole(found, models):
    """Whether a model's facts and numbers are those of one of two models."""
    return [found.about.table, predicted(found)] in ([one.about.table, predicted(one)] for one in models)


def test_the_model_and_its_facts_are_one_file(tmp_path, models):
    for place, model in zip("mn", models, strict=True):
        model.write(tmp_path / place)
    (tmp_path / "m" / MODEL).replace(tmp_path / "n" / MODEL)
    assert is_whole(ModelFolder.read(tmp_path / "n"), models[:1])
    assert json.loads((tmp_path / "n" / ABOUT).read_text())["table"] == models[1].about.table
    assert predicted(models[0]) == float(load(tmp_path / "n" / MODEL).predict(table(1).astype({"a": object})[:1])[0])


@pytest.mark.parametrize("header", [{}, {"folder": {"about": {"format": 9}}}])
def test_a_folder_of_another_format_is_refused(tmp_path, models, header):
    own, tensors = contents_of(models[0].estimator)
    tensor_files.write(tmp_path / MODEL, "model", own | header, tensors)
    with pytest.raises(InputError, match=r"in format (4 or older|9), but .* reads format 5; train again"):
        ModelFolder.read(tmp_path)


def test_force_keeps_the_old_model_until_the_new_one_is_complete(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(2).to_csv("t.csv", index=False)
    models[0].write(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    monkeypatch.setattr("bayesify.serving.fitting.fit_table", lambda *_, **__: models[1])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = CliRunner().invoke(app, ["fit", "t.csv", "--target", "price", "--out", "m", "--force"])
    assert done.exit_code == 1
    assert "m/model.safetensors: the file cannot be written (No space left on device)" in done.output
    assert "its old contents are still there" in done.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    done = CliRunner().invoke(app, ["fit", "t.csv", "--target", "price", "--out", "m", "--force"])
    assert done.exit_code == 0, done.output
    assert ModelFolder.read(tmp_path / "m").about == models[1].about
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == sorted([ABOUT, CARD, MODEL])


def write_until(model, folder, ended):
    while not ended.is_set():
        model.write(folder)


@posix
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_writers_and_a_reader(tmp_path, models):
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    models[0].write(tmp_path / "m")
    writers = [context.Process(target=write_until, args=(model, tmp_path / "m", ended)) for model in models]
    for process in writers:
        process.start()
    found = []
    try:
        while len(found) < 30 or len({model.about.table for model in found}) < 2:
            found.append(ModelFolder.read(tmp_path / "m"))
            assert all(process.is_alive() for process in writers)
    finally:
        ended.set()
        for process in writers:
            process.join()
    assert [process.exitcode for process in writers] == [0, 0]
    assert all(is_whole(model, models) for model in (*found, ModelFolder.read(tmp_path / "m")))
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == sorted([ABOUT, CARD, MODEL])


NAMES = ("a", "id 'a'", "'a'", "b \"a\" 'a'", "a (days)x", "a was left out: ", "Column 'a' was left out: ", "")


@pytest.mark.parametrize("used", ["a", "'a'", ""])
def test_names_of_columns_do_not_touch_each_other(tmp_path, used):
    """Columns that are left out, with names that hold the name of the column that is used."""
    frame = table(1).rename(columns={"a": used})
    for index, name in enumerate(name for name in NAMES if name != used):
        frame[name] = f"text {index}"
    model = fit_table(frame, "price", method="point", epochs=1, scored=SCORED)
    assert [column.name for column in model.about.columns] == [used, "c"]
    model.write(tmp_path / "m")
    assert ModelFolder.read(tmp_path / "m").about == model.about


def test_numbers_of_a_date_do_not_replace_a_column():
    frame = table(1).assign(day=pandas.date_range("2020-01-01", periods=40), **{"day (x)": range(40)})
    model = fit_table(frame, "price", method="point", epochs=1, scored=SCORED)
    columns = model.estimator.fitted_.columns.schema
    assert dict(zip(columns.number_names, columns.sources, strict=True))["day (x)"] == "day (x)"
    for names in (["day", "day (days)"], ["day (days)", "day"]):
        both = frame.rename(columns={"day (x)": "day (days)"})[[*names, "price"]]
        with pytest.raises(
            InputError,
            match=r"'day \(days\)' has the same name as a column of numbers computed from the dates in 'day'",
        ):
            fit_table(both, "price", method="point", epochs=1, scored=SCORED)
