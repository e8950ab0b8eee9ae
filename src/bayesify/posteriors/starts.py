"""Where standard deviations start: at a share of the size of the weights they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from bayesify.weights.catalog import Layer

RELATIVE_STD = 0.1
"""Share of a layer's root mean square, by default. Much smaller scales stay where they start for many epochs, since the objective
hardly sees them; chosen on trained networks (`benchmarks/defaults.py`)."""

NORMALIZED_RELATIVE_STD = 0.03
"""The same in networks with BatchNorm that normalizes all draws by the same statistics. By each draw's own batch it would take most
of the noise of weights before it away; so it does not. Three epochs of mean-field after a trained CNN (NLL 0.380): 0.425 with 0.1,
0.381 with 0.03; twelve epochs from scratch, statistics averaged over draws: 0.65 and 0.52."""


def relative_std(normalized: bool) -> float:
    """The share for a network with or without such layers."""
    return NORMALIZED_RELATIVE_STD if normalized else RELATIVE_STD


def start_std(
    init_std: float | None, layer: Layer, values: Mapping[str, Tensor], relative: float = RELATIVE_STD
) -> float:
    """The standard deviation of a layer's weights before training.

    Args:
        init_std: What the user gives; `None` for a share of the root mean square of the layer's weights, bias included.
        layer: The layer.
        values: The network's weights by name. Where a layer's are all 0, Neal's standard deviation stands in for their size.
        relative: The share.
    """
    return init_std if init_std is not None else relative * root_mean_square(layer, values)


def root_mean_square(layer: Layer, values: Mapping[str, Tensor]) -> float:
    """Of a layer's weights, bias included; Neal's standard deviation where they are all 0 or not finite."""
    square = sum(float(values[weight.name].detach().double().square().sum()) for weight in layer.weights)
    size = math.sqrt(square / max(1, layer.numel))
    return size if 0 < size < math.inf else 1 / math.sqrt(layer.weights[0].fan_in or 1)
