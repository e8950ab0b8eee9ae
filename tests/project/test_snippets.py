"""Every Python block of the README, the contributing guide and the documentation runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from bayesify import posteriors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {
    "transformers.md": "transformers",
    "lora.md": "peft",
    "hmc.md": "pyro",
    "scientist.md": "pyro",
    "engineer.md": "onnxruntime",
} | {
    "small-device.md": "onnxruntime",
    "bayesian-optimization.md": "botorch",
}
LONG = {"small-device.md", "engineer.md"}
"""Pages of ten seconds, which run with the slow tests: others show the same functions, and exports have tests of their own."""
QUICK = {"README.md", "CONTRIBUTING.md", "gotchas.md", "prediction.md", "concepts.md"}
"""Pages that always run as they are written: the first page, and those whose assertions need few steps or none."""
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The page's Python blocks, each after as many empty lines as stand before it, so that errors name the page's line."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


WITH_CODE = [page for page in PAGES if page.exists() and blocks(page)]


def runs(exports: bool) -> pytest.MarkDecorator:
    """Each page with brief trainings and without its assertions; as it is written with the slow tests.

    Args:
        exports: Whether those pages that export to ONNX, or the others.
    """
    found = []
    for page in (page for page in WITH_CODE if (NEEDS.get(page.name) == "onnxruntime") == exports):
        name = str(page.relative_to(ROOT))
        if page.name not in LONG | QUICK:
            found.append(pytest.param(page, "brief", id=name))
        marks = [] if page.name in QUICK else [pytest.mark.slow]
        found.append(pytest.param(page, "whole", id=f"{name}-whole", marks=marks))
    return pytest.mark.parametrize(("page", "trainings"), found, indirect=["trainings"])


@runs(exports=True)
def test_blocks_with_exports_run(page, trainings, tmp_path, monkeypatch, operators_looked_up_once):
    test_blocks_run(page, trainings, tmp_path, monkeypatch)


@runs(exports=False)
def test_blocks_run(page, trainings, tmp_path, monkeypatch):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    if page.name == "transformers.md":  # the folder of tests that is called `datasets` is not the package of that name
        monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(posteriors, "REGISTRY", dict(posteriors.REGISTRY))  # a page may add a posterior of its own
    namespace = {"__name__": "__main__", **trainings}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks(page):
            exec(compile(block, str(page), "exec", optimize=1 if trainings else 0), namespace)  # 1: no assertions


def test_code_fits_its_column():
    lines = [(page, line) for page in WITH_CODE for block in blocks(page) for line in block.splitlines()]
    assert [(page, line) for page, line in lines if len(line) > 88] == []


def test_pages_with_code_are_found():
    names = {page.name for page in WITH_CODE}
    assert {"README.md", "CONTRIBUTING.md", "getting-started.md", "training.md", "mean-field.md"} <= names
