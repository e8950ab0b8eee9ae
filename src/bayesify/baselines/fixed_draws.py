"""Predictors that consist of existing draws, such as the draws of several Markov chains."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, checked
from bayesify.configuration import restore_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.maths.convergence import effective_sample_size, split_r_hat
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
        """Return evenly spaced draws from the list.

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
        drawn = {alias for name in self.draws.weights for alias in (name, *runner.weights[name].aliases)}
        named = (*runner.network.named_parameters(), *runner.network.named_buffers())
        network = {name: runner.point_values.get(name, value) for name, value in named if name not in drawn}
        drawn_weights, likelihood = self.draws.materialize().weights, self.likelihood.state_dict()
        own = self.draws.buffers or []
        buffers = {name: torch.stack([part[name] for part in own]) for name in (own[0] if own else ())}
        return prefixed(network=network, draws=drawn_weights, likelihood=likelihood, buffers=buffers)

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Rebuild the draws over a copy of the network. The KL of the draws is not stored, so the rebuilt KL is NaN."""
        network = copy_network(net, "FixedDraws")
        network.load_state_dict(below("network", state), strict=False)
        reference = next(network.parameters())
        weights = {name: value.to(reference.device) for name, value in below("draws", state).items()}
        known = {name: weight for name, weight in catalog(net).weights.items() if name in weights}
        unknown = reference.new_full((len(next(iter(weights.values()))),), float("nan"))
        likelihood = restore_likelihood(config["likelihood"], state, reference)
        stored = {name: value.to(reference.device) for name, value in below("buffers", state).items()}
        buffers = [{name: value[index] for name, value in stored.items()} for index in range(len(unknown))]
        draws = Draws(Runner(network, known), weights, unknown, buffers if stored else None)
        return cls(draws, likelihood, config["output"])

    def fingerprint(self) -> dict[str, str]:
        result = fingerprint(self.draws.runner.network)
        for name, value in self.draws.weights.items():
            for alias in (name, *self.draws.runner.weights[name].aliases):
                result[alias] = describe(value.shape[1:], value.dtype)
        return result


MAX_R_HAT = 1.05
"""Chains count as converged to the same distribution if the R-hat of every function is below this value."""


@dataclass(frozen=True)
class Diagnostics:
    """Convergence diagnostics of several chains. A "function" is one output, or one class probability, at one input."""

    r_hat: float  # largest split R-hat over all functions
    r_hat_95: float  # 95 % quantile of the split R-hat over functions
    effective_draws: float  # smallest effective sample size over all functions
    median_effective_draws: float  # median of the effective sample sizes over functions
    log_density_r_hat: float  # split R-hat of log p(w, y)
    log_density_effective_draws: float  # effective sample size of log p(w, y)
    energy_error: float  # root mean square energy error (as the sampler defines it), averaged over chains, in nats
    acceptance: float  # share of proposals that were accepted; 1 for a sampler without proposals

    @property
    def passed(self) -> bool:
        """Whether the R-hat of every function is below 1.05."""
        return self.r_hat < MAX_R_HAT


@register_predictor
class Chains(FixedDraws):
    """A posterior that consists of the draws of C Markov chains with T draws each.

    Args:
        draws: All C T draws, one chain after the other.
        likelihood: p(y | outputs).
        output: Name or index of the output that the likelihood uses, if the network has several; see `bayesianize`.
        log_density: log p(w, y) of each draw, [C, T].
        energy_error: Root mean square energy error of each chain, [C].
        acceptance: Share of accepted proposals of each chain, [C].
    """

    @checked
    def __init__(
        self,
        draws: Draws,
        likelihood: Likelihood,
        output: str | int | None = None,
        *,
        log_density: Tensor | None = None,
        energy_error: Tensor | None = None,
        acceptance: Tensor | None = None,
    ) -> None:
        super().__init__(draws, likelihood, output)
        self.log_density = torch.zeros(1, len(draws)) if log_density is None else log_density.detach()
        chains = len(self.log_density)
        self.energy_error = torch.zeros(chains) if energy_error is None else energy_error.detach()
        self.acceptance = torch.ones(chains) if acceptance is None else acceptance.detach()
        if self.log_density.numel() != len(draws):
            raise ValueError(
                f"Chains: log_density= has shape {list(self.log_density.shape)}, but there are {len(draws)} draws; "
                "give one number per draw, [C, T]"
            )
        for name, value in (("energy_error", self.energy_error), ("acceptance", self.acceptance)):
            if value.shape != (chains,) or not value.isfinite().all():
                remedy = "give one finite number per chain, [C]"
                raise ValueError(f"Chains: {name}={value.tolist()}, but there are {chains} chains; {remedy}")

    @property
    def num_chains(self) -> int:
        """Number of chains C."""
        return len(self.log_density)

    @torch.no_grad()
    def functions(self, x: Any) -> Tensor:
        """The outputs of all draws, or their class probabilities if the likelihood has classes: [C, T, B, ...]."""
        args, kwargs = checked_inputs(x)
        outputs = self.draws.outputs(args, kwargs, output=self.output, keep=True).kept
        assert outputs is not None
        axis = self.likelihood.logit_axis(outputs.ndim)
        values: Tensor = outputs if axis is None else outputs.softmax(axis)
        return values.reshape(*self.log_density.shape, *values.shape[1:])

    def diagnostics(self, x: Any) -> Diagnostics:
        """Diagnostics that show whether the chains agree about the functions at the inputs and about the log density.

        Args:
            x: Inputs in any form that `predict` accepts.

        Raises:
            ValueError: If the chains have fewer than 4 draws.
        """
        values = self.functions(x).flatten(2)
        r_hat, effective = split_r_hat(values), effective_sample_size(values)
        return Diagnostics(
            r_hat=float(r_hat.max()),
            r_hat_95=float(r_hat.quantile(0.95)),
            effective_draws=float(effective.min()),
            median_effective_draws=float(effective.median()),
            log_density_r_hat=float(split_r_hat(self.log_density)),
            log_density_effective_draws=float(effective_sample_size(self.log_density)),
            energy_error=float(self.energy_error.double().mean()),
            acceptance=float(self.acceptance.double().mean()),
        )

    def state(self) -> dict[str, Tensor]:
        """The draws, and the chains' log densities, energy errors and acceptance rates."""
        own = {"log_density": self.log_density, "energy_error": self.energy_error, "acceptance": self.acceptance}
        return super().state() | prefixed(chains=own)

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Rebuild the chains over a copy of the network."""
        fixed = FixedDraws.restore(net, config, state)
        return cls(fixed.draws, fixed.likelihood, fixed.output, **below("chains", state))
