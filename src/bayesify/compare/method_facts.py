"""What a comparison knows of single methods: what to try, in which order, and up to which size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PORTFOLIO = ("ensemble", "laplace", "mean_field", "inducing")
"""Methods that a comparison runs by default: they differ in kind and are cheap enough for many splits."""
FROM_CHEAP_TO_DEAR = ("laplace", "swag", "dropout", "mean_field", "ensemble")
"""Methods in the order of what they train and store; all others come after them."""
TRIALS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "dropout": ({"rate": 0.05}, {"rate": 0.02}, {"rate": 0.1}),
    "swag": ({"learning_rate": 0.01}, {"learning_rate": 0.001}, {"learning_rate": 0.003}),
    "vogn": ({"learning_rate": 0.1}, {"learning_rate": 0.05}, {"learning_rate": 0.2}),
    "nng": ({"learning_rate": 0.1}, {"learning_rate": 0.05}, {"learning_rate": 0.2}),
    "deep_gp": ({"learning_rate": 0.02}, {"learning_rate": 0.05}, {"learning_rate": 0.01}),
    "function_space": ({"prior_variance": 1.0}, {"prior_variance": 10.0}, {"prior_variance": 3.0}),
}
"""Options among which validation rows choose, the usual ones first."""
TUNED_WITHOUT_TRAINING = frozenset({"laplace", "subnetwork"})
"""Methods with `tune_prior_precision(loader)`, which needs no further training."""
MAX_LAYER_WEIGHTS: Mapping[str, int] = {"full_covariance": 3000}
"""Number of weights of one layer above which a method is too large."""
MAX_WEIGHTS: Mapping[str, int] = {"hmc": 5000}
"""Number of all weights above which a method is too slow."""
