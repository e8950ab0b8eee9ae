"""Draws that exist already, as something that predicts: what a Markov chain leaves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.configuration import make_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Predictive
from bayesify.running.inputs import as_inputs, check_inputs, explain_shape_errors
from bayesify.running.runner import Runner
from bayesify.storage.serializers import Serializer, describe, fingerprint, register_serializer
from bayesify.weights.catalog import catalog


class FixedDraws:
    """A posterior that is a list of draws: those of a Markov chain, or of anything else that was drawn once.

    Args:
        draws: The draws, such as those of `baselines.nuts`.
        likelihood: p(y | outputs).
        output: Which of several outputs the likelihood is about; see `bayesianize`.
    """

    def __init__(self, draws: Draws, likelihood: Likelihood, output: str | int | None = None) -> None:
        self.draws, self.likelihood, self.output = draws, likelihood, output

    def draw(self, num_draws: int | None = None) -> Draws:
        """Draws at equal distances in the list; all of them if left out.

        Raises:
            ValueError: If there are not so many.
        """
        if num_draws is None or num_draws == len(self.draws):
            return self.draws
        if not 1 <= num_draws < len(self.draws):
            raise ValueError(f"FixedDraws: num_draws={num_draws}; give at least 1 and at most {len(self.draws)}")
        return self.draws[:: len(self.draws) // num_draws][:num_draws]

    @torch.no_grad()
    def predict(
        self, x: Any, num_draws: int | None = None, *, keep_outputs: bool | None = None, memory: int | None = None
    ) -> Predictive:
        """The predictive distribution of a batch, in evaluation mode, without gradients.

        Args:
            x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            num_draws: How many of the draws; all if left out.
            keep_outputs: Keep all outputs whatever their size (true) or never (false).
            memory: The budget in bytes; 256 MiB if left out.
        """
        args, kwargs = as_inputs(x)
        check_inputs(args, kwargs)
        with explain_shape_errors(args, kwargs):
            outputs = self.draw(num_draws).outputs(args, kwargs, output=self.output, keep=keep_outputs, memory=memory)
        return self.likelihood.predictive(outputs)


def _state(model: FixedDraws) -> dict[str, Tensor]:
    runner = model.draws.runner
    named: dict[str, Tensor] = dict(runner.network.named_parameters())
    named.update(runner.network.named_buffers())
    named.update({name: value for name, value in runner.point_values.items() if name in named})
    state = {f"network.{name}": value for name, value in named.items()}
    state |= {f"draws.{name}": value for name, value in model.draws.materialize().weights.items()}
    return state | {f"likelihood.{name}": value for name, value in model.likelihood.state_dict().items()}


def _fingerprint(model: FixedDraws) -> dict[str, str]:
    runner = model.draws.runner
    result = fingerprint(runner.network)
    for name, value in model.draws.weights.items():
        for alias in (name, *runner.weights[name].aliases):
            result[alias] = describe(value.shape[1:], value.dtype)
    return result


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state below a dotted prefix, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}


def restore_likelihood(config: Any, state: Mapping[str, Tensor], like: Tensor) -> Likelihood:
    """A likelihood from its configuration and what it has learned, on the device of a tensor."""
    likelihood = make_likelihood(config)
    assert likelihood is not None
    likelihood = likelihood.to(like)
    likelihood.load_state_dict(under("likelihood", state))
    return likelihood


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> FixedDraws:
    network = copy.deepcopy(net)
    network.load_state_dict(under("network", state), strict=False)
    reference = next(network.parameters())
    weights = {name: value.to(reference.device) for name, value in under("draws", state).items()}
    known = {name: weight for name, weight in catalog(net).weights.items() if name in weights}
    unknown = reference.new_full((len(next(iter(weights.values()))),), float("nan"))
    likelihood = restore_likelihood(config["likelihood"], state, reference)
    return FixedDraws(Draws(Runner(network, known), weights, unknown), likelihood, config["output"])


register_serializer(
    Serializer(
        kind=FixedDraws,
        name="FixedDraws",
        config=lambda model: {"likelihood": model.likelihood.config(), "output": model.output},
        state=_state,
        fingerprint=_fingerprint,
        restore=_restore,
    )
)
