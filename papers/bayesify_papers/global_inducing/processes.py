"""Deep Gaussian processes of two and five layers on UCI splits, with global inducing points and with DSVI."""

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.deep_gp import DeepGP
from bayesify.likelihoods import Gaussian
from bayesify.training import ModelStack
from bayesify_papers.global_inducing.stacked_training import Schedule, train

MODELS: dict[str, tuple[int, Any]] = {
    f"dgp{depth}-{name}": (depth, inducing)
    for depth in (2, 5)
    for name, inducing in (("gi", "global"), ("dsvi", "local"))
}
"""Number of layers and kind of inducing points of each model."""

NUM_POINTS, NOISE_VARIANCE = 100, 0.1


def run(
    data: str,
    rows: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor],
    model: str,
    schedule: Schedule,
    num_draws: int,
) -> dict[str, Any]:
    """Train on all splits at once and return scores by split.

    Args:
        data: Name of the data set, for messages.
        rows: Training rows, test rows and units of the splits, as `uci.stack_splits` makes them.
        model: A key of `MODELS`.
    """
    (x, y), (x_test, y_test), units = rows
    stack = ModelStack([make(x[split], y[split], model, seed=split) for split in range(len(x))])
    outcome = train(stack, x, y, schedule, label=f"{data}, {model}")
    found = [
        score(made, (x[split], y[split]), (x_test[split], y_test[split]), float(units[split]), num_draws, seed=split)
        for split, made in enumerate(stack.unstack())
    ]
    return {**{key: [one[key] for one in found] for key in found[0]}, **outcome.facts()}


def make(x: Tensor, y: Tensor, model: str, seed: int = 0) -> DeepGP:
    """One process before training.

    Args:
        x: Inputs, [N, D].
        y: Targets, [N, 1].
        model: A key of `MODELS`.
    """
    depth, inducing = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepGP(
            x,
            y,
            depth=depth,
            inducing=inducing,
            num_inducing=NUM_POINTS,
            likelihood=Gaussian(noise=NOISE_VARIANCE),
            seed=seed,
        )


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
