"""Every method has a page with its figures, and the table of scores is what was stored."""

import importlib.util
import re
from pathlib import Path

import pytest

from bayesify.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page(name):
    page = PAGES / f"{name.replace('_', '-')}.md"
    text = page.read_text()
    assert "$$" in text, "its formula"
    assert "numbers stored" in text, "its cost"
    assert {"## When", "## When not", "## How"} <= set(text.splitlines())
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(figures) == 2
    assert all((PAGES / figure).stat().st_size > 1000 for figure in figures)
    assert f"methods/{page.name}" in (ROOT / "mkdocs.yml").read_text()
    assert f"| `{name}` |" in (PAGES / "index.md").read_text()


def test_the_table_of_scores_is_what_was_stored():
    spec = importlib.util.spec_from_file_location("method_figures", ROOT / "tools" / "method_figures.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    shown = made.PAGE.read_text().split(made.START)[1].split(made.END)[0].strip()
    assert shown == made.table(), "run python tools/method_figures.py"
    assert set(re.findall(r"^\| \[[^\]]+\]\(\.\./methods/([\w-]+)\.md\)", shown, re.MULTILINE)) == {
        name.replace("_", "-") for name in METHODS
    }
