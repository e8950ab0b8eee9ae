"""The one display of progress: on a terminal with `rich`, nothing elsewhere; nobody else builds one."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bayesify.running.progress import Display


def test_a_line_shows_what_it_is_told():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    columns = ("{task.description}", "bar", "count", "bytes", "percent", "elapsed", "left", "at {task.fields[place]}")
    with Display(*columns, console=console, total=4, transient=False, description="work", place="home") as display:
        assert display.shown
        display.update(advance=1, place="sea")
        display.update(completed=3, description="rest")
    text = console.file.getvalue()
    assert "rest" in text
    assert "3/4" in text
    assert "75%" in text
    assert "at sea" in text


@pytest.mark.parametrize("missing", ["terminal", "wish"])
def test_nothing_is_shown_elsewhere(missing, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: missing != "terminal")
    with Display("bar", show=missing != "wish", total=2) as display:
        display.update(advance=1)
    assert not display.shown
    assert capsys.readouterr().err == ""


def test_nobody_else_builds_one():
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "papers", "benchmarks", "tools") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in files if "rich.progress" in path.read_text()] == ["progress.py"]
