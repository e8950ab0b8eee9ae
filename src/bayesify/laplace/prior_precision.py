"""Prior precisions: one number for all layers or one for each layer, their defaults, and the search on a grid."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bayesify.posteriors.common.starts import root_mean_square
from bayesify.predictive.findings import Finding
from bayesify.weights.catalog import Layer, Weight, group_layers

Precision = float | dict[str, float]


def check_precision(value: Any, weights: Mapping[str, Weight], values: Mapping[str, Tensor]) -> Precision:
    """Convert a prior precision from any form that `Laplace` accepts to numbers.

    Keys of a dict are names of weights, names of modules that contain weights, or patterns. `"size"` is the inverse mean square
    of each layer's weights. Raises `ValueError` if a number is not positive, if a key matches no weight, or if a weight has no
    number.
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
                f"Laplace: prior_precision= has the entry {key!r}, which matches no weight; the weights are "
                f"{', '.join(names)}"
            )
    for name in names:
        precision_of(found, name)
    return found


FACTOR_PER_LAYER = 3.0
"""The default precision under a Kronecker or diagonal posterior is multiplied by this factor for each layer. These
posteriors ignore correlations between layers, so the contributions of the layers to the output variance add up. The
more layers there are, the narrower each layer must be. A single layer of a deeper network gets this factor under a full
covariance, too. The inputs of such a layer are trained features. Their mean square was 0.5 to 22 in the benchmark of
defaults, whereas Neal's prior assumes 1. For classes, `Laplace.fit` then lowers the precision. The factor was chosen on
trained networks (`benchmarks/laplace_defaults.py`, `benchmarks/defaults.py`)."""


SETTLING_FACTORS = tuple(10.0 ** (power / 8) for power in range(-24, 1))
"""Factors on the default precision of one layer from which `Laplace.fit` chooses, ascending to 1."""
MAX_TRAINING_LOSS_RISE = 0.005
"""With the chosen factor, the mean negative log density of training rows may exceed the network's own by this many nats."""
MAX_SETTLING_ROWS = 2000
"""Number of training rows on which `MAX_TRAINING_LOSS_RISE` is measured for one layer."""
WIDE_FACTORS = tuple(10.0 ** (power / 4) for power in range(17))
"""Factors on the default precision of several layers from which `Laplace.fit` chooses, ascending from 1."""
NUM_WIDE_ROWS = 256
"""Number of training rows on which `MAX_TRAINING_LOSS_RISE` is measured for several layers. On six networks for digits
and sequences, two of which have GroupNorm and BatchNorm, the NLL of test rows rose as much as the NLL of training rows
at every factor."""
POINT_FACTOR = 1e12
"""Factor on the precisions that is so large that the posterior is a point."""


def stands_alone(weights: Mapping[str, Weight], chosen: Iterable[str]) -> bool:
    """Whether the chosen weights belong to a single linear map, in a network with several linear maps."""
    return _depth(weights, chosen) == 1 < _depth(weights, weights)


def _depth(weights: Mapping[str, Weight], chosen: Iterable[str]) -> int:
    names = set(chosen)
    layers = group_layers(weights.values())
    return sum(any(part.fan_in and part.name in names for part in layer.weights) for layer in layers)


def default_precision(
    weights: Mapping[str, Weight], values: Mapping[str, Tensor], covariance: str, chosen: Iterable[str]
) -> dict[str, float]:
    """Default prior precision of each weight. It starts from the precision of `priors.Neal()`, which is a layer's number of
    inputs. This precision is then multiplied by `FACTOR_PER_LAYER` and by the number of chosen linear maps.

    If the covariance is full and covers several maps, the precision is not multiplied. Embeddings and custom
    parameters, such as position encodings, have no number of inputs. Their precision is the inverse mean square of
    their values. Normalization layers get 1, because their scales are about 1.
    """
    names, layers = tuple(chosen), group_layers(weights.values())
    narrowed = covariance != "full" or stands_alone(weights, names)
    factor = FACTOR_PER_LAYER * max(1, _depth(weights, names)) if narrowed else 1.0

    def inputs(weight: Weight, layer: Layer) -> float:
        return weight.fan_in or (1.0 if weight.kind == "norm" else root_mean_square(layer, values) ** -2)

    found = {part.name: factor * inputs(part, layer) for layer in layers for part in layer.weights}
    return {name: found[name] for name in weights}


def isotropic(precision: Mapping[str, float], weights: Mapping[str, Weight]) -> dict[str, float]:
    """Precisions with one value for all linear maps. This value leaves the mean prior variance of these maps' weights
    unchanged."""
    inputs = [weight for weight in weights.values() if weight.fan_in]
    variance = sum(weight.numel / precision[weight.name] for weight in inputs)
    shared = sum(weight.numel for weight in inputs) / variance if inputs else 1.0
    return {name: shared if weights[name].fan_in else value for name, value in precision.items()}


def precision_of(value: Precision, name: str) -> float:
    """The precision of one weight, from the first key that matches its name."""
    if not isinstance(value, dict):
        return value
    for key, number in value.items():
        if _matches(key, name):
            return number
    raise ValueError(
        f"Laplace: prior_precision= has no entry for {name}; add an entry with this name, or an entry '*' for all "
        "other weights"
    )


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
        raise ValueError(f"Laplace: prior_precision={number!r} is not a positive number; give a positive number")
    return found


Score = Callable[[list[float]], list[float]]
"""Function that takes factors on the prior precisions and returns scores. The search maximizes the score."""

DEFAULT_GRID = tuple(10.0**power for power in range(-4, 5))
"""The paper's grid for images: a prior precision between 1e-4 and 1e4."""
MAX_ADDED_VALUES = 4
"""Number of values by which the default grid is extended at a time, while its best value is at an end."""
CERTAIN_FACTOR = 1e5
"""A factor on the prior precisions that lies beyond the default grid and leaves almost no uncertainty."""
NUM_FINE_SCORES, NUM_FINE_EVIDENCES = 9, 180
"""Number of values in the second grid, around the best value of the first grid. Each further evidence costs almost nothing."""


def search_precision(score: Score, base: float, grid: Sequence[float], num_fine: int) -> tuple[float, Finding | None]:
    """The prior precision with the best score, and a `Finding` if this precision is at an end of the grid or very large.

    `base` is the prior precision at which the factor is 1. `DEFAULT_GRID` is extended while its best value is at an end.
    Then `num_fine` values between the neighbors of the best value are tried, evenly spaced in the logarithm.
    """
    candidates = sorted(set(grid))
    scores = score([value / base for value in candidates])
    best = best_of(scores)
    for _ in range(MAX_ADDED_VALUES if tuple(grid) == DEFAULT_GRID else 0):
        if 0 < best < len(candidates) - 1:
            break
        place = 0 if best == 0 else len(candidates)
        candidates.insert(place, candidates[0] / 10 if best == 0 else 10 * candidates[-1])
        scores.insert(place, score([candidates[place] / base])[0])
        best = best_of(scores)
    chosen, finding = candidates[best], None
    if len(candidates) > 1 and best in (0, len(candidates) - 1):
        end, remedy = "smallest", "more or other weights"
        if best > 0:
            end, remedy = "largest", "use the plain network if this precision leaves almost no uncertainty"
        sentence = (
            f"the best prior precision, {chosen:.3g}, is the {end} value that was tried, and a better value may lie "
            "beyond it"
        )
        finding = Finding("search_at_edge", sentence, f"give a wider grid=, or {remedy}")
    if num_fine and len(candidates) > 1:
        low, high = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        finer = [low * math.exp(math.log(high / low) * (step + 1) / (num_fine + 1)) for step in range(num_fine)]
        finer_scores = score([value / base for value in finer])
        place = best_of(finer_scores)
        if finer_scores[place] > scores[best]:
            chosen = finer[place]
    return chosen, finding or _nearly_certain(chosen / base)


def _nearly_certain(factor: float) -> Finding | None:
    """A `Finding` if the factor on the prior precisions leaves almost no uncertainty."""
    if factor < CERTAIN_FACTOR:
        return None
    sentence = f"the chosen factor on the prior precisions, {factor:.3g}, leaves almost no uncertainty"
    remedy = "training data always prefer this, so give held-out data; if you did, the plain network predicts as well"
    return Finding("no_uncertainty", sentence, remedy)


def best_of(scores: Sequence[float]) -> int:
    """Index of the largest score."""
    return max(range(len(scores)), key=scores.__getitem__)
