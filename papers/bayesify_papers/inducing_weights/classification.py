"""Image classification: accuracy, calibration, out-of-distribution and corrupted images (the paper's tables 3, 5, 11 and 12).

    python -m bayesify_papers.inducing_weights.classification --out DIR
    python -m bayesify_papers.inducing_weights.classification --validation 10000 --out DIR
    python -m bayesify_papers.inducing_weights.classification --evaluate DIR

The first command trains each system, writes its predictions to DIR, and scores them. The second command holds out training images
and scores them, so that settings can be chosen without the test images. The third command only scores. The same command resumes an
interrupted run, even in the middle of training. Data come from the folder in BAYESIFY_DATA. `fashion` chooses the caps and runs
several seeds.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bayesify import BayesianNetwork, Laplace, count_parameters
from bayesify.datasets import corruptions
from bayesify.predictor import Predictor
from bayesify_papers.inducing_weights import rows, scores
from bayesify_papers.inducing_weights.systems import BASELINES, SYSTEMS, Recipe, System, train
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.image_problems import ImageProblem
from bayesify_papers.shared.program import Program, fill
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.sources import COMPARED_KINDS, NOISE, SYNTHETIC, Source, available

OUTSIDE_SETS = {
    "fashion_mnist": ("mnist", "notmnist"),
    "mnist": ("fashion_mnist", "notmnist"),
    "cifar10": ("mnist", "fashion_mnist"),
    SYNTHETIC: (NOISE,),
}
"""Out-of-distribution sets for each training set."""

OPTIONAL_OUTSIDE_SETS = {"cifar10": ("cifar100", "svhn")}
"""Further sets of the paper's table 3, used if their files are available."""

NUM_CORRUPTED_IMAGES = 2000
"""Number of test images to corrupt; the first ones are used."""

SMOKE = Recipe(epochs=1, batch=50, width=4, inducing=4, members=2, ensemble_draws=2, prediction_draws=3)
SMOKE_SOURCE = Source(SYNTHETIC, num_train=150, outside=(NOISE,), corrupted_images=20, severities=(5,))
"""Settings and images of the quick run, which takes seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "classification")
    program.choice("dataset", (name for name in OUTSIDE_SETS if name != SYNTHETIC), default="fashion_mnist")
    program.choice("systems", SYSTEMS | BASELINES, default=list(SYSTEMS))
    program.option("data", "evaluate", "seed", "num_train", "validation", corrupted_images=NUM_CORRUPTED_IMAGES)
    chosen = add_recipe(program).read(arguments)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    recipe, source = SMOKE, replace(SMOKE_SOURCE, validation=chosen.validation)
    if not chosen.smoke:
        recipe = recipe_from(chosen)
        limits = {"num_train": chosen.num_train, "validation": chosen.validation}
        outside = (
            *OUTSIDE_SETS[chosen.dataset],
            *available(OPTIONAL_OUTSIDE_SETS.get(chosen.dataset, ()), chosen.data),
        )
        kinds = tuple(corruptions.SEVERITIES) if chosen.dataset == "cifar10" else COMPARED_KINDS
        corrupted = {"corrupted_images": chosen.corrupted_images, "kinds": kinds}
        source = Source(chosen.dataset, chosen.data, outside=outside, **limits, **corrupted)
    if chosen.validation:
        source = replace(source, outside=())
    device = "cpu" if chosen.smoke else chosen.device
    run(chosen.out, source, recipe, systems=chosen.systems, seed=chosen.seed, device=device, facts=chosen.facts)
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
    """Train systems one after the other and write their predictions.

    Args:
        folder: Folder for `labels.npz`, one `.npz` per system, `run.json`, and checkpoints of the point estimates, which both the
            deterministic system and Ensemble-W use. Systems with predictions from a run of the same settings are not trained
            again. Several processes may train different systems in one folder.
        source: Training images and images to score.
        systems: Names from `SYSTEMS` and `BASELINES`.
        seed: Seed of all random numbers. Network k of an ensemble has `seed + k`.

    Raises:
        ValueError: If the folder has predictions with other settings.
    """
    problem = ImageProblem(source, device)
    folder.mkdir(parents=True, exist_ok=True)
    about = {**source.settings, "num_train": len(problem.x), "seed": seed, "settings": asdict(recipe)}

    def known() -> dict[str, Any]:
        """Results so far, including those of other processes that share the folder."""
        return records.begin_run(folder / "run.json", about, facts, parameters={}, seconds={}, history={})

    known()
    records.write_arrays(folder / "labels.npz", test=problem.test_labels.numpy())
    for name in systems:
        system = (SYSTEMS | BASELINES)[name]
        kind = system.checkpoint_name or name
        if name in known()["seconds"] and (folder / f"{name}.npz").is_file():
            _remove_checkpoints(system, folder, f"{name}-{seed}")
            print(f"{system.title}: predictions already exist", flush=True)
            continue
        paths = [folder / f"{kind}-{seed + index}.safetensors" for index in range(system.count_networks(recipe))]
        trained = [train(system, recipe, problem, seed + index, path) for index, path in enumerate(paths)]
        networks, start = [network for network, _ in trained], time.perf_counter()
        seconds = sum(epoch["seconds"] for _, history in trained for epoch in history)
        made, after = _predict(system, networks, problem, recipe, seed)
        predictions.write(folder / f"{name}.npz", made)
        content = known()
        content["history"][name] = trained[-1][1]
        content["parameters"][name] = sum(count_parameters(network) for network in networks)
        content["seconds"][name] = round(seconds + after, 1)
        records.write(folder / "run.json", content)
        _remove_checkpoints(system, folder, paths[0].stem)
        print(
            f"{system.title}: {100 * problem.score(made['test'])['accuracy']:.2f} % of the scored images, "
            f"trained {seconds:.0f} s, predicted {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def _remove_checkpoints(system: System, folder: Path, stem: str) -> None:
    """Remove the files of a finished training run, unless other systems use its network."""
    for path in () if system.checkpoint_name else folder.glob(f"*{stem}.*"):  # the files of the start too
        path.unlink()


def _predict(
    system: System, networks: Sequence[BayesianNetwork], problem: ImageProblem, recipe: Recipe, seed: int
) -> tuple[dict[str, predictions.StoredPrediction], float]:
    """Predictions for every set, and the seconds of `system.after`. A closed form runs in float32, others as in training."""
    start, predictors = time.perf_counter(), list[Predictor](networks)
    if system.after:
        predictors = [system.after(network, recipe, problem, seed) for network in networks]
    seconds = time.perf_counter() - start if system.after else 0.0
    precision = "float32" if isinstance(predictors[0], Laplace) else recipe.precision
    return problem.predict(predictors, system.count_draws(recipe), seed, precision), seconds


def evaluate(folder: Path) -> int:
    """Score the predictions of a run, print the tables and write `results.json`."""
    found, about = scores.score(folder), records.read(folder / "run.json")
    if about.get("validation"):
        print(f"Scored on {about['validation']:,} training images that were held out, not on the test images.")
    lines = scores.requirement(found)
    history = about.pop("history", {})
    curves = {
        name: {key: [round(epoch[key], 4) for epoch in epochs] for key in ("nll", "kl", "seconds")}
        for name, epochs in history.items()
    }
    records.write(folder / "results.json", {**about, "epochs": curves, "scores": found, "requirement": lines})
    print("\n\n".join([show(rows.classification(folder)), *lines]))
    return 0


def add_recipe(program: Program) -> Program:
    """Add options for all settings of a `Recipe` and for the device."""
    return program.option("device").settings(Recipe(precision="bf16"))


def recipe_from(chosen: argparse.Namespace) -> Recipe:
    """The recipe from the options of `add_recipe`. On a CPU its precision is float32."""
    return fill(Recipe, chosen, **({"precision": "float32"} if chosen.device == "cpu" else {}))


if __name__ == "__main__":
    sys.exit(main())
