"""Priors whose scale is given: the same for all weights, or by the fan-in."""

from __future__ import annotations

import math

from bayesify.arguments.checks import Positive, checked
from bayesify.priors.base import Prior
from bayesify.weights.catalog import Weight


class Gaussian(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{std}^2)$, the same for every weight.

    Args:
        std: Standard deviation.

    Raises:
        ValueError: If `std` is not positive and finite.
    """

    name = "gaussian"

    @checked
    def __init__(self, std: Positive) -> None:
        super().__init__()
        self.std = float(std)

    def std_of(self, weight: Weight) -> float:
        """`std`, whatever the weight."""
        return self.std


class Standard(Prior):
    r"""$p(w) = \mathcal{N}(0, 1)$ for every weight."""

    name = "standard"

    def std_of(self, weight: Weight) -> float:
        """1, whatever the weight."""
        return 1.0


class Neal(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{scale}^2 / \text{fan\_in})$, so that activations keep their scale in width (Neal 1996).

    A bias shares its layer's fan-in; embeddings, normalization layers and custom parameters, which have none,
    get standard deviation `scale`.

    Args:
        scale: Factor on the standard deviation. Without a prior `bayesianize` takes 8, which leaves trained networks as good as
            they are; 1 is Neal's own, for networks that start at it.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    name = "neal"

    @checked
    def __init__(self, scale: Positive = 1.0) -> None:
        super().__init__()
        self.scale = float(scale)

    def std_of(self, weight: Weight) -> float:
        """`scale / sqrt(fan_in)`."""
        return self.scale / math.sqrt(weight.fan_in or 1)
