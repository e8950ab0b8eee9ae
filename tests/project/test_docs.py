"""The site builds without a warning and without the network, and shows every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayesify
from bayesify import compare, likelihoods, posteriors, priors

ROOT = Path(__file__).parents[2]
BUILD = "import gc, sys; gc.disable(); sys.modules['ruff'] = None; from mkdocs.__main__ import cli; cli()"
"""`mkdocs` without looking for garbage, a tenth of its time, and without ruff, which lays out each signature in a process."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    offline = "http://127.0.0.1:9"  # nothing listens there, so a build that fetches anything fails
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "NO_MKDOCS_2_WARNING": "1",
            "SITE_SEARCH": "false",  # a fifth of the time, and nothing here reads its index
            "SITE_HIGHLIGHT": "false",  # a tenth, and nothing here reads the colors of code
            "SITE_SIGNATURES": "false",  # a sixth, and nothing here reads links in signatures
            "http_proxy": offline,
            "https_proxy": offline,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_has_an_entry(site):
    pages = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    modules = {"posteriors": posteriors, "priors": priors, "likelihoods": likelihoods}
    wanted = [f"bayesify.{name}" for name in bayesify.__all__ if isinstance(getattr(bayesify, name), type)]
    wanted += [f"bayesify.{name}" for name in ("training.ModelStack", "training.StackedBatch", "scale_out.run_jobs")]
    wanted += ["bayesify.bayesianize", "bayesify.fit", "bayesify.save", "bayesify.load", "bayesify.prune"]
    wanted += [f"bayesify.posteriors.{name}" for name in posteriors.__all__]
    wanted += [f"bayesify.compare.{name}" for name in compare.__all__]
    for module in ("priors", "likelihoods"):
        wanted += [f"bayesify.{module}.{kind.__name__}" for kind in modules[module].REGISTRY.values()]
    assert [name for name in wanted if f'id="{name}"' not in pages] == []


def test_usual_arguments_of_fit_stand_apart_from_rare_ones(site):
    text = (site / "api" / "training" / "index.html").read_text()
    usual, rare = text.index("Other Parameters"), text.index("kl_schedule</code>", text.index("Other Parameters"))
    assert text.index("learning_rate</code>") < usual < rare


def test_formulas_are_mathml(site):
    text = (site / "methods" / "index.html").read_text() + (site / "api" / "posteriors" / "index.html").read_text()
    assert text.count("<math") > 10
    assert 'class="arithmatex"' not in text


def test_figures_suit_a_dark_page(site):
    style = (site / "style.css").read_text()
    assert '[data-md-color-scheme="slate"] .md-typeset img:not(.plain)' in style
    for picture in (site / "gallery").glob("*.png"):
        header = picture.read_bytes()[:26]
        assert header[25] == 6, f"{picture.name}: no transparency; run python -m tools.gallery"  # RGB with alpha
    page = (site / "methods" / "mean-field" / "index.html").read_text()
    assert '<div class="formula"><math' in page


def test_pages_load_nothing_from_elsewhere(site):
    loaded = re.compile(
        r'<(?:script|img)[^>]+src="(?:https?:)?//[^"]*"|<link[^>]+rel="stylesheet"[^>]+href="(?:https?:)?//'
    )
    found = {page.name: loaded.findall(page.read_text()) for page in site.rglob("*.html")}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_table_rows_have_as_many_cells_as_their_head(site):
    for page in site.rglob("*.html"):
        for table in re.findall(r"<table>.*?</table>", page.read_text(), re.DOTALL):
            rows = [re.findall(r"<t[hd][ >]", row) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)]
            assert len({len(row) for row in rows}) == 1, page.name
            assert not re.search(r"<td>[^<]*\$", table), f"{page}: a formula in a table was cut at a vertical bar"
