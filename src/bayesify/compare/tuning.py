"""What each method tunes on validation rows, and how long everything trains."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bayesify.compare.method_facts import (
    FROM_CHEAP_TO_DEAR,
    MAX_LAYER_WEIGHTS,
    MAX_WEIGHTS,
    PORTFOLIO,
    TRIALS,
    TUNED_WITHOUT_TRAINING,
)
from bayesify.methods import Method, all_methods, get_method
from bayesify.sklearn.training import TEMPERATURE

BASELINES = ("point", TEMPERATURE)
"""The network without a posterior; always run."""
RIVALS = {
    "constant": "Constant guess",
    "linear": "Linear model",
    "boosted_trees": "Boosted trees",
    "lightgbm": "LightGBM",
    "xgboost": "XGBoost",
    "catboost": "CatBoost",
}
"""What is no network, with names for readers; the first three always run, the others where they are installed."""
ALWAYS = tuple(RIVALS)[:3]
AUTO = "auto"
"""The estimators' default, which chooses transform and likelihood by itself."""
APART = (*RIVALS, AUTO)
"""What estimators of their own train, and not the networks and settings that all other methods share."""
PRIOR_SCALE = 2.0


@dataclass(frozen=True)
class Effort:
    """How much work runs do.

    Args:
        splits: Splits, if the user does not say; half as many of tables from `splits.SMALL` rows on.
        steps: Optimizer steps of the main phase.
        tuning_steps: Of each candidate in tuning.
        slow_steps: Of methods that the registry calls slow.
        slow_tuning_steps: Of each candidate of these.
        least_epochs: Passes over large tables, at least; a quarter as many in tuning.
        chain_steps: Of a Markov chain, after as many of warm-up.
        chain_rows: Rows that a chain takes, at most.
        num_draws: Draws of the weights in a step.
        max_rows: Rows of a table, if the user does not say.
        candidates: How many settings are tried.
        auto_steps: Optimizer steps of the estimators' default, at most (default: its own).
        winner_epochs: Of the method that is trained on all rows at the end (default: the estimators' own).
    """

    splits: int
    steps: int
    tuning_steps: int
    slow_steps: int
    slow_tuning_steps: int
    least_epochs: int
    chain_steps: int
    chain_rows: int
    num_draws: int
    max_rows: int
    candidates: int
    auto_steps: int | None = None
    winner_epochs: int | None = None


FULL = Effort(10, 500, 200, 300, 100, 10, 80, 1000, 4, 20_000, 3)
QUICK = Effort(5, 150, 60, 120, 40, 4, 20, 400, 2, 5_000, 2, 300)


def effort(quick: bool) -> Effort:
    """The work of a quick comparison or of a full one."""
    return QUICK if quick else FULL


def method_of(name: str) -> Method:
    """The registry's entry that trains a method of the comparison."""
    return get_method("point" if name == TEMPERATURE else name)


def trains_together(name: str) -> bool:
    """Whether all splits of a method are one run: rivals are quick, and stacks of networks train side by side."""
    if name in APART:
        return name != AUTO
    method = method_of(name)
    return method.fit is None or method.make is not None or method.starts_at_point


def title_of(name: str) -> str:
    """A method's name for readers."""
    known = {"point": "Plain network", TEMPERATURE: "Temperature scaling", AUTO: "bayesify default", **RIVALS}
    return known[name] if name in known else method_of(name).title


def work_of(name: str) -> float:
    """How long a run of one split takes, roughly and relative to others, to tell the time that is left."""
    if name in RIVALS:
        return 0.1 if name in ("constant", "linear") else 1.0
    if name == AUTO:
        return 12.0
    return 6.0 if method_of(name).is_chain else 4.0 if method_of(name).slow else 1.5


def portfolio() -> list[str]:
    """Methods of a comparison by default."""
    return [AUTO, *PORTFOLIO]


def cost_rank(name: str) -> int:
    """Place among all methods from cheap to dear, by what is trained and stored: measured times would differ between runs."""
    return (*RIVALS, *BASELINES, *FROM_CHEAP_TO_DEAR, AUTO, *all_methods()).index(name)


PRIOR_SCALES = (1.0, 3.0, 2.0)
NOISE_FACTORS = (1.0, 0.5, 0.7)
"""On the noise that cross-validation found, which holds the network's own error too."""


def candidates(name: str, task: str, quick: bool) -> list[dict[str, Any]]:
    """Settings among which validation rows choose: a `prior_scale`, a `noise_factor` and `options` of the method.

    Of a regression, methods that learn no noise of their own try less of it; variational ones learn it, and the plain network
    is a baseline, whose noise is what temperature scaling tunes. Laplace posteriors moreover tune their prior precision without
    training again. A chain is too slow to be run several times.

    Args:
        name: Of the method.
        task: `"regression"` or `"classification"`.
        quick: Whether to try fewer.
    """
    if name in APART:
        return [{}]
    amount, method = effort(quick), method_of(name)
    options = TRIALS.get(name, ({},))
    first: dict[str, Any] = {"prior_scale": PRIOR_SCALE, "noise_factor": 1.0, "options": options[0]}
    if method.is_chain:
        return [first]
    if task == "regression" and not method.learns_noise and name not in BASELINES:
        return [
            {**first, "noise_factor": factor, "options": options[position % len(options)]}
            for position, factor in enumerate(NOISE_FACTORS[: amount.candidates])
        ]
    if len(options) > 1:
        return [{**first, "options": entry} for entry in options[: amount.candidates]]
    if name in TUNED_WITHOUT_TRAINING:
        return [first]
    return [{**first, "prior_scale": scale} for scale in PRIOR_SCALES[: amount.candidates]]


def obstacle(name: str, num_inputs: int, hidden: tuple[int, ...], num_outputs: int) -> str:
    """Why a method cannot be had for a network of that size; empty if it can."""
    if name in APART:
        return ""
    widths = [num_inputs, *hidden, num_outputs]
    layers = [d_out * (d_in + 1) for d_in, d_out in pairwise(widths)]
    method = method_of(name)
    if max(layers) > MAX_LAYER_WEIGHTS.get(name, max(layers)):
        return f"left out: it is too large for a layer of {max(layers):,} weights"
    if sum(layers) > MAX_WEIGHTS.get(name, sum(layers)):
        return f"left out: it is too slow for {sum(layers):,} weights"
    return "" if method.status == "ready" else f"left out: it {method.status}; pip install 'bayesify[all]'"
