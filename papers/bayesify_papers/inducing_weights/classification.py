"""Image classification: accuracy, calibration, other image sets, corrupted images (the paper's tables 3, 5, 11 and 12).

    python -m bayesify_papers.inducing_weights.classification --out DIR
    python -m bayesify_papers.inducing_weights.classification --validation 10000 --out DIR
    python -m bayesify_papers.inducing_weights.classification --evaluate DIR

The first command trains, writes each system's predictions to DIR as soon as they are there, and scores them where
torchmetrics is installed; the second holds training images out and scores on them, for choosing settings without the test
images; the third only scores. Data come from the folder that BAYESIFY_DATA names. `fashion` chooses the caps and runs
several seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.network import BayesianNetwork
from bayesify.weights.catalog import count_parameters
from bayesify_papers import records
from bayesify_papers.inducing_weights import predictions, scores
from bayesify_papers.inducing_weights.sources import OUTSIDE, SYNTHETIC, Source
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe
from bayesify_papers.inducing_weights.trainings import Problem

CORRUPTED_IMAGES = 2000
"""Test images that are corrupted: the first so many."""

WHOLE = ("epochs", "batch", "depth", "width", "inducing", "members", "ensemble_draws")
FRACTIONS = (
    "learning_rate",
    "inducing_learning_rate",
    "spread_learning_rate",
    "max_lambda",
    "max_std",
    "ensemble_max_lambda",
    "mean_field_max_std",
)
"""Settings of `Recipe` that the command line takes."""

SMOKE = Recipe(epochs=3, batch=50, width=4, inducing=4, members=2, ensemble_draws=2, prediction_draws=3)
SMOKE_SOURCE = Source(SYNTHETIC, corrupted_images=60, severities=(5,))
"""Settings and images under which everything runs in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(given)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    recipe, source = SMOKE, replace(SMOKE_SOURCE, validation=chosen.validation, outside=not chosen.validation)
    if not chosen.smoke:
        recipe = recipe_from(chosen)
        source = Source(
            chosen.dataset,
            chosen.data,
            chosen.num_train,
            chosen.validation,
            outside=not chosen.validation,
            corrupted_images=chosen.corrupted_images,
        )
    chosen.out.mkdir(parents=True, exist_ok=True)
    run(
        chosen.out,
        source,
        recipe,
        systems=chosen.systems,
        seed=chosen.seed,
        device="cpu" if chosen.smoke else chosen.device,
        facts=records.facts("bayesify_papers.inducing_weights.classification", given),
    )
    if find_spec("torchmetrics") is None:
        print(f"torchmetrics is not installed here; score with: --evaluate {chosen.out}")
        return 0
    return evaluate(chosen.out)


def run(
    folder: Path,
    source: Source,
    recipe: Recipe,
    *,
    systems: Sequence[str] = tuple(SYSTEMS),
    seed: int = 0,
    device: torch.device | str = "cpu",
    facts: dict[str, Any] | None = None,
) -> None:
    """Train systems one after the other and write what they predict.

    Args:
        folder: Gets `labels.npz`, one `.npz` per system and `run.json`. What a former run of other systems
            left there stays.
        source: Training images, and those to be scored.
        recipe: How to train.
        systems: Names from `SYSTEMS`.
        seed: Of everything random; network k of an ensemble has `seed + k`.
        device: Where to train.
        facts: Goes into `run.json`.
    """
    problem = Problem(source, device)
    np.savez_compressed(folder / "labels.npz", test=problem.test_labels.numpy())
    former = scores.read_run(folder)
    content: dict[str, Any] = {
        **(facts or {}),
        "dataset": source.dataset,
        "validation": source.validation,
        "seed": seed,
    }
    content["settings"] = asdict(recipe)
    for key in ("parameters", "seconds", "history"):
        content[key] = former.get(key, {}) if former.get("settings") == content["settings"] else {}
    plain: BayesianNetwork | None = None
    for name in systems:
        system, start = SYSTEMS[name], time.perf_counter()
        networks: list[BayesianNetwork] = []
        for index in range(system.count_networks(recipe)):
            if name == "ensemble_w" and index == 0 and plain is not None:
                networks.append(plain)
                continue
            network, content["history"][name] = problem.train(name, recipe, seed + index)
            networks.append(network)
        plain = networks[0] if name == "deterministic" else plain
        trained = time.perf_counter()
        made = problem.predict(networks, system.count_draws(recipe), seed)
        predictions.write(folder / f"{name}.npz", made)
        content["parameters"][name] = sum(count_parameters(network) for network in networks)
        content["seconds"][name] = round(trained - start, 1)
        records.write(folder / "run.json", content)
        print(
            f"{system.title}: {100 * problem.score(made['test'])['accuracy']:.2f} % of the scored images, "
            f"trained {trained - start:.0f} s, predicted {time.perf_counter() - trained:.0f} s",
            flush=True,
        )


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    found, about = scores.score(folder), scores.read_run(folder)
    dataset = about.get("dataset", "unknown")
    if about.get("validation"):
        print(f"Scored on {about['validation']:,} training images that were held out, not on the test images.")
    print(scores.tables(found, dataset, about))
    lines = scores.requirement(found)
    print("\n" + "\n".join(lines))
    history = about.pop("history", {})
    last = {name: rows[-1] for name, rows in history.items() if rows}
    records.write(folder / "results.json", {**about, "last_epoch": last, "scores": found, "requirement": lines})
    return 0


def recipe_from(chosen: argparse.Namespace) -> Recipe:
    """The recipe that `add_recipe` read."""
    options: dict[str, Any] = {name: getattr(chosen, name) for name in (*WHOLE, *FRACTIONS, "augment")}
    return Recipe(precision="float32" if chosen.device == "cpu" else chosen.precision, **options)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Options for all settings of a `Recipe`, and for where to train."""
    defaults = Recipe()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="bf16", help="on a GPU")
    parser.add_argument("--augment", action="store_true", help="mirror and shift training images at random")
    for name in WHOLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in FRACTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=list(OUTSIDE), default="fashion_mnist")
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "classification")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only score what a run wrote to DIR")
    parser.add_argument("--smoke", action="store_true", help="tiny synthetic images, seconds on a CPU")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, help="only the first so many training images")
    parser.add_argument(
        "--validation", type=int, default=0, metavar="N", help="hold out the last N training images and score on those"
    )
    parser.add_argument("--corrupted-images", type=int, default=CORRUPTED_IMAGES)
    add_recipe(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
