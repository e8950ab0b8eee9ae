"""The conversion of drawn weights to a network's own form: units, padding rows, low precision and channels last."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor, nn

from bayesify.weights.catalog import Weight, padding_rows
from bayesify.weights.placed import PlacedWeights
from bayesify.weights.structured import StructuredWeight


class NetworkLayout:
    """Types, memory layouts, padding rows and units of a network's own weights, which drawn weights adopt.

    Attributes:
        units: Factor by which a posterior's weight is multiplied to give the network's weight, by name; 1 for names
            that are not listed.
        is_plain: Whether drawn weights need no conversion.
    """

    def __init__(self, net: nn.Module, weights: list[Weight], values: Mapping[str, Tensor]) -> None:
        self._padding = padding_rows(net, weights)
        self.low_precision = {name: value.dtype for name, value in values.items() if value.dtype == torch.bfloat16}
        self.channels_last = {
            name
            for name, value in values.items()
            if value.ndim >= 4 and not value.is_contiguous() and value.stride(1) == 1
        }
        self.set_units({})

    def set_units(self, units: dict[str, float]) -> None:
        """Use other units."""
        self.units = units
        self.is_plain = not (self._padding or self.low_precision or self.channels_last or units)

    def widen(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values in at least float32, the type of a posterior's parameters."""
        return {name: value.float() if name in self.low_precision else value for name, value in values.items()}

    def cast(self, weights: MutableMapping[str, Tensor], *, spread: bool = False) -> MutableMapping[str, Tensor]:
        """Give drawn weights [S, *shape] the units, padding rows, types and memory layouts of the network's own weights, in place.

        Args:
            weights: Drawn weights by name.
            spread: Whether the weights are variances, which are 0 in padding rows.
        """
        for name in [name for name in self.units if name in weights]:
            weight, unit = weights[name], self.units[name]
            factor = unit**2 if spread else unit
            weights[name] = weight.times(factor) if isinstance(weight, StructuredWeight) else weight * factor
        # Keep the network's padding rows, because torch does not train them either.
        for name in [name for name in self._padding if name in weights]:
            (row, value), weight = self._padding[name], weights[name]
            weight = weight.materialize() if isinstance(weight, StructuredWeight) else weight
            rows = (torch.zeros_like(value) if spread else value).to(weight).expand(weight.shape[0], 1, -1)
            weights[name] = weight.index_copy(1, torch.tensor([row], device=weight.device), rows)
        if isinstance(weights, PlacedWeights):
            return weights
        # Keep the order of the weights, because local weights draw noise here. The order of a set would differ between processes.
        for name in [name for name in weights if name in self.low_precision]:
            weights[name] = weights[name].to(self.low_precision[name])
            if name not in self.channels_last and not isinstance(weights[name], StructuredWeight):
                weights[name] = weights[name].contiguous()  # unaligned rows use slower kernels
        for name in [name for name in weights if name in self.channels_last]:
            if weights[name].stride(2) != 1:
                weights[name] = weights[name].movedim(2, -1).contiguous().movedim(-1, 2)
        return weights


def strides_of(layout: NetworkLayout | None, name: str, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and stride of a weight in the network's memory layout, without gaps."""
    like = torch.empty(shape, device="meta")
    if layout is not None and name in layout.channels_last:
        like = like.movedim(1, -1).contiguous().movedim(-1, 1)
    return tuple(like.shape), like.stride()
