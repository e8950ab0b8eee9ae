"""The systems that the paper compares on images, and the recipe that trains them all alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, History, KLSchedule, Laplace, bayesianize, fit
from bayesify.baselines import IVON, SWAG, FixedDraws
from bayesify.likelihoods import Categorical
from bayesify.posteriors import Dropout, InducingWeights, MeanField, Point, Posterior
from bayesify.predictor import Predictor
from bayesify.priors import Gaussian, Neal, Prior, Standard
from bayesify.training import Checkpointing, Steps, schedules
from bayesify_papers.shared.batches import MemoryBatches, cut_out, mirror_and_shift
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
        batch: Number of images per step.
        learning_rate: Learning rate of Adam.
        inducing_learning_rate: Of Adam for the inducing weights; very short trainings want a higher one.
        spread_learning_rate: Learning rate of the parameters in `SPREAD_NAMES`.
        depth: Residual blocks in each of the four stages.
        width: Channels of the first stage.
        bottleneck: Whether it is a ResNet-50, in place of `depth`.
        inducing: Number M of rows and of columns of U in every layer.
        max_lambda: Cap on lambda in FFG-U.
        max_std: Cap on the standard deviations of q(U) in FFG-U.
        ensemble_max_lambda: Cap on lambda in Ensemble-U.
        mean_field_max_std: Cap on the standard deviations of FFG-W.
        members: Number of members of both ensembles.
        ensemble_draws: Draws of Ensemble-U in a training step; as many as members uses each once.
        prediction_draws: Number of draws for testing.
        precision: Floating-point precision of the network in training.
        augment: Whether training images are mirrored and shifted at random, as is usual for photographs.
        cutout: Side in pixels of the square that is cut out of each training image; 0 cuts none.
        schedule: Of the learning rates: they fall to a tenth after two thirds of the epochs (the paper), or they rise for a fifth
            of the steps and fall to zero along a cosine (Smith & Topin 2018).
        average: Decay per step of an exponential average of the parameters, with which training ends; 0 for none.
        point_optimizer: Of point estimates: Adam as for all others, or SGD with Nesterov's momentum, which photographs like better.
        point_learning_rate: Of that SGD.
        point_weight_decay: Of that SGD.
        ivon_learning_rate: Of IVON, which rises for a twentieth of the run and falls to zero along a cosine.
        ivon_curvature: What IVON's curvature starts at.
        ivon_weight_decay: Prior precision of IVON divided by the number of training images.
        swag_epochs: Epochs of SWAG, one iterate each, from the point estimate on.
        swag_learning_rate: The constant one of SWAG.
        dropout_rate: Dropout rate of MC dropout.
        kl_weight: Factor of the KL in training, at the end of its schedule.
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
    cutout: int = 0
    schedule: Literal["falls_late", "one_cycle"] = "falls_late"
    average: float = 0.0
    point_optimizer: Literal["adam", "sgd"] = "adam"
    point_learning_rate: float = 0.1
    point_weight_decay: float = 5e-4
    ivon_learning_rate: float = 0.2
    ivon_curvature: float = 0.5
    ivon_weight_decay: float = 2e-4
    swag_epochs: int = 20
    swag_learning_rate: float = 0.01
    dropout_rate: float = 0.1
    kl_weight: float = 1.0

    def changed(self, x: Tensor) -> Tensor:
        """Training images as a step sees them, [B, C, H, W]."""
        return cut_out(mirror_and_shift(x) if self.augment else x, self.cutout)

    def network(self, channels: int, num_classes: int) -> nn.Module:
        """The network that all systems share."""
        return residual_network(self.depth, self.width, channels, num_classes, bottleneck=self.bottleneck)


After = Callable[[BayesianNetwork, Recipe, ImageProblem, int], Predictor]


@dataclass(frozen=True)
class System:
    """One line of the tables.

    Args:
        title: The paper's name.
        posterior: Posterior of the weights.
        prior: Prior of the weights.
        natural: Whether IVON trains it, under a prior of its own.
        point: Whether the weights are trained by maximum likelihood, without a KL.
        random: Whether draws of such weights differ all the same (dropout).
        after: What a trained point estimate is made into, from it, the recipe, the images and the seed.
        apart: Whether it is several networks, as many as members, trained apart, that predict together.
        members: Whether the posterior has members, several of which a training step draws.
    """

    title: str
    posterior: Callable[[Recipe], Posterior]
    prior: type[Prior] = Neal
    natural: bool = False
    point: bool = False
    random: bool = False
    after: After | None = None
    apart: bool = False
    members: bool = False

    def count_networks(self, recipe: Recipe) -> int:
        """Networks that are trained apart."""
        return recipe.members if self.apart else 1

    def count_draws(self, recipe: Recipe) -> int:
        """Draws of each network for testing."""
        return 1 if self.point and not self.random else recipe.prediction_draws

    @property
    def checkpoint_name(self) -> str | None:
        """What checkpoints of its networks are called; those of point estimates are shared, and `None` stands for its own name."""
        return "point" if self.point and (self.after or not self.random) else None


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
"""The paper's, in the order in which they are trained. The first network of Ensemble-W is the deterministic one."""


def _last_layer(bnn: BayesianNetwork, recipe: Recipe, given: ImageProblem, seed: int) -> Predictor:
    laplace = Laplace(bnn.mean_network().eval(), Categorical(), subset="last_layer", covariance="full")
    return laplace.fit(MemoryBatches(given.x, given.y, recipe.batch, rest=True))


def _swag(bnn: BayesianNetwork, recipe: Recipe, given: ImageProblem, seed: int) -> Predictor:
    swag = SWAG(bnn.mean_network(), Categorical())
    swag.fit(
        MemoryBatches(given.x, given.y, recipe.batch, recipe.changed),
        recipe.swag_epochs,
        recipe.swag_learning_rate,
        weight_decay=recipe.point_weight_decay,
        precision=recipe.precision,
        seed=seed,
        progress=False,
    )
    generator = torch.Generator(given.x.device).manual_seed(seed)
    plain = MemoryBatches(given.x, given.y, recipe.batch)
    return FixedDraws(swag.draw(recipe.prediction_draws, generator=generator, loader=plain), Categorical())


BASELINES: dict[str, System] = {
    "last_layer": System("Last-layer Laplace", lambda recipe: Point(), point=True, after=_last_layer),
    "swag": System("SWAG", lambda recipe: Point(), point=True, random=True, after=_swag),
    "ivon": System("IVON", lambda recipe: MeanField(), natural=True),
    "dropout": System("MC dropout", lambda recipe: Dropout(recipe.dropout_rate), point=True, random=True),
}
"""Others that people know, which the paper does not have."""


def train(system: System, recipe: Recipe, given: ImageProblem, seed: int, checkpoint: Path | None = None) -> Trained:
    """One network of a system, trained on its device, and what its epochs were like.

    Args:
        system: A name of `SYSTEMS`.
        recipe: Recipe of the training.
        given: On what.
        seed: Seed of the initial values and of the training.
        checkpoint: File to go on from, written about twenty times; by default none.
    """
    x, y = given.x, given.y
    every = max(1, recipe.epochs // 20)
    prior = Gaussian((len(x) * recipe.ivon_weight_decay) ** -0.5) if system.natural else system.prior()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = recipe.network(x.shape[1], given.num_classes)
        if x.is_cuda:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        bnn = bayesianize(net, system.posterior(recipe), likelihood=Categorical(), prior=prior)
    bnn.to(x.device)

    def report(_: Any, history: History) -> None:
        row = history[-1]
        if row["epoch"] % every == 0:
            told = f"epoch {row['epoch']}/{recipe.epochs}, {row['seconds']:.1f} s, NLL {row['nll']:.4f}"
            print(f"{system.title}: {told}", flush=True)

    batches, steps = MemoryBatches(x, y, recipe.batch, recipe.changed), len(x) // recipe.batch
    options: dict[str, Any] = {"precision": recipe.precision, "average": recipe.average or None, "seed": seed}
    options |= {"callbacks": [] if checkpoint is None else [report], "progress": False}
    options |= {"checkpoint": None if checkpoint is None else Checkpointing(checkpoint, every=every * steps)}
    if system.natural:
        trainer = IVON(bnn, learning_rate=recipe.ivon_learning_rate, init_curvature=recipe.ivon_curvature)
        return bnn.eval(), trainer.fit(batches, recipe.epochs, schedule=warm_cosine, **options).history
    history = fit(
        bnn,
        batches,
        num_data=len(x),
        epochs=recipe.epochs,
        optimizer=make_sgd(bnn, recipe) if system.point and recipe.point_optimizer == "sgd" else make_adam(bnn, recipe),
        **schedule_options(recipe, steps),
        kl_weight=0.0 if system.point else recipe.kl_weight,
        kl_schedule=KLSchedule(recipe.epochs / 3, recipe.epochs / 6),
        num_draws=recipe.ensemble_draws if system.members else 1,
        **options,
    )
    return bnn.eval(), history


def warm_cosine(share: float) -> float:
    """A factor on the learning rate that rises to 1 in a twentieth of the run and falls to 0 along a cosine."""
    return 20 * share if share < 0.05 else schedules.cosine((share - 0.05) / 0.95)


def schedule_options(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The options of `fit` for a recipe's learning rates, with a number of steps an epoch."""
    if recipe.schedule == "falls_late":
        return {"scheduler": falling_late(recipe.epochs)}

    def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        rates, total = [group["lr"] for group in optimizer.param_groups], recipe.epochs * steps + 1
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total, pct_start=0.2, cycle_momentum=False)

    return {"scheduler": one_cycle, "steps": Steps(scheduler="step")}


def make_sgd(bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD with Nesterov's momentum and the recipe's learning rate and weight decay for point estimates."""
    fused = next(bnn.parameters()).device.type in ("cpu", "cuda")
    rate, decay = recipe.point_learning_rate, recipe.point_weight_decay
    return torch.optim.SGD(bnn.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=decay, fused=fused)


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
