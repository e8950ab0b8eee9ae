"""Functions that fit the baselines to a training task."""

from collections.abc import Callable
from typing import Any

import torch

from bayesify.arguments.checks import Count, checked
from bayesify.baselines.fixed_draws import Chains, FixedDraws
from bayesify.baselines.ivon import IVON
from bayesify.baselines.microcanonical import microcanonical
from bayesify.baselines.noisy_kfac import NoisyKFAC
from bayesify.baselines.nuts import nuts
from bayesify.baselines.sghmc import sghmc
from bayesify.baselines.swag import SWAG, gentle_rate
from bayesify.baselines.vogn import VOGN
from bayesify.conversion import bayesianize
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, MatrixNormal, MeanField, Point
from bayesify.running.generators import own_generators
from bayesify.training.batches import total_count
from bayesify.training.schedules import cosine
from bayesify.training.task import TrainingTask, search_point, train_point

MIN_FULL_CHAIN_STEPS = 50
"""A chain with fewer steps has shorter trajectories."""
SHORT_TRAJECTORY_STEPS = 16
"""Maximum number of steps of a microcanonical trajectory, in a chain shorter than `MIN_FULL_CHAIN_STEPS`."""


def fit_swag(task: TrainingTask, *, learning_rate: float = 0.01, rank: int = 20) -> SWAG:
    """Train the network to the maximum a posteriori for all epochs, then for half as many at `gentle_rate` to collect iterates.

    The first phase gets all epochs, because the lower learning rate of the second phase hardly improves the network. In the
    regression of `bayesify demo`, a first phase with only half the epochs gave a flat curve (NLL 0.78 instead of -0.53). If a row
    represents w examples on average, gradients are w times as large, so the learning rate is divided by w.
    """
    trained = train_point(task)
    swag = SWAG(trained.mean_network(), trained.likelihood or task.likelihood, rank=rank)
    batches = task.batches()
    weighted = any(batch.weights is not None for batch in batches)
    mean = total_count(batches) / task.num_data if weighted else 1.0
    rate = gentle_rate(learning_rate, swag.likelihood) / mean
    epochs = max(2, task.epochs // 2)
    return swag.fit(task.loader, epochs, rate, prior=task.prior, num_data=task.num_data, seed=task.seed, progress=False)


@checked
def fit_sghmc(task: TrainingTask, *, num_draws: Count = 100) -> FixedDraws:
    """Train the network to the maximum a posteriori for all epochs, then run `sghmc` for the same number of epochs."""
    options: dict[str, Any] = {"num_data": task.num_data, "seed": task.seed, "progress": False}
    return sghmc(train_point(task), task.loader, task.epochs, num_draws=num_draws, **options)


def natural_gradient_fit(
    trainer: type[VOGN | IVON | NoisyKFAC], family: type[MeanField | MatrixNormal], **settings: Any
) -> Callable[..., BayesianNetwork]:
    """Make a function that trains a posterior family on a task with natural gradients. `settings` are the trainer's settings."""

    def fit_natural(task: TrainingTask, *, learning_rate: float = 0.1, num_draws: int = 4) -> BayesianNetwork:
        bnn = bayesianize(task.net, family(init_std=0.02), likelihood=task.likelihood, prior=task.prior)
        made = trainer(bnn, num_data=task.num_data, learning_rate=learning_rate, num_draws=num_draws, **settings)
        return made.fit(task.loader, task.epochs, schedule=cosine, seed=task.seed, progress=False).bnn

    return fit_natural


def _all_rows(task: TrainingTask) -> dict[str, Any]:
    batches = task.batches()
    x, y = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("x", "y"))
    weighted = batches[0].weights is not None
    return {"x": x, "y": y, "example_weights": torch.cat([batch.counts for batch in batches]) if weighted else None}


@checked
def fit_hmc(task: TrainingTask, *, num_draws: Count = 100) -> FixedDraws:
    """Run a Markov chain with `nuts`. The numbers of its steps and of its warm-up steps are the task's number of epochs.

    A chain of fewer than `MIN_FULL_CHAIN_STEPS` steps is only meant for a first impression. In such a short chain, the limit on
    gradients per step is an eighth of the limit in a longer chain.
    """
    epochs, rows = task.epochs, _all_rows(task)
    bnn = bayesianize(task.net, Point(), likelihood=task.likelihood, prior=task.prior)
    kept = max(1, min(num_draws, epochs))
    draws = nuts(
        bnn,
        **rows,
        num_draws=kept,
        num_warmup=max(1, epochs),
        thin=max(1, epochs // kept),
        max_tree_depth=5 if epochs < MIN_FULL_CHAIN_STEPS else 8,
        seed=task.seed,
    )
    return FixedDraws(draws, bnn.require_likelihood("fit_hmc"))


@checked
def fit_microcanonical(task: TrainingTask, *, members: Count = 8, num_draws: Count = 200) -> Chains:
    """Train an ensemble to the maximum a posteriori, then run chains of `microcanonical` from its members.

    Each chain runs half as many warm-up trajectories as there are epochs, and then one trajectory per epoch. In chains of fewer
    than `MIN_FULL_CHAIN_STEPS` trajectories, which are only meant for a first impression, trajectories are short.
    """
    epochs, rows = task.epochs, _all_rows(task)
    with own_generators(seed=task.seed):
        bnn = bayesianize(task.net, Ensemble(members), likelihood=task.likelihood, prior=task.prior)
    search_point(bnn, task.loader, num_data=task.num_data, epochs=epochs, seed=task.seed)
    kept = max(1, min(num_draws // members, epochs))
    return microcanonical(
        bnn,
        **rows,
        num_draws=kept,
        num_warmup=max(3, epochs // 2),
        thin=max(1, epochs // kept),
        max_steps=SHORT_TRAJECTORY_STEPS if epochs < MIN_FULL_CHAIN_STEPS else 256,
        seed=task.seed,
    )
