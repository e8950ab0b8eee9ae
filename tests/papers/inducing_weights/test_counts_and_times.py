"""Tables of parameters and run times."""

from __future__ import annotations

import json

import pytest
from bayesify_papers.inducing_weights import parameters, run_time
from bayesify_papers.shared.tables import table

from bayesify.posteriors import MeanField


def test_counts_are_the_published_ones(smoke):
    done = smoke("inducing-weights/parameters")
    assert "1,384,662" in done.printed
    assert [row["difference"] for row in done.rows if row["metric"] == "parameters"] == [0.0] * 3
    assert parameters.count(MeanField()) == 46_988_564


def test_a_size_that_is_not_published():
    with pytest.raises(ValueError, match="M=17 is not published; give some of 16"):
        parameters.rows([17])


def test_run_times_are_read(tmp_path, capsys):
    figures = {"resnet18/inducing/5_draws": 1.06, "resnet18/inducing/bf16/5_draws": 1.191}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"figures": figures, "hardware": {"gpu": "A"}, "batch": 500, "date": "2026-01-01"}))
    assert run_time.main([str(path), "--out", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resnet18, inducing"))
    assert line.split()[2:] == ["1.06", "-", "-", "1.19", "-", "-"]
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.resnets"):
        run_time.read(tmp_path / "none.json")


def test_tables_align():
    text = table(["name", "n"], [["a", "1"], ["long name", "200"]], "title")
    assert text.splitlines() == ["title", "name         n", "---------  ---", "a            1", "long name  200"]
