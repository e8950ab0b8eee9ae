"""One prior that combines the fixed priors of several models. Its scales are tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.maths.noise import Randomness
from bayesify.priors.base import Prior, PriorDraw
from bayesify.weights.catalog import Weight


class Varied(Prior):
    r"""$p(w) = \mathcal{N}(0, \sigma_w^2)$. The scales are in a buffer, because the models of a stack may have different scales.

    Shapes:
        scales: [U], the distinct scales. Two weights share one entry of `scales` if each model gives both weights the same scale.
    """

    name = "varied"
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}
        self.every = torch.empty(0)

    @classmethod
    def of(cls, prior: Prior, stds: Sequence[Mapping[str, Any]], like: Tensor) -> Self:
        """Make a prior whose `scales` are those of the first of R models. `stds` contains the scales of each model, by weight
        name. The attribute `every` of the prior contains the scales of all models, [R, U]."""
        made = cls()
        made.weights = dict(prior.weights)
        columns = {name: tuple(float(one[name]) for one in stds) for name in prior.weights}
        distinct = list(dict.fromkeys(columns.values()))
        made.places = {name: distinct.index(column) for name, column in columns.items()}
        made.every = torch.tensor(distinct, dtype=like.dtype, device=like.device).mT.contiguous()
        made.register_buffer("scales", made.every[0].clone())
        return made

    def std_of(self, weight: Weight) -> float:
        """The scale as a number. This method does not work inside function transforms such as `vmap`."""
        return float(self.scales[self.places[weight.name]])

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """The scales."""
        parts = self.scales.unbind(-1)
        return PriorDraw({name: parts[place] for name, place in self.places.items()})
