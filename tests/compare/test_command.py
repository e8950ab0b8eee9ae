"""`bayesify compare` from a file to a report: results, resuming, failures, bad input."""

import errno
import html
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.compare import InputError, Question, compare, comparison, contestants
from bayesify.compare.models import PACKAGES, installed
from bayesify.compare.page import render
from bayesify.compare.winner import Winner
from bayesify.methods import METHODS, Method
from bayesify.running import progress as progress_display
from bayesify.serving import ModelFolder

runner = CliRunner()
pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture
def methods():
    known = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(known)


def houses(rows=60, seed=0):
    generator = np.random.default_rng(seed)
    size, age = generator.uniform(30, 200, rows), generator.uniform(0, 90, rows)
    city = generator.choice(["Rome", "Oslo", "Lima"], rows)
    price = 3 * size - age + 50 * (city == "Oslo") + generator.normal(0, 10, rows)
    age[::7] = np.nan
    return pandas.DataFrame({"size": size, "age": age, "city": city, "built": "2020-01-01", "price": price})


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "houses.csv"
    houses().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, leanly):
    """The folder of a comparison by `LAPLACE` that nothing disturbed: to be copied, not changed."""
    place = tmp_path_factory.mktemp("whole")
    houses().to_csv(place / "houses.csv", index=False)
    with leanly():
        run(place / "houses.csv", *LAPLACE, "--out", place / "out")
    return place / "out"


LAPLACE = ("--target", "price", "--methods", "laplace", "--workers", 1)


def run(*arguments, code=0):
    result = runner.invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def without_times(record):
    return {**record, "methods": [{**entry, "times": None} for entry in record["methods"]]}


def read(folder):
    return without_times(json.loads((folder / "results.json").read_text()))


def test_from_a_csv_to_a_report(csv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("houses.csv", "--target", "price", "--methods", "laplace", "--quick", "--workers", "1")
    page = Path(result.stdout.splitlines()[-1])
    assert page == tmp_path / "bayesify-compare-houses" / "report.html"
    assert all(
        re.match(r"\d of 6 runs finished after", line) for line in result.stderr.splitlines()
    )  # on a slow machine
    text = page.read_text()
    assert "which method predicts price best?" in text
    assert text.count("<svg") == 1 + 6 * 4
    for heading in ("Use the model", "Example predictions", "What each column contributes"):
        assert f"<h2>{heading}</h2>" in text
    assert text.index("<h2>Use the model</h2>") < text.index("<h2>All numbers</h2>")
    assert not re.search(r'(src|href)="', text)  # nothing outside of the page
    assert "Column &#39;built&#39; was left out: it holds the same value in every row." in text
    record = json.loads((page.parent / "results.json").read_text())
    assert record["task"] == "regression"
    names = {"constant", "linear", "boosted_trees", "point", "temperature_scaled", "laplace"}
    assert names <= {entry["name"] for entry in record["methods"]} <= names | set(PACKAGES)
    for entry in record["methods"]:
        wanted = "nll rmse crps calibration coverage_50 coverage_90 coverage_95 coverage_90_high parameters kilobytes"
        assert set(wanted.split()) <= set(entry["mean"])
        assert entry["times"]["train_seconds"] > 0
        assert entry["failure"] is None
    assert record["verdict"]["headline"] in " ".join(result.stdout.split())
    card = (page.parent / "model" / "MODEL.md").read_text()
    assert "the test rows of 2 splits of a comparison" in card
    assert f"bayesify compare: {record['verdict']['headline']}" in card.replace("\\", "")
    snippet = html.unescape(re.search(r"<pre><code>(.*?)</code></pre>", text, re.DOTALL)[1])
    assert snippet.splitlines() == [line for line in result.stdout.splitlines() if line.startswith("bayesify ")]
    (tmp_path / "new.csv").write_bytes(csv.read_bytes())
    for line in snippet.splitlines():  # on the table that it came from
        done = runner.invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    assert len(pandas.read_csv("predictions.csv")) == 60
    (other,) = tmp_path.glob("houses-*")  # the command that trains names its folder by the method
    assert other.name.removeprefix("houses-") in snippet
    assert (other / "MODEL.md").exists()


def test_classes_with_json_and_rows_of_another_kind(tmp_path):
    generator = np.random.default_rng(1)
    frame = pandas.DataFrame({"a": generator.normal(size=80), "kind": generator.choice(["u", "v"], 80)})
    frame["label"] = np.where(frame["a"] > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    pandas.DataFrame({"a": generator.normal(50, 1, 40), "kind": "u"}).to_csv(tmp_path / "far.csv", index=False)
    out = tmp_path / "out"
    result = run(
        tmp_path / "t.csv", "--target", "label", "--methods", "mean_field", "--ood", tmp_path / "far.csv", "--json", "--out", out,
        "--workers", 1,
    )  # fmt: skip
    record = json.loads(result.stdout)
    assert record["task"] == "classification"
    assert record["classes"] == ["no", "yes"]
    means = {entry["name"]: entry["mean"] for entry in record["methods"]}
    assert {"accuracy", "brier", "ece", "auroc_entropy", "auroc_mutual_information"} <= set(means["mean_field"])
    assert "Out-of-distribution rows" in (out / "report.html").read_text()
    probs = ModelFolder.read(out / "model").estimator.predict_proba(frame[["a", "kind"]])
    assert probs.shape == (80, 2)


@pytest.mark.usefixtures("lean")
def test_a_resumed_comparison_is_identical(csv, tmp_path, whole):
    parts = shutil.copytree(whole, tmp_path / "parts")
    jobs = sorted((parts / "jobs").glob("*.json"))
    kept = {path: path.stat().st_mtime_ns for path in jobs[::2]}
    for path in jobs[1::2]:
        path.unlink()
    (parts / "jobs" / ".half.json.123.tmp").write_text("{")
    run(csv, *LAPLACE, "--out", parts, "--resume")
    assert read(parts) == read(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.usefixtures("lean")
def test_the_same_seed_gives_the_same_table_and_another_one_does_not(csv, tmp_path):
    def table(seed, folder):
        asked = Question(str(csv), "price", methods=["laplace"], seed=seed, splits=1)
        return without_times(compare(asked, tmp_path / folder, workers=1).record())

    first = table(3, "a")
    assert table(3, "b") == first
    assert table(4, "c")["methods"] != first["methods"]


@pytest.mark.usefixtures("lean")
def test_results_are_neither_overwritten_nor_mixed(csv, tmp_path, whole):
    arguments = (csv, *LAPLACE, "--out", shutil.copytree(whole, tmp_path / "out"))
    before = read(tmp_path / "out")
    assert "finished runs; continue with --resume" in run(*arguments, code=2).stderr
    assert "--seed 0 instead of 1" in run(*arguments, "--resume", "--seed", 1, code=2).stderr
    houses(seed=5).to_csv(csv, index=False)
    assert "made with a different table" in run(*arguments, "--resume", code=2).stderr
    assert read(tmp_path / "out") == before


@pytest.mark.usefixtures("lean")
def test_more_methods_and_splits_may_be_added(csv, tmp_path):
    arguments = (csv, "--target", "price", "--out", tmp_path / "out", "--workers", 1)
    run(*arguments, "--methods", "point", "--splits", 1)
    run(*arguments, "--methods", "laplace", "--splits", 2, "--resume")
    record = read(tmp_path / "out")
    assert record["splits"] == 2
    assert {"point", "laplace"} <= {entry["name"] for entry in record["methods"]}


class Broken:
    def __init__(self):
        raise RuntimeError("the draw went wrong\nsecond line")


@pytest.mark.usefixtures("lean")
def test_a_method_that_fails_is_named_and_the_others_go_on(csv, tmp_path, methods):
    methods["broken"] = Method("broken", "Broken", "Nobody 2099", "P", Broken)
    result = run(csv, "--target", "price", "--methods", "broken", "--out", tmp_path / "out", "--workers", 1)
    assert "Broken failed: RuntimeError: the draw went wrong" in result.stdout
    assert "second line" not in result.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "failed: RuntimeError: the draw went wrong" in page
    record = read(tmp_path / "out")
    assert [entry["name"] for entry in record["methods"]][-1] == "broken"
    assert record["verdict"] is not None


@pytest.mark.usefixtures("lean")
def test_failed_runs_are_tried_again(csv, tmp_path, methods):
    methods["broken"] = Method("broken", "Broken", "Nobody 2099", "P", Broken)
    arguments = (csv, "--target", "price", "--methods", "broken", "--out", tmp_path / "out", "--workers", 1)
    run(*arguments)
    methods["broken"] = Method("broken", "Mended", "Nobody 2099", "P", METHODS["mean_field"].posterior)
    run(*arguments, "--resume")
    assert all(entry["failure"] is None for entry in read(tmp_path / "out")["methods"])


@pytest.mark.usefixtures("lean")
def test_ctrl_c_keeps_what_is_finished(csv, tmp_path, monkeypatch, whole):
    original = comparison.run_method

    def interrupted(path, job):
        if job["method"] == "laplace":
            raise KeyboardInterrupt
        return original(path, job)

    monkeypatch.setattr(comparison, "run_method", interrupted)
    arguments = (csv, *LAPLACE, "--out", tmp_path / "out")
    result = run(*arguments, code=130)
    assert "run the same command with --resume" in " ".join(result.stderr.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "training of 1 method is not finished" in page
    monkeypatch.setattr(comparison, "run_method", original)
    run(*arguments, "--resume")
    assert read(tmp_path / "out") == read(whole)


def test_ctrl_c_before_anything_is_finished(csv, tmp_path, monkeypatch):
    def interrupted(path, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "run_method", interrupted)
    result = run(csv, "--target", "price", "--out", tmp_path / "out", "--workers", 1, code=130)
    assert "Interrupted before the comparison was finished" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("lean")
def test_ctrl_c_while_the_recommended_method_is_trained(csv, tmp_path, monkeypatch, whole):
    """All runs are finished by then: they are reported, and `--resume` only trains the recommended method."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    shutil.copytree(whole, out)
    arguments = (csv, *LAPLACE, "--out", out, "--resume")
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "train_winner", interrupted)
        result = run(*arguments, code=130)
    assert "Interrupted; to continue, run the same command with --resume" in " ".join(result.stderr.split())
    assert str(out / "report.html") in result.stdout
    record = read(out)
    assert record["methods"] == read(whole)["methods"]
    assert record["unfinished"] == [read(whole)["verdict"]["network"]]
    assert "training of 1 method is not finished" in (out / "report.html").read_text()
    run(*arguments)
    assert read(out) == read(whole)


@pytest.mark.usefixtures("lean")
def test_a_full_disk_loses_nothing(csv, tmp_path, monkeypatch):
    arguments = (csv, *LAPLACE, "--out", tmp_path / "out")
    original = os.replace

    def full(source, destination):
        if Path(destination).name == "laplace.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))
        return original(source, destination)

    monkeypatch.setattr(os, "replace", full)
    result = run(*arguments, code=1)
    assert "No space left on device" in result.stderr
    assert "finished runs are kept" in result.stderr
    assert (tmp_path / "out" / "jobs" / "point.json").exists()
    monkeypatch.setattr(os, "replace", original)
    run(*arguments, "--resume")
    assert all(entry["failure"] is None and entry["splits"] == 2 for entry in read(tmp_path / "out")["methods"])


@pytest.mark.skipif(os.geteuid() == 0 and sys.platform != "linux", reason="root may write anywhere")
def test_a_folder_without_permission(csv, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(locked, os.W_OK):
        locked = Path("/proc/bayesify")  # root writes into any folder but this one
    result = run(csv, "--target", "price", "--out", locked / "out", code=2)
    assert "cannot be written" in result.stderr
    assert "another folder with --out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "prise"], "there is no column 'prise'; did you mean 'price'?"),
        ([], "say with --target which column to predict"),
        (["--target", "price", "--methods", "laplase"], "did you mean 'laplace'?"),
        (["--target", "price", "--ignore", "sice"], "did you mean 'size'?"),
        (["--target", "price", "--ignore", "price"], "this is the target"),
        (["--target", "price", "--splits", "-1"], "give at least 1"),
        (["--target", "price", "--ood", "nothing.csv"], "there is no such file"),
        (["--target", "price", "--max-rows", "10"], "only 10 rows have a target; a comparison needs at least 20"),
        (["--target", "city", "--task", "regression"], "holds texts"),
    ],
)
def test_bad_arguments_are_named(csv, tmp_path, arguments, message):
    result = run(csv, *arguments, "--out", tmp_path / "out", code=2)
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_unknown_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'concrete'?" in run("concreet", code=2).stderr
    assert "there is no such file" in run("nothing.csv", "--target", "y", code=2).stderr
    with pytest.raises(ValueError, match="task='guess'; give 'regression' or 'classification'"):
        Question("x.csv", task="guess")


def test_a_missing_file_is_told_before_anything_large_is_loaded(tmp_path):
    program = (
        "import sys\nfrom bayesify.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "loaded = [name for name in ('torch', 'pandas', 'sklearn', 'scipy') if name in sys.modules]\nprint(code, loaded)"
    )
    command = [sys.executable, "-c", program, "compare", "nothing.csv", "--target", "y"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "bayesify compare: nothing.csv: there is no such file; check the path\n"
    assert done.stdout == "2 []\n"


def test_rows_in_messages_are_those_of_the_file(tmp_path):
    frame = houses().astype({"age": object, "price": object})
    frame.loc[:4, "price"] = None
    frame.loc[9, "age"] = "old"
    frame.to_csv(tmp_path / "t.csv", index=False)
    result = run(tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "o", code=2)
    assert "column 'age' holds numbers, but row 10 below the header has 'old' (1 of " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("lean")
def test_many_rows_are_thinned_and_few_are_enough(tmp_path):
    houses(3000).to_csv(tmp_path / "many.csv", index=False)
    plain = ("--target", "price", "--methods", "point", "--splits", 1, "--workers", 1)
    run(tmp_path / "many.csv", *plain, "--max-rows", 200, "--out", tmp_path / "a")
    record = read(tmp_path / "a")
    assert record["rows"] == 200
    assert any("200 of 3,000 rows, chosen at random, were used" in note for note in record["notes"])
    houses(30).to_csv(tmp_path / "few.csv", index=False)
    run(tmp_path / "few.csv", *plain, "--out", tmp_path / "b")
    assert read(tmp_path / "b")["methods"][0]["mean"]["conformal_coverage_95"] is None  # three calibration rows


@pytest.mark.parametrize(
    ("target", "other"), [("price", "dear"), pytest.param("dear", "price", marks=pytest.mark.slow)]
)
def test_every_method_runs(target, other, tmp_path, monkeypatch):
    """All registered methods, a chain too, for a few steps each: none fails; the best one is not trained on all rows as well."""
    pytest.importorskip("pyro")
    monkeypatch.setattr(comparison, "train_winner", lambda *given: Winner(given[3].network, "", ""))
    frame = houses(40)
    frame["dear"] = np.where(frame["price"] > frame["price"].median(), "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = compare(
        Question(str(tmp_path / "t.csv"), target, methods=["all"], ignore=[other, "built"], splits=1, quick=True),
        tmp_path / target,
        workers=1,
    )
    assert [row.name for row in found.summary.rows if row.failure] == []
    assert len(found.summary.rows) == len(METHODS) + 2 + len(contestants.DEFAULT_RIVALS) + len(installed())


@pytest.mark.usefixtures("lean")
def test_a_report_where_every_method_failed(csv, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise ValueError("fit: cannot")

    monkeypatch.setattr("bayesify.compare.runs._score", fails)
    result = run(csv, "--target", "price", "--methods", "point", "--out", tmp_path / "out", "--workers", 1, code=1)
    assert re.search(r"Plain network failed: \w*Error: ", result.stdout)
    assert "No method finished" in (tmp_path / "out" / "report.html").read_text()


def test_a_small_portfolio_by_default_and_every_method_by_request():
    few, every = Question("t.csv").chosen(), Question("t.csv", methods=["all"]).chosen()
    assert [*contestants.DEFAULT_RIVALS, *installed(), *contestants.BASELINES, *contestants.PORTFOLIO] == few
    assert set(few) | set(METHODS) == set(every)
    assert set(Question("t.csv", methods=["swag"]).chosen()) - {"swag"} == set(few) - set(contestants.PORTFOLIO)


def test_results_stream_into_the_report(csv, tmp_path, monkeypatch):
    """While runs go on, the page shows what is finished, and loads itself again."""
    monkeypatch.setattr(comparison, "MIN_REPORT_SECONDS", 0.0)
    pages = []

    def keep(found, running):
        pages.append((running, [row.name for row in found.summary.ranked], render(found, running)))

    compare(Question(str(csv), "price", methods=["laplace"]), tmp_path / "out", workers=1, report=keep)
    assert [running != "" for running, _, _ in pages] == [True] * (len(pages) - 1) + [False]
    assert set(pages[0][1][:2]) == {"linear", "constant"}
    assert "laplace" in pages[-1][1]
    assert all(('http-equiv="refresh"' in page) == (running != "") for running, _, page in pages)
    assert "Still running: 2 of 6 runs are finished." in pages[0][2]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_told_with_the_time_that_is_left(monkeypatch, terminal):
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(progress_display, "monotonic", lambda: float(next(clock)))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with progress_display.TimeLeft("runs", console=console) as progress:
        for done in range(1, 5):
            progress.tell(f"Laplace, split {done}", done, 4, done / 4)
    text = console.file.getvalue()
    if terminal:
        assert "Laplace, split 4" in text
    else:
        lines = text.splitlines()
        assert re.fullmatch(r"2 of 4 runs finished after \d+ s, about \d+ s left: Laplace, split 2", lines[0])
        assert len(lines) == 2


def test_an_engine_that_is_not_there(csv, tmp_path):
    with pytest.raises(InputError, match="--engine"):
        compare(Question(str(csv), "price", methods=["point"]), tmp_path / "out", engine="steam")


def test_too_large_a_covariance_is_left_out():
    reason = contestants.obstacle("full_covariance", 100, 1)
    assert "left out because it needs too much memory for a layer of 5,050 weights" in reason
    assert "left out because it is too slow for 10,101 weights" in contestants.obstacle("hmc", 200, 1)
    assert contestants.obstacle("full_covariance", 8, 1) == ""


ROOT = Path(__file__).parents[2]


def commands():
    pages = [ROOT / "README.md", ROOT / "docs" / "compare.md"]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    return sorted({tuple(words[2:]) for words in lines if words[:2] == ["bayesify", "compare"]})


@pytest.mark.usefixtures("lean")
@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_of_the_documentation_run(arguments, csv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(
        *arguments, *(() if "--methods" in arguments else ("--methods", "point")), "--splits", 1, "--workers", 1
    )
    assert Path(result.stdout.splitlines()[-1]).exists()


def test_the_documentation_has_commands_and_names_every_option():
    assert ("iris", "--quick") in commands()
    text = (ROOT / "docs" / "compare.md").read_text()
    help_text = runner.invoke(app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    for option in set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help"}:
        assert option in text, option
