"""Multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from bayesify.arguments.checks import checked


@checked
def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A multilayer perceptron with the given layer sizes, without an activation after the last layer.

    Args:
        sizes: Number of inputs, sizes of the hidden layers and number of outputs; at least two numbers.
        activation: Module class of the activation between layers.

    Raises:
        ValueError: If fewer than two sizes are given.
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp: sizes={list(sizes)}; give at least two sizes, the numbers of inputs and outputs")
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])
