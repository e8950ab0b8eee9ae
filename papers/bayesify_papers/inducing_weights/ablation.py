"""Ablation over M, the cap on lambda and the cap on the spread of U (the paper's figure 4), on a smaller problem.

    python -m bayesify_papers.inducing_weights.ablation --out DIR [--workers 6] [--seeds 3] [--num-train 20000] [--smoke]

The paper varies them on a ResNet-18 and CIFAR-10 and shows a figure without numbers. We use the small ResNet of `fashion` on the
first images of Fashion-MNIST, and change one setting of `fashion` at a time.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bayesify.scale_out import read_results
from bayesify_papers.inducing_weights import rows
from bayesify_papers.inducing_weights.classification import SMOKE, add_recipe, recipe_from
from bayesify_papers.inducing_weights.systems import Recipe
from bayesify_papers.inducing_weights.trainings import Training, classify
from bayesify_papers.shared import records
from bayesify_papers.shared.jobs import count_workers, run_trainings
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import CLASSIFICATION_SCORES
from bayesify_papers.shared.sources import SYNTHETIC, Source

INDUCING_SIZES: tuple[int, ...] = (16, 32, 64, 128)
MAX_LAMBDAS, MAX_STDS = (0.0, 0.03, 0.1, 0.3), (0.0, 0.1, 0.3)
"""Caps that the paper tries (appendix J.2)."""

SETTING_KEYS = ("inducing", "max_lambda", "max_std")
"""Settings that the ablation varies."""

SMOKE_SIZES: tuple[int, ...] = (2, 4)


def variants(recipe: Recipe, sizes: Sequence[int] = INDUCING_SIZES) -> Iterator[tuple[str, Recipe]]:
    """Systems and recipes. Each recipe changes one setting: M, `max_lambda` or `max_std`."""
    for size in sizes:
        yield "ffg_u", replace(recipe, inducing=size)
        yield "ensemble_u", replace(recipe, inducing=size)
    for cap in MAX_LAMBDAS:
        yield "ffg_u", replace(recipe, max_lambda=cap)
        yield "ensemble_u", replace(recipe, ensemble_max_lambda=cap)
    for cap in MAX_STDS:
        yield "ffg_u", replace(recipe, max_std=cap)


def jobs(recipe: Recipe, sizes: Sequence[int], source: Source, device: str, seeds: int) -> dict[str, Training]:
    """Training runs by name, all runs of the first seed first. Equal runs appear once."""
    found: dict[str, Training] = {}
    for seed in range(seeds):
        for system, variant in variants(recipe, sizes):
            part = setting(system, variant)
            name = "-".join([system, *(str(value) for value in part.values() if value is not None), f"seed{seed}"])
            found[name] = Training(system, variant, source, seed, device)
    return found


def means(planned: Mapping[str, Training], results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Scores of each system and setting, averaged over the finished seeds, FFG-U first.

    Args:
        results: Results of the finished jobs.
    """
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for name, job in planned.items():
        if name in results:
            key = (job.system, *setting(job.system, job.recipe).values())
            grouped.setdefault(key, []).append(results[name])
    found = [
        dict(zip(("system", *SETTING_KEYS), key, strict=True))
        | {"seeds": len(own), "parameters": own[0]["parameters"]}
        | {
            name: round(statistics.fmean(one[name] for one in own), 5)
            for name in (*CLASSIFICATION_SCORES, "train_seconds")
        }
        for key, own in grouped.items()
    ]
    return sorted(found, key=lambda row: (row["system"] != "ffg_u", *(row[part] or 0 for part in SETTING_KEYS)))


def setting(system: str, recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe's settings that the ablation varies for a system."""
    plain = system == "ffg_u"
    return {
        "inducing": recipe.inducing,
        "max_lambda": recipe.max_lambda if plain else recipe.ensemble_max_lambda,
        "max_std": recipe.max_std if plain else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ablation from the command line."""
    program = Program(__doc__, __spec__, "ablation").option("data", "workers", "table", seeds=3, num_train=20_000)
    add_recipe(program).set_defaults(batch=250)
    chosen = program.read(arguments)
    if chosen.inducing_by_stage:
        program.error("--inducing-by-stage replaces the sizes that the ablation varies; leave it out")
    recipe, device, sizes, seeds = replace(SMOKE, epochs=1), "cpu", SMOKE_SIZES, 1
    source = Source(SYNTHETIC, num_train=100)
    if not chosen.smoke:
        recipe, device, sizes, seeds = recipe_from(chosen), chosen.device, INDUCING_SIZES, chosen.seeds
        source = Source("fashion_mnist", chosen.data, chosen.num_train)
    planned = jobs(recipe, sizes, source, device, seeds)
    workers = count_workers(chosen.workers, device)
    settings = {**source.settings, "settings": asdict(recipe)}
    content = records.begin_run(chosen.out / "ablation.json", settings, {**chosen.facts, "workers": workers}, rows=[])
    results = (
        read_results(chosen.out) if chosen.table else run_trainings(classify, planned, chosen.out, workers=workers)
    )
    records.write(chosen.out / "ablation.json", {**content, "rows": means(planned, results)})
    title = f"Ablation on {source.dataset}; the paper shows its own on CIFAR-10 as a figure without numbers."
    print(show(rows.ablation(chosen.out), title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
