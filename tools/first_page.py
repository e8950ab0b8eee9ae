"""Writer of the first figure, the table of four numbers and the installation lines of the README and the site.

python -m tools.first_page              # writes the table and the lines from stored results
python -m tools.first_page --figure     # also trains the two networks of the figure and draws it again, about 20 seconds

`on_pypi` in pyproject.toml ([tool.bayesify]) is the one switch that turns the lines into `pip install bayesify`.
"""

import argparse
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import toy
from bayesify.demo.figures import DATA_COLOR, EPISTEMIC_COLOR, MEAN_COLOR, TRUTH_COLOR
from bayesify.methods import get_method
from bayesify.version import __version__
from benchmarks import truth
from benchmarks.truth_problems import PROBLEMS
from tools import cifar10_page, tables_page, unseen_tables_page
from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "figures" / "first-page.png"
START, END = "<!-- {}: python -m tools.first_page -->", "<!-- end -->"
PANELS = {"network": "A trained network", "laplace": "bayesify.Laplace of this network", "exact": "The exact posterior"}
SEED = 0
Json = dict[str, Any]


def functions(seed: int = SEED, epochs: int = truth.EPOCHS) -> dict[str, Tensor]:
    """Draws of each panel's functions at the problem's inputs, [S, I]: one for the trained network, 400 for the others."""
    problem = PROBLEMS["gap"]()
    model: Any = truth.train(problem, get_method("laplace"), seed, epochs)
    with torch.no_grad():
        network = model.network(problem.inputs)[None]
    exact = torch.from_numpy(np.load(truth.TRUTHS / "gap.npz")["functions"])
    found = {"network": network, "laplace": truth.draws_of(model, problem.inputs, seed), "exact": exact}
    return {name: draws[..., 0] for name, draws in found.items()}


def drawing(found: dict[str, Tensor]) -> bytes:
    """The panels side by side on the same axes, as PNG: mean function, two standard deviations, data and true curve."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    problem, data = PROBLEMS["gap"](), toy.cosine(num_data=60, seed=0)
    inputs = problem.inputs[:, 0].numpy()
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        draws = found[name]
        mean, spread = draws.mean(0).numpy(), 2 * draws.std(0, correction=0).numpy()
        band = axes.fill_between(inputs, mean - spread, mean + spread, color=EPISTEMIC_COLOR, alpha=0.55, linewidth=0)
        (line,) = axes.plot(inputs, mean, color=MEAN_COLOR, linewidth=1.8)
        (curve,) = axes.plot(data.grid[:, 0], data.truth[:, 0], color=TRUTH_COLOR, linewidth=1.5, linestyle=(0, (4, 2)))
        (points,) = axes.plot(problem.x[:, 0], problem.y[:, 0], "o", color=DATA_COLOR, markersize=2.4)
        axes.set(xlim=(inputs[0], inputs[-1]), ylim=(-3.2, 3.2), xlabel="x", title=title)
        axes.spines[["top", "right"]].set_visible(False)
    handles = {"data": points, "true curve": curve, "mean": line, "two standard deviations": band}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=200, metadata={"Software": None})
    return buffer.getvalue()


# -- the table ---------------------------------------------------------------------------------------------------------


def numbers(prefix: str) -> str:
    """The table, with links to the pages of evidence below `prefix`."""
    rows = [_tables(), _draw(), _images(), _classes()]
    pages = ("unseen-tables", "speed", "experiments/cifar10", "speed")
    linked = [[f"[{what}]({prefix}{page}.md)", *cells] for (what, *cells), page in zip(rows, pages, strict=True)]
    return table(["measured", "bayesify", "the best alternative", "command"], linked)


def _tables() -> list[str]:
    found, cells = tables_page.stored(), []
    for classes in (False, True):
        wanted = [one for one in unseen_tables_page.sources(found) if (one.task == "classification") == classes]
        parts = []
        for source in wanted:
            rival = unseen_tables_page.best_on_validation(found, source)
            runs = found[rival][source.name]
            parts.append(unseen_tables_page.log_ratio(runs, unseen_tables_page.kind(source.task)[0]))
        cells.append((len(wanted), unseen_tables_page.combined(parts)))
    (numeric, crps), (labelled, loss) = cells
    return [
        f"Tables on which no setting was chosen: CRPS ({numeric} tables), log-loss ({labelled})",
        f"CRPS **{crps}**, log-loss {loss}",
        "CRPS 1, log-loss 1: for each table, the best of up to eight rivals on validation rows",
        "`python -m benchmarks.tables run tables --new`",
    ]


def _draw() -> list[str]:
    stored = _read("resnets_gpu.json")
    figures = stored["figures"]
    return [
        "Cost of a new draw of ResNet-50 and its forward pass (32 x 32 pixels, H200)",
        f"{figures['resnet50/inducing/5_draws']:.2f} plain passes;"
        f" {figures['resnet50/inducing/one_at_a_time']:.2f} for single draws",
        "**1**: an ensemble member, with all members stored",
        "`python -m benchmarks.resnets`",
    ]


def _images() -> list[str]:
    rows = {(row.about[0], row.about[1], row.about[4]): row for row in cifar10_page.ours()}
    ours = rows["FFG-U (KL weight 0.25, SGD, deterministic start)", "ResNet-18", "120 + 240"]
    plain = rows["Last-layer Laplace", "ResNet-18", "480"]
    five = rows["Ensemble-W", "ResNet-18", "80"]
    return [
        "ResNet-18 on CIFAR-10: accuracy, NLL, calibration error, parameters",
        f"inducing weights, 20 draws: {ours.accuracy:.1f} %, {ours.nll:.3f},"
        f" {ours.ece:.2f} %, **{ours.parameters:.1f} million**",
        f"last-layer Laplace: **{plain.accuracy:.1f} %**, {plain.nll:.3f}, {plain.ece:.2f} %, {plain.parameters:.1f} million;"
        f" five networks: {five.accuracy:.1f} %, **{five.nll:.3f}**, **{five.ece:.2f} %**, {five.parameters:.1f} million",
        "`python -m bayesify_papers.inducing_weights.classification --dataset cifar10`",
    ]


def _classes() -> list[str]:
    stored = _read("x86_64/last_layer_peers_cpu.json")["figures"]
    ours, theirs = (stored[f"{name}, kronecker, 1000 classes"] for name in ("bayesify", "laplace-torch"))
    few = [stored[f"{name}, kronecker, 10 classes"]["fit_s"] for name in ("laplace-torch", "bayesify")]
    assert "can't allocate memory" in theirs["said"], "laplace-torch ends: say what it takes"
    return [
        "Last-layer Laplace of a narrow ResNet-18, 1,000 classes, CPU: fit, predict, memory",
        f"**{ours['fit_s']:.1f} s, {ours['predict_s']:.1f} s, {ours['added_gib']:.2f} GiB**",
        f"laplace-torch: {theirs['fit_s']:.1f} s to fit, then needs more than {stored['limit_gib']:.0f} GiB;"
        f" faster with 10 classes ({few[0]:.1f} s; bayesify {few[1]:.1f} s)",
        "`python -m benchmarks.last_layer_peers`",
    ]


def _read(name: str) -> Json:
    content: Json = json.loads((RESULTS / name).read_text())
    return content


# -- the pages ---------------------------------------------------------------------------------------------------------


def install() -> str:
    """Installation lines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if project["tool"]["bayesify"]["on_pypi"]:
        return "```bash\npip install bayesify               # or 'bayesify[all]'\n```"
    return (
        "bayesify is not on PyPI yet. In a clone:\n\n"
        "```bash\n"
        "pip install -c constraints.txt .            # the library\n"
        "pip install -c constraints.txt '.[all]'     # with estimators, tables and reports\n"
        "```\n\n"
        "From a wheel (`make wheel` builds one): "
        f"`pip install -c constraints.txt 'dist/bayesify-{__version__}-py3-none-any.whl[all]'`."
    )


def pages() -> dict[Path, str]:
    """Updated text of each page by its path."""
    made = {}
    for name, prefix in (("README.md", "docs/"), ("docs/index.md", ""), ("docs/getting-started.md", "")):
        text = replaced((ROOT / name).read_text(), START.format("install"), END, install())
        if START.format("numbers") in text:
            text = replaced(text, START.format("numbers"), END, numbers(prefix))
        made[ROOT / name] = text
    return made


def main() -> None:
    """Write the pages, and the figure if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="store_true", help="draw the figure again")
    if parser.parse_args().figure:
        torch.set_num_threads(1)
        FIGURE.write_bytes(drawing(functions()))
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
