"""Every example runs from start to end, without a warning, in a folder of its own; its assertions hold in the slow tests."""

import re
import sys
from pathlib import Path

import pytest
import torch

plt = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("trainings", ["brief", pytest.param("whole", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, trainings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))  # there is no display
    plt.switch_backend("Agg")
    code = compile(example.read_text(), str(example), "exec", optimize=1 if trainings else 0)  # 1: no assertions
    with torch.random.fork_rng():
        exec(code, {"__name__": "__main__", **(trainings or {})})
    assert capsys.readouterr().out.strip(), "an example prints what it found"
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_the_gallery_shows_examples_with_their_results():
    page = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r'--8<-- "examples/(\w+)\.py"', page)
    assert len(shown) >= 6
    for name in shown:
        stem = name.replace("_", "-")
        assert (ROOT / "examples" / f"{name}.py").exists()
        assert f"gallery/{stem}.png){{ .plain }}" in page
        assert f'--8<-- "docs/gallery/{stem}.txt"' in page
        assert (ROOT / "docs" / "gallery" / f"{stem}.png").stat().st_size > 5000, "run python -m tools.gallery"
        assert (ROOT / "docs" / "gallery" / f"{stem}.txt").read_text().strip()


def test_examples_fit_the_column_of_the_gallery():
    assert [(path.name, line) for path in EXAMPLES for line in path.read_text().splitlines() if len(line) > 88] == []
