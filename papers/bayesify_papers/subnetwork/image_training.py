"""MAP estimates of residual networks on images, as in appendix C.3."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bayesify import History, bayesianize, fit
from bayesify.likelihoods import Categorical
from bayesify.posteriors import Point
from bayesify.training import Steps
from bayesify_papers.shared.batches import MemoryBatches, mirror_and_shift
from bayesify_papers.shared.networks import residual_network, start_at_identity


@dataclass(frozen=True)
class Recipe:
    """Training recipe of every network: SGD with momentum and a learning rate that falls to a tenth twice.

    The last BatchNorm of each residual block starts at 0 (Goyal et al. 2017). There is no label smoothing.

    Args:
        epochs: Number of passes over the data; in the paper 90 for MNIST and 300 for CIFAR-10.
        drops: Shares of the epochs after which the learning rate falls to a tenth: 40/90 and 70/90, or 1/2 and 3/4.
        batch: Number of images per step; in the paper 2048 for the MAP estimate and 256 for systems that are trained separately.
        learning_rate: Initial learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of all parameters.
        warmup: Number of epochs over which the learning rate grows to `learning_rate`; none in the paper.
        crops: Largest random shift of training images in pixels; in the authors' code 2 on MNIST and 4 on CIFAR-10.
        flips: Whether to mirror half of the training images.
        depth: Number of residual blocks in each of the four stages. ResNet-18 has 2.
        width: Number of channels of the first stage. ResNet-18 has 64.
        bottleneck: Whether to use a ResNet-50, which ignores `depth`.
        precision: Floating-point precision of the network in training on a GPU.
    """

    epochs: int = 90
    drops: tuple[float, float] = (40 / 90, 70 / 90)
    batch: int = 2048
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.0
    crops: int = 2
    flips: bool = False
    depth: int = 2
    width: int = 64
    bottleneck: bool = False
    precision: Literal["float32", "bf16"] = "bf16"

    def sgd(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """SGD with the recipe's settings."""
        return torch.optim.SGD(
            parameters, self.learning_rate, self.momentum, weight_decay=self.weight_decay, fused=True
        )


def batches(x: Tensor, y: Tensor, batch: int, recipe: Recipe) -> MemoryBatches:
    """Shuffled batches of at most `batch` images, mirrored and shifted as the recipe says. Black moves in at the border."""
    augment = partial(
        mirror_and_shift, reach=recipe.crops, mirror=recipe.flips, border=x.amin((0, 2, 3))[:, None, None]
    )
    return MemoryBatches(x, y, min(batch, len(x)), augment if recipe.crops or recipe.flips else None)


def make(recipe: Recipe, channels: int, num_classes: int, seed: int) -> nn.Module:
    """An untrained network from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = residual_network(recipe.depth, recipe.width, channels, num_classes, bottleneck=recipe.bottleneck)
    start_at_identity(net)
    return net


def rate(recipe: Recipe, epoch: float) -> float:
    """Factor on the learning rate after a number of epochs, which may be fractional."""
    started = min(1.0, (epoch + 1e-3) / recipe.warmup) if recipe.warmup else 1.0
    return started * 0.1 ** sum(epoch >= math.floor(share * recipe.epochs) for share in recipe.drops)


def schedule(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The options of `fit` for the recipe's learning rate, given the number of steps per epoch."""
    return {
        "scheduler": lambda sgd: LambdaLR(sgd, lambda step: rate(recipe, step / steps)),
        "steps": Steps(scheduler="step"),
    }


def trained(
    path: Path, recipe: Recipe, x: Tensor, y: Tensor, *, num_classes: int, seed: int
) -> tuple[nn.Module, float]:
    """A network trained by the mean cross-entropy, on the device of the images.

    Args:
        path: File of the checkpoint. A network that it contains is not trained again.
        x: Images, normalized, [N, C, H, W].
        y: Labels, [N].

    Returns:
        The network in evaluation mode, and the seconds of its training.
    """
    net = make(recipe, x.shape[1], num_classes, seed).to(x.device)
    if x.is_cuda:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = bayesianize(net, Point(), likelihood=Categorical())
    loader = batches(x, y, recipe.batch, recipe)

    def report(_: Any, history: History) -> None:
        row = history[-1]
        if row["epoch"] % max(1, recipe.epochs // 9) == 0:
            print(f"{path.stem}: epoch {row['epoch']}/{recipe.epochs}, loss {row['nll']:.4f}", flush=True)

    history = fit(
        bnn,
        loader,
        num_data=len(x),
        epochs=recipe.epochs,
        optimizer=recipe.sgd,
        **schedule(recipe, len(loader)),
        kl_weight=0.0,
        num_draws=1,
        precision=recipe.precision if x.is_cuda else "float32",
        checkpoint=path,
        callbacks=[report],
        seed=seed,
        progress=False,
    )
    return bnn.mean_network().eval(), sum(history.column("seconds"))
