"""The page on the architecture: the drawing is current, it says where to add things, and every name that it mentions exists."""

import ast
import re
from pathlib import Path

import pytest

from tools.architecture_drawing import DRAWING, drawing, reduced
from tools.import_graph import LAYERS, PACKAGE

PAGE = DRAWING.parent / "architecture.md"
TEXT = PAGE.read_text()


@pytest.mark.usefixtures("garbage_left_alone")
def test_the_drawing_is_current():
    assert DRAWING.read_text() == drawing(), "run python -m tools.architecture_drawing"


def test_no_arrow_of_the_drawing_runs_up():
    arrows = re.findall(r'<path d="(M[^"]+)" fill="none"', DRAWING.read_text())
    assert len(arrows) > 30
    for arrow in arrows:
        heights = []
        for letter, numbers in re.findall(r"([MVC])([^MVC]+)", arrow):
            numbers = [float(number) for number in numbers.split()]
            heights += numbers if letter == "V" else numbers[1::2]
        assert heights == sorted(heights), arrow


def test_arrows_that_follow_from_others_are_left_out():
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_the_table_has_every_room():
    table = TEXT.split("The layers from bottom to top:")[1].split("Two contracts")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    layers: dict[str, set[str]] = {}
    for row in rows:
        title = row[1].strip() or title  # noqa: F821 (of the row before)
        layers.setdefault(title, set()).update(re.findall(r"`(\w+)(?:/|\.py)`", row[2]))
    assert layers == {title: set(rooms) for title, rooms in LAYERS.items()}
    assert list(layers) == list(LAYERS)


@pytest.mark.parametrize("what", ["a posterior", "a likelihood", "an adapter", "a table encoding"])
def test_one_table_says_where_to_add_things(what):
    """A blank line inside the table would end it, and the site would show the rest as text with bars."""
    table = TEXT.split("## Where would I add ...\n\n| what | where |\n| --- | --- |\n")[1].split("\n\n")[0]
    assert f"\n| {what} | " in f"\n{table}"


def defined(tree: ast.AST, names: list[str]) -> bool:
    """Whether a dotted name is defined in a module."""
    for node in ast.iter_child_nodes(tree):
        targets = [getattr(node, "name", None), *(getattr(one, "id", None) for one in getattr(node, "targets", ()))]
        targets.append(getattr(getattr(node, "target", None), "id", None))
        if names[0] in targets and (len(names) == 1 or defined(node, names[1:])):
            return True
    return False


MENTIONED = sorted(set(re.findall(r"`([\w/]+\.py):\s([\w.]+)`", TEXT)))


@pytest.mark.parametrize(("file", "name"), MENTIONED, ids=lambda part: part)
def test_names_that_it_mentions_are_there(file, name):
    assert defined(ast.parse((PACKAGE / file).read_text()), name.split("."))


def test_files_that_it_mentions_are_there():
    assert len(MENTIONED) > 30
    root = PACKAGE.parents[1]
    for file in re.findall(r"`([\w/]+\.(?:py|toml))`", TEXT):
        assert any((place / file).exists() for place in (PACKAGE, root)) or file in (
            "from_task.py",
            "method_facts.py",
        ), file
    for folder in re.findall(r"`([\w/]+/)`", TEXT):
        assert any((place / folder).is_dir() for place in (PACKAGE, root, root.parent, Path(root, "src"))), folder
