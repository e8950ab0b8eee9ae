"""The precision of the prior: one number, or one for each layer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bayesify.posteriors.common.starts import root_mean_square
from bayesify.weights.catalog import Layer, Weight, group_layers

Precision = float | dict[str, float]


def check_precision(value: Any, weights: Mapping[str, Weight], values: Mapping[str, Tensor]) -> Precision:
    """A prior precision as numbers, from a form that `Laplace` takes.

    Keys are names of weights or of modules above them, or patterns; `"size"` is the inverse mean square of each layer's weights.

    Raises:
        ValueError: If a number is not positive, a key matches no weight, or a weight has no number.
    """
    if value == "size":
        layers = group_layers(weights.values())
        sizes = {part.name: root_mean_square(layer, values) for layer in layers for part in layer.weights}
        return {name: sizes[name] ** -2 for name in weights}
    if not isinstance(value, Mapping):
        return _positive(value)
    found = {str(key): _positive(number) for key, number in value.items()}
    names = list(weights)
    for key in found:
        if not any(_matches(key, name) for name in names):
            raise ValueError(
                f"Laplace: prior_precision names {key!r}, which matches no weight; the network has {', '.join(names)}"
            )
    for name in names:
        precision_of(found, name)
    return found


FACTOR_PER_LAYER = 3.0
"""Factor on the default precision for each layer under a Kronecker or diagonal posterior. These leave out correlations that hold
layers together, so that the variances that layers give the outputs add up: the more layers, the narrower each has to be. One layer
of a deeper network has it under a full covariance too: its inputs are features, whose mean square training has made larger than the
1 that Neal's prior counts on (0.5 to 22 in the suite of defaults), and no other layer's weights vary with its own; for classes
`Laplace.fit` then lowers it. Chosen on trained networks (`benchmarks/laplace_defaults.py`, `benchmarks/defaults.py`)."""


SETTLING_FACTORS = tuple(10.0 ** (power / 8) for power in range(-24, 1))
"""Factors on the default precision of one layer from which `Laplace.fit` chooses, ascending to 1."""
MAX_TRAINING_LOSS_RISE = 0.005
"""Nats by which the mean negative log predictive density of training rows may exceed the network's own under a chosen factor."""
MAX_SETTLING_ROWS = 2000
"""Training rows on which `MAX_TRAINING_LOSS_RISE` is measured."""
WIDE_FACTORS = tuple(10.0 ** (power / 4) for power in range(17))
"""Factors on the default precision of several layers from which `Laplace.fit` chooses, ascending from 1."""
NUM_WIDE_ROWS = 256
"""Training rows on which `MAX_TRAINING_LOSS_RISE` of several layers is measured. On six networks over digits and sequences, two of
them with GroupNorm and BatchNorm, the NLL of test rows rose as much as that of training rows, whatever the factor."""
POINT_FACTOR = 1e12
"""Factor on the precisions under which the weights do not vary."""


def stands_alone(weights: Mapping[str, Weight], chosen: Iterable[str]) -> bool:
    """Whether the chosen weights belong to one linear map of several."""
    return _depth(weights, chosen) == 1 < _depth(weights, weights)


def _depth(weights: Mapping[str, Weight], chosen: Iterable[str]) -> int:
    """Linear maps with a weight among the chosen ones."""
    names = set(chosen)
    layers = group_layers(weights.values())
    return sum(any(part.fan_in and part.name in names for part in layer.weights) for layer in layers)


def default_precision(
    weights: Mapping[str, Weight], values: Mapping[str, Tensor], covariance: str, chosen: Iterable[str]
) -> dict[str, float]:
    """The precision of `priors.Neal()`, a layer's inputs, times `FACTOR_PER_LAYER` for each linear map among the chosen weights; a
    full covariance over several has no such factor.

    Embeddings and custom parameters, such as positions, have no inputs to count: the inverse mean square of their values stands in.
    Normalization layers, whose scales are about 1, have 1.
    """
    names, layers = tuple(chosen), group_layers(weights.values())
    narrowed = covariance != "full" or stands_alone(weights, names)
    factor = FACTOR_PER_LAYER * max(1, _depth(weights, names)) if narrowed else 1.0

    def inputs(weight: Weight, layer: Layer) -> float:
        return weight.fan_in or (1.0 if weight.kind == "norm" else root_mean_square(layer, values) ** -2)

    found = {part.name: factor * inputs(part, layer) for layer in layers for part in layer.weights}
    return {name: found[name] for name in weights}


def isotropic(precision: Mapping[str, float], weights: Mapping[str, Weight]) -> dict[str, float]:
    """Precisions with one value for the weights of all linear maps, whose mean prior variance stays as it is."""
    inputs = [weight for weight in weights.values() if weight.fan_in]
    variance = sum(weight.numel / precision[weight.name] for weight in inputs)
    shared = sum(weight.numel for weight in inputs) / variance if inputs else 1.0
    return {name: shared if weights[name].fan_in else value for name, value in precision.items()}


def precision_of(value: Precision, name: str) -> float:
    """The precision of one weight: that of the first key that matches it."""
    if not isinstance(value, dict):
        return value
    for key, number in value.items():
        if _matches(key, name):
            return number
    raise ValueError(f"Laplace: prior_precision says nothing about {name}; add it, or '*' for the rest")


def scaled(value: Precision, factor: float) -> Precision:
    """All precisions times a factor."""
    if isinstance(value, dict):
        return {key: factor * number for key, number in value.items()}
    return factor * value


def _matches(key: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, key) or name.startswith(f"{key}.")


def _positive(number: Any) -> float:
    try:
        found = float(number)
    except (TypeError, ValueError):
        found = math.nan
    if not (found > 0 and math.isfinite(found)):
        raise ValueError(f"Laplace: prior_precision={number!r}; give a positive number")
    return found
