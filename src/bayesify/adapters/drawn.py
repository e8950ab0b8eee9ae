"""A fixed set of draws from anything that can draw."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood


def fixed_draws(model: Any, num_draws: int | None, generator: torch.Generator | None, owner: str) -> Draws:
    """Draws of a model, formed and cut off from its parameters and from later training.

    Args:
        model: Draws already, or something with `draw`: a `BayesianNetwork`, a `Laplace`, a `SWAG`, ...
        num_draws: S; all of them, or what the model draws by default, if left out.
        generator: Source of randomness.
        owner: Who asks, for messages.

    Raises:
        TypeError: If the model cannot draw.
        ValueError: If there are fewer draws than asked for.
    """
    if isinstance(model, Draws):
        if num_draws is not None and not 1 <= num_draws <= len(model):
            raise ValueError(f"{owner}: num_draws={num_draws}; give at least 1 and at most {len(model)}")
        return (model if num_draws is None else model[:num_draws]).detach()
    draw = getattr(model, "draw", None)
    if draw is None:
        raise TypeError(f"{owner}: {type(model).__name__} has no draws; give a BayesianNetwork, a Laplace, or Draws")
    options: dict[str, Any] = {} if num_draws is None else {"num_draws": num_draws}
    if generator is not None and "generator" in inspect.signature(draw).parameters:
        options["generator"] = generator
    with torch.no_grad():
        drawn: Draws = draw(**options)
    return drawn.detach()


def likelihood_of(model: Any, given: Likelihood | None, owner: str) -> Likelihood:
    """The given likelihood, else the model's.

    Raises:
        ValueError: If there is neither.
    """
    found = given if given is not None else getattr(model, "likelihood", None)
    if not isinstance(found, Likelihood):
        raise ValueError(f"{owner}: no likelihood; pass likelihood=, such as likelihoods.Categorical()")
    return found
