"""The notebooks are those of their examples, with outputs and pictures; they run with the slow tests."""

import json

import pytest

pytest.importorskip("matplotlib")

from tools import notebooks

ROOT = notebooks.ROOT


def stored(name):
    return json.loads((notebooks.FOLDER / f"{name.replace('_', '-')}.ipynb").read_text())


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_is_current_and_was_run(name):
    found, cells = notebooks.cells(name), stored(name)["cells"]
    assert ["".join(cell["source"]) for cell in cells] == [cell.source for cell in found], (
        "run python -m tools.notebooks"
    )
    assert [cell["cell_type"] == "code" for cell in cells] == [cell.is_code for cell in found]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_its_page_shows_the_same_and_is_in_the_menu(name):
    stem, cells = name.replace("_", "-"), stored(name)["cells"]
    text = (notebooks.FOLDER / f"{stem}.md").read_text()
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all("".join(cell["source"]) in text for cell in code)
    printed = [output for cell in code for output in cell["outputs"] if output["output_type"] == "stream"]
    assert all("".join(output["text"]).rstrip() in text for output in printed)
    pictures = [output for cell in code for output in cell["outputs"] if output["output_type"] == "display_data"]
    assert all((notebooks.FOLDER / f"{stem}-{number}.png").exists() for number in range(1, len(pictures) + 1))
    assert f"notebooks/{stem}.md" in (ROOT / "mkdocs.yml").read_text()


def test_cells_keep_what_they_print_and_draw(tmp_path, monkeypatch):
    code = "from matplotlib import pyplot as plt\nplt.plot([0, 1])\nprint('drawn')\nplt.show()"
    (tmp_path / "one.py").write_text(f"# %% [markdown]\n# # A title\n#\n# Prose.\n\n# %%\n{code}\n")
    monkeypatch.setattr(notebooks, "EXAMPLES", tmp_path)
    prose, drawing = found = notebooks.cells("one")
    assert (prose.source, drawing.source) == ("# A title\n\nProse.", code)
    notebooks.run(found)
    assert drawing.printed == "drawn\n"
    assert drawing.pictures[0].startswith(b"\x89PNG")
    assert json.loads(notebooks.notebook(found))["cells"][1]["execution_count"] == 1
    assert "![Picture 1 of the notebook](one-1.png)" in notebooks.page("one", found)


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_runs(name):
    found = notebooks.cells(name)
    notebooks.run(found)
    assert any(cell.pictures for cell in found)
