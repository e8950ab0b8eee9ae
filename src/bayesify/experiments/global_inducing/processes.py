"""Deep Gaussian processes of two and five layers on UCI splits, with global inducing points and with DSVI."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.deep_gp import DeepGP
from bayesify.experiments import records
from bayesify.experiments.global_inducing.stacked_training import Schedule
from bayesify.likelihoods import Gaussian

MODELS: dict[str, tuple[int, Any]] = {
    f"dgp{depth}-{name}": (depth, inducing)
    for depth in (2, 5)
    for name, inducing in (("gi", "global"), ("dsvi", "local"))
}
"""Layers, and the kind of inducing points."""

POINTS, NOISE = 100, 0.1


def run(
    path: Path,
    head: dict[str, Any],
    rows: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor],
    model: str,
    schedule: Schedule,
    num_draws: int,
) -> None:
    """Train on the splits that a file does not hold yet, and write it after each.

    Args:
        path: The file.
        head: What stands above the scores in it.
        rows: Training rows, test rows and units of the splits, as `uci.stack_splits` makes them.
        model: A key of `MODELS`.
        schedule: Of the training.
        num_draws: For bounds and predictions.
    """
    (x, y), (x_test, y_test), units = rows
    keys = ("elbo", "log_likelihood", "rmse", "noise")
    scores: dict[str, Any] = {key: [] for key in keys} | {"seconds": 0.0}
    if path.is_file():
        scores = json.loads(path.read_text())["scores"]
    for split in range(len(scores["elbo"]), len(x)):
        start = time.perf_counter()
        made = fit(x[split], y[split], model, schedule, seed=split)
        unit = float(units[split])
        found = score(made, (x[split], y[split]), (x_test[split], y_test[split]), unit, num_draws, seed=split)
        for key in keys:
            scores[key].append(found[key])
        scores["seconds"] = round(scores["seconds"] + time.perf_counter() - start, 1)
        records.write(path, {**head, "scores": scores})
        print(f"{head['dataset']}, {model}, split {split}: {found}, {scores['seconds']:.0f} s", flush=True)


def fit(x: Tensor, y: Tensor, model: str, schedule: Schedule, seed: int = 0) -> DeepGP:
    """One process, trained by a schedule.

    Args:
        x: Inputs, [N, D].
        y: Targets, [N, 1].
        model: A key of `MODELS`.
        schedule: How.
        seed: Of everything random.
    """
    depth, inducing = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = DeepGP(
            x, y, depth=depth, inducing=inducing, num_inducing=POINTS, likelihood=Gaussian(noise=NOISE), seed=seed
        )
    generator = torch.Generator(device=x.device).manual_seed(seed)
    optimizer = torch.optim.Adam(made.parameters(), lr=schedule.learning_rate)
    for step in range(schedule.steps):
        rows = torch.randperm(len(x), generator=generator, device=x.device)[: schedule.batch]
        options: dict[str, Any] = {
            "num_draws": schedule.draws,
            "kl_weight": schedule.kl_weight(step),
            "generator": generator,
        }
        loss = -made.elbo(x[rows], y[rows], num_data=len(x), **options) / len(x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), schedule.clip)
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        optimizer.step()
    return made


@torch.no_grad()
def score(
    made: DeepGP,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    unit: float,
    num_draws: int,
    seed: int = 0,
) -> dict[str, float]:
    """Bound per example, test log-likelihood and RMSE, in the target's own unit."""
    generator = torch.Generator(device=train[0].device).manual_seed(seed)
    count = len(train[0])
    parts = [
        float(made.elbo(*train, num_data=count, num_draws=10, generator=generator))
        for _ in range(max(1, num_draws // 10))
    ]
    prediction: Any = made.predict(test[0], num_draws, generator=generator)
    return {
        "elbo": sum(parts) / len(parts) / count - math.log(unit),
        "log_likelihood": float(prediction.log_prob(test[1]).mean()) - math.log(unit),
        "rmse": float((prediction.mean - test[1]).square().mean().sqrt()) * unit,
        "noise": float(made.likelihood.noise) * unit**2,  # type: ignore[arg-type]
    }
