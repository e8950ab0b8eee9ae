"""Accuracy and calibration after pruning, with and without fine-tuning (section 4.3, the paper's table 7).

    python -m bayesify_papers.inducing_weights.pruning --out DIR [--workers 6] [--seeds 3]
    python -m bayesify_papers.inducing_weights.pruning --dataset cifar10 --systems ffg_u --fine-tuning 50 --out DIR

FFG-U loses the smallest entries of Z, FFG-W the weights with the smallest |mean| / std. As in appendix K, a new Adam with a
learning rate of 1e-4 fine-tunes the rest, for a sixth of the training epochs. By default, the data are Fashion-MNIST; the small
network and the caps are those of `fashion`. DIR keeps a checkpoint of each training run and the result of each kept fraction, so
the same command resumes an interrupted run; a checkpoint of `classification` with the same settings may be copied there
(and, after a deterministic start, the file `start-*.json` next to it).
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bayesify import BayesianNetwork, count_parameters, fit, keep_draws, prune
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
    """One network to train, or to restore from the checkpoint of its training run, and then to prune to one fraction.

    Args:
        system: `"ffg_u"` or `"ffg_w"`.
        recipe: Recipe of the training.
        source: Images for training and scoring.
        fine_tuning: Number of epochs after pruning.
        seed: Seed of all random numbers.
        device: Device of the computation.
        keep: Fraction to keep; 1 for the whole network.
    """

    system: str
    recipe: Recipe
    source: Source
    fine_tuning: int
    seed: int = 0
    device: str = "cpu"
    keep: float = 1.0


def plan(jobs: Mapping[str, Pruning], results: Mapping[str, Any]) -> dict[str, Pruning]:
    """All jobs by name, each followed by one job per fraction when its network is trained."""
    found: dict[str, Pruning] = {}
    for name, job in jobs.items():
        shares = KEPT_SHARES[job.system] if name in results else ()
        found |= {name: job} | {f"{name}-{keep}": replace(job, keep=keep) for keep in shares}
    return found


def work(job: Pruning, folder: Path) -> dict[str, Any]:
    """Scores of the whole network, or of the pruned network before and after fine-tuning."""
    given, start = problem(job.source, job.device), time.perf_counter()
    checkpoint = folder / f"{job.system}-{job.seed}.safetensors"
    network, _ = train(SYSTEMS[job.system], job.recipe, given, job.seed, checkpoint)
    pruned = network if job.keep == 1 else _pruned(given, network, job)
    found = [{"keep": job.keep, "fine_tuned": False, **_score(given, pruned, job)}]
    if job.keep < 1:
        history = fit(
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
        found.append({"keep": job.keep, "fine_tuned": True, **_score(given, pruned.eval(), job)})
        note = history.notes.get("capture", "no GPU")
        told = f"{history[-1]['seconds']:.1f} s per epoch of fine-tuning ({note}), NLL {found[-1]['nll']:.4f}"
        print(f"{SYSTEMS[job.system].title}, {job.keep} kept: {told}", flush=True)
    return {"system": job.system, "seed": job.seed, "seconds": round(time.perf_counter() - start, 1), "rows": found}


def _pruned(given: ImageProblem, network: BayesianNetwork, job: Pruning) -> BayesianNetwork:
    """The pruned network, with draws that have their own batch statistics, as `fit` keeps them for the whole network."""
    pruned, recipe = prune(network, job.keep), job.recipe
    batches = MemoryBatches(given.x, given.y, recipe.batch, recipe.changed)
    bf16 = torch.autocast(given.device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
    with bf16, torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)  # the order of the images and their augmentation
        keep_draws(pruned, batches, recipe.prediction_draws, seed=job.seed)
    return pruned


def _score(given: ImageProblem, network: BayesianNetwork, job: Pruning) -> dict[str, float]:
    made = given.predict([network], job.recipe.prediction_draws, job.seed, job.recipe.precision)
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
        | {key: round(statistics.fmean(row[key] for row in own), 7) for key in CLASSIFICATION_SCORES}
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
    path = chosen.out / "pruning.json"
    settings = {**source.settings, "fine_tuning": epochs, "settings": asdict(recipe)}
    content = records.begin_run(path, settings, {**chosen.facts, "workers": workers}, rows=[])
    results = run_trainings(work, partial(plan, jobs), chosen.out, workers=workers)
    content["seconds"] = {name: result["seconds"] for name, result in results.items()}
    content["rows"] = means(list(results.values()))
    records.write(path, content)
    print(
        show(rows.pruning(chosen.out), f"Pruning on {source.dataset}. The paper's table 7 has a ResNet-50 on CIFAR-10.")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
