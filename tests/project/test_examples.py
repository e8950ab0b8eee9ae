"""Every example runs from start to end, without a warning, in a folder of its own."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example prints what it found"
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_examples_are_found():
    assert len(EXAMPLES) >= 4
