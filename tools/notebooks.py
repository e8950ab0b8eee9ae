"""Writer of docs/notebooks: runs examples with cells and stores notebooks with their output, and a page of each for the site.

python -m tools.notebooks [NAME ...]     # examples/NAME.py to docs/notebooks/NAME.ipynb and NAME.md; all by default

The lines `# %%` (code) and `# %% [markdown]` (comments that are prose) divide an example into cells.
"""

import argparse
import base64
import contextlib
import io
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES, FOLDER = ROOT / "examples", ROOT / "docs" / "notebooks"
NAMES = ("small_resnet", "table_predictions", "lora_adapter")
MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?$", re.MULTILINE)


@dataclass
class Cell:
    """A cell of a notebook.

    Args:
        source: Text of the cell.
        is_code: Whether it is code; otherwise it is Markdown.
        printed: What the code printed.
        pictures: What the code drew, as PNG.
    """

    source: str
    is_code: bool
    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def cells(name: str) -> list[Cell]:
    """The cells of an example, not run."""
    text = (EXAMPLES / f"{name}.py").read_text()
    marks = [*MARK.finditer(text)]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    found = []
    for mark, end in zip(marks, ends, strict=True):
        source, is_code = text[mark.end() : end].strip("\n"), mark["markdown"] is None
        found.append(Cell(source if is_code else re.sub(r"^# ?", "", source, flags=re.MULTILINE), is_code))
    return found


def run(found: list[Cell]) -> None:
    """Run the code of all cells in one namespace, and keep their output and pictures."""
    from matplotlib import pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    shown: list[bytes] = []

    def show() -> None:
        for number in plt.get_fignums():
            buffer = io.BytesIO()
            plt.figure(number).savefig(buffer, dpi=110, metadata={"Software": None})
            shown.append(buffer.getvalue())
        plt.close("all")

    plt.switch_backend("Agg")
    plain, plt.show = plt.show, show
    try:
        for cell in (one for one in found if one.is_code):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, "cell", "exec"), names)
            cell.printed, cell.pictures = printed.getvalue(), shown.copy()
            shown.clear()
    finally:
        plt.show = plain


def notebook(found: list[Cell]) -> str:
    """The cells as a notebook, format 4.5."""
    made, count = [], 0
    for place, cell in enumerate(found):
        entry: dict[str, Any] = {"id": f"cell-{place}", "metadata": {}, "source": cell.source.splitlines(keepends=True)}
        if cell.is_code:
            count += 1
            outputs: list[dict[str, Any]] = []
            if cell.printed:
                text = cell.printed.splitlines(keepends=True)
                outputs.append({"output_type": "stream", "name": "stdout", "text": text})
            for picture in cell.pictures:
                data = {"image/png": base64.b64encode(picture).decode()}
                outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
            entry |= {"execution_count": count, "outputs": outputs}
        made.append({"cell_type": "code" if cell.is_code else "markdown", **entry})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def page(name: str, found: list[Cell]) -> str:
    """The cells as a page of the site, with links to the notebook and the example."""
    stem, parts, count = name.replace("_", "-"), [], 0
    for cell in found:
        if not cell.is_code:
            parts.append(cell.source)
            continue
        parts.append(f"``` {{ .python }}\n{cell.source}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        for _ in cell.pictures:
            count += 1
            parts.append(f"![Picture {count} of the notebook]({stem}-{count}.png)")
    title, rest = parts[0].split("\n\n", 1)
    told = (
        "*For readers who prefer to learn from a complete program. This program runs in less than a minute on two CPU cores.*"
        f" This page shows [the notebook]({stem}.ipynb), whose code is `examples/{name}.py`."
        " `python -m tools.notebooks` runs the notebook again."
    )
    return "\n\n".join([title, told, rest, *parts[1:]]) + "\n"


def write(name: str) -> float:
    """Run an example, write its notebook, page and pictures, and return the seconds of the run."""
    import torch

    start, found, stem = time.perf_counter(), cells(name), name.replace("_", "-")
    with torch.random.fork_rng():
        run(found)
    spent = time.perf_counter() - start
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob(f"{stem}-*.png"):
        old.unlink()
    pictures = [picture for cell in found for picture in cell.pictures]
    for number, picture in enumerate(pictures, 1):
        (FOLDER / f"{stem}-{number}.png").write_bytes(picture)
    (FOLDER / f"{stem}.ipynb").write_text(notebook(found))
    (FOLDER / f"{stem}.md").write_text(page(name, found))
    return spent


def main() -> None:
    """Write the named notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    for name in parser.parse_args().names:
        print(name, f"{write(name):.1f} s", flush=True)


if __name__ == "__main__":
    main()
