"""MAP estimates of small regression networks, as in appendices C.1 and C.2."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Gaussian
from bayesify.models import mlp


@dataclass(frozen=True)
class Recipe:
    """How a network and its noise variance are trained: SGD on the mean negative log-likelihood, early stopping.

    Args:
        learning_rate: Of SGD.
        momentum: Of SGD.
        weight_decay: Of the network's weights; the noise has none.
        batch: Examples in a step.
        epochs: At most.
        patience: Epochs without a better validation log-likelihood after which training ends; never if left out.
    """

    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch: int = 512
    epochs: int = 2000
    patience: int | None = 500


def make(inputs: int, hidden_layers: int, width: int, seed: int) -> nn.Sequential:
    """A ReLU network with one output, from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp([inputs, *[width] * hidden_layers, 1])


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    *,
    validation: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    noise: float = 1.0,
) -> Gaussian:
    """Train a network in place, and give the noise that was learned with it.

    Args:
        net: Anything from [B, D] to [B, 1].
        x: Inputs, [N, D].
        y: Targets, [N, 1].
        recipe: How.
        validation: Inputs and targets whose log-likelihood decides which epoch is kept; the last one if left out.
        seed: Of the order of examples.
        noise: Starting variance.
    """
    likelihood = Gaussian(noise=noise).to(x.device)
    groups = [
        {"params": list(net.parameters()), "weight_decay": recipe.weight_decay},
        {"params": list(likelihood.parameters()), "weight_decay": 0.0},
    ]
    sgd = torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)
    generator = torch.Generator().manual_seed(seed)
    best, kept, waited = -float("inf"), None, 0
    for _ in range(recipe.epochs):
        for index in torch.randperm(len(x), generator=generator).to(x.device).split(recipe.batch):
            loss = -likelihood.log_density(net(x[index]), y[index]).mean()
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
        if validation is None:
            continue
        with torch.no_grad():
            score = float(likelihood.log_density(net(validation[0]), validation[1]).mean())
        waited += 1
        if score > best:
            best, waited = score, 0
            kept = copy.deepcopy((net.state_dict(), likelihood.state_dict()))
        if recipe.patience is not None and waited >= recipe.patience:
            break
    if kept is not None:
        net.load_state_dict(kept[0])
        likelihood.load_state_dict(kept[1])
    return likelihood


def freeze_biases(net: nn.Module) -> int:
    """Take the biases out of what a Laplace approximation covers, and count the weights that stay."""
    count = 0
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
        count += 0 if name.endswith("bias") else parameter.numel()
    return count
