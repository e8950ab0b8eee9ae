"""The README and the site's front page show what was measured, and their figure can be made again."""

import importlib.util
import tomllib

import pytest

pytest.importorskip("matplotlib")

from tools import first_page
from tools.addresses import addresses


def test_tables_and_install_lines_are_current():
    for path, text in first_page.pages().items():
        assert path.read_text() == text, f"{path.name}: run python -m tools.first_page"


def test_the_figure_can_be_made_and_is_shown():
    found = first_page.functions(epochs=8)
    assert {name: len(draws) for name, draws in found.items()} == {"network": 1, "laplace": 400, "exact": 400}
    made = first_page.drawing(found)
    stored = first_page.FIGURE.read_bytes()
    assert made[:24] == stored[:24]  # PNG, with the same width and height
    assert "(docs/figures/first-page.png)" in (first_page.ROOT / "README.md").read_text()
    assert "(figures/first-page.png)" in (first_page.ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("on_pypi", [True, False])
def test_one_switch_decides_how_to_install(on_pypi, monkeypatch):
    project = {"tool": {"bayesify": {"on_pypi": on_pypi}}}
    monkeypatch.setattr(tomllib, "loads", lambda text: project)
    assert ("pip install bayesify " in first_page.install()) == on_pypi
    assert ("constraints.txt" in first_page.install()) != on_pypi


def test_links_of_the_readme_work_on_pypi():
    spec = importlib.util.spec_from_file_location("hatch_build", first_page.ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "![A picture](docs/one.png) [a page](docs/two.md) [the web](https://two.example) [here](#cite)"
    shown = hook.absolute(text, "https://code.example")
    assert "![A picture](https://code.example/raw/main/docs/one.png)" in shown
    assert "[a page](https://code.example/blob/main/docs/two.md)" in shown
    assert shown.endswith("[the web](https://two.example) [here](#cite)")


def test_addresses_of_the_site_come_from_the_project():
    urls = {"Documentation": "https://docs.example", "Repository": "https://code.example"}
    assert addresses({"urls": urls}) == {"site_url": "https://docs.example", "repo_url": "https://code.example"}
    assert addresses({}) == {}
