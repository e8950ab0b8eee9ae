"""The tables of the papers' pages are what the stored results say."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.paper_pages")


@pytest.mark.parametrize("name", ["inducing-weights", "function-space"])
def test_the_page_shows_the_committed_results(pages, name):
    page = (ROOT / "docs" / "experiments" / f"{name}.md").read_text()
    assert pages.filled(page, ROOT / "papers" / "results" / name.replace("-", "_"), name) == page
    assert all(pages.START.format(table) in page for table in pages.PAGES[name])


def test_a_table_is_made_again_between_its_marks(pages, tmp_path):
    facts = {"hardware": {"cpu": "A"}, "versions": {"torch": "2"}, "date": "2026-01-01", "command": "run"}
    row = {
        "system": "ffg_u",
        "keep": 0.5,
        "fine_tuned": True,
        "parameters": 1234,
        "accuracy": 0.9,
        "nll": 1.0,
        "ece": 0.01,
    }
    (tmp_path / "pruning.json").write_text(json.dumps({**facts, "rows": [row]}))
    small = {"system": "ensemble_u", "inducing": 4, "max_lambda": 0.1, "max_std": None, "parameters": 5}
    rows = [{**small, "accuracy": 0.8, "ece": 0.02}]
    (tmp_path / "ablation.json").write_text(json.dumps({**facts, "num_train": 100, "rows": rows}))
    names = ("pruning", "ablation", "fashion_mnist")
    text = "a\n" + "".join(f"{pages.START.format(name)}\nold\n{pages.END}\n" for name in names) + "b"
    made = pages.filled(text, tmp_path, "inducing-weights")
    assert "| FFG-U | 50 | yes | 1,234 | 90.00 | 1.00 | 94.31 | 2.31 |" in made
    assert "| Ensemble-U | 4 | 0.10 | - | 5 | 80.00 | 2.00 |" in made
    assert made.count("Not measured yet.") == 1
    assert "old" not in made
    assert (made[0], made[-1]) == ("a", "b")
    assert pages.filled(made, tmp_path, "inducing-weights") == made
