"""Ensembles: several point estimates."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.priors import PriorDraw
from bayesify.weights.named_parameters import NamedParameters


class Ensemble(Posterior):
    r"""Several point estimates trained together: $q(w) = \frac1K \sum_k \delta(w - m_k)$ (Lakshminarayanan et al. 2017).

    q has no density, so `kl` is $-\log p(m_k)$ averaged over members, and the ELBO is the mean of the members' MAP
    objectives. Each draw is one of the members, and all members share one likelihood. `fit` runs members in the same way as the
    draws of other posteriors. The members of a small network run in one batch, using `vmap`. For models with their own likelihood
    and data, use a `ModelStack`. Every member is drawn equally often. Each member has its own running statistics of BatchNorm
    layers.

    A network may have several ensembles with $K_1, K_2, \dots$ members. Together they form
    $L = \operatorname{lcm}(K_1, K_2, \dots)$ networks, each with its own statistics. Network n uses member n mod $K_i$ of
    ensemble i. Ensembles of equal size K form K networks.
    Stored parameters: `value`, with a leading axis of members.

    Args:
        members: Number of members K.
        init: How the members start. With `"reset"`, the first member starts at the network's weights. The other members
            get their initial values from `reset_parameters()` of the module that owns the weight. If the module has no such
            method, the initial values are drawn from a normal distribution with the mean and standard deviation of the weight's
            entries. With `"network"`, the other members start at the network's weights plus noise. The noise has 10 % of the
            standard deviation of the weight's entries.

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
        self.training_draws = self.num_networks = self.num_members = members

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start each member at different weights."""
        stacked = {weight.name: [values[weight.name].clone()] for weight in self.weights}
        for _ in range(self.members - 1):
            # Reset each module once, so that all its weights come from the same initialization.
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
        """Draw the members in random order, each equally often. In one draw, all ensembles of a network use the same network
        index."""
        chosen = request.choose(self.num_networks, self.value.values()[0].device) % self.members
        return {name: value[chosen] for name, value in self.value.items()}, self.kl(request.prior)

    @property
    def num_distinct_draws(self) -> int:
        """The number of networks that all ensembles form together; K for a single ensemble."""
        return self.num_networks

    def bind_network(self, buffers: Mapping[str, Tensor], posteriors: Sequence[Posterior]) -> None:
        """Give each network its own batch statistics, because an average over unrelated networks would suit none of them.

        The first ensemble stores the statistics of all networks.
        """
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
        chosen = request.chosen[self.num_networks].tolist()
        return [{name: value[network] for name, value in statistics.items()} for network in chosen]

    def average_buffers(self, network: nn.Module) -> None:
        """Write the mean of all networks' statistics into a plain network, in place."""
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
        """The mean of `-log p` over members."""
        moments = {name: prior.second_moments(name, value) / self.members for name, value in self.value.items()}
        return prior.cross_entropy(moments, self.sizes())


def _spread(value: Tensor) -> Tensor:
    return value.std(unbiased=False) if value.numel() > 1 else value.abs().max().clamp_min(1e-2)


def _reset(module: nn.Module) -> nn.Module | None:
    """Copy a module, and reset the copy's own parameters, but not those of its children. The result is `None` if the module
    cannot be reset."""
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            again: Any = copy.deepcopy(module)
            getattr(again, method)()
            return cast(nn.Module, again)
    return None
