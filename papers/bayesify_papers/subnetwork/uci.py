"""UCI regression of section 5.2 (figure 3): subnetworks of large networks compared with whole small networks.

    python -m bayesify_papers.subnetwork.uci --datasets wine kin8nm protein [--splits 5] [--out DIR] [--smoke]

There are four networks (1 or 2 hidden layers of 50 or 100 ReLU units, the second layer residual as in the authors' code), with
standard and gap splits. 15 % of the training rows are for early stopping and for the prior precision (appendix C.2). In each
network, the posterior covers as many weights as each smaller network has, chosen by largest variance, and finally all weights.
Biases are point estimates. Every split of every network is stored when it ends, and a run resumes where an earlier run ended.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import Laplace, subnetwork
from bayesify.datasets import Standardization, uci
from bayesify.likelihoods import Gaussian
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.shared.rows import show
from bayesify_papers.subnetwork import map_regression, rows

DATASETS = ("wine", "kin8nm", "protein")
NETWORKS = ((1, 50), (1, 100), (2, 50), (2, 100))
"""Number of hidden layers and width of each network."""

MEMORY_BUDGET = "4GiB"
"""Memory budget of a posterior. 11,200 weights take 1.4 GiB."""

PRIOR_PRECISIONS = (1e-4, 1e-3, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, 1000.0)
"""Prior precisions of appendix C.2."""

RECIPE = map_regression.Recipe()
RECIPES = dict.fromkeys(uci.REGRESSION, RECIPE) | {"protein": replace(RECIPE, epochs=500, patience=125)}
SMOKE = map_regression.Recipe(epochs=3, patience=2)


Outcome = dict[str, Any]
"""Results of one posterior on one split: `KEY_COLUMNS`; `num_weights` with a variance (0 for MAP); `log_likelihood` (mean over test
rows in nats) and `rmse`, both in the target's own unit; the chosen `prior_precision` (`None` for MAP); and `seconds` of fitting and
tuning (of training for MAP)."""

KEY_COLUMNS = ("dataset", "gap", "split", "hidden_layers", "width")
"""Columns that identify a run: data set, whether it is a gap split, number of the split, and network."""


def count_weights(inputs: int, hidden_layers: int, width: int) -> int:
    """Number of weights without biases: `(inputs + 1) width + (hidden_layers - 1) width^2` (section 5.2)."""
    return (inputs + 1) * width + (hidden_layers - 1) * width**2


def subnetwork_sizes(inputs: int, hidden_layers: int, width: int, networks: Sequence[tuple[int, int]]) -> list[int]:
    """Sizes of the networks that are not larger than this one, ascending. The last size is its own."""
    own = count_weights(inputs, hidden_layers, width)
    return sorted({size for size in (count_weights(inputs, *network) for network in networks) if size < own} | {own})


def run_split(
    table_: uci.Table,
    split: uci.Split,
    *,
    gap: bool,
    index: int,
    network: tuple[int, int],
    networks: Sequence[tuple[int, int]],
    recipe: map_regression.Recipe,
    largest: int | None = None,
    device: torch.device | str = "cpu",
) -> list[Outcome]:
    """Train a network on a split, and score MAP and every subnetwork."""
    own = split.with_validation(0.15, seed=index)
    scale_x, scale_y = Standardization.of(table_.X[own.train]), Standardization.of(table_.y[own.train])

    def part(which: np.ndarray) -> tuple[Tensor, Tensor]:
        x, y = scale_x(table_.X[which]), scale_y(table_.y[which])
        return torch.from_numpy(x).float().to(device), torch.from_numpy(y).float().to(device)

    train, validation, test = part(own.train), part(own.validation), part(own.test)
    unit = float(scale_y.std[0, 0])
    start = time.perf_counter()
    net = map_regression.make(table_.X.shape[1], *network, seed=index, residual=True).to(device)
    likelihood = map_regression.train(net, *train, recipe, validation=validation, seed=index)

    def outcome(size: int, log_likelihood: Tensor, precision: float | None, since: float) -> Outcome:
        with torch.no_grad():
            rmse = float((net(test[0]) - test[1]).square().mean().sqrt()) * unit
        scores = {"log_likelihood": float(log_likelihood.mean()) - math.log(unit), "rmse": rmse}
        key = dict(zip(KEY_COLUMNS, (table_.name, gap, index, *network), strict=True))
        seconds = round(time.perf_counter() - since, 2)
        return {**key, "num_weights": size, **scores, "prior_precision": precision, "seconds": seconds}

    with torch.no_grad():
        point = likelihood.log_density(net(test[0]), test[1])
    outcomes = [outcome(0, point, None, start)]
    map_regression.freeze_biases(net)
    for size in subnetwork_sizes(table_.X.shape[1], *network, networks):
        if largest is not None and size > largest:
            break
        start = time.perf_counter()
        laplace, precision = fit_laplace(net, likelihood, size, train, validation)
        outcomes.append(outcome(size, laplace.predict(test[0]).log_prob(test[1]), precision, start))
    return outcomes


def fit_laplace(
    net: torch.nn.Module,
    likelihood: Gaussian,
    size: int,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
) -> tuple[Laplace, float]:
    """A Laplace approximation over a subnetwork, with the prior precision of the best validation log-likelihood."""
    whole = size == sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    chosen = "all" if whole else subnetwork.largest_variance(size, skip_flat=False)
    laplace = Laplace(net, likelihood, subset=chosen, prior_precision=1.0, memory=MEMORY_BUDGET)
    laplace.fit(_batches(*train))
    precision = laplace.tune_prior_precision(_batches(*validation), grid=PRIOR_PRECISIONS, fine=False)
    return laplace, precision


def _batches(x: Tensor, y: Tensor, batch: int = 512) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(batch), y.split(batch), strict=True))


def run(
    folder: Path,
    tables: Sequence[uci.Table],
    *,
    kinds: Sequence[str] = ("standard", "gap"),
    splits: int | None = None,
    networks: Sequence[tuple[int, int]] = NETWORKS,
    recipes: Mapping[str, map_regression.Recipe] = RECIPES,
    largest: int | None = None,
    device: torch.device | str = "cpu",
    facts: dict[str, Any] | None = None,
) -> list[Outcome]:
    """Run everything that is not yet in the folder's `uci.jsonl`.

    Args:
        folder: Folder for `uci.jsonl`, with one line per posterior, and `uci.json`, with the facts and settings of the run.
        kinds: `"standard"`, `"gap"` or both.
        splits: Number of splits of each kind, from the first.
        networks: Number of hidden layers and width of each network.
        recipes: Recipes of the MAP estimates by data set.
        largest: Largest number of weights of a subnetwork.

    Raises:
        ValueError: If the folder has results with other settings.
    """
    path = folder / "uci.jsonl"
    settings = {"networks": list(networks), "largest": largest, "prior_precisions": PRIOR_PRECISIONS}
    about = {"settings": settings, "recipes": {name: asdict(recipe) for name, recipe in recipes.items()}}
    records.begin_run(folder / "uci.json", about, facts)
    outcomes = read(path)
    done = {tuple(outcome[key] for key in KEY_COLUMNS) for outcome in outcomes}
    for table_ in tables:
        for kind in kinds:
            every = table_.splits if kind == "standard" else table_.gap_splits
            for index, split in enumerate(every[:splits]):
                for network in networks:
                    if (table_.name, kind == "gap", index, *network) in done:
                        continue
                    made = run_split(
                        table_,
                        split,
                        gap=kind == "gap",
                        index=index,
                        network=network,
                        networks=networks,
                        recipe=recipes[table_.name],
                        largest=largest,
                        device=device,
                    )
                    outcomes += made
                    records.write_lines(path, outcomes)
                    scores = ", ".join(f"{one['num_weights']}: {one['log_likelihood']:.3f}" for one in made)
                    print(f"{table_.name} {kind} {index}, {network[0]} x {network[1]}: {scores}", flush=True)
    return outcomes


def read(path: Path) -> list[Outcome]:
    """Results that earlier runs stored."""
    return records.read_lines(path) if path.is_file() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "subnetwork-uci", small=True)
    program.choice("datasets", uci.REGRESSION, list(DATASETS)).choice("kinds", ("standard", "gap"))
    program.add_argument("--largest", type=int, help="largest number of weights of a subnetwork")
    chosen = program.option("data", "splits", device="cpu").read(arguments)
    if chosen.smoke:
        options: dict[str, Any] = {"networks": ((1, 4), (2, 6)), "recipes": {"synthetic": SMOKE}, "splits": 1}
        run(chosen.out, [synthetic(120, splits=2, amplitude=1.0)], facts=chosen.facts, **options)
    else:
        tables = [uci.load(name, chosen.data) for name in chosen.datasets]
        options = {name: getattr(chosen, name) for name in ("kinds", "splits", "largest", "device", "facts")}
        run(chosen.out, tables, **options)
    title = "Mean test log-likelihood by the number of weights with a variance, 0 for MAP; the paper shows figure 3 and no numbers."
    print(show(rows.uci(chosen.out), title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
