"""MAP estimates of residual networks on images, as in appendix C.3."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.models.resnet import BasicBlock, ResNet
from bayesify.storage import write_atomically
from bayesify_papers.shared.batches import MemoryBatches


@dataclass(frozen=True)
class Recipe:
    """How every network is trained: SGD with momentum, the learning rate falling to a tenth at two epochs.

    The last BatchNorm of each residual block starts at 0 (Goyal et al. 2017). No label smoothing.

    Args:
        epochs: Passes over the data: 90 for MNIST, 300 for CIFAR-10 in the paper.
        drops: Shares of the epochs after which the learning rate falls to a tenth: 40/90 and 70/90, or 1/2 and 3/4.
        batch: Images in a step: 2048 in the paper for the MAP estimate, 256 for what is trained apart.
        learning_rate: At the start.
        momentum: Of SGD.
        weight_decay: Of all parameters.
        warmup: Epochs over which the learning rate grows to `learning_rate`; none in the paper.
        crops: Whether training images are flipped and shifted at random, by up to an eighth of their side.
        depth: Residual blocks in each of the four stages; 2 is ResNet-18.
        width: Channels of the first stage; 64 is ResNet-18.
        precision: Of the network in training on a GPU.
    """

    epochs: int = 90
    drops: tuple[float, float] = (40 / 90, 70 / 90)
    batch: int = 2048
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.0
    crops: bool = False
    depth: int = 2
    width: int = 64
    precision: Literal["float32", "bf16"] = "bf16"


def batches(x: Tensor, y: Tensor, batch: int, recipe: Recipe) -> MemoryBatches:
    """Shuffled batches, all of the images if there are fewer; flipped and shifted if the recipe says so."""
    return MemoryBatches(x, y, min(batch, len(x)), recipe.crops)


def make(recipe: Recipe, channels: int, num_classes: int, seed: int) -> ResNet:
    """An untrained network from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ResNet(BasicBlock, (recipe.depth,) * 4, num_classes, "cifar", channels, recipe.width)
    for module in net.modules():
        if isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
    return net


def rate(recipe: Recipe, epoch: float) -> float:
    """Factor on the learning rate after so many epochs."""
    started = min(1.0, (epoch + 1e-3) / recipe.warmup) if recipe.warmup else 1.0
    return started * 0.1 ** sum(epoch >= math.floor(share * recipe.epochs) for share in recipe.drops)


def train(net: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, *, seed: int, title: str = "network") -> float:
    """Train a network in place, on the device of the images, by the mean cross-entropy.

    Args:
        net: On the images' device.
        x: Images, normalized, [N, C, H, W].
        y: Labels, [N].
        recipe: How.
        seed: Of the order of images.
        title: For the lines that tell how far it is.

    Returns:
        Seconds.

    Raises:
        ValueError: If the loss is not finite.
    """
    start = time.perf_counter()
    sgd = torch.optim.SGD(
        net.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    loader = batches(x, y, recipe.batch, recipe)
    net.train()
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=x.device)
        for step, (images, labels) in enumerate(loader):
            for group in sgd.param_groups:
                group["lr"] = recipe.learning_rate * rate(recipe, epoch + step / len(loader))
            with autocast(recipe, x.device):
                loss = nn.functional.cross_entropy(net(images), labels)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            total += loss.detach()
        mean = float(total) / len(loader)
        if not math.isfinite(mean):
            raise ValueError(f"{title}: the loss is {mean} in epoch {epoch + 1}; lower the learning rate")
        if (epoch + 1) % max(1, recipe.epochs // 9) == 0:
            seconds = time.perf_counter() - start
            print(f"{title}: epoch {epoch + 1}/{recipe.epochs}, loss {mean:.4f}, {seconds:.0f} s", flush=True)
    net.eval()
    return time.perf_counter() - start


def trained(
    path: Path, recipe: Recipe, x: Tensor, y: Tensor, *, num_classes: int, seed: int, settings: dict[str, Any]
) -> tuple[ResNet, float]:
    """A trained network: from a file if it was stored there under the same settings, else trained and stored.

    Args:
        path: The file.
        recipe: How.
        x: Images on the device, [N, C, H, W].
        y: Labels.
        num_classes: Outputs.
        seed: Of the start and of training.
        settings: Of the run; a file with others is trained anew.

    Returns:
        The network in evaluation mode, and the seconds that its training took.
    """
    net = make(recipe, x.shape[1], num_classes, seed).to(x.device)
    if x.is_cuda:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if path.is_file():
        stored = torch.load(path, map_location=x.device, weights_only=True)
        if stored["settings"] == settings:
            net.load_state_dict(stored["network"])
            return net.eval(), float(stored["seconds"])
    seconds = train(net, x, y, recipe, seed=seed, title=path.stem)
    with write_atomically(path) as temporary:
        torch.save({"network": net.state_dict(), "settings": settings, "seconds": seconds}, temporary)
    return net, seconds


def autocast(recipe: Recipe, device: torch.device) -> Any:
    """bf16 on a GPU if the recipe says so."""
    wanted = recipe.precision == "bf16" and device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if wanted else nullcontext()
