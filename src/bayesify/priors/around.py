"""A prior around a trained network."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.maths.noise import Randomness
from bayesify.priors.base import Prior, PriorDraw
from bayesify.weights.catalog import Weight
from bayesify.weights.named_parameters import NamedParameters


class AroundNetwork(Prior):
    r"""$p(w) = \mathcal{N}(w_0, \text{scale}^2 / \text{fan\_in})$ around the weights $w_0$ that the network comes with.

    A trained network is pulled nowhere, so that few epochs and wide scales are safe. It is no prior in the strict sense: where
    $w_0$ was trained on the same data these are used twice, the evidence is too high, and uncertainty is too small where
    training has overfitted. With $w_0$ from other data (a pretrained network) it is one. Weights without a fan-in have
    the standard deviation `scale`.

    Stored: `center`, $w_0$ by name, not trained.

    Args:
        scale: Factor on the standard deviation of `Neal`.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    name = "around_network"
    center: NamedParameters

    @checked
    def __init__(self, scale: Positive = 1.0) -> None:
        super().__init__()
        self.scale = float(scale)

    def look_at(self, values: Mapping[str, Tensor] | None) -> None:
        """Keep a copy of the network's weights."""
        if values is None:
            raise ValueError(
                "AroundNetwork: this method takes priors around 0; use Neal(), or a posterior of bayesianize"
            )
        self.center = NamedParameters({name: values[name].clone() for name in self.weights}, trainable=False)

    def std_of(self, weight: Weight) -> float:
        """`scale / sqrt(fan_in)`."""
        return self.scale / math.sqrt(weight.fan_in or 1)

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """Numbers, around the network's weights."""
        stds = {name: self.std_of(weight) for name, weight in self.weights.items()}
        return PriorDraw(stds, mean=dict(self.center.items()))
