"""The folder of a comparison: what is in it belongs to the table and the settings at hand, or is not used."""

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.compare import InputError, Question, compare
from bayesify.compare.compared_table import read_compared_table
from bayesify.compare.folder import open_folder
from bayesify.serving.terminal import plain
from bayesify.storage.locks import InUse, locked

pytestmark = pytest.mark.usefixtures("lean")
forks = pytest.mark.skipif(
    sys.platform != "linux" or torch.accelerator.is_available(),
    reason="forks; where there is an accelerator, torch's threads do not outlive that",
)


def write_table(path, seed, columns=("a", "b", "y")):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).normal(size=(60, len(columns)))
    pandas.DataFrame(values, columns=list(columns)).to_csv(path, index=False)
    return path


def run(path, folder, *more, target="y", code=0):
    arguments = ["compare", path, "--target", target, "--methods", "point", "--splits", 1, "--workers", 1, *more]
    found = CliRunner().invoke(app, [str(word) for word in [*arguments, "--out", folder]], env={"COLUMNS": "200"})
    assert code is None or found.exit_code == code, found.output
    return found


def scores(folder):
    record = json.loads((folder / "results.json").read_text())
    return [entry["mean"]["nll"] for entry in record["methods"]]


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "jobs").glob("*.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, leanly):
    """A table, and the folder of its comparison: to be copied, not changed."""
    place = tmp_path_factory.mktemp("finished")
    table, folder = write_table(place / "t.csv", 1), place / "out"
    with leanly():
        run(table, folder)
    return table, folder


DAMAGES = {
    "lost": None,
    "empty": "",
    "cut": '{"format": 2, "fing',
    "list": "[1, 2]",
    "number": "3",
    "null": "null",
    "nested": "[" * 10_000,
    "nothing known": "{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_runs_without_readable_settings_are_never_used(tmp_path, finished, damage):
    old, new, folder = finished[0], write_table(tmp_path / "new.csv", 2), shutil.copytree(finished[1], tmp_path / "out")
    before = scores(folder)
    settings = folder / "settings.json"
    settings.unlink()
    if DAMAGES[damage] is not None:
        settings.write_text(DAMAGES[damage])
    for table in (new, old):
        for more in ((), ("--resume",)):
            assert "choose another" in run(table, folder, *more, code=2).stderr
    assert scores(folder) == before


def test_a_copied_folder_and_a_moved_table_resume(tmp_path, finished):
    table, folder = finished
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(folder, moved)
    before = times(moved)
    shutil.copy(table, tmp_path / "elsewhere" / "renamed.csv")
    run(tmp_path / "elsewhere" / "renamed.csv", moved, "--resume")
    assert times(moved) == before
    assert scores(moved) == scores(folder)
    assert str(tmp_path) not in "".join(path.read_text() for path in (moved / "jobs").glob("*.json"))


@pytest.mark.parametrize("text", ['{"job": [], "result": {}}', "[1]", "7", "{", "altered"])
def test_runs_with_damaged_or_altered_files_are_done_again(tmp_path, finished, text):
    table, folder = finished[0], shutil.copytree(finished[1], tmp_path / "out")
    before = scores(folder)
    path = folder / "jobs" / "point.json"
    if text == "altered":
        stored = json.loads(path.read_text())
        stored["result"]["runs"][0]["scores"]["nll"] = -99.0
        text = json.dumps(stored)
    path.write_text(text)
    run(table, folder, "--resume")
    assert scores(folder) == before


def test_runs_of_other_data_in_a_folder_are_not_taken_for_ours(tmp_path, finished):
    ours, theirs = shutil.copytree(finished[1], tmp_path / "ours"), tmp_path / "theirs"
    run(write_table(tmp_path / "u.csv", 2), theirs)
    before = scores(ours)
    for path in (theirs / "jobs").glob("*.json"):
        shutil.copy(path, ours / "jobs" / path.name)
    shutil.copy(theirs / "data.npz", ours / "data.npz")
    run(finished[0], ours, "--resume")
    assert scores(ours) == before


def test_two_tables_of_one_name_do_not_share_the_usual_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = write_table(tmp_path / "a" / "train.csv", 1), write_table(tmp_path / "b" / "train.csv", 2)
    arguments = ["--target", "y", "--methods", "point", "--splits", "1", "--workers", "1"]
    assert CliRunner().invoke(app, ["compare", str(first), *arguments]).exit_code == 0
    for more in ((), ("--resume",)):
        found = CliRunner().invoke(app, ["compare", str(second), *arguments, *more])
        assert found.exit_code == 2
        assert "bayesify-compare-train" in found.stderr


def test_a_data_file_that_was_exchanged_is_noticed(tmp_path):
    """Should the file change under running workers, their runs fail in place of giving results of other data."""
    from bayesify.compare.runs import run_method

    problems = [
        read_compared_table(Question(str(write_table(tmp_path / f"{seed}.csv", seed)), target="y", max_rows=99, seed=0))
        for seed in (1, 2)
    ]
    with open_folder(tmp_path / "out", problems[0], {}, resume=False) as data:
        job = {
            "data": problems[1].fingerprint,
            "splits": [0],
            "seed": 0,
            "quick": True,
            "method": "point",
        }
        with pytest.raises(ValueError, match="data of another comparison"):
            run_method(str(data), job)


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_free_afterwards(tmp_path):
    table, folder = write_table(tmp_path / "t.csv", 1), tmp_path / "out"
    folder.mkdir()
    with locked(folder / ".lock"):
        message = run(table, folder, code=2).stderr
    assert re.search(
        rf"is in use by process {os.getpid()} on \S+; wait until the folder is free, or choose another folder", message
    )
    run(table, folder)
    assert not (folder / ".lock").exists()


def test_the_folder_is_held_until_the_report_is_written(tmp_path):
    table, folder, seen = write_table(tmp_path / "t.csv", 1), tmp_path / "out", []

    def report(found, running):
        with pytest.raises(InputError, match="is in use"):
            compare(Question(str(table), "y", methods=["point"], splits=1), folder, resume=True, workers=1)
        seen.append(found)

    found = compare(Question(str(table), "y", methods=["point"], splits=1), folder, workers=1, report=report)
    assert seen[-1] is found


def start(target, *arguments):
    """A process with a copy of what is loaded here, and a connection to it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    return process, ours


def hold(path, connection):
    with locked(path):
        connection.send("held")
        time.sleep(600)


@forks
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    path = tmp_path / ".lock"
    holder, connection = start(hold, path)
    try:
        assert connection.recv() == "held"
        with pytest.raises(InUse, match=f"process {holder.pid} on"), locked(path):
            pass
    finally:
        holder.kill()
        holder.join()
    assert path.exists()  # left behind, and in nobody's way
    with locked(path):
        assert path.read_text().startswith(f"process {os.getpid()} on")
    path.write_text("\x1b[2J")
    with locked(path):
        pass
    assert not path.exists()


def command(table, folder, connection):
    found = run(table, folder, "--quick", code=None)
    connection.send((found.exit_code, found.stderr))


@forks
def test_two_tables_at_once_in_one_folder(tmp_path):
    """Whatever the moment: a report of a folder is that of its own table, and the other command is refused."""
    tables = [write_table(tmp_path / f"{name}.csv", seed) for seed, name in enumerate("ab")]
    programs = [start(command, table, tmp_path / "both") for table in tables]
    answers = [connection.recv() for _, connection in programs]
    for process, _ in programs:
        process.join(60)
    assert sorted(code for code, _ in answers) == [0, 2], answers
    winner = [code for code, _ in answers].index(0)
    assert re.search("is in use by process|continue with --resume", answers[1 - winner][1])
    run(tables[winner], tmp_path / "alone", "--quick")
    assert json.loads((tmp_path / "both" / "results.json").read_text())["data"] == "ab"[winner]
    assert scores(tmp_path / "both") == scores(tmp_path / "alone")


# -- names that a terminal would obey -----------------------------------------------------------------------------------


def test_control_characters_are_shown_not_sent():
    assert plain("a\x1b[2J\x07\x9b\u202eb\r\u2028\udc80") == r"a\x1b[2J\x07\x9b\u202eb\r\u2028\udc80"
    assert plain("Größe [m²] 価格 💶\n") == "Größe [m²] 価格 💶\n"


def test_names_from_a_table_do_not_reach_the_terminal_raw(tmp_path):
    bad = "y\x1b[2J\x1b]0;owned\x07"
    table = write_table(tmp_path / "t\x1b[31m.csv", 1, columns=("a\x1b[1m", "b", bad))
    frame = pandas.read_csv(table)
    frame["constant\x1b[5m"] = "x"
    frame.to_csv(table, index=False)
    found = run(table, tmp_path / "out", target=bad)
    assert r"y\x1b[2J" in found.stdout
    wrong = run(Path("\x1b[2Jnothing.csv"), tmp_path / "no", code=2)
    missing = run(table, tmp_path / "no", target="z\x1b[2J", code=2)
    for text in (found.stdout, found.stderr, wrong.output, missing.output):
        assert "\x1b" not in text
        assert "\x07" not in text
