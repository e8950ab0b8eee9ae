"""UCI regressions: bounds and test log-likelihoods of networks and deep Gaussian processes (section 3.3, figure 3).

    python -m bayesify_papers.global_inducing.uci --out DIR [--datasets yacht] [--models fac gi] [--device cuda]

Networks have two hidden layers of 50 ReLU units. The splits are the standard ones, inputs and targets are standardized, and numbers
are in the target's own unit. All splits of a data set train at once. The paper's schedule is in an appendix that we did not have.
Here, Adam's learning rate falls from 0.02 to 0 along half a cosine, with batches of 128 and one draw per step. The factor on the KL
rises from 0.1 to 1 in the first fifth of the steps. The learned noise variance starts at 0.1, and there are 100 inducing inputs.
The schedule is the same for every posterior, and for deep Gaussian processes of two and five layers (`dgp2-gi`, `dgp2-dsvi`,
`dgp5-gi`, `dgp5-dsvi`). Each job has its own results file, and jobs whose file exists are not run again.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import uci
from bayesify.datasets.scaling import Standardization
from bayesify_papers.global_inducing import processes, rows
from bayesify_papers.global_inducing.networks import PRIORS, STARTS, Design, stack
from bayesify_papers.global_inducing.stacked_training import Schedule, bounds, train
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import standard_error

DATASETS = ("boston", "concrete", "energy", "wine", "yacht")
"""The five smallest data sets, which figure 3 shows."""

MODELS = {"fac": ("fac",) * 3, "li": ("li",) * 3, "gi": ("gi",) * 3, "fac-gi": ("fac", "fac", "gi")}
WIDTH, NUM_POINTS, NOISE_VARIANCE, NUM_DRAWS = 50, 100, 0.1, 100
HIDDEN_PRECISION = 1.0
"""Initial precision of pseudo-outputs in hidden layers. At 0.1, noise keeps the later layers from learning on energy."""
START_KIND = "random"
SCHEDULE = Schedule(steps=10_000, batch=128, learning_rate=2e-2)
Rows = tuple[Tensor, Tensor]


def stack_splits(data: uci.Table, splits: int | None = None, device: str = "cpu") -> tuple[Rows, Rows, Tensor]:
    """Training and test rows of all splits, [R, N, ...], standardized, and the targets' units, [R].

    Args:
        data: A regression whose splits are of one size.
        splits: Number of splits, from the first; all by default.
    """
    parts: list[list[np.ndarray]] = [[], [], [], []]
    units = []
    for split in data.splits[:splits]:
        scale_x, scale_y = Standardization.of(data.X[split.train]), Standardization.of(data.y[split.train])
        units.append(float(scale_y.std[0, 0]))
        for index, part in enumerate((split.train, split.test)):
            parts[2 * index].append(scale_x(data.X[part]))
            parts[2 * index + 1].append(scale_y(data.y[part]))
    x, y, x_test, y_test = (torch.from_numpy(np.stack(part)).float().to(device) for part in parts)
    return (x, y), (x_test, y_test), torch.tensor(units)


def run_networks(
    data: uci.Table,
    model: str,
    prior: str,
    schedule: Schedule,
    splits: int | None = None,
    device: str = "cpu",
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    hidden_precision: float = HIDDEN_PRECISION,
    start: str = START_KIND,
    points: int = NUM_POINTS,
) -> dict[str, Any]:
    """Train networks on all splits at once and return scores by split.

    Args:
        model: A key of `MODELS`.
        prior: One of `PRIORS`.
        splits: Number of splits, from the first; all by default.
        hidden_precision: Initial precision of the pseudo-outputs of hidden layers.
        start: Initial pseudo-outputs of hidden layers, see `Design`.
        points: Number M of inducing inputs.
    """
    (x, y), test, units = stack_splits(data, splits, device)
    design = Design(
        (x.shape[-1], WIDTH, WIDTH, 1), MODELS[model], prior, points, hidden_precision=hidden_precision, start=start
    )
    networks = stack(design, x.cpu(), y.cpu(), NOISE_VARIANCE, seed=seed).to(device)
    outcome = train(networks, x, y, schedule, seed, label=f"{data.name}, {model}, {prior}")
    bound = bounds(networks, x, y, num_draws, seed).cpu() / x.shape[1]
    scores: dict[str, Any] = {"elbo": (bound - units.log()).tolist(), "log_likelihood": [], "rmse": [], "noise": []}
    generator = torch.Generator(device=device).manual_seed(seed)
    for made, inputs, targets, unit in zip(networks.unstack(), *test, units.tolist(), strict=True):
        prediction = made.to(device).predict(inputs, num_draws, generator=generator)
        scores["log_likelihood"].append(float(prediction.log_prob(targets).mean()) - math.log(unit))
        scores["rmse"].append(float((prediction.mean - targets).square().mean().sqrt()) * unit)
        scores["noise"].append(float(made.likelihood.noise.detach()) * unit**2)
    return {**scores, **outcome.facts()}


def run(
    folder: Path,
    tables: Sequence[uci.Table],
    models: Sequence[str],
    priors: Sequence[str],
    schedule: Schedule,
    *,
    splits: int | None = None,
    device: str = "cpu",
    num_draws: int = NUM_DRAWS,
    facts: dict[str, Any] | None = None,
    **inducing: Any,
) -> None:
    """Run one job for each data set, prior and model, except jobs whose results are in the folder.

    Args:
        folder: Folder for the results, one file per job.
        models: Keys of `MODELS` and of `processes.MODELS`.
        priors: Priors of networks. Deep Gaussian processes do not use them.
        splits: Number of splits, from the first; all by default.
        inducing: `hidden_precision`, `start` and `points` of `run_networks`.

    Raises:
        ValueError: If a file in the folder has another schedule or other splits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for data in tables:
        for prior in priors:
            for model in models:
                name = f"{data.name}-{model}" + (f"-{prior}" if model in MODELS else "")
                wanted = {"dataset": data.name, "model": model, "prior": prior if model in MODELS else None}
                count = len(data.splits[:splits])
                path, settings = folder / f"{name}.json", {**asdict(schedule), "splits": count}
                if set(MODELS.get(model, ())) & {"li", "gi"}:
                    settings |= inducing
                content = records.begin_run(path, {"settings": settings}, {**(facts or {}), **wanted})
                if "scores" in content:
                    continue
                if model in MODELS:
                    scores = run_networks(data, model, prior, schedule, splits, device, num_draws, **inducing)
                else:
                    scores = processes.run(data.name, stack_splits(data, splits, device), model, schedule, num_draws)
                records.write(path, {**content, "scores": scores})


def compare(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each data set and prior with both gi and fac: the higher bound, and the difference in log-likelihood."""
    by_key = {(one["dataset"], one["prior"], one["model"]): one["scores"] for one in found if "scores" in one}
    lines = []
    for (dataset, prior, model), gi in by_key.items():
        fac = by_key.get((dataset, prior, "fac"))
        if model != "gi" or fac is None:
            continue
        size = min(len(gi["elbo"]), len(fac["elbo"]))
        gain = np.mean(gi["elbo"][:size]) - np.mean(fac["elbo"][:size])
        apart = np.subtract(gi["log_likelihood"][:size], fac["log_likelihood"][:size])
        error = max(standard_error(one["log_likelihood"][:size]) or math.inf for one in (gi, fac))
        verdict = "higher" if gain > 0 else "NOT higher"
        within = "no worse" if apart.mean() >= -error else "WORSE"
        lines.append(
            f"{dataset}, {prior}: gi's bound is {verdict} than fac's by {gain:.3f} per example; its test log-likelihood is "
            f"{within} within a standard error ({apart.mean():+.3f}, standard error {error:.3f})"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    every = (*MODELS, *processes.MODELS)
    program = Program(__doc__, __spec__, "global-inducing-uci", small=True)
    program.choice("datasets", uci.REGRESSION, list(DATASETS)).choice("models", every, ["fac", "gi"])
    program.choice("priors", PRIORS, ["scale"]).choice("start", STARTS, START_KIND)
    program.option("data", "splits", "table", device="cpu", hidden_precision=HIDDEN_PRECISION, points=NUM_POINTS)
    names = ("steps", "learning_rate", "batch", "draws", "first_weight")
    chosen = program.option(**{name: getattr(SCHEDULE, name) for name in names}).read(arguments)
    if not chosen.table:
        schedule = replace(SCHEDULE, **{name: getattr(chosen, name) for name in names})
        tables, models = [synthetic(splits=2)], list(every)
        if chosen.smoke:
            schedule = replace(schedule, steps=3, batch=16)
        else:
            tables, models = [uci.load(name, chosen.data) for name in chosen.datasets], chosen.models
        draws = 10 if chosen.smoke else NUM_DRAWS
        options = {"splits": chosen.splits, "device": chosen.device, "num_draws": draws, "facts": chosen.facts}
        options |= {"hidden_precision": chosen.hidden_precision, "start": chosen.start, "points": chosen.points}
        run(chosen.out, tables, models, chosen.priors, schedule, **options)
    print(show(rows.uci(chosen.out), "Bounds per example and scores, in the target's own unit."))
    print("\n".join(compare([records.read(path) for path in sorted(chosen.out.glob("*.json"))])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
