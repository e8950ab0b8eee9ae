"""The systems that the paper compares on images, and the recipe that trains all of them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
from bayesify_papers.shared import records
from bayesify_papers.shared.batches import MemoryBatches, cut_out, mirror_and_shift
from bayesify_papers.shared.image_problems import ImageProblem, Trained, falling_late
from bayesify_papers.shared.networks import residual_network

SPREAD_NAMES = ("raw_lambda", "raw_std")
"""Parameters of a posterior's spread. They take steps in log space and grow by several e-folds, so a short training run needs a
higher learning rate for them."""

LAMBDA_RATE, STD_RATE = 1e-2, 1e3
"""Learning rates of SGD for lambda and the standard deviations of U. The gradient of a standard deviation is divided by the number
of images."""


@dataclass(frozen=True)
class Recipe:
    """Training recipe of every system (appendix J.2, shortened).

    Adam's learning rate falls to a tenth after two thirds of the epochs. The KL weight is 0 for a third of the epochs, then grows
    to 1 over a sixth. `fashion` chose the caps on held-out training images. The caps of FFG-U equal the paper's; those of
    Ensemble-U and FFG-W are below the paper's 0.1.

    Args:
        epochs: Number of passes over the data, the same for every system.
        batch: Number of images per step.
        learning_rate: Learning rate of Adam.
        inducing_learning_rate: Learning rate of Adam for the inducing weights. Very short training runs need a higher one.
        spread_learning_rate: Learning rate of the parameters in `SPREAD_NAMES`.
        depth: Number of residual blocks in each of the four stages.
        width: Number of channels of the first stage.
        bottleneck: Whether to use a ResNet-50, which ignores `depth`.
        inducing: Number M of rows, and also of columns, of U in every layer.
        inducing_by_stage: M of the four stages, such as `"64,80,96,40"`; empty for `inducing` in all stages. A `b` before a size
            stands for balanced matrices (see `InducingWeights`).
        max_lambda: Cap on lambda in FFG-U.
        max_std: Cap on the standard deviations of q(U) in FFG-U.
        ensemble_max_lambda: Cap on lambda in Ensemble-U.
        mean_field_max_std: Cap on the standard deviations of FFG-W.
        members: Number of members of both ensembles.
        ensemble_draws: Number of draws of Ensemble-U per training step. With as many draws as members, each member is used once.
        prediction_draws: Number of draws for testing.
        precision: Floating-point precision of the network in training.
        augment: Whether to mirror and shift training images at random, as is usual for photographs.
        cutout: Side in pixels of the square that is cut out of each training image; 0 for none.
        schedule: Schedule of the learning rates. They fall to a tenth after two thirds of the epochs (the paper), or they rise for
            a fifth of the steps and then fall to zero along a cosine (Smith & Topin 2018).
        average: Decay per step of an exponential average of the parameters, which is the result of training; 0 for no average.
        point_optimizer: Optimizer of point estimates: Adam, or SGD with Nesterov's momentum, which is better on photographs.
        point_learning_rate: Learning rate of this SGD.
        point_weight_decay: Weight decay of this SGD.
        inducing_optimizer: Optimizer of networks with inducing weights: Adam, or SGD with Nesterov's momentum; see
            `make_inducing_sgd`.
        u_learning_rate: Learning rate of this SGD for U.
        z_learning_rate: Learning rate of this SGD for Z.
        ivon_learning_rate: Peak learning rate of IVON. It rises for a twentieth of the run and falls to zero along a cosine.
        ivon_curvature: Initial curvature of IVON.
        ivon_weight_decay: Prior precision of IVON divided by the number of training images.
        swag_epochs: Number of epochs of SWAG from the point estimate on, with one iterate per epoch.
        swag_learning_rate: Constant learning rate of SWAG.
        dropout_rate: Dropout rate of MC dropout.
        kl_weight: Final factor on the KL in training.
        start_epochs: Number of epochs of a deterministic network before `epochs`. FFG-U and Ensemble-U start at its weights, as
            closely as rank M allows; 0 for the random start of appendix J.
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
    inducing_by_stage: str = ""
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
    inducing_optimizer: Literal["adam", "sgd"] = "adam"
    u_learning_rate: float = 5.0
    z_learning_rate: float = 0.1
    ivon_learning_rate: float = 0.2
    ivon_curvature: float = 0.5
    ivon_weight_decay: float = 2e-4
    swag_epochs: int = 20
    swag_learning_rate: float = 0.01
    dropout_rate: float = 0.1
    kl_weight: float = 1.0
    start_epochs: int = 0

    def __post_init__(self) -> None:
        if self.inducing_by_stage and not re.fullmatch(r"b?[1-9]\d*(,b?[1-9]\d*){3}", self.inducing_by_stage):
            raise ValueError(
                f"inducing_by_stage={self.inducing_by_stage!r} must have four positive numbers, such as '64,64,96,45' or "
                "'64,b80,b96,b96'"
            )

    def changed(self, x: Tensor) -> Tensor:
        """Augmented training images of a step, [B, C, H, W]."""
        return cut_out(mirror_and_shift(x) if self.augment else x, self.cutout)

    def network(self, channels: int, num_classes: int) -> nn.Module:
        """The network that all systems share."""
        return residual_network(self.depth, self.width, channels, num_classes, bottleneck=self.bottleneck)


After = Callable[[BayesianNetwork, Recipe, ImageProblem, int], Predictor]


@dataclass(frozen=True)
class System:
    """A system: one line of the tables.

    Args:
        title: Name in the paper.
        posterior: Posterior of the weights.
        prior: Prior of the weights.
        natural: Whether IVON trains it, with IVON's own prior.
        point: Whether to train the weights by maximum likelihood, without a KL.
        random: Whether draws of these point estimates differ nevertheless (dropout).
        after: Function from a trained point estimate, the recipe, the images and the seed to a predictor.
        apart: Whether the system consists of several networks that are trained separately and predict jointly.
        members: Whether the posterior has members, and a training step draws several of them.
    """

    title: str
    posterior: Callable[[Recipe], Posterior | dict[str, Posterior]]
    prior: type[Prior] = Neal
    natural: bool = False
    point: bool = False
    random: bool = False
    after: After | None = None
    apart: bool = False
    members: bool = False

    def count_networks(self, recipe: Recipe) -> int:
        """Number of networks that are trained separately."""
        return recipe.members if self.apart else 1

    def count_draws(self, recipe: Recipe) -> int:
        """Number of draws of each network for testing."""
        return 1 if self.point and not self.random else recipe.prediction_draws

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the networks' checkpoints; `None` stands for the system's own name. Point estimates share their checkpoints."""
        return "point" if self.point and (self.after or not self.random) else None


def _inducing(recipe: Recipe, max_lambda: float, **options: Any) -> Posterior | dict[str, Posterior]:
    options |= {"init": "network" if recipe.start_epochs else "random", "init_lambda": 1e-4, "fit_to_layer": False}

    def of_size(size: str) -> Posterior:
        m = int(size.removeprefix("b"))
        return InducingWeights(m, m, max_lambda=max_lambda, balanced=size.startswith("b"), **options)

    others = str(recipe.inducing)
    if not recipe.inducing_by_stage:
        return of_size(others)
    sizes = enumerate(recipe.inducing_by_stage.split(","), 1)
    stages = {f"layer{stage}": of_size(size) for stage, size in sizes if size != others}
    return {**stages, "*": of_size(others)}


def _inducing_gaussian(recipe: Recipe) -> Posterior | dict[str, Posterior]:
    return _inducing(recipe, recipe.max_lambda, init_std=1e-3, max_std=recipe.max_std)


def _inducing_ensemble(recipe: Recipe) -> Posterior | dict[str, Posterior]:
    return _inducing(recipe, recipe.ensemble_max_lambda, q="ensemble", members=recipe.members)


SYSTEMS: dict[str, System] = {
    "deterministic": System("Deterministic", lambda recipe: Point(), point=True),
    "ffg_u": System("FFG-U", _inducing_gaussian),
    "ensemble_u": System("Ensemble-U", _inducing_ensemble, members=True),
    "ffg_w": System("FFG-W", lambda recipe: MeanField(1e-4, recipe.mean_field_max_std), prior=Standard),
    "ensemble_w": System("Ensemble-W", lambda recipe: Point(), point=True, apart=True),
}
"""The paper's systems in the order of training. The first network of Ensemble-W is the deterministic network."""


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the order of the images
        draws = swag.draw(recipe.prediction_draws, generator=generator, loader=plain)
    return FixedDraws(draws, Categorical())


BASELINES: dict[str, System] = {
    "last_layer": System("Last-layer Laplace", lambda recipe: Point(), point=True, after=_last_layer),
    "swag": System("SWAG", lambda recipe: Point(), point=True, random=True, after=_swag),
    "ivon": System("IVON", lambda recipe: MeanField(), natural=True),
    "dropout": System("MC dropout", lambda recipe: Dropout(recipe.dropout_rate), point=True, random=True),
}
"""Well-known systems that the paper does not have."""


def train(
    system: System,
    recipe: Recipe,
    given: ImageProblem,
    seed: int,
    checkpoint: Path | None = None,
    *,
    until: int | None = None,
    callbacks: Sequence[Callable[[Any, History], Any]] = (),
) -> Trained:
    """One network of a system, trained on the images' device, and its training history.

    Args:
        system: A name of `SYSTEMS`.
        checkpoint: File to resume from, written about twenty times; none by default.
        until: Number of epochs after which training stops, without a change of its schedules; by default all.
        callbacks: Functions that are called with the network and the history after each epoch.
    """
    x, y = given.x, given.y
    every = max(1, recipe.epochs // 20)
    prior = Gaussian((len(x) * recipe.ivon_weight_decay) ** -0.5) if system.natural else system.prior()
    posterior = system.posterior(recipe)
    begins = recipe.start_epochs > 0 and isinstance(posterior, InducingWeights | dict)
    start, before = _begin(recipe, given, seed, checkpoint) if begins else (None, [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = start.mean_network() if start else recipe.network(x.shape[1], given.num_classes)
        if x.is_cuda:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        bnn = bayesianize(net, posterior, likelihood=Categorical(), prior=prior, batch_statistics="train")
    bnn.to(x.device)

    def report(_: Any, history: History) -> None:
        row = history[-1]
        if row["epoch"] % every == 0:
            told = f"epoch {row['epoch']}/{recipe.epochs}, {row['seconds']:.1f} s, NLL {row['nll']:.4f}"
            print(f"{system.title}: {told}", flush=True)

    batches, steps = MemoryBatches(x, y, recipe.batch, recipe.changed), len(x) // recipe.batch
    options: dict[str, Any] = {"precision": recipe.precision, "average": recipe.average or None, "seed": seed}
    options |= {"callbacks": [*callbacks, *([report] if checkpoint else [])], "progress": False}
    options |= {"checkpoint": None if checkpoint is None else Checkpointing(checkpoint, every=every * steps)}
    if system.natural:
        trainer = IVON(bnn, learning_rate=recipe.ivon_learning_rate, init_curvature=recipe.ivon_curvature)
        return bnn.eval(), trainer.fit(batches, recipe.epochs, schedule=warm_cosine, **options).history
    history = fit(
        bnn,
        batches,
        num_data=len(x),
        epochs=until or recipe.epochs,
        optimizer=make_optimizer(system, bnn, recipe),
        **schedule_options(recipe, steps),
        kl_weight=0.0 if system.point else recipe.kl_weight,
        kl_schedule=KLSchedule(recipe.epochs / 3, recipe.epochs / 6),
        num_draws=recipe.ensemble_draws if system.members else 1,
        **options,
    )
    return bnn.eval(), [*before, *history]


def _begin(
    recipe: Recipe, given: ImageProblem, seed: int, checkpoint: Path | None
) -> tuple[BayesianNetwork | None, list[dict[str, Any]]]:
    """The deterministic network that an inducing posterior starts at, and its training history.

    The network's learning rate would fall to zero only after all epochs, so it is still high at the end. If a checkpoint of the
    posterior exists, `fit` resumes at its values, so no network is needed. The history is then read from a small file next to
    the checkpoint.

    Raises:
        FileNotFoundError: If a checkpoint of the posterior exists without the file of its start.
        ValueError: If the start had other settings.
    """
    whole = replace(recipe, epochs=recipe.start_epochs + recipe.epochs, start_epochs=0)
    settings = {"start_epochs": recipe.start_epochs, "settings": asdict(whole)}
    path = None if checkpoint is None else checkpoint.with_name(f"start-{checkpoint.name}")
    if path and checkpoint and checkpoint.is_file():
        found = records.read_run(path.with_suffix(".json"), settings)
        if not found:
            raise FileNotFoundError(
                f"{checkpoint} exists without {path.with_suffix('.json').name}, the record of its start; copy this file too, "
                "or remove the checkpoint to train again"
            )
        return None, found["history"]
    start, history = train(SYSTEMS["deterministic"], whole, given, seed, path, until=recipe.start_epochs)
    if path:
        records.write(path.with_suffix(".json"), {**settings, "history": history})
    return start, history


def warm_cosine(share: float) -> float:
    """A factor on the learning rate that rises to 1 in a twentieth of the run and falls to 0 along a cosine."""
    return 20 * share if share < 0.05 else schedules.cosine((share - 0.05) / 0.95)


def schedule_options(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The options of `fit` for a recipe's learning rates, given the number of steps per epoch."""
    if recipe.schedule == "falls_late":
        return {"scheduler": falling_late(recipe.epochs)}

    def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        rates, total = [group["lr"] for group in optimizer.param_groups], recipe.epochs * steps + 1
        share = max(0.2, 2 / total)  # at a share of 1 / total, the rise has no steps, and torch divides by zero
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total, pct_start=share, cycle_momentum=False)

    return {"scheduler": one_cycle, "steps": Steps(scheduler="step")}


def make_optimizer(system: System, bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer for a network of a system."""
    if system.point:
        return make_sgd(bnn, recipe) if recipe.point_optimizer == "sgd" else make_adam(bnn, recipe)
    inducing = any(isinstance(posterior, InducingWeights) for posterior in bnn.posteriors)
    return make_inducing_sgd(bnn, recipe) if inducing and recipe.inducing_optimizer == "sgd" else make_adam(bnn, recipe)


def make_inducing_sgd(bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD with Nesterov's momentum for a network with inducing weights.

    Z has the weight decay for which the rate times the decay is that of the deterministic network. This product determines by
    which angle a step turns a weight before a BatchNorm layer. U has no weight decay, because its KL already has this effect.
    All other parameters have the settings of the deterministic network, and D has no weight decay.
    """
    rate, decay = recipe.point_learning_rate, recipe.point_weight_decay
    z = recipe.z_learning_rate, rate * decay / recipe.z_learning_rate
    settings = {
        "raw_lambda": (LAMBDA_RATE, 0.0),
        "raw_std": (STD_RATE, 0.0),
        "raw_d_row": (rate, 0.0),
        "raw_d_col": (rate, 0.0),
        **dict.fromkeys(("z_row", "z_col"), z),
        **dict.fromkeys(("location", "value"), (recipe.u_learning_rate, 0.0)),
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in bnn.named_parameters():
        own = [settings[part] for part in name.split(".") if part in settings and name.startswith("posteriors.")]
        groups.setdefault(own[0] if own else (rate, decay), []).append(parameter)
    listed = [{"params": params, "lr": lr, "weight_decay": one} for (lr, one), params in groups.items()]
    fused = next(bnn.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.SGD(listed, rate, momentum=0.9, nesterov=True, fused=fused)


def make_sgd(bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD with Nesterov's momentum and the recipe's learning rate and weight decay for point estimates."""
    fused = next(bnn.parameters()).device.type in ("cpu", "cuda")
    rate, decay = recipe.point_learning_rate, recipe.point_weight_decay
    return torch.optim.SGD(bnn.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=decay, fused=fused)


def make_adam(bnn: BayesianNetwork, recipe: Recipe) -> torch.optim.Optimizer:
    """Adam with the recipe's learning rates for spreads, for the rest of an inducing posterior, and for all other parameters."""
    inducing = any(isinstance(posterior, InducingWeights) for posterior in bnn.posteriors)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in bnn.named_parameters():
        rate = recipe.inducing_learning_rate if inducing and name.startswith("posteriors.") else recipe.learning_rate
        if any(part in SPREAD_NAMES for part in name.split(".")):
            rate = recipe.spread_learning_rate
        groups.setdefault(rate, []).append(parameter)
    fused = next(bnn.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.Adam([{"params": params, "lr": rate} for rate, params in groups.items()], fused=fused)
