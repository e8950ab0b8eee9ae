"""Tables of parameters and run times, and those of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bayesify_papers.inducing_weights import pages, parameters, run_time
from bayesify_papers.tables import table


def test_counts_are_the_published_ones(smoke):
    done = smoke("inducing-weights/parameters")
    assert "1,384,662" in done.printed
    assert "46,988,564" in done.printed
    assert [row["difference"] for row in done.rows] == [0.0] * 4


def test_a_size_that_is_not_published():
    with pytest.raises(ValueError, match="M=17 is not published; give some of 16"):
        parameters.rows([17])


def test_run_times_are_read(tmp_path, capsys):
    figures = {"resnet18/inducing/5_draws": 1.06, "resnet18/inducing/bf16/5_draws": 1.191}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"figures": figures, "hardware": {"gpu": "A"}, "batch": 500, "date": "2026-01-01"}))
    assert run_time.main([str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resnet18, inducing"))
    assert line.split()[2:] == ["1.06", "-", "-", "1.19", "-", "-"]
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.resnets"):
        run_time.read(tmp_path / "none.json")


def test_tables_align():
    text = table(["name", "n"], [["a", "1"], ["long name", "200"]], "title")
    assert text.splitlines() == ["title", "name         n", "---------  ---", "a            1", "long name  200"]


def test_the_page_shows_the_committed_results():
    root = Path(__file__).parents[3]
    page = (root / pages.PAGE).read_text()
    assert pages.filled(page, root / pages.RESULTS) == page
    assert all(pages.START.format(name) in page for name in pages.TABLES)


def test_a_table_is_made_anew_between_its_marks(tmp_path):
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
    made = pages.filled(text, tmp_path)
    assert "| FFG-U | 50 | yes | 1,234 | 90.00 | 1.00 | 94.31 | 2.31 |" in made
    assert "| Ensemble-U | 4 | 0.10 | - | 5 | 80.00 | 2.00 |" in made
    assert made.count("Not measured yet.") == 1
    assert "old" not in made
    assert (made[0], made[-1]) == ("a", "b")
    assert pages.filled(made, tmp_path) == made
