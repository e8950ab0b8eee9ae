"""Point estimates under a prior."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayesify.posteriors.common.base import DrawRequest, Posterior, repeat_draws
from bayesify.weights.named_parameters import NamedParameters


class Point(Posterior):
    r"""A point estimate: $q(w) = \delta(w - m)$.

    q has no density, so `kl` is $-\log p(m)$ and the ELBO is the MAP objective. Every draw is $m$. Stored parameters:
    `value`, which starts at the network's weights.
    """

    name = "point"
    title, paper = "Point (MAP)", "MacKay 1992"
    cost = "P"
    aliases = ("map", "deterministic")
    is_point = True
    correlated_priors = True
    shares_statistics = False
    independent = True

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start at the network's weights."""
        self.value = NamedParameters({weight.name: values[weight.name].clone() for weight in self.weights})

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Return the same weights for every draw, without copying them."""
        weights = {name: repeat_draws(value, request.num_draws) for name, value in self.value.items()}
        return weights, self.kl(request.prior)

    def mean(self) -> dict[str, Tensor]:
        """The weights."""
        return dict(self.value.items())

    def variance(self) -> dict[str, Tensor]:
        """Zero."""
        return {name: torch.zeros_like(value) for name, value in self.value.items()}

    @property
    def num_distinct_draws(self) -> int:
        """One."""
        return 1
