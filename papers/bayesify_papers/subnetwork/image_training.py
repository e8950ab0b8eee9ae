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
    """How every network is trained: SGD with momentum, the learning rate falling to a tenth at two epochs.

    The last BatchNorm of each residual block starts at 0 (Goyal et al. 2017). No label smoothing.

    Args:
        epochs: Passes over the data: 90 for MNIST, 300 for CIFAR-10 in the paper.
        drops: Shares of the epochs after which the learning rate falls to a tenth: 40/90 and 70/90, or 1/2 and 3/4.
        batch: Images in a step: 2048 in the paper for the MAP estimate, 256 for what is trained apart.
        learning_rate: Initial learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of all parameters.
        warmup: Epochs over which the learning rate grows to `learning_rate`; none in the paper.
        crops: Pixels by which training images are shifted at random, at most: 2 on MNIST in the authors' code, 4 on CIFAR-10.
        flips: Whether half of them are mirrored.
        depth: Residual blocks in each of the four stages; 2 is ResNet-18.
        width: Channels of the first stage; 64 is ResNet-18.
        bottleneck: Whether it is a ResNet-50, in place of `depth`.
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
        """The optimizer."""
        return torch.optim.SGD(
            parameters, self.learning_rate, self.momentum, weight_decay=self.weight_decay, fused=True
        )


def batches(x: Tensor, y: Tensor, batch: int, recipe: Recipe) -> MemoryBatches:
    """Shuffled batches, all of the images if there are fewer; flipped and shifted if the recipe says so, black coming in."""
    augment = partial(mirror_and_shift, reach=recipe.crops, mirror=recipe.flips, border=float(x.min()))
    return MemoryBatches(x, y, min(batch, len(x)), augment if recipe.crops or recipe.flips else None)


def make(recipe: Recipe, channels: int, num_classes: int, seed: int) -> nn.Module:
    """An untrained network from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = residual_network(recipe.depth, recipe.width, channels, num_classes, bottleneck=recipe.bottleneck)
    start_at_identity(net)
    return net


def rate(recipe: Recipe, epoch: float) -> float:
    """Factor on the learning rate after some epochs, a fraction within one."""
    started = min(1.0, (epoch + 1e-3) / recipe.warmup) if recipe.warmup else 1.0
    return started * 0.1 ** sum(epoch >= math.floor(share * recipe.epochs) for share in recipe.drops)


def trained(
    path: Path, recipe: Recipe, x: Tensor, y: Tensor, *, num_classes: int, seed: int
) -> tuple[nn.Module, float]:
    """A network trained by the mean cross-entropy, on the device of the images.

    Args:
        path: Its checkpoint: what was trained before is not trained again.
        recipe: Recipe of the training.
        x: Images, normalized, [N, C, H, W].
        y: Labels, [N].
        num_classes: Number of outputs.
        seed: Seed of the initial values and of the training.

    Returns:
        The network in evaluation mode, and the seconds that its training took.
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
        scheduler=lambda sgd: LambdaLR(sgd, lambda step: rate(recipe, step / len(loader))),
        steps=Steps(scheduler="step"),
        kl_weight=0.0,
        num_draws=1,
        precision=recipe.precision if x.is_cuda else "float32",
        checkpoint=path,
        callbacks=[report],
        seed=seed,
        progress=False,
    )
    return bnn.mean_network().eval(), sum(history.column("seconds"))
