"""One training run of one system. A job, which is plain data, becomes stored predictions and scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesify import count_parameters
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify_papers.shared.image_problems import problem
from bayesify_papers.shared.sources import Source


@dataclass(frozen=True)
class Training:
    """One network to train and to score.

    Args:
        system: A name of `SYSTEMS`.
        recipe: Recipe of the training.
        source: Images for training and scoring.
        seed: Seed of all random numbers.
        device: Device of the computation.
        file: Path of the predictions without suffix, relative to the run's folder. If it is empty, they are not stored.
    """

    system: str
    recipe: Recipe
    source: Source
    seed: int = 0
    device: str = "cpu"
    file: str = ""


def classify(job: Training, folder: Path) -> dict[str, Any]:
    """Train, write the predictions, and return scores, numbers of parameters and seconds of training."""
    given, system = problem(job.source, job.device), SYSTEMS[job.system]
    path = folder / f"{job.file}.npz" if job.file else None
    draws, precision = system.count_draws(job.recipe), job.recipe.precision
    scores, _, network = given.run(lambda: train(system, job.recipe, given, job.seed), draws, job.seed, path, precision)
    return {"system": job.system, "seed": job.seed, **scores, "parameters": count_parameters(network)}
