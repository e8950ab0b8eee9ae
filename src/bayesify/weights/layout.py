"""Drawn weights in a network's own form: units, padding rows, low precision, channels last, and shared memory."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from bayesify.maths.fused_draws import Place, Places
from bayesify.weights.catalog import Weight, has_channels_last, padding_rows
from bayesify.weights.structured import StructuredWeight


class NetworkLayout:
    """Types, memory layouts, padding rows and units of a network's own weights, which drawn weights adopt."""

    def __init__(self, net: nn.Module, weights: list[Weight], values: Mapping[str, Tensor]) -> None:
        self._padding = padding_rows(net, weights)
        self.low_precision = {name: value.dtype for name, value in values.items() if value.dtype == torch.bfloat16}
        self.channels_last = {name for name, value in values.items() if has_channels_last(value)}
        self.set_units({})

    def set_units(self, units: dict[str, float]) -> None:
        """Set the factors, by name, that convert weights of a posterior to weights of the network; 1 for all others."""
        self.units = units
        # Whether drawn weights need no conversion.
        self.is_plain = not (self._padding or self.low_precision or self.channels_last or units)

    def widen(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values in the type of a posterior's parameters, which is at least float32."""
        return {name: value.float() if name in self.low_precision else value for name, value in values.items()}

    def cast(self, weights: MutableMapping[str, Tensor], *, spread: bool = False) -> MutableMapping[str, Tensor]:
        """Give drawn weights [S, *shape] the units, padding rows, types and memory layouts of the network's own weights, in place.
        With `spread`, the weights are variances, which are 0 in padding rows."""
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
    """Size and stride of a weight that has the network's memory layout and no gaps."""
    like = torch.empty(shape, device="meta")
    if layout is not None and name in layout.channels_last:
        like = like.movedim(1, -1).contiguous().movedim(-1, 1)
    return tuple(like.shape), like.stride()


class PlacedWeights(MutableMapping[str, Tensor]):
    """Weights [S, *shape] by name, with the network's own types and layouts.

    Creating a tensor costs about 1 µs on the host, and a large network needs hundreds of tensors per draw. Tensors are therefore
    created lazily. A pass that needs only one draw gets tensors that never had an axis of draws.
    """

    def __init__(self, names: Sequence[str], places: Sequence[Place]) -> None:
        self.num_draws: int = places[0][1][0]
        self._names, self._given = names, places
        self._values: dict[str, Tensor | None] = dict.fromkeys(names)  # weights that were created or replaced
        self._draws: dict[int, dict[str, Tensor]] = {}
        self._is_whole = True

    @cached_property
    def _places(self) -> dict[str, Place]:
        return dict(zip(self._names, self._given, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        if value is None:
            flat, size, stride, start = self._places[name]
            value = self._values[name] = flat.as_strided(size, stride, start)
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._values[name] = value
        self._change()

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._change()

    def _change(self) -> None:
        self._is_whole = False
        self._draws.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def places(self) -> dict[str, Place] | None:
        """Place of each weight in memory, by name; `None` if a weight was replaced or deleted."""
        return self._places if self._is_whole else None

    def at(self, index: int) -> Mapping[str, Tensor]:
        """Weights of one draw, [*shape] each. The tensors are made once and must not be changed."""
        if index in self._draws:
            return self._draws[index]
        if isinstance(self._given, Places):
            found = dict(zip(self._names, self._given.at(index), strict=True))
        else:
            found = {
                name: flat.as_strided(size[1:], stride[1:], start + index % size[0] * stride[0])
                for name, (flat, size, stride, start) in self._places.items()
            }
        if not self._is_whole:
            found = {name: found[name] if value is None else value[index] for name, value in self._values.items()}
        self._draws[index] = found
        return found
