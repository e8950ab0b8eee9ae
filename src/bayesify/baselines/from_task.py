"""How the registry's methods that are not posteriors train on a problem, for the demonstration and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.baselines.noisy_kfac import NoisyKFAC
from bayesify.baselines.nuts import nuts
from bayesify.baselines.swag import SWAG, gentle_rate
from bayesify.baselines.vogn import VOGN
from bayesify.conversion import bayesianize
from bayesify.network import BayesianNetwork
from bayesify.posteriors.matrix_normal import MatrixNormal
from bayesify.posteriors.mean_field import MeanField
from bayesify.posteriors.point import Point
from bayesify.running.generators import own_generators
from bayesify.training.batches import parse_batch
from bayesify.training.maximum_a_posteriori import train_point
from bayesify.training.schedules import cosine
from bayesify.training.task import TrainingTask

BRIEF_CHAIN = 50
"""Steps of a chain below which its trajectories are shorter."""


def fit_swag(problem: TrainingTask, *, learning_rate: float = 0.01, rank: int = 20) -> SWAG:
    """All epochs to the maximum a posteriori, half as many to collect at a `gentle_rate`; see `training.task.TrainingTask`.

    A gentle rate trains no further: after half of the epochs the demonstration's curve was flat (NLL 0.78, and -0.53 so).
    Rows that stand for w examples on average have a gradient of w times the size: the rate is divided by it.
    """
    trained = train_point(problem)
    swag = SWAG(trained.mean_network(), trained.likelihood or problem.likelihood, rank=rank)
    with own_generators():  # the order of batches in the training stays
        weights = [parse_batch(item).weights for item in problem.loader]
    mean = float(torch.cat([part for part in weights if part is not None]).mean()) if weights[0] is not None else 1.0
    rate = gentle_rate(learning_rate, swag.likelihood) / max(1.0, mean)
    shares: dict[str, Any] = {"prior": problem.prior, "num_data": problem.num_data, "seed": problem.seed}
    return swag.fit(problem.loader, max(2, problem.epochs // 2), rate, progress=False, **shares)


def natural_recipe(trainer: type[VOGN | NoisyKFAC], family: type[MeanField | MatrixNormal]) -> Callable[..., Any]:
    """The recipe of a trainer by natural gradients; see `training.task.TrainingTask`."""

    def fit_natural(problem: TrainingTask, *, learning_rate: float = 0.1, num_draws: int = 4) -> BayesianNetwork:
        posterior = family(init_std=0.02)
        bnn = bayesianize(problem.net, posterior, likelihood=problem.likelihood, prior=problem.prior)
        options: dict[str, Any] = {"learning_rate": learning_rate, "num_draws": num_draws, "antithetic": True}
        made = trainer(bnn, num_data=problem.num_data, **options)
        return made.fit(problem.loader, problem.epochs, schedule=cosine, seed=problem.seed, progress=False).bnn

    return fit_natural


def fit_hmc(problem: TrainingTask, *, num_draws: int = 100) -> FixedDraws:
    """As many steps of a chain of `nuts` as there are epochs, after as many of warm-up; see `training.task.TrainingTask`.

    A chain of fewer than `BRIEF_CHAIN` steps is a quick look: its steps take an eighth as many gradients.
    """
    epochs = problem.epochs
    bnn = bayesianize(problem.net, Point(), likelihood=problem.likelihood, prior=problem.prior)
    batches = [parse_batch(item) for item in problem.loader]
    x = torch.cat([batch.x for batch in batches])
    y = torch.cat([batch.y for batch in batches])
    kept = max(1, min(num_draws, epochs))
    draws = nuts(
        bnn, x, y, num_draws=kept, num_warmup=max(1, epochs), thin=max(1, epochs // kept),
        max_tree_depth=5 if epochs < BRIEF_CHAIN else 8, seed=problem.seed,
    )  # fmt: skip
    return FixedDraws(draws, bnn.require_likelihood("fit_hmc"))
