"""The whole study on Fashion-MNIST: caps chosen on held-out training images, then several seeds scored once on the test images.

    python -m bayesify_papers.inducing_weights.fashion --out DIR [--workers 8] [--seeds 3]
    python -m bayesify_papers.inducing_weights.fashion --evaluate DIR

Every setting of `SETTINGS_GRID` is trained without the last 10,000 training images and scored on them. Each system takes its
setting with the lowest ECE among the settings whose accuracy is within half a point of the deterministic network's. The test
images play no part in this choice. The chosen setting is then trained on all training images with seeds that the grid did not
use. Ensemble-W consists of the deterministic networks of all seeds and as many further networks as it needs. Training runs proceed
at the same time in worker processes, and the same command resumes an interrupted run. The second command scores existing results.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bayesify.scale_out import read_results
from bayesify_papers.inducing_weights import rows, seeds
from bayesify_papers.inducing_weights.classification import OUTSIDE_SETS, SMOKE, SMOKE_SOURCE, add_recipe, recipe_from
from bayesify_papers.inducing_weights.systems import Recipe
from bayesify_papers.inducing_weights.trainings import Training, classify
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.jobs import count_workers, run_trainings
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import grouped, show
from bayesify_papers.shared.scores import CLASSIFICATION_SCORES
from bayesify_papers.shared.sources import Source

SETTINGS_GRID: dict[str, tuple[dict[str, Any], ...]] = {
    "deterministic": ({},),
    "ensemble_u": tuple({"ensemble_max_lambda": cap} for cap in (0.03, 0.05, 0.07)),
    "ffg_u": tuple({"max_lambda": cap, "max_std": 0.1} for cap in (0.01, 0.015, 0.02, 0.03)),
    "ffg_w": tuple({"mean_field_max_std": cap} for cap in (0.02, 0.03, 0.05)),
}
"""Settings to try, by system."""

MAX_ACCURACY_LOSS = 0.005
"""Largest accepted loss of accuracy against the deterministic network, on the held-out images."""

GRID_SEED, FIRST_SEED, SEED_GAP = 0, 1, 1000
"""Seed of the grid, first seed of the final training runs, and distance between the seeds of Ensemble-W's further networks."""

NUM_VALIDATION, NUM_CORRUPTED_IMAGES = 10_000, 1000


@dataclass(frozen=True)
class Study:
    """Settings of the study.

    Args:
        recipe: Recipe for everything that the grid does not vary.
        source: Images on which the final networks are trained and scored.
        validation: Number of training images that the grid holds out.
        num_seeds: Number of final training runs of each system.
        device: Device for training.
        settings: Settings to try, as in `SETTINGS_GRID`.
    """

    recipe: Recipe
    source: Source
    validation: int = NUM_VALIDATION
    num_seeds: int = 3
    device: str = "cpu"
    settings: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=lambda: SETTINGS_GRID)

    def plan(self, results: Mapping[str, dict[str, Any]]) -> dict[str, Training]:
        """Training runs that are possible given the results so far: first the grid, then the final runs, longest first."""
        jobs = dict(self.grid())
        chosen = self.choose(results)
        finals = range(FIRST_SEED, FIRST_SEED + self.num_seeds)
        for system in ("ensemble_u", "ffg_u", "deterministic", "ffg_w"):
            if system in chosen:
                for seed in finals:
                    jobs[f"{system}-{seed}"] = self.final(system, seed, chosen[system])
        for index in range(1, self.recipe.members - self.num_seeds + 1):
            single = self.final("deterministic", FIRST_SEED + SEED_GAP * index, {})
            jobs[f"member-{index}"] = replace(single, file=f"members/{index}")
        return jobs

    def grid(self) -> dict[str, Training]:
        """Training runs of the grid, the longest first."""
        source = replace(self.source, validation=self.validation, outside=(), corrupted_images=0)
        return {
            f"grid-{system}-{index}": Training(system, replace(self.recipe, **setting), source, GRID_SEED, self.device)
            for system in ("ensemble_u", "ffg_u", "ffg_w", "deterministic")
            for index, setting in enumerate(self.settings[system])
        }

    def final(self, system: str, seed: int, setting: Mapping[str, Any]) -> Training:
        """One training run on all training images."""
        recipe = replace(self.recipe, **setting)
        return Training(system, recipe, self.source, seed, self.device, file=f"seed-{seed}/{system}")

    def choose(self, results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The chosen setting of each system whose part of the grid is finished."""
        return choose(self.settings, results)


def choose(
    tried: Mapping[str, Sequence[dict[str, Any]]], results: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The setting with the lowest ECE among the accurate settings, for each system whose grid is finished.

    Args:
        tried: Settings by system, as in `SETTINGS_GRID`.
        results: Results of the training runs by name.
    """
    if "grid-deterministic-0" not in results:
        return {}
    least = results["grid-deterministic-0"]["accuracy"] - MAX_ACCURACY_LOSS
    chosen = {}
    for system, settings in tried.items():
        names = [f"grid-{system}-{index}" for index in range(len(settings))]
        if all(name in results for name in names):
            ranks = [(max(0.0, least - results[name]["accuracy"]), results[name]["ece"]) for name in names]
            chosen[system] = settings[ranks.index(min(ranks))]
    return chosen


def prepare(study: Study, folder: Path, facts: dict[str, Any]) -> None:
    """Write `study.json` and the labels of the scored images.

    Raises:
        ValueError: If `study.json` has other settings.
    """
    varied = {key for settings in study.settings.values() for setting in settings for key in setting}
    fixed = {key: value for key, value in asdict(study.recipe).items() if key not in varied}
    about = {**study.source.settings, "validation": study.validation, "settings": fixed, "grid": dict(study.settings)}
    records.begin_run(folder / "study.json", about, facts)
    for seed in range(FIRST_SEED, FIRST_SEED + study.num_seeds):
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        records.write_arrays(place / "labels.npz", test=study.source.images().test_labels)


def evaluate(folder: Path) -> int:
    """Score the predictions of a run, print the tables and write `results.json`."""
    about = records.read(folder / "study.json", needed=True)
    tried = about.pop("grid")
    results = read_results(folder)
    chosen = choose(tried, results)
    grid = [
        {"system": system, "setting": setting, **{key: round(results[name][key], 5) for key in CLASSIFICATION_SCORES}}
        for system, settings in tried.items()
        for index, setting in enumerate(settings)
        if (name := f"grid-{system}-{index}") in results
    ]
    shown = [
        {**one, "taken": chosen.get(one["system"]) == one["setting"], "setting": str(one["setting"])} for one in grid
    ]
    title = f"Scored on {about['validation']:,} held-out training images."
    print(show(grouped(shown, ("system", "setting", "taken"), CLASSIFICATION_SCORES), title) + "\n")
    members = about["settings"]["members"]
    _combine(folder, members)
    for key, part in (("parameters", "parameters"), ("seconds", "train_seconds")):
        final = [result for name, result in results.items() if not name.startswith("grid-")]
        about[key] = {result["system"]: result[part] for result in reversed(final)}
        about[key]["ensemble_w"] = round(members * about[key].get("deterministic", 0), 1)
    found = seeds.score(folder)
    lines = seeds.requirement(found)
    about |= {"tried": grid, "chosen": chosen}
    records.write(folder / "results.json", {**about, **seeds.summary(found), "requirement": lines})
    print("\n\n".join([show(rows.fashion(folder), f"Test images of {about['dataset']}."), *lines]))
    return 0


def _combine(folder: Path, members: int) -> None:
    """Write Ensemble-W's predictions next to the first seed's, once there are enough deterministic networks."""
    files = [*sorted(folder.glob("seed-*/deterministic.npz")), *sorted((folder / "members").glob("*.npz"))][:members]
    if len(files) == members:
        together = predictions.combine([predictions.read(file) for file in files])
        predictions.write(folder / f"seed-{FIRST_SEED}" / "ensemble_w.npz", together)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line."""
    program = Program(__doc__, __spec__, "fashion")
    program.option("data", "evaluate", "workers", "num_train", seeds=3)
    program.option(validation=NUM_VALIDATION, corrupted_images=NUM_CORRUPTED_IMAGES)
    chosen = add_recipe(program).read(arguments)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    if chosen.seeds < 1:
        program.error(f"--seeds {chosen.seeds}; give at least 1")
    few = {system: settings[:2] for system, settings in SETTINGS_GRID.items()}
    study = Study(replace(SMOKE, epochs=1), SMOKE_SOURCE, validation=50, num_seeds=1, settings=few)
    if not chosen.smoke:
        outside = OUTSIDE_SETS["fashion_mnist"]
        corrupted = chosen.corrupted_images
        source = Source("fashion_mnist", chosen.data, chosen.num_train, outside=outside, corrupted_images=corrupted)
        study = Study(recipe_from(chosen), source, chosen.validation, chosen.seeds, chosen.device)
    workers = count_workers(chosen.workers, study.device, 8)
    prepare(study, chosen.out, {**chosen.facts, "workers": workers})
    run_trainings(classify, study.plan, chosen.out, workers=workers)
    return evaluate(chosen.out)


if __name__ == "__main__":
    sys.exit(main())
