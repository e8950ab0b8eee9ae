"""Accuracy and calibration after pruning, with and without fine-tuning (section 4.3, the paper's table 7).

    python -m bayesify_papers.inducing_weights.pruning --out DIR [--workers 6] [--seeds 3]
    python -m bayesify_papers.inducing_weights.pruning --dataset cifar10 --systems ffg_u --fine-tuning 50 --out DIR

FFG-U loses the smallest entries of Z, FFG-W the weights with the smallest |mean| / std. As in appendix K, a new Adam with a
learning rate of 1e-4 fine-tunes the rest, for a sixth of the training epochs. By default, the data are Fashion-MNIST; the small
network and the caps are those of `fashion`. DIR keeps a checkpoint of each training run, so the same command resumes it; a
checkpoint of `classification` with the same settings may be copied there.
"""

import copy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bayesify import BayesianNetwork, count_parameters, fit, prune
from bayesify_papers.inducing_weights import rows
from bayesify_papers.inducing_weights.classification import SMOKE, SMOKE_SOURCE, add_recipe, recipe_from
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify_papers.shared import records
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.image_problems import ImageProblem, problem
from bayesify_papers.shared.jobs import count_workers, run_trainings
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import CLASSIFICATION_SCORES
from bayesify_papers.shared.sources import Source

KEPT_SHARES: dict[str, tuple[float, ...]] = {"ffg_u": (0.75, 0.5, 0.25), "ffg_w": (0.5, 0.1, 0.01)}
"""Kept fractions of the entries of Z (FFG-U) and of the weights (FFG-W)."""

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Pruning:
    """One network to train once and then prune to each fraction.

    Args:
        system: `"ffg_u"` or `"ffg_w"`.
        recipe: Recipe of the training.
        source: Images for training and scoring.
        fine_tuning: Number of epochs after pruning.
        seed: Seed of all random numbers.
        device: Device of the computation.
    """

    system: str
    recipe: Recipe
    source: Source
    fine_tuning: int
    seed: int = 0
    device: str = "cpu"


def work(job: Pruning, folder: Path) -> dict[str, Any]:
    """Scores of the whole network, and of each pruned network before and after fine-tuning."""
    given, start = problem(job.source, job.device), time.perf_counter()
    checkpoint = folder / f"{job.system}-{job.seed}.safetensors"
    network, _ = train(SYSTEMS[job.system], job.recipe, given, job.seed, checkpoint)
    found = [{"keep": 1.0, "fine_tuned": False, **_score(given, network, job)}]
    for keep in KEPT_SHARES[job.system]:
        pruned = prune(copy.deepcopy(network), keep)
        found.append({"keep": keep, "fine_tuned": False, **_score(given, pruned, job)})
        fit(
            pruned,
            MemoryBatches(given.x, given.y, job.recipe.batch, job.recipe.changed),
            num_data=len(given.x),
            epochs=job.fine_tuning,
            learning_rate=LEARNING_RATE,
            scheduler="constant",
            kl_weight=job.recipe.kl_weight,
            precision=job.recipe.precision,
            seed=job.seed,
            progress=False,
        )
        found.append({"keep": keep, "fine_tuned": True, **_score(given, pruned.eval(), job)})
    return {"system": job.system, "seed": job.seed, "seconds": round(time.perf_counter() - start, 1), "rows": found}


def _score(given: ImageProblem, network: BayesianNetwork, job: Pruning) -> dict[str, float]:
    made = given.predict([network], job.recipe.prediction_draws, job.seed)
    return {"parameters": count_parameters(network), **given.score(made["test"])}


def means(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scores of each system, fraction and kind, averaged over seeds."""
    grouped: dict[tuple[str, float, bool], list[dict[str, float]]] = {}
    for result in results:
        for row in result["rows"]:
            grouped.setdefault((result["system"], row["keep"], row["fine_tuned"]), []).append(row)
    return [
        {
            "system": system,
            "keep": keep,
            "fine_tuned": fine_tuned,
            "seeds": len(own),
            "parameters": own[0]["parameters"],
        }
        | {key: round(statistics.fmean(row[key] for row in own), 5) for key in CLASSIFICATION_SCORES}
        for (system, keep, fine_tuned), own in grouped.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "pruning").option("data", "workers", "num_train", seed=1, seeds=3)
    program.choice("dataset", ("fashion_mnist", "cifar10"), default="fashion_mnist")
    program.choice("systems", KEPT_SHARES, default=list(KEPT_SHARES))
    program.add_argument(
        "--fine-tuning", type=int, help="number of epochs after pruning; default: a sixth of the training epochs"
    )
    chosen = add_recipe(program).read(arguments)
    recipe, device, seeds = replace(SMOKE, epochs=1), "cpu", 1
    source = replace(SMOKE_SOURCE, outside=(), corrupted_images=0)
    if not chosen.smoke:
        source = Source(chosen.dataset, chosen.data, chosen.num_train)
        recipe, device, seeds = recipe_from(chosen), chosen.device, chosen.seeds
    epochs = chosen.fine_tuning or max(1, recipe.epochs // 6)
    jobs = {
        f"{system}-{seed}": Pruning(system, recipe, source, epochs, seed, device)
        for system in chosen.systems
        for seed in range(chosen.seed, chosen.seed + seeds)
    }
    workers = count_workers(chosen.workers, device)
    results = run_trainings(work, jobs, chosen.out, workers=workers)
    content = {"dataset": source.dataset, "workers": workers, "fine_tuning": epochs, "settings": asdict(recipe)}
    content["seconds"] = {name: results[name]["seconds"] for name in jobs}
    content["rows"] = means([results[name] for name in jobs])
    records.write(chosen.out / "pruning.json", {**chosen.facts, **content})
    print(
        show(rows.pruning(chosen.out), f"Pruning on {source.dataset}. The paper's table 7 has a ResNet-50 on CIFAR-10.")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
