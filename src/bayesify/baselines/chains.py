"""Draws of several Markov chains, with diagnostics that show whether the chains agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import checked
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.maths.convergence import effective_sample_size, split_r_hat
from bayesify.running.inputs_and_outputs import checked_inputs
from bayesify.storage.serializers import register_predictor
from bayesify.weights.module_state import below, prefixed

MAX_R_HAT = 1.05
"""Chains count as converged to the same distribution if the R-hat of every function is below this value."""


@dataclass(frozen=True)
class Diagnostics:
    r"""Convergence diagnostics of several chains.

    In these diagnostics, a "function" is one output, or one class probability, at one input.

    Args:
        r_hat: Largest split R-hat over all functions.
        r_hat_95: 95 % quantile of the split R-hat over functions.
        effective_draws: Smallest effective sample size over all functions.
        median_effective_draws: Median of the effective sample sizes over functions.
        log_density_r_hat: Split R-hat of $\log p(w, y)$.
        log_density_effective_draws: Effective sample size of $\log p(w, y)$.
        energy_error: Root mean square energy error of a chain, averaged over chains, in nats; the sampler's documentation defines
            the energy error.
        acceptance: Share of proposals that were accepted; 1 for a sampler without proposals.
    """

    r_hat: float
    r_hat_95: float
    effective_draws: float
    median_effective_draws: float
    log_density_r_hat: float
    log_density_effective_draws: float
    energy_error: float
    acceptance: float

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
                f"Chains: log_density has shape {list(self.log_density.shape)}, but there are {len(draws)} draws; give "
                "one number per draw, [C, T]"
            )
        for name, value in (("energy_error", self.energy_error), ("acceptance", self.acceptance)):
            if value.shape != (chains,) or not value.isfinite().all():
                raise ValueError(
                    f"Chains: {name}={value.tolist()}, but there are {chains} chains; give one finite number per chain, "
                    "[C]"
                )

    @property
    def num_chains(self) -> int:
        """Number of chains C."""
        return len(self.log_density)

    @torch.no_grad()
    def functions(self, x: Any) -> Tensor:
        """The outputs of all draws; if the likelihood has classes, the class probabilities of all draws: [C, T, B, ...]."""
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
            r_hat=float(r_hat.max()), r_hat_95=float(r_hat.quantile(0.95)), effective_draws=float(effective.min()),
            median_effective_draws=float(effective.median()), log_density_r_hat=float(split_r_hat(self.log_density)),
            log_density_effective_draws=float(effective_sample_size(self.log_density)),
            energy_error=float(self.energy_error.double().mean()), acceptance=float(self.acceptance.double().mean()),
        )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The draws, and the chains' log densities, energy errors and acceptance rates."""
        own = {"log_density": self.log_density, "energy_error": self.energy_error, "acceptance": self.acceptance}
        return super().state() | prefixed(chains=own)

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Rebuild the chains over a copy of the network."""
        fixed = FixedDraws.restore(net, config, state)
        return cls(fixed.draws, fixed.likelihood, fixed.output, **below("chains", state))
