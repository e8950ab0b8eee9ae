"""A fixed set of draws from any model that can draw."""

import torch

from bayesify.arguments.checks import shown
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.predictor import Drawable, Predictor


def fixed_draws(
    model: Drawable | Draws, num_draws: int | None, generator: torch.Generator | None, owner: str, default: int = 1
) -> Draws:
    """Draws of a model, materialized and detached, so that later training does not change them.

    If no number is given, all draws are taken. If the model has infinitely many draws, `default` draws are taken. `owner` names
    the caller in messages.
    """
    if isinstance(model, Draws):
        if num_draws is not None and not 1 <= num_draws <= len(model):
            raise ValueError(f"{owner}: num_draws={num_draws}; give at least 1 and at most {len(model)}")
        return (model if num_draws is None else model[:num_draws]).detach()
    check_draws(model, owner)
    count = num_draws if num_draws is not None else model.num_distinct_draws or default
    with torch.no_grad():
        return model.prediction_draws(count, generator=generator).detach()


def check_draws(model: object, owner: str) -> None:
    """Raise `TypeError` for a model that cannot draw."""
    if not isinstance(model, Drawable | Draws):
        raise TypeError(f"{owner}: model={shown(model)} has no draws; give a BayesianNetwork, a Laplace, or Draws")


def likelihood_of(model: object, given: Likelihood | None, owner: str) -> Likelihood:
    """The given likelihood, or otherwise the model's likelihood. Raises `ValueError` if there is none."""
    found = given if given is not None else model.likelihood if isinstance(model, Predictor) else None
    if not isinstance(found, Likelihood):
        raise ValueError(
            f"{owner}: the model has no likelihood; pass one, such as likelihood=likelihoods.Categorical()"
        )
    return found


def output_of(model: object, given: str | int | None) -> str | int | None:
    """The given name or index of an output, or otherwise the model's `output`."""
    return model.output if given is None and isinstance(model, Predictor) else given
