"""Fashion-MNIST against MNIST: accuracy, calibration and out-of-distribution detection (table 1, figures 2, 5 to 8).

    python -m bayesify_papers.function_space.fashion --out DIR [--workers 4] [--seeds 3]
    python -m bayesify_papers.function_space.fashion --grid --out DIR
    python -m bayesify_papers.function_space.fashion --evaluate DIR

The systems are function-space inference with several contexts, mean-field inference, maximum a posteriori and ensembles of five.
All use all training images. Mean-field inference has three times as many epochs because its KL falls slowly. An ablation over the
number of context inputs follows. Training runs proceed at the same time in worker processes. Each stores its predictions when it
ends, and the same command resumes an interrupted run.

`--grid` chooses settings without the test images: it holds out the last 10,000 training images and scores the settings on them.
`--dataset cifar10` uses CIFAR-10, seven convolutions, and SVHN (or Fashion-MNIST in three channels if SVHN is not available).
`--no-ablation` trains only the systems of table 1, and `--systems` only some of them (`map` includes the ensemble). `--prior`
replaces the paper's prior of the weights. `--patience` stops mean-field inference early.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bayesify_papers.function_space import scores
from bayesify_papers.function_space.networks import CIFAR_WIDTHS
from bayesify_papers.function_space.trainings import OUTSIDE_SETS, PRIOR_NAMES, Training, classify
from bayesify_papers.shared import records
from bayesify_papers.shared.jobs import count_workers, run_trainings
from bayesify_papers.shared.program import Program, fill
from bayesify_papers.shared.rows import grouped, show
from bayesify_papers.shared.sources import SYNTHETIC, available

CONTEXTS: tuple[str, ...] = ("notmnist", "outlines", "noise", "train")
MAIN_CONTEXT = "notmnist"
"""Context of the row named FSVI."""

NUM_POINTS, PRIOR_VARIANCE, INIT_STD = 40, 1.0, 0.03
"""Number of context inputs, prior variance and initial standard deviation of function-space rows, chosen by the grid."""

ABLATION_POINTS: tuple[int, ...] = (2, 10, 20, 80)
MEAN_FIELD_EPOCHS_RATIO = 3
"""Number of epochs of mean-field inference, as a multiple of the other systems' epochs."""

TRIED_SETTINGS = (
    ("notmnist", 10, 10.0, 0.01),
    ("notmnist", 10, 10.0, 0.1),
    ("notmnist", 10, 1.0, 0.01),
    ("notmnist", 40, 0.1, 0.01),
    ("notmnist", 40, 1.0, 0.01),
    ("notmnist", 40, 1.0, 0.03),
    ("notmnist", 40, 10.0, 0.01),
    ("notmnist", 150, 1.0, 0.01),
    ("notmnist+outlines", 40, 1.0, 0.01),
    ("notmnist+train", 40, 1.0, 0.01),
    ("outlines", 40, 1.0, 0.01),
    ("noise", 40, 1.0, 0.01),
)
"""Contexts, numbers of context inputs, prior variances and initial standard deviations of the grid."""

NUM_MEMBERS, SEED_GAP = 5, 1000
"""Number of networks of an ensemble, and the distance between their seeds."""

NUM_VALIDATION = 10_000


def plan(
    base: Training,
    num_seeds: int,
    main: str = MAIN_CONTEXT,
    contexts: Sequence[str] = CONTEXTS,
    ablation: Sequence[int] = ABLATION_POINTS,
    init_std: float = INIT_STD,
) -> dict[str, Training]:
    """All training runs by name, those of the main table first.

    Args:
        base: Settings that they share.
        num_seeds: Number of training runs for each row of the main table, including ensembles.
        main: Context of the row named FSVI.
        contexts: Other contexts to try with one seed.
        ablation: Numbers of context inputs to try with one seed.
        init_std: Initial standard deviations of weights in function-space rows.
    """

    def made(name: str, system: str, seed: int, **changes: object) -> tuple[str, Training]:
        return name, replace(base, system=system, seed=seed, file=f"predictions/{name}", **changes)  # type: ignore[arg-type]

    space = {"points": NUM_POINTS, "prior_variance": base.prior_variance or PRIOR_VARIANCE, "init_std": init_std}
    plain = {"points": 0, "prior_variance": 0.0}
    seeds = range(1, num_seeds + 1)
    jobs = [made(f"fsvi-{seed}", "fsvi", seed, context=main, **space) for seed in seeds]
    longer = {**plain, "epochs": MEAN_FIELD_EPOCHS_RATIO * base.epochs}
    jobs = [made(f"mfvi-{seed}", "mfvi", seed, **longer) for seed in seeds] + jobs
    for seed in seeds:
        jobs += [made(f"map-{seed}-{k}", "map", seed + SEED_GAP * k, **plain) for k in range(NUM_MEMBERS)]
    jobs += [made(f"fsvi.{context}-1", "fsvi", 1, context=context, **space) for context in contexts if context != main]
    jobs += [
        made(f"fsvi.{points}-1", "fsvi", 1, context=main, **{**space, "points": points})
        for points in ablation
        if points >= len(main.split("+"))
    ]
    return dict(jobs)


def grid(base: Training) -> dict[str, Training]:
    """Settings to try on held-out training images."""
    jobs: dict[str, Training] = {}
    for context, points, variance, std in TRIED_SETTINGS:
        jobs[f"fsvi-{context}-{points}-{variance:g}-{std:g}"] = replace(
            base, system="fsvi", context=context, points=points, prior_variance=variance, init_std=std
        )
    jobs["mfvi"] = replace(base, system="mfvi", epochs=MEAN_FIELD_EPOCHS_RATIO * base.epochs)
    jobs["map"] = replace(base, system="map")
    return jobs


def _own_settings(jobs: Mapping[str, Training], shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each system, the settings of its first training run that differ from the shared ones."""
    left_out = {"system", "folder", "seed", "file"}
    first = {job.system: asdict(job) for job in reversed(list(jobs.values()))}
    return {
        system: {key: value for key, value in own.items() if key not in left_out and value != shared[key]}
        for system, own in first.items()
    }


def _write_study(folder: Path, study: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `study.json`. What earlier commands with the same settings found stays in the file. Other settings are an error."""
    path = folder / "study.json"
    empty: dict[str, Any] = {"own_settings": {}, "seconds": {}, "last_epoch": {}}
    content = records.begin_run(path, {"settings": study["settings"]}, study, **empty)
    records.write(path, {**content, **{key: {**content[key], **found.get(key, {})} for key in empty}})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    defaults = Training("fsvi")
    program = Program(__doc__, __spec__, "function_space").option("data", "device", "evaluate", "workers")
    program.add_argument("--grid", action="store_true", help="try settings on held-out training images")
    program.choice("dataset", (name for name in OUTSIDE_SETS if name != SYNTHETIC), default="fashion_mnist")
    program.choice("systems", ("mfvi", "fsvi", "map"))
    program.choice("prior", PRIOR_NAMES, default=PRIOR_NAMES[0])
    program.choice("precision", ("float32", "bf16"), default=defaults.precision)
    program.option(seeds=3, context=MAIN_CONTEXT, prior_variance=PRIOR_VARIANCE, init_std=INIT_STD, ablation=True)
    usual = ("epochs", "batch", "draws", "learning_rate", "augment", "kl_free", "patience")
    program.option(**{name: getattr(defaults, name) for name in usual})
    chosen = program.read(arguments)
    if chosen.evaluate is not None:
        return scores.evaluate(chosen.evaluate, chosen.data)
    widths = CIFAR_WIDTHS if chosen.dataset == "cifar10" else defaults.widths
    base = fill(
        Training, chosen, system="fsvi", folder=chosen.data, widths=widths, context="", init_std=defaults.init_std
    )
    context, seeds = chosen.context, chosen.seeds
    contexts, ablation = (CONTEXTS, ABLATION_POINTS) if chosen.ablation else ((), ())
    if chosen.smoke:
        base = replace(base, dataset=SYNTHETIC, epochs=2, batch=100, draws=3, widths=(4, 4, 4), device="cpu")
        context, contexts, seeds, ablation = "noise", ("noise", "train"), 1, ABLATION_POINTS[:1]
    elif len(OUTSIDE_SETS[base.dataset]) > 1:
        base = replace(base, outside=next(iter(available(OUTSIDE_SETS[base.dataset], chosen.data))))
    workers = count_workers(chosen.workers, base.device, 4)
    if chosen.grid:
        held = replace(base, validation=NUM_VALIDATION if not chosen.smoke else 100)
        found = run_trainings(classify, grid(held), chosen.out, workers=workers)
        keys = ("accuracy", "ece", "nll", "auroc_mutual_information", "auroc_entropy", "train_seconds")
        print(show(grouped([{"setting": name, **one} for name, one in found.items()], ["setting"], keys)))
        return 0
    settings = {**asdict(base), "folder": None, "points": NUM_POINTS, "context": context, "init_std": chosen.init_std}
    every = plan(base, seeds, context, contexts, ablation, chosen.init_std)
    wanted = {name: job for name, job in every.items() if job.system in chosen.systems}
    study = {**chosen.facts, "workers": workers, "settings": settings}
    own = _own_settings(wanted, settings)
    _write_study(chosen.out, study, {"own_settings": own})
    found = run_trainings(classify, wanted, chosen.out, workers=workers)
    seconds = {name: one["train_seconds"] for name, one in found.items()}
    last = {name: {key: one["last_epoch"][key] for key in ("epoch", "nll", "kl")} for name, one in found.items()}
    _write_study(chosen.out, study, {"own_settings": own, "seconds": seconds, "last_epoch": last})
    return scores.evaluate(chosen.out, chosen.data)


if __name__ == "__main__":
    sys.exit(main())
