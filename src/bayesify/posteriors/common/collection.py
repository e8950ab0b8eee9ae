"""The posteriors of one network."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.priors import Prior
from bayesify.weights.layout import NetworkLayout


def shares_statistics(posteriors: Sequence[Posterior]) -> bool:
    """Whether the network's batch statistics suit all draws.

    At least one posterior must vary around the network's weights, and every other posterior must have a single draw.
    """
    kept = [part.shares_statistics for part in posteriors]
    return any(kept) and all(
        keeps or part.num_distinct_draws == 1 for keeps, part in zip(kept, posteriors, strict=True)
    )


class Posteriors(nn.ModuleList):
    """The posteriors of one network, in the order of their selectors."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Posterior]: ...

    def in_drawing_order(self) -> list[Posterior]:
        """The posteriors in the order of drawing: posteriors that run the network come last."""
        return sorted(self, key=lambda part: part.runs_network)

    @property
    def num_distinct_draws(self) -> int | None:
        """The number of different draws: 1 for point estimates, the number of networks for ensembles, otherwise `None`."""
        counts = {part.num_distinct_draws for part in self} - {1}
        return counts.pop() if len(counts) == 1 else None if counts else 1

    def bind_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Offer each posterior the network's running statistics; see `Posterior.bind_buffers`."""
        for part in self:
            part.bind_buffers(buffers, list(self))

    def buffers_for(self, request: DrawRequest) -> list[dict[str, Tensor]] | None:
        """Per-draw buffers of all posteriors together, one dict per draw, or `None`."""
        owned = [found for part in self if (found := part.buffers_for(request)) is not None]
        return [dict(ChainMap(*each)) for each in zip(*owned, strict=True)] or None

    def means(self, layout: NetworkLayout) -> dict[str, Tensor]:
        """The posterior means by name, [1, *shape]. Posteriors that run the network use the means of the other posteriors."""
        means: dict[str, Tensor] = {}
        for part in self.in_drawing_order():
            others = {name: mean[0] for name, mean in layout.cast(dict(means)).items()} if part.runs_network else {}
            means |= {name: mean.unsqueeze(0) for name, mean in part.mean_given(others).items()}
        return means

    def kl(self, prior: Any) -> Tensor:
        """KL to a draw of the prior, in closed form: a scalar."""
        return torch.as_tensor(sum((part.kl(prior) for part in self), prior.kl)).mean()

    def set_to_prior(self, prior: Prior) -> None:
        """Make q equal to the prior, in place. If a posterior cannot equal the prior, raise `ValueError` and change nothing."""
        before = [copy.deepcopy(part.state_dict()) for part in (self, prior)]
        try:
            prior.set_to_prior()
            for part in self:
                part.set_to_prior(prior.draw(1))
        except ValueError:
            self.load_state_dict(before[0])
            prior.load_state_dict(before[1])
            raise
