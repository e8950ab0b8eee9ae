"""Conversion of draws to ArviZ's `InferenceData`, for summaries, rank plots, effective sample sizes and cross-validation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.adapters.drawn import fixed_draws, likelihood_of, output_of
from bayesify.arguments.checks import Count, Inputs, checked
from bayesify.arguments.installing import load
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.running.inputs_and_outputs import checked_inputs, select_output


@checked
@torch.no_grad()
def to_inference_data(
    model: Any,
    *,
    num_draws: Count | None = None,
    x: Inputs | None = None,
    y: Tensor | None = None,
    likelihood: Likelihood | None = None,
    output: str | int | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Draws of the weights, and the predictions that they make, as an `arviz.InferenceData`.

    The group `posterior` has one variable per weight, [chain, draw, *shape]. The variable has the weight's name in
    `named_parameters()`. If `x` is given, the group `posterior_predictive` has a variable `outputs` [chain, draw, B, ...] with
    the network's outputs. If `y` is given too, the group `observed_data` has the targets, and the group `log_likelihood` has a
    variable `y` [chain, draw, B] with their log-likelihoods. From these groups, `arviz.loo` estimates the predictive density of
    unseen data.

    Args:
        model: A model with a `draw` method; a `Draws` object; or a sequence of either, one per chain. All chains must have the
            same length.
        num_draws: Number of draws per chain; by default all draws of a `Draws`, or the model's default number.
        x: Inputs in any form that `predict` accepts.
        y: Targets of the inputs.
        likelihood: Likelihood p(y | outputs); needed if the model has no likelihood.
        output: Name or index of the output to use, if there are several; see `bayesianize`.
        generator: Source of randomness.

    Raises:
        ImportError: If arviz is not installed.
        TypeError: If the model cannot draw.
        ValueError: If chains differ in length or weights, if `y` is given without `x`, or if `y` is given and there is
            no likelihood.
    """
    arviz = load("arviz", extra="arviz", owner="to_inference_data")
    if y is not None and x is None:
        raise ValueError("to_inference_data: y= is given without x=; give x= too")
    models = list(model) if isinstance(model, Sequence) and not isinstance(model, Draws) else [model]
    if not models:
        raise ValueError("to_inference_data: model= is an empty sequence of chains; give at least one chain")
    chains = [fixed_draws(each, num_draws, generator, "to_inference_data") for each in models]
    for index, chain in enumerate(chains):
        if len(chain) != len(chains[0]) or chain.weights.keys() != chains[0].weights.keys():
            raise ValueError(
                f"to_inference_data: chain {index} has {len(chain)} draws of {len(chain.weights)} weights, but the "
                f"first chain has {len(chains[0])} draws of {len(chains[0].weights)}; give chains of the same "
                "network, with equally many draws, or give num_draws= a value"
            )
    groups: dict[str, Any] = {"posterior": _together([chain.weights for chain in chains])}
    if x is not None:
        args, kwargs = checked_inputs(x)
        key = output_of(models[0], output)
        outputs = [select_output(chain.outputs(args, kwargs, output=key, keep=True).kept, None) for chain in chains]
        groups["posterior_predictive"] = _together([{"outputs": each} for each in outputs])
        if y is not None:
            law = likelihood_of(models[0], likelihood, "to_inference_data")
            scores = [{"y": law.log_prob(each, y, has_draws=True)} for each in outputs]
            groups["log_likelihood"] = _together(scores)
            groups["observed_data"] = {"y": y.detach().cpu().numpy()}
    return arviz.from_dict(**groups)


def _together(chains: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Stack each variable over the chains: [chain, draw, ...]. A bfloat16 variable becomes float32, because numpy has no
    bfloat16."""
    joined = {name: torch.stack([chain[name] for chain in chains]).detach().cpu() for name in chains[0]}
    return {name: (value.float() if value.dtype == torch.bfloat16 else value).numpy() for name, value in joined.items()}
