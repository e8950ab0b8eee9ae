"""Writer of the gallery's pictures and printed results: runs every example of docs/gallery.md once.

python -m tools.gallery [NAME ...]     # writes docs/gallery/NAME.png and NAME.txt; all by default
"""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
FOLDER = ROOT / "docs" / "gallery"
INK = "#888888"
"""Color of axes and text. It is readable on white and on dark pages, because the background is transparent."""


def names() -> list[str]:
    """Examples that the page shows, in its order."""
    return re.findall(r'--8<-- "examples/(\w+)\.py"', PAGE.read_text())


def main(chosen: list[str]) -> None:
    """Run the chosen examples."""
    import matplotlib
    import torch

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
        | {"savefig.transparent": True, "savefig.bbox": "tight", "savefig.dpi": 150, "legend.framealpha": 0}
        | {"axes.spines.top": False, "axes.spines.right": False, "boxplot.boxprops.color": INK}
        | {"boxplot.whiskerprops.color": INK, "boxplot.capprops.color": INK, "boxplot.flierprops.markeredgecolor": INK}
    )
    FOLDER.mkdir(exist_ok=True)
    for name in chosen or names():
        stem = name.replace("_", "-")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), torch.random.fork_rng():
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](str(FOLDER / f"{stem}.png"))
        (FOLDER / f"{stem}.txt").write_text(printed.getvalue())
        print(name, printed.getvalue(), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
