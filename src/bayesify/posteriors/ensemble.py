"""Ensembles: several point estimates."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked
from bayesify.maths.noise import choose_members
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.priors import PriorDraw
from bayesify.weights.named_parameters import NamedParameters


class Ensemble(Posterior):
    r"""Several point estimates trained together: $q(w) = \frac1K \sum_k \delta(w - m_k)$ (Lakshminarayanan et al. 2017).

    It has no density, so `kl` is the mean over members of $-\log p(m_k)$: with it the ELBO is the mean of the members' MAP
    objectives. The members are the draws, and they share one likelihood, so `fit` runs them as it runs draws, together by `vmap`
    for small networks. A `ModelStack` is for models with a likelihood and data of their own.
    Draws visit the members equally often. Each member has its own running statistics of BatchNorm layers. Several
    ensembles of one network, of $K_1, K_2, \dots$ members, are $L = \operatorname{lcm}(K_1, K_2, \dots)$ networks: the n-th takes
    member n mod $K_i$ of each and has its own statistics. With equal sizes these are K networks.
    Stored: `value`, with a leading axis of members.

    Args:
        members: K.
        init: `"reset"` starts the first member at the network's weights and each other one again, by `reset_parameters()` of
            the module that owns the weight (a module without it: normal numbers with the weight's own mean and
            spread); `"network"` starts all at the network's weights plus noise of 10 % of the weight's spread.

    Raises:
        ValueError: If `members` is below 1 or `init` is unknown.
    """

    name = "ensemble"
    title, paper = "Ensemble", "Lakshminarayanan et al. 2017"
    cost = "K P"
    aliases = ("ensemble-w",)
    is_point = True
    correlated_priors = True
    shares_statistics = False

    @checked
    def __init__(self, members: Count = 5, init: Literal["reset", "network"] = "reset") -> None:
        super().__init__()
        self.members, self.init, self.starts_at_network = members, init, init == "network"
        self.training_draws = self.num_networks = members

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start the members apart."""
        stacked = {weight.name: [values[weight.name].clone()] for weight in self.weights}
        for _ in range(self.members - 1):
            # One new start per module, so that its weights belong together.
            fresh: dict[nn.Module, nn.Module | None] = {}
            for weight in self.weights:
                value, module = values[weight.name], modules[weight.name]
                if self.init == "network":
                    stacked[weight.name].append(value + 0.1 * _spread(value) * torch.randn_like(value))
                    continue
                if module not in fresh:
                    fresh[module] = _reset(module)
                again = fresh[module]
                leaf = weight.name.rpartition(".")[2]
                start = None if again is None else getattr(again, leaf).detach().to(value)
                if start is None or torch.equal(start, value):
                    start = value.mean() + _spread(value) * torch.randn_like(value)
                stacked[weight.name].append(start)
        self.value = NamedParameters({name: torch.stack(members) for name, members in stacked.items()})

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Members in random order, each equally often; several ensembles of one network take those of the same networks."""
        if self.num_networks not in request.networks:
            device = self.value.values()[0].device
            drawn = choose_members(self.num_networks, request.num_draws, request.noise, device)
            request.networks[self.num_networks] = drawn
        chosen = request.networks[self.num_networks] % self.members
        return {name: value[chosen] for name, value in self.value.items()}, self.kl(request.prior)

    @property
    def num_distinct_draws(self) -> int:
        """The members, or the networks that this and other ensembles make together."""
        return self.num_networks

    def bind_buffers(self, buffers: Mapping[str, Tensor], posteriors: Sequence[Posterior]) -> None:
        """Give each network batch statistics of its own, kept by the first ensemble: unrelated ones have no meaningful average."""
        ensembles = [part for part in posteriors if isinstance(part, Ensemble)]
        self.num_networks = math.lcm(*(part.members for part in ensembles))
        for name, value in buffers.items() if self is ensembles[0] else ():
            self.register_buffer(
                f"statistics:{name.replace('.', '/')}", value.repeat(self.num_networks, *[1] * value.ndim)
            )

    def buffers_for(self, request: DrawRequest) -> list[dict[str, Tensor]] | None:
        """Views of the statistics that each draw of a request uses and updates."""
        statistics = self._statistics()
        if not statistics:
            return None
        chosen = request.networks[self.num_networks].tolist()
        return [{name: value[network] for name, value in statistics.items()} for network in chosen]

    def average_buffers(self, network: nn.Module) -> None:
        """Put the networks' mean statistics into a plain network, in place."""
        buffers = dict(network.named_buffers(remove_duplicate=False))
        for name, value in self._statistics().items():
            buffers[name].copy_(value.mean(0) if value.is_floating_point() else value[0])

    def _statistics(self) -> dict[str, Tensor]:
        """Each running statistic of the network by name, with a leading axis of networks."""
        return {
            key.removeprefix("statistics:").replace("/", "."): value
            for key, value in self._buffers.items()
            if value is not None and key.startswith("statistics:")
        }

    def mean(self) -> dict[str, Tensor]:
        """Mean over members."""
        return {name: value.mean(0) for name, value in self.value.items()}

    def variance(self) -> dict[str, Tensor]:
        """Variance over members."""
        return {name: value.var(0, unbiased=False) for name, value in self.value.items()}

    def kl(self, prior: PriorDraw) -> Tensor:
        """Mean over members of `-log p`."""
        moments = {name: prior.second_moments(name, value) / self.members for name, value in self.value.items()}
        return prior.cross_entropy(moments, self.sizes())


def _spread(value: Tensor) -> Tensor:
    return value.std(unbiased=False) if value.numel() > 1 else value.abs().max().clamp_min(1e-2)


def _reset(module: nn.Module) -> nn.Module | None:
    """A copy of one module (without its children) with new random parameters, or `None` where it cannot do that."""
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            again: Any = copy.deepcopy(module)
            getattr(again, method)()
            return cast(nn.Module, again)
    return None
