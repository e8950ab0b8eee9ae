"""Networks for tables: linear layers with activations in between, or the user's own network."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.arguments.plain import Plain
from bayesify.running.generators import own_generators
from bayesify.training.perceptrons import SLOPES


class SiLUReLU(nn.Module):
    """SiLU for the first half of the units, and ReLU for the others. SiLU suits smooth functions, and ReLU suits functions with
    kinks."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activations to each entry of the inputs [..., units]."""
        first, second = _halves(x)
        return torch.cat((F.silu(first), F.relu(second)), dim=-1)

    @staticmethod
    def slope(grad: Tensor, x: Tensor) -> Tensor:
        """Gradient with respect to the inputs, [..., units], from the gradient with respect to the outputs."""
        (first, second), (x_first, x_second) = _halves(grad), _halves(x)
        aten = torch.ops.aten
        return torch.cat((aten.silu_backward(first, x_first), aten.threshold_backward(second, x_second, 0)), dim=-1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    first, second = x.split((half, x.shape[-1] - half), dim=-1)  # with slices, each gradient would be as large as x
    return first, second


SLOPES[SiLUReLU] = SiLUReLU.slope


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "silu_relu": SiLUReLU,
}


@dataclass(frozen=True)
class NetworkShape(Plain):
    """A network of linear layers.

    Args:
        num_inputs: Number of inputs of the first layer.
        hidden: Number of units of each hidden layer; empty for a linear model.
        activation: A key of `ACTIVATIONS`.
        num_outputs: Number of outputs of the last layer.
        dropout: Share of hidden units that each training step drops.
    """

    num_inputs: int
    hidden: tuple[int, ...]
    activation: str
    num_outputs: int
    dropout: float = 0.0

    def make(self, seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        """The untrained network; the same seed gives the same network."""
        drop = [self.dropout] if self.dropout else []
        with own_generators(seed=seed):
            layers: list[nn.Module] = []
            for d_in, d_out in pairwise((self.num_inputs, *self.hidden, self.num_outputs)):
                layers += [nn.Linear(d_in, d_out), ACTIVATIONS[self.activation](), *map(nn.Dropout, drop)]
        return nn.Sequential(*layers[: -1 - len(drop)]).double().to(dtype)


def own_network(net: nn.Module, num_inputs: int, num_outputs: int, owner: str) -> nn.Module:
    """A checked copy of the user's network in float64.

    Raises:
        ValueError: If the network does not accept rows with `num_inputs` columns, or does not return `num_outputs` outputs.
    """
    copied = copy.deepcopy(net).double()
    modes = [(module, module.training) for module in copied.modules()]
    try:
        with torch.no_grad(), own_generators():
            outputs = copied.eval()(torch.zeros(2, num_inputs, dtype=torch.float64))
    except RuntimeError as error:
        raise ValueError(
            f"{owner}: the given network does not accept rows with {num_inputs} columns: {error}"
        ) from error
    for module, mode in modes:
        module.training = mode
    if tuple(outputs.shape) != (2, num_outputs):
        raise ValueError(
            f"{owner}: the given network returns outputs of shape {tuple(outputs.shape)} for 2 rows, but y requires the "
            f"shape (2, {num_outputs}); give the last layer {num_outputs} outputs"
        )
    return copied
