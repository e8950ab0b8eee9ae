"""The command line: methods, help, and arguments that are refused."""

import os
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bayesify import posteriors
from bayesify.cli import app
from bayesify.methods import METHODS, Method

runner = CliRunner()


def test_methods_lists_every_entry(add_method):
    add_method(
        Method("brand_new", "Brand new", "Nobody 2099", "7 P", posteriors.Point, slow=True, extra="no_such_module")
    )
    result = runner.invoke(app, ["methods"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for method in METHODS.values():
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"{method.name} ")]
        for part in (method.title, method.paper, method.cost, method.status):
            assert part in line
    assert "needs no_such_module, slow" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--methods", "mean_feild"], "did you mean 'mean_field'?"),
        (["demo", "--out", __file__], "is a file; give a folder"),
        (["demo", "--seed", "-1"], "--seed"),
        (["dmeo"], "No such command"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("bayesify.serving.terminal.find_spec", lambda name: None)
    result = runner.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'jinja2>=3.1' 'matplotlib>=3.9' (bayesify's extra 'report')" in " ".join(result.stderr.split())


def test_help_and_version():
    from bayesify import __version__

    assert runner.invoke(app, ["--version"]).stdout.strip() == __version__
    for arguments in (["--help"], ["-h"], ["demo", "--help"], ["methods", "--help"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0
        assert "Usage" in result.stdout


@pytest.mark.parametrize("command", [None, "compare", "demo", "fit", "methods", "predict", "reproduce"])
def test_help_shows_no_type_for_a_switch(command):
    found = runner.invoke(app, [command, "--help"] if command else ["--help"]).stdout
    assert "--help" in found
    assert "bool" not in found.lower()


@pytest.mark.parametrize("arguments", [["--version"], ["demo", "--help"]])
def test_a_reader_that_leaves_is_no_error(arguments):
    """As `| head` does; the pipe is closed before anything is written, which a buffer does at the end."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", "from bayesify.cli import main; main()", *arguments]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered)
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    program.wait(60)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told_in_a_sentence(unbuffered):
    words = [sys.executable, "-c", "from bayesify.cli import main; main()", "--help"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=env, text=True)
        assert (done.returncode, done.stderr) == (
            1,
            "bayesify: the output cannot be written: No space left on device\n",
        )
        assert subprocess.run(words, stdout=full, stderr=full, env=env).returncode == 1
    closed = subprocess.run(
        f"exec {shlex.join([*words[:-1], '--version'])} >&-", shell=True, stderr=subprocess.PIPE, env=env
    )
    assert (closed.returncode, closed.stderr) == (0, b"")
