"""The systems that the paper compares on images, and the recipe that trains them all alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bayesify import BayesianNetwork, History, KLSchedule, bayesianize, fit
from bayesify.likelihoods import Categorical
from bayesify.posteriors import InducingWeights, MeanField, Point, Posterior
from bayesify.priors import Neal, Prior, Standard
from bayesify.training import Checkpointing
from bayesify_papers.shared.batches import MemoryBatches, mirror_and_shift
from bayesify_papers.shared.image_problems import ImageProblem, Trained, falling_late
from bayesify_papers.shared.networks import residual_network

SPREAD_NAMES = ("raw_lambda", "raw_std")
"""Parameters that say how wide a posterior is. They start some e-folds below where they end and take steps in log space,
so that a short training needs a higher learning rate for them."""


@dataclass(frozen=True)
class Recipe:
    """How every system is trained (appendix J.2, shortened): Adam, a learning rate that falls to a tenth after two thirds,
    a KL weight of 0 for a third of the epochs, then growing over a sixth, then 1.

    The caps are those that `fashion` chose on held-out training images; for FFG-U they are the paper's, for Ensemble-U and FFG-W
    below its 0.1.

    Args:
        epochs: Passes over the data, the same for every system.
        batch: Images in a step.
        learning_rate: Of Adam.
        inducing_learning_rate: Of Adam for the inducing weights; very short trainings want a higher one.
        spread_learning_rate: Of the parameters in `SPREAD_NAMES`.
        depth: Residual blocks in each of the four stages.
        width: Channels of the first stage.
        bottleneck: Whether it is a ResNet-50, in place of `depth`.
        inducing: M, rows and columns of U in every layer.
        max_lambda: Cap on lambda in FFG-U.
        max_std: Cap on the standard deviations of q(U) in FFG-U.
        ensemble_max_lambda: Cap on lambda in Ensemble-U.
        mean_field_max_std: Cap on the standard deviations of FFG-W.
        members: Of both ensembles.
        ensemble_draws: Draws of Ensemble-U in a training step; as many as members uses each once.
        prediction_draws: For testing.
        precision: Of the network in training.
        augment: Whether training images are mirrored and shifted at random, as is usual for photographs.
    """

    epochs: int = 24
    batch: int = 500
    learning_rate: float = 1e-3
    inducing_learning_rate: float = 1e-3
    spread_learning_rate: float = 2e-2
    depth: int = 1
    width: int = 32
    bottleneck: bool = False
    inducing: int = 64
    max_lambda: float = 0.03
    max_std: float = 0.1
    ensemble_max_lambda: float = 0.05
    mean_field_max_std: float = 0.02
    members: int = 5
    ensemble_draws: int = 2
    prediction_draws: int = 20
    precision: Literal["float32", "bf16"] = "float32"
    augment: bool = False

    def network(self, channels: int, num_classes: int) -> nn.Module:
        """The network that all systems share."""
        return residual_network(self.depth, self.width, channels, num_classes, bottleneck=self.bottleneck)


@dataclass(frozen=True)
class System:
    """One line of the tables.

    Args:
        title: The paper's name.
        posterior: What the weights are under.
        prior: Of the weights.
        point: Whether the weights are point estimates, trained by maximum likelihood: no KL, one draw.
        apart: Whether it is several networks, as many as members, trained apart, that predict together.
        members: Whether the posterior has members, several of which a training step draws.
    """

    title: str
    posterior: Callable[[Recipe], Posterior]
    prior: type[Prior] = Neal
    point: bool = False
    apart: bool = False
    members: bool = False

    def count_networks(self, recipe: Recipe) -> int:
        """Networks that are trained apart."""
        return recipe.members if self.apart else 1

    def count_draws(self, recipe: Recipe) -> int:
        """Draws of each network for testing."""
        return 1 if self.point else recipe.prediction_draws


def _inducing(recipe: Recipe, max_lambda: float, **options: Any) -> Posterior:
    start: dict[str, Any] = {"init": "random", "init_std": 1e-3, "init_lambda": 1e-4, "fit_to_layer": False}
    return InducingWeights(recipe.inducing, recipe.inducing, max_lambda=max_lambda, **start, **options)


def _inducing_gaussian(recipe: Recipe) -> Posterior:
    return _inducing(recipe, recipe.max_lambda, max_std=recipe.max_std)


def _inducing_ensemble(recipe: Recipe) -> Posterior:
    return _inducing(recipe, recipe.ensemble_max_lambda, q="ensemble", members=recipe.members)


SYSTEMS: dict[str, System] = {
    "deterministic": System("Deterministic", lambda recipe: Point(), point=True),
    "ffg_u": System("FFG-U", _inducing_gaussian),
    "ensemble_u": System("Ensemble-U", _inducing_ensemble, members=True),
    "ffg_w": System("FFG-W", lambda recipe: MeanField(1e-4, recipe.mean_field_max_std), prior=Standard),
    "ensemble_w": System("Ensemble-W", lambda recipe: Point(), point=True, apart=True),
}
"""In the order in which they are trained. The first network of Ensemble-W is the deterministic one."""


def train(system: System, recipe: Recipe, given: ImageProblem, seed: int, checkpoint: Path | None = None) -> Trained:
    """One network of a system, trained on its device, and what its epochs were like.

    Args:
        system: From `SYSTEMS`.
        recipe: How.
        given: On what.
        seed: Of the start and of everything random in training.
        checkpoint: File to go on from, written about twenty times; by default none.
    """
    x, y = given.x, given.y
    every = max(1, recipe.epochs // 20) * (len(x) // recipe.batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = recipe.network(x.shape[1], given.num_classes)
        if x.is_cuda:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        bnn = bayesianize(net, system.posterior(recipe), likelihood=Categorical(), prior=system.prior())
    bnn.to(x.device)

    def report(_: Any, history: History) -> None:
        row = history[-1]
        if row["epoch"] % max(1, recipe.epochs // 20) == 0:
            told = f"epoch {row['epoch']}/{recipe.epochs}, {row['seconds']:.1f} s, NLL {row['nll']:.4f}"
            print(f"{system.title}: {told}", flush=True)

    history = fit(
        bnn,
        MemoryBatches(x, y, recipe.batch, mirror_and_shift if recipe.augment else None),
        num_data=len(x),
        epochs=recipe.epochs,
        optimizer=make_adam(bnn, recipe),
        scheduler=falling_late(recipe.epochs),
        kl_weight=0.0 if system.point else 1.0,
        kl_schedule=KLSchedule(recipe.epochs / 3, recipe.epochs / 6),
        num_draws=recipe.ensemble_draws if system.members else 1,
        precision=recipe.precision,
        checkpoint=None if checkpoint is None else Checkpointing(checkpoint, every=every),
        callbacks=[] if checkpoint is None else [report],
        seed=seed,
        progress=False,
    )
    return bnn.eval(), history


def make_adam(bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """Adam with the recipe's learning rates: of spreads, of the rest of an inducing posterior, and of everything else."""
    inducing = any(isinstance(posterior, InducingWeights) for posterior in bnn.posteriors)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in bnn.named_parameters():
        rate = recipe.inducing_learning_rate if inducing and name.startswith("posteriors.") else recipe.learning_rate
        if any(part in SPREAD_NAMES for part in name.split(".")):
            rate = recipe.spread_learning_rate
        groups.setdefault(rate, []).append(parameter)
    fused = next(bnn.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.Adam([{"params": params, "lr": rate} for rate, params in groups.items()], fused=fused)
