"""A predictor that consists of existing draws, such as the draws of a Markov chain."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, checked
from bayesify.configuration import restore_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Predictive
from bayesify.predictor import Drawable
from bayesify.running.inputs_and_outputs import checked_inputs, explain_shape_errors
from bayesify.running.runner import Runner
from bayesify.storage.serializers import register_predictor
from bayesify.weights.catalog import catalog
from bayesify.weights.module_state import below, copy_network, describe, fingerprint, prefixed


@register_predictor
class FixedDraws(Drawable):
    """A posterior that is a fixed list of draws, for example the draws of a Markov chain.

    Args:
        draws: The draws, such as the result of `baselines.nuts`.
        likelihood: p(y | outputs).
        output: Name or index of the output that the likelihood uses, if the network has several; see `bayesianize`.
    """

    @checked
    def __init__(self, draws: Draws, likelihood: Likelihood, output: str | int | None = None) -> None:
        self.draws, self.likelihood, self.output = draws, likelihood, output

    likelihood: Likelihood

    @property
    def num_distinct_draws(self) -> int:
        """Number of draws in the list."""
        return len(self.draws)

    @checked
    def draw(self, num_draws: Count | None = None, *, generator: torch.Generator | None = None) -> Draws:
        """Return evenly spaced draws of the list.

        Args:
            num_draws: Number of draws; by default all draws of the list.
            generator: Not used, because the draws are fixed.

        Raises:
            ValueError: If the list has fewer than `num_draws` draws.
        """
        if num_draws is None or num_draws == len(self.draws):
            return self.draws
        if not 1 <= num_draws < len(self.draws):
            raise ValueError(f"FixedDraws: num_draws={num_draws}; give at least 1 and at most {len(self.draws)}")
        return self.draws[:: len(self.draws) // num_draws][:num_draws]

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Any,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        keep_outputs: bool | None = None,
        split_batch: bool = True,
    ) -> Predictive:
        """The predictive distribution of a batch; see `Predictor.predict` for the other arguments.

        Args:
            num_draws: Number of draws to use; by default all draws of the list.
            generator: Not used, because the draws are fixed.
            keep_outputs: Whether to keep the outputs of all draws. By default, they are kept if they fit in memory.
            split_batch: Whether the batch may be split; see `BayesianNetwork.predict`.
        """
        args, kwargs = checked_inputs(x)
        with explain_shape_errors(args, kwargs):
            outputs = self.draw(num_draws).outputs(
                args, kwargs, output=self.output, keep=keep_outputs, memory=memory, split_batch=split_batch
            )
        return self.likelihood.predictive(outputs)

    def config(self) -> dict[str, Any]:
        """Likelihood and output."""
        return {"likelihood": self.likelihood.config(), "output": self.output}

    def state(self) -> dict[str, Tensor]:
        """The draws, the buffers of the draws, and all tensors of the network that are not drawn."""
        runner = self.draws.runner
        named: dict[str, Tensor] = dict(runner.network.named_parameters())
        named.update(runner.network.named_buffers())
        named.update({name: value for name, value in runner.point_values.items() if name in named})
        drawn = {alias for name in self.draws.weights for alias in (name, *runner.weights[name].aliases)}
        named = {name: value for name, value in named.items() if name not in drawn}
        drawn_weights, likelihood = self.draws.materialize().weights, self.likelihood.state_dict()
        own = self.draws.buffers or []
        buffers = {name: torch.stack([part[name] for part in own]) for name in (own[0] if own else ())}
        return prefixed(network=named, draws=drawn_weights, likelihood=likelihood, buffers=buffers)

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Rebuild the draws over a copy of the network. The KL of the draws is not stored, so it is NaN."""
        network = copy_network(net, "FixedDraws")
        network.load_state_dict(below("network", state), strict=False)
        reference = next(network.parameters())
        weights = {name: value.to(reference.device) for name, value in below("draws", state).items()}
        known = {name: weight for name, weight in catalog(net).weights.items() if name in weights}
        unknown = reference.new_full((len(next(iter(weights.values()))),), float("nan"))
        likelihood = restore_likelihood(config["likelihood"], state, reference)
        stored = {name: value.to(reference.device) for name, value in below("buffers", state).items()}
        buffers = [{name: value[index] for name, value in stored.items()} for index in range(len(unknown))]
        return cls(
            Draws(Runner(network, known), weights, unknown, buffers if stored else None), likelihood, config["output"]
        )

    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of the original network."""
        result = fingerprint(self.draws.runner.network)
        for name, value in self.draws.weights.items():
            for alias in (name, *self.draws.runner.weights[name].aliases):
                result[alias] = describe(value.shape[1:], value.dtype)
        return result
