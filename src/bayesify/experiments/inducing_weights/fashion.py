"""Fashion-MNIST in full: caps chosen on held-out training images, then several seeds scored once on the test images.

    python -m bayesify.experiments.inducing_weights.fashion --out DIR [--workers 8] [--seeds 3]
    python -m bayesify.experiments.inducing_weights.fashion --evaluate DIR

Every setting of `GRID` is trained on all but the last 10,000 training images and scored on those. Of each system the
setting with the lowest ECE there is taken among those whose accuracy there is within half a point of the
deterministic network's; the test images have no part in it. What is taken is trained anew on all training images under
seeds that the grid did not use. Trainings run at the same time in worker processes, and a run that was interrupted goes on
when the command is given again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.experiments import records
from bayesify.experiments.inducing_weights import predictions, seeds
from bayesify.experiments.inducing_weights.classification import SMOKE, SMOKE_SOURCE, add_recipe, recipe_from
from bayesify.experiments.inducing_weights.sources import Source
from bayesify.experiments.inducing_weights.systems import SYSTEMS, Recipe
from bayesify.experiments.inducing_weights.trainings import Training, classify
from bayesify.experiments.inducing_weights.workers import run_jobs
from bayesify.experiments.tables import number, table

GRID: dict[str, tuple[dict[str, Any], ...]] = {
    "deterministic": ({},),
    "ensemble_u": tuple({"ensemble_max_lambda": cap} for cap in (0.03, 0.05, 0.07)),
    "ffg_u": tuple({"max_lambda": cap, "max_std": 0.1} for cap in (0.01, 0.015, 0.02, 0.03)),
    "ffg_w": tuple({"mean_field_max_std": cap} for cap in (0.03, 0.05, 0.02)),
}
"""Settings that are tried, by system."""

ACCURACY_LOSS = 0.005
"""How far below the deterministic network's accuracy on the held-out images a setting may lie."""

GRID_SEED, FIRST_SEED, APART = 0, 1, 1000
"""Seed of the grid, first one of the final trainings, and the distance between those of an ensemble's networks."""

VALIDATION, CORRUPTED_IMAGES = 10_000, 1000


@dataclass(frozen=True)
class Study:
    """What is run.

    Args:
        recipe: Of everything that the grid leaves alone.
        source: On what the final networks are trained and scored.
        validation: Training images that the grid holds out.
        num_seeds: Final trainings of each system.
        num_ensembles: For how many of those seeds there is an Ensemble-W, which takes further networks.
        device: Where to train.
        settings: What is tried, as in `GRID`.
    """

    recipe: Recipe
    source: Source
    validation: int = VALIDATION
    num_seeds: int = 3
    num_ensembles: int = 1
    device: str = "cpu"
    settings: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=lambda: GRID)

    def plan(self, results: Mapping[str, dict[str, Any]]) -> dict[str, Training]:
        """The trainings that can be run given what is known, the grid first, then the longest."""
        jobs = dict(self.grid())
        chosen = self.choose(results)
        finals = range(FIRST_SEED, FIRST_SEED + self.num_seeds)
        for system in ("ensemble_u", "ffg_u", "deterministic", "ffg_w"):
            if system in chosen:
                for seed in finals:
                    jobs[f"{system}-{seed}"] = self.final(system, seed, chosen[system])
        for seed in finals[: self.num_ensembles]:
            for index in range(1, self.recipe.members):
                jobs[f"member-{seed}-{index}"] = replace(
                    self.final("deterministic", seed + APART * index, {}), file=f"members/{seed}-{index}"
                )
        return jobs

    def grid(self) -> dict[str, Training]:
        """The trainings of the grid, the longest first."""
        source = replace(self.source, validation=self.validation, outside=False, corrupted_images=0)
        return {
            f"grid-{system}-{index}": Training(system, replace(self.recipe, **setting), source, GRID_SEED, self.device)
            for system in ("ensemble_u", "ffg_u", "ffg_w", "deterministic")
            for index, setting in enumerate(self.settings[system])
        }

    def final(self, system: str, seed: int, setting: Mapping[str, Any]) -> Training:
        """One training on all training images."""
        recipe = replace(self.recipe, **setting)
        return Training(system, recipe, self.source, seed, self.device, file=f"seed-{seed}/{system}")

    def choose(self, results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The setting of each system whose part of the grid is finished."""
        if "grid-deterministic-0" not in results:
            return {}
        least = results["grid-deterministic-0"]["accuracy"] - ACCURACY_LOSS
        chosen = {}
        for system, settings in self.settings.items():
            found = [results.get(f"grid-{system}-{index}") for index in range(len(settings))]
            tried = [entry for entry in found if entry is not None]
            if len(tried) < len(settings):
                continue
            ranks = [(max(0.0, least - entry["accuracy"]), entry["ece"]) for entry in tried]
            chosen[system] = settings[ranks.index(min(ranks))]
        return chosen


def run(study: Study, folder: Path, workers: int, facts: dict[str, Any]) -> None:
    """Run a study; its predictions go to a folder for each seed, laid out as `classification` does, and `study.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "facts.json"
    if first.is_file():
        facts = json.loads(first.read_text())  # those of the run that this one goes on with
    else:
        records.write(first, facts)
    results = run_jobs(classify, study.plan, folder, workers)
    chosen = study.choose(results)
    labels = study.source.images().test_labels
    for seed in range(FIRST_SEED, FIRST_SEED + study.num_seeds):
        place = folder / f"seed-{seed}"
        np.savez_compressed(place / "labels.npz", test=labels)
        if seed < FIRST_SEED + study.num_ensembles:
            files = [place / "deterministic.npz"]
            files += [folder / "members" / f"{seed}-{index}.npz" for index in range(1, study.recipe.members)]
            predictions.write(place / "ensemble_w.npz", predictions.combine([predictions.read(file) for file in files]))
    tried = [
        {"system": system, "setting": setting, **_scores(results[f"grid-{system}-{index}"])}
        for system, settings in study.settings.items()
        for index, setting in enumerate(settings)
    ]
    about: dict[str, Any] = {**facts, "dataset": study.source.dataset, "settings": asdict(study.recipe)}
    about |= {"validation": {"images": study.validation, "seed": GRID_SEED, "tried": tried}, "chosen": chosen}
    for key, part in (("parameters", "parameters"), ("seconds", "train_seconds")):
        about[key] = {system: results[f"{system}-{FIRST_SEED}"][part] for system in study.settings}
        if study.num_ensembles:
            about[key]["ensemble_w"] = study.recipe.members * about[key]["deterministic"]
    about["trainings"] = len(results)
    records.write(folder / "study.json", about)


def _scores(result: dict[str, Any]) -> dict[str, float]:
    return {key: round(result[key], 5) for key in ("accuracy", "nll", "ece", "brier")}


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    about = seeds.read(folder)
    print(_grid_table(about) + "\n")
    found = seeds.score(folder)
    print(seeds.tables(found, about))
    lines = seeds.requirement(found)
    print("\n" + "\n".join(lines))
    records.write(folder / "results.json", {**about, **seeds.summary(found), "requirement": lines})
    return 0


def _grid_table(about: dict[str, Any]) -> str:
    rows = [
        [
            SYSTEMS[entry["system"]].title,
            ", ".join(f"{key}={value:g}" for key, value in entry["setting"].items()) or "-",
            number(100 * entry["accuracy"], 2),
            number(entry["nll"]),
            number(100 * entry["ece"], 2),
            "taken" if about["chosen"][entry["system"]] == entry["setting"] else "",
        ]
        for entry in about["validation"]["tried"]
    ]
    count = about["validation"]["images"]
    return table(
        ["system", "setting", "acc %", "nll", "ece %", ""], rows, f"Scored on {count:,} training images held out."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "fashion")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only score what a run wrote to DIR")
    parser.add_argument("--smoke", action="store_true", help="tiny synthetic images, seconds on a CPU")
    parser.add_argument("--workers", type=int, help="trainings at a time; 8 on a GPU and 1 on a CPU if left out")
    parser.add_argument("--seeds", type=int, default=3, help="final trainings of each system")
    parser.add_argument("--ensembles", type=int, default=1, help="for how many seeds an Ensemble-W is trained")
    parser.add_argument("--num-train", type=int, help="only the first so many training images")
    parser.add_argument(
        "--validation", type=int, default=VALIDATION, metavar="N", help="images that the grid holds out"
    )
    parser.add_argument("--corrupted-images", type=int, default=CORRUPTED_IMAGES)
    add_recipe(parser)
    chosen = parser.parse_args(given)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    if not 0 <= chosen.ensembles <= chosen.seeds or chosen.seeds < 1:
        parser.error(f"--seeds {chosen.seeds} --ensembles {chosen.ensembles}; give 1 seed or more, and at most as many")
    few = {system: settings[:2] for system, settings in GRID.items()}
    small = replace(SMOKE_SOURCE, num_train=150, corrupted_images=20)
    study = Study(replace(SMOKE, epochs=1), small, validation=50, num_seeds=2, settings=few)
    if not chosen.smoke:
        source = Source("fashion_mnist", chosen.data, chosen.num_train, corrupted_images=chosen.corrupted_images)
        recipe, device = recipe_from(chosen), chosen.device
        study = Study(recipe, source, chosen.validation, chosen.seeds, chosen.ensembles, device)
    workers = chosen.workers or (8 if torch.device(study.device).type == "cuda" else 1)
    facts = records.facts("bayesify.experiments.inducing_weights.fashion", given)
    run(study, chosen.out, workers, {**facts, "workers": workers})
    if find_spec("torchmetrics") is None:
        print(f"torchmetrics is not installed here; score with: --evaluate {chosen.out}")
        return 0
    return evaluate(chosen.out)


if __name__ == "__main__":
    sys.exit(main())
