"""The methods that are compared: the estimators' default method, other methods of the library, and rivals from other libraries."""

from collections.abc import Mapping
from itertools import pairwise

from bayesify.methods import Method, all_methods, get_method
from bayesify.sklearn.recipe import HIDDEN_BY_NAME
from bayesify.sklearn.settings import AUTO, TEMPERATURE

BASELINES = ("point", TEMPERATURE)
"""Networks without a posterior; every comparison includes them."""
RIVALS = {
    "constant": "Constant guess",
    "linear": "Linear model",
    "boosted_trees": "Boosted trees",
    "lightgbm": "LightGBM",
    "xgboost": "XGBoost",
    "catboost": "CatBoost",
}
"""Methods that are not networks, with their titles. After the first three, only methods of installed packages are included."""
DEFAULT_RIVALS = tuple(RIVALS)[:3]
PORTFOLIO = (AUTO, "ensemble", "laplace", "mean_field", "inducing")
"""Default methods of a comparison, chosen to be of different kinds and cheap enough for many splits."""
FROM_CHEAP_TO_DEAR = ("laplace", "swag", "dropout", "mean_field", "ensemble")
"""Methods from cheap to expensive, judged by what they train and store. All other methods are more expensive."""
RELATIVE_WORK: Mapping[str, float] = {AUTO: 12.0, "inducing": 3.0}
"""Relative time of a run on one split, for methods whose time `work_of` would estimate wrongly."""
MAX_LAYER_WEIGHTS: Mapping[str, int] = {"full_covariance": 3000}
"""Maximum number of weights in one layer, for methods that need too much memory for larger layers."""
MAX_WEIGHTS: Mapping[str, int] = {"hmc": 5000}
"""Maximum number of weights in total, for methods that are too slow for larger networks."""


def method_of(name: str) -> Method:
    """The library's method with the given name in comparisons."""
    return get_method("point" if name == TEMPERATURE else name)


def trains_together(name: str) -> bool:
    """Whether all splits of a method form one run: rivals train quickly, and the splits of a stacked network train together."""
    if name in RIVALS or name == AUTO:
        return name != AUTO
    method = method_of(name)
    return method.fit is None or method.make is not None or method.starts_at_point


def title_of(name: str) -> str:
    """The display name of a method."""
    known = {"point": "Plain network", TEMPERATURE: "Temperature scaling", AUTO: "bayesify default", **RIVALS}
    return known[name] if name in known else method_of(name).title


def work_of(name: str) -> float:
    """Rough time of a run on one split, relative to other methods; the remaining time is estimated from it."""
    if name in RIVALS:
        return 0.1 if name in ("constant", "linear") else 1.0
    if name in RELATIVE_WORK:
        return RELATIVE_WORK[name]
    return 6.0 if method_of(name).is_chain else 4.0 if method_of(name).slow else 1.5


def cost_rank(name: str) -> int:
    """Rank of a method from cheap to expensive, judged by what it trains and stores, because measured times vary."""
    return (*RIVALS, *BASELINES, *FROM_CHEAP_TO_DEAR, AUTO, *all_methods()).index(name)


def obstacle(name: str, num_inputs: int, num_outputs: int) -> str:
    """The reason why a method cannot be used for a network of this size; empty if the method can be used."""
    if name in RIVALS or name == AUTO:
        return ""
    layers = [d_out * (d_in + 1) for d_in, d_out in pairwise((num_inputs, *HIDDEN_BY_NAME, num_outputs))]
    method = method_of(name)
    if max(layers) > MAX_LAYER_WEIGHTS.get(name, max(layers)):
        return f"left out because it needs too much memory for a layer of {max(layers):,} weights"
    if sum(layers) > MAX_WEIGHTS.get(name, sum(layers)):
        return f"left out because it is too slow for {sum(layers):,} weights"
    return "" if method.status == "ready" else f"left out because it {method.status}; {method.remedy}"
