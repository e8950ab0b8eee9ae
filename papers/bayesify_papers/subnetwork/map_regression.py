"""MAP estimates of small regression networks, as in appendices C.1 and C.2."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import bayesianize, fit
from bayesify.likelihoods import Gaussian
from bayesify.models import mlp
from bayesify.posteriors import Point
from bayesify.training import Validation
from bayesify_papers.shared.batches import MemoryBatches


@dataclass(frozen=True)
class Recipe:
    """Training recipe of a network and its noise variance: SGD on the mean negative log-likelihood with early stopping.

    Args:
        learning_rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the network's weights. The noise has none.
        batch: Number of examples per step.
        epochs: Largest number of epochs.
        patience: Number of epochs without a better validation log-likelihood after which training ends; `None` for no early
            stopping.
    """

    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch: int = 512
    epochs: int = 2000
    patience: int | None = 500


class Residual(nn.Module):
    """x + layer(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        changed: Tensor = self.layer(x)
        return x + changed


def make(inputs: int, hidden_layers: int, width: int, seed: int, *, residual: bool = False) -> nn.Sequential:
    """A ReLU network with one output, from a seed.

    Args:
        residual: Whether each hidden layer after the first adds to its input, as in the authors' code.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = mlp([inputs, *[width] * hidden_layers, 1])
    if not residual:
        return net
    modules = list(net)
    between = [Residual(*modules[at : at + 2]) for at in range(2, len(modules) - 1, 2)]
    return nn.Sequential(*modules[:2], *between, modules[-1])


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
    """Train a network in place and return the learned noise.

    Args:
        net: Network from [B, D] to [B, 1].
        x: Inputs, [N, D].
        y: Targets, [N, 1].
        validation: Inputs and targets whose log-likelihood decides which epoch is kept; by default the last epoch.
        seed: Seed of the order of examples.
        noise: Initial noise variance.
    """
    bnn = bayesianize(net, Point(), likelihood=Gaussian(noise=noise)).to(x.device)
    assert isinstance(bnn.likelihood, Gaussian)
    own = list(bnn.likelihood.parameters())
    weights = [parameter for parameter in bnn.parameters() if all(parameter is not one for one in own)]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": own}]
    passes = (
        1 if validation is not None else math.gcd(recipe.epochs, 100)
    )  # without validation, epochs may have several passes
    fit(
        bnn,
        MemoryBatches(x, y, min(recipe.batch, len(x)), rest=True, passes=passes),
        num_data=len(x),
        epochs=recipe.epochs // passes,
        optimizer=torch.optim.SGD(groups, recipe.learning_rate, recipe.momentum),
        kl_weight=0.0,
        num_draws=1,
        validation=None if validation is None else Validation([validation], num_draws=1),
        patience=None if validation is None else recipe.patience or recipe.epochs,
        seed=seed,
        progress=False,
    )
    net.load_state_dict(bnn.mean_network().state_dict())
    return bnn.likelihood


def freeze_biases(net: nn.Module) -> int:
    """Exclude the biases from a Laplace approximation, and return the number of remaining weights."""
    count = 0
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
        count += 0 if name.endswith("bias") else parameter.numel()
    return count
