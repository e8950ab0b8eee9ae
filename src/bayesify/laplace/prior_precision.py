"""The precision of the prior: one number, or one for each layer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

from bayesify.priors import Neal
from bayesify.weights.catalog import Weight

Precision = float | dict[str, float]


def check_precision(value: Any, names: Iterable[str]) -> Precision:
    """A prior precision as numbers.

    Args:
        value: A number, or a mapping from a weight's name, the name of a module above it, or a pattern, to a number.
        names: Of all weights.

    Raises:
        ValueError: If a number is not positive, a key matches no weight, or a weight has no number.
    """
    if not isinstance(value, Mapping):
        return _positive(value)
    found = {str(key): _positive(number) for key, number in value.items()}
    names = list(names)
    for key in found:
        if not any(_matches(key, name) for name in names):
            raise ValueError(
                f"Laplace: prior_precision names {key!r}, which matches no weight; the network has {', '.join(names)}"
            )
    for name in names:
        precision_of(found, name)
    return found


NEAL_FACTORS = {"full": 1.0, "kronecker": 5.0, "diagonal": 10.0}
"""Factors on the default precision, by structure. Kronecker and diagonal covariances leave out correlations that hold the whole
network together and give their outputs too much variance; chosen on trained networks (`benchmarks/laplace_defaults.py`)."""


def default_precision(weights: Mapping[str, Weight], covariance: str) -> dict[str, float]:
    """The precision of `priors.Neal()`, a layer's inputs, times `NEAL_FACTORS`, by name."""
    stds = Neal().bind(dict(weights)).draw(1).std
    return {name: NEAL_FACTORS[covariance] * float(std) ** -2 for name, std in stds.items()}


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
