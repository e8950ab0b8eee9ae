"""The systems that the paper compares on images. Each turns a trained network into a function that predicts probabilities."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify import (
    BayesianNetwork,
    ClassificationPredictive,
    Laplace,
    Predictive,
    bayesianize,
    fit,
    priors,
    subnetwork,
)
from bayesify.baselines import SWAG, VOGN
from bayesify.laplace.covariances import DiagonalCovariance, FullCovariance
from bayesify.likelihoods import Categorical
from bayesify.posteriors import Dropout, MeanField
from bayesify.training import Checkpointing
from bayesify_papers.shared.published import published
from bayesify_papers.subnetwork import image_training
from bayesify_papers.subnetwork.image_training import Recipe, batches

PAPER = published("subnetwork")

Predict = Callable[[Tensor], Tensor]
"""Function from normalized images on the device, [B, C, H, W], to probabilities, [B, classes]."""

MEMORY_BYTES = 4 * 2**30
"""Budget in bytes for activations on a GPU."""

PRIOR_PRECISION_GRID = tuple(10.0**power for power in range(-12, 6, 2))
"""Prior precisions of the first search. The paper searches from 1e-4 to 1e4 in factors of ten (appendix C.3). We search lower
because the weights of largest variance have very little curvature."""


@dataclass(frozen=True)
class Settings:
    """Settings of the systems.

    Args:
        size: Number of weights of a subnetwork.
        num_fit: Number of training images for the curvature, which is scaled to all training images.
        select: Rule that chooses the subnetwork. `"swag"`, as in the authors' code, takes the weights with the largest variance
            over iterates of SGD, one per epoch. `"hessian"`, as in the paper's text, takes the largest 1 / (H + lambda).
        num_select: Number of curvature images that choose the subnetwork by `"hessian"`.
        select_epochs: Number of iterates of `"swag"`; 256 in the authors' code.
        select_learning_rate: Learning rate of `"swag"`.
        select_batch: Batch size of `"swag"`.
        select_weight_decay: Weight decay of `"swag"`.
        num_validation: Number of training images set aside to choose prior precisions.
        num_tune: Number of these images that are used.
        grid: Prior precisions of the first search.
        tune: Prior precisions to use in addition to the paper's. `"tuned"` is the best on validation images, `"widest"` the
            smallest that costs little on them, `"shifted"` the best on shifted validation images. `"none"` alone adds none.
        cost: Largest loss of validation log-likelihood against MAP for `"widest"`. In the paper's table 2, its posterior loses
            0.06 nats.
        draws: Number of draws of dropout, SWAG, VOGN and the diagonal posterior; 16 in the paper.
        members: Number of members of the ensemble.
        apart_batch: Batch size of systems that are trained separately and of all members of the ensemble except the MAP estimate;
            256 in the paper.
        swag_epochs: Number of epochs of SWAG after training.
        swag_learning_rate: Constant learning rate of SWAG.
        vogn_epochs: Number of epochs of VOGN. It replaces the recipe's because a step of VOGN costs several steps of SGD.
        vogn_learning_rate: Learning rate of VOGN.
        vogn_prior_std: Standard deviation of VOGN's prior.
        vogn_damping: Damping of VOGN.
        chunk: Number of images that a Laplace posterior predicts at a time.
        memory: Memory budget of a Laplace posterior.
    """

    size: int = PAPER["subnetwork_size"]
    num_fit: int = 10_000
    select: Literal["swag", "hessian"] = "swag"
    num_select: int = 10_000
    select_epochs: int = 40
    select_learning_rate: float = 1e-2
    select_batch: int = 1024
    select_weight_decay: float = 3e-4
    num_validation: int = 5_000
    num_tune: int = 300
    grid: tuple[float, ...] = PRIOR_PRECISION_GRID
    tune: tuple[str, ...] = ("tuned", "widest", "shifted")
    cost: float = 0.06
    draws: int = 16
    members: int = 5
    apart_batch: int = 256
    swag_epochs: int = 20
    swag_learning_rate: float = 0.05
    vogn_epochs: int = 90
    vogn_learning_rate: float = 1e-3
    vogn_prior_std: float = 0.1
    vogn_damping: float = 1e-3
    chunk: int = 250
    memory: str = "24GiB"


@dataclass
class Workshop:
    """A data set on a device, with the MAP estimate that systems share. It is trained once.

    Args:
        folder: Folder of the trained networks.
        x: Training images, normalized, [N, C, H, W].
        y: Labels, [N].
        validation: Images and labels that are set aside.
        shifted: These images and labels, shifted like the test images.
        num_classes: Number of outputs.
        recipe: Recipe of the training.
        settings: Settings of the systems.
        seed: Seed of all random numbers.
    """

    folder: Path
    x: Tensor
    y: Tensor
    validation: tuple[Tensor, Tensor]
    shifted: tuple[Tensor, Tensor]
    num_classes: int
    recipe: Recipe
    settings: Settings
    seed: int = 0

    def network(self, member: int = 0) -> tuple[nn.Module, float]:
        """A trained network of the ensemble, and the seconds of its training.

        The first network is the MAP estimate. The others have the paper's batch size for all systems except MAP (appendix C.3).
        Their files have other names, so that a member is never read as the MAP estimate of another seed.
        """
        recipe, name, seed = self.recipe, "network", self.seed + member
        if member:
            recipe = replace(recipe, batch=min(self.settings.apart_batch, len(self.x)))
            name = f"member-batch-{recipe.batch}"
        options = {"num_classes": self.num_classes, "seed": seed}
        return image_training.trained(self.folder / f"{name}-{seed}.safetensors", recipe, self.x, self.y, **options)

    def checkpoint(self, name: str, epochs: int, steps: int) -> Checkpointing:
        """Checkpoints from which an interrupted training run resumes. They are written about twenty times.

        Args:
            name: Name of the trained system.
            epochs: Number of epochs of the whole run. Runs of other lengths have other files.
            steps: Number of steps of an epoch.
        """
        path = self.folder / f"{name}-{epochs}-{self.seed}.safetensors"
        return Checkpointing(path, every=max(1, epochs // 20) * steps)

    @property
    def precision(self) -> Literal["float32", "bf16"]:
        """Floating-point precision of networks in training: the recipe's on a GPU, otherwise float32."""
        return self.recipe.precision if self.x.is_cuda else "float32"

    @cached_property
    def map_estimate(self) -> nn.Module:
        """The network at which the Laplace posteriors are centered."""
        return self.network()[0]

    def fit_batches(self, batch: int = 250) -> list[tuple[Tensor, ...]]:
        """Batches of training images for the curvature, with example weights that scale them to all training images."""
        count = self.settings.num_fit
        weights = torch.full((count,), len(self.x) / count, device=self.x.device)
        return _cut(batch, self.x[:count], self.y[:count], weights)

    def validation_score(self, predict: Predict, part: tuple[Tensor, Tensor]) -> float:
        """Mean log-likelihood of the first `num_tune` images of a labeled part."""
        x, y = (values[: self.settings.num_tune] for values in part)
        return float(predict(x).double().gather(1, y[:, None]).clamp_min(1e-37).log().mean())


def _cut(batch: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(batch) for tensor in tensors), strict=True))


@dataclass(frozen=True)
class Variant:
    """A system that is ready to predict."""

    name: str
    predict: Predict
    facts: dict[str, Any]


def _point(net: nn.Module, chunk: int = 2000) -> Predict:
    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([net(part).double().softmax(-1) for part in x.split(chunk)])

    return predict


def _map(shop: Workshop) -> Iterator[Variant]:
    net, seconds = shop.network()
    yield Variant("map", _point(net), {"train_seconds": round(seconds, 1)})


def _ensemble(shop: Workshop) -> Iterator[Variant]:
    members = [shop.network(index) for index in range(shop.settings.members)]
    predictors = [_point(net) for net, _ in members]
    facts = {"train_seconds": round(sum(seconds for _, seconds in members), 1)}
    yield Variant("ensemble", lambda x: torch.stack([predict(x) for predict in predictors]).mean(0), facts)


def _laplace(
    shop: Workshop, name: str, subset: Any, covariance: Literal["full", "diagonal"] = "full", **known: Any
) -> Iterator[Variant]:
    """The posterior at the paper's prior precision, and at the precisions chosen on validation images."""
    settings, start = shop.settings, time.perf_counter()
    base = PAPER["prior_precision"].get(name, 1.0)
    options: dict[str, Any] = {"prior_precision": base, "link": "probit", "memory": settings.memory}
    laplace = Laplace(shop.map_estimate, Categorical(), subset, covariance, **options).fit(shop.fit_batches())
    facts: dict[str, Any] = {**known, "fit_seconds": round(time.perf_counter() - start, 1)}

    def predict(x: Tensor) -> Tensor:
        if covariance == "diagonal":
            generator = torch.Generator(x.device).manual_seed(shop.seed)
            return _probs(laplace.predict(x, method="network_mc", num_draws=settings.draws, generator=generator))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* is not positive definite, so ")
            return torch.cat([_probs(laplace.predict(part)) for part in x.split(settings.chunk)])

    if name in PAPER["prior_precision"]:
        yield Variant(name, predict, {**facts, "prior_precision": base})
    if set(settings.tune) <= {"none"}:
        return
    start = time.perf_counter()
    grid = [precision for precision in settings.grid if precision >= _least(laplace)] or [max(settings.grid)]
    floor = shop.validation_score(_point(shop.map_estimate), shop.validation) - settings.cost
    found = search(lambda precision: _scores(shop, laplace, precision / base, predict), grid, settings.tune, floor)
    facts["tune_seconds"] = round(time.perf_counter() - start, 1)
    for ending, (precision, tried) in found.items():
        laplace.set_prior_factor(precision / base)
        yield Variant(f"{name}_{ending}", predict, {**facts, "prior_precision": precision, "tried": tried})


def _scores(shop: Workshop, laplace: Laplace, factor: float, predict: Predict) -> dict[str, float]:
    """Mean log-likelihoods of the clean and of the shifted validation images, for a factor on the prior precision."""
    laplace.set_prior_factor(factor)
    scores = {"tuned": shop.validation_score(predict, shop.validation)}
    if "shifted" in shop.settings.tune:
        scores["shifted"] = shop.validation_score(predict, shop.shifted)
    return scores


def _least(laplace: Laplace) -> float:
    """The smallest prior precision that exceeds the rounding errors of the curvature."""
    posterior = laplace.posterior
    assert isinstance(posterior, (FullCovariance, DiagonalCovariance))
    curvature = posterior.curvature
    return 1e-4 * float((curvature.diagonal() if curvature.ndim == 2 else curvature).mean())


def search(
    score: Callable[[float], Mapping[str, float]], grid: Sequence[float], endings: Sequence[str], floor: float
) -> dict[str, tuple[float, dict[str, float]]]:
    """The best prior precision by each of several rules, searched first on a grid and then between its values.

    `"tuned"` and `"shifted"` each maximize the score of this name; a tenth and ten times the grid's best are tried too. `"widest"`
    is the smallest precision down to which the score `"tuned"` stays above a floor. It is bisected twice between two values of the
    grid.

    Args:
        score: Function from a prior precision to the scores, called once for each value.
        grid: Prior precisions of the first search.
        endings: Names of the rules.
        floor: Floor of the score for `"widest"`.

    Returns:
        By rule: the chosen value, and the score of every value tried.
    """
    known = {precision: score(precision) for precision in grid}

    def look(precision: float) -> Mapping[str, float]:
        if precision not in known:
            known[precision] = score(precision)
        return known[precision]

    found = {}
    for ending in endings:
        key = "tuned" if ending == "widest" else ending
        if ending == "widest":
            falling = sorted(known, reverse=True)
            count = next((place for place, one in enumerate(falling) if known[one][key] < floor), len(falling))
            best = falling[max(0, count - 1)]
            for _ in range(2 if 0 < count < len(falling) else 0):
                below = max(precision for precision in known if precision < best)
                middle = math.sqrt(below * best)
                best = middle if look(middle)[key] >= floor else best
        else:
            best = max(known, key=lambda precision: known[precision][key])
            for near in (best / 10, best * 10):
                look(near)
            best = max(known, key=lambda precision: known[precision][key])
        found[ending] = (best, key)
    return {
        ending: (best, {f"{precision:g}": round(known[precision][key], 4) for precision in sorted(known)})
        for ending, (best, key) in found.items()
    }


def _probs(made: Predictive) -> Tensor:
    assert isinstance(made, ClassificationPredictive)
    return made.probs


def _subnetwork(shop: Workshop) -> Iterator[Variant]:
    settings = shop.settings
    if settings.select == "swag":
        indices, seconds = moving_weights(shop)
        yield from _laplace(shop, "subnetwork", subnetwork.from_indices(indices), select_seconds=round(seconds, 1))
    else:
        chosen = subnetwork.largest_variance(settings.size, num_examples=settings.num_select, skip_flat=False)
        yield from _laplace(shop, "subnetwork", chosen)


def _sgd_goes_on(
    shop: Workshop, name: str, batch: int, epochs: int, learning_rate: float, *, weight_decay: float, rank: int
) -> tuple[SWAG, float]:
    """Iterates of SGD at a constant learning rate that starts at the MAP estimate (or a checkpoint), and its seconds."""
    loader = batches(shop.x, shop.y, batch, shop.recipe)
    options: dict[str, Any] = {"momentum": shop.recipe.momentum, "precision": shop.precision, "seed": shop.seed}
    options |= {"weight_decay": weight_decay, "checkpoint": shop.checkpoint(name, epochs, len(loader))}
    swag = SWAG(shop.map_estimate, Categorical(), rank=rank)
    swag.fit(loader, epochs, learning_rate, progress=False, **options)
    return swag, sum(swag.history.column("seconds"))


def moving_weights(shop: Workshop) -> tuple[Tensor, float]:
    """The weights that vary most while SGD continues from the MAP estimate, and the seconds of this SGD.

    The weights are indices into the concatenated parameters, [S]. Only convolutions and the last layer are considered.
    """
    settings = shop.settings
    how: dict[str, Any] = {"weight_decay": settings.select_weight_decay, "rank": 0}
    rate = settings.select_learning_rate
    swag, seconds = _sgd_goes_on(shop, "selection", settings.select_batch, settings.select_epochs, rate, **how)
    variances = swag.variance()
    scores = [
        (variances[name] if parameter.ndim > 1 else torch.full_like(parameter, -torch.inf)).detach().reshape(-1)
        for name, parameter in shop.map_estimate.named_parameters()
    ]
    return torch.cat(scores).topk(settings.size).indices, seconds


def _bayesian(bnn: BayesianNetwork, shop: Workshop) -> Predict:
    def predict(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(shop.seed)
        return _probs(
            bnn.predict(x, shop.settings.draws, generator=generator, memory=MEMORY_BYTES if x.is_cuda else None)
        )

    return predict


def _dropout(shop: Workshop) -> Iterator[Variant]:
    """Dropout with rate 0.1 between the two convolutions of each block (appendix C.3), trained from scratch."""
    recipe = replace(shop.recipe, batch=min(shop.settings.apart_batch, len(shop.x)))
    net = image_training.make(recipe, shop.x.shape[1], shop.num_classes, shop.seed)
    if shop.x.is_cuda:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = bayesianize(net, {"layer*.conv2": Dropout(rate=0.1)}, likelihood=Categorical()).to(shop.x.device)
    loader = batches(shop.x, shop.y, recipe.batch, recipe)
    history = fit(
        bnn,
        loader,
        num_data=len(shop.x),
        epochs=recipe.epochs,
        optimizer=recipe.sgd,
        **image_training.schedule(recipe, len(loader)),
        kl_weight=0.0,
        num_draws=1,
        precision=shop.precision,
        checkpoint=shop.checkpoint("dropout", recipe.epochs, len(loader)),
        seed=shop.seed,
        progress=False,
    )
    bnn.eval()
    yield Variant("dropout", _bayesian(bnn, shop), {"train_seconds": round(sum(history.column("seconds")), 1)})


def _swag(shop: Workshop) -> Iterator[Variant]:
    """SWAG: SGD at a constant learning rate from the MAP estimate on. Each draw has its own batch statistics."""
    settings = shop.settings
    how: dict[str, Any] = {"weight_decay": shop.recipe.weight_decay, "rank": min(20, settings.swag_epochs)}
    rate = settings.swag_learning_rate
    swag, seconds = _sgd_goes_on(shop, "swag", settings.apart_batch, settings.swag_epochs, rate, **how)
    generator = torch.Generator().manual_seed(shop.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shop.seed)  # the order of the images
        draws = swag.draw(settings.draws, generator=generator, loader=shop.fit_batches(batch=500))
    facts = {"train_seconds": round(seconds, 1)}

    def predict(x: Tensor) -> Tensor:
        return _probs(swag.predict(x, draws=draws, memory=MEMORY_BYTES if x.is_cuda else None))

    yield Variant("swag", predict, facts)


def _vogn(shop: Workshop) -> Iterator[Variant]:
    """VOGN: mean-field Gaussians over convolutions and the last layer, trained from scratch (Osawa et al. 2019)."""
    settings = shop.settings
    net = image_training.make(shop.recipe, shop.x.shape[1], shop.num_classes, shop.seed)
    prior = priors.Gaussian(std=settings.vogn_prior_std)
    bnn = bayesianize(net, MeanField(init_std=1e-4), likelihood=Categorical(), prior=prior).to(shop.x.device)
    trainer = VOGN(bnn, num_data=len(shop.x), learning_rate=settings.vogn_learning_rate, damping=settings.vogn_damping)
    loader = batches(shop.x, shop.y, settings.apart_batch, shop.recipe)
    recipe = replace(shop.recipe, epochs=settings.vogn_epochs)
    trainer.fit(
        loader,
        settings.vogn_epochs,
        schedule=lambda share: image_training.rate(recipe, share * settings.vogn_epochs),
        checkpoint=shop.checkpoint("vogn", settings.vogn_epochs, len(loader)),
        seed=shop.seed,
        progress=False,
    )
    bnn.eval()
    seconds = sum(trainer.history.column("seconds"))
    yield Variant("vogn", _bayesian(bnn, shop), {"train_seconds": round(seconds, 1)})


SYSTEMS: dict[str, Callable[[Workshop], Iterator[Variant]]] = {
    "map": _map,
    "subnetwork": _subnetwork,
    "random": lambda shop: _laplace(shop, "random", subnetwork.random(shop.settings.size, seed=shop.seed)),
    "largest_magnitude": lambda shop: _laplace(
        shop, "largest_magnitude", subnetwork.largest_magnitude(shop.settings.size)
    ),
    "last_layer": lambda shop: _laplace(shop, "last_layer", "last_layer"),
    "diagonal": lambda shop: _laplace(shop, "diagonal", "all", covariance="diagonal"),
    "dropout": _dropout,
    "swag": _swag,
    "vogn": _vogn,
    "ensemble": _ensemble,
}
"""Systems in the order in which they run. The paper has no results for the largest magnitude and the last layer on images."""

DEFAULT_SYSTEMS = tuple(name for name in SYSTEMS if name != "largest_magnitude")
