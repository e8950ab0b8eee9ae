"""Drawn weights in shared memory, each of which becomes a tensor on first access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property

from torch import Tensor

from bayesify.maths.fused_draws import Place, Places


class PlacedWeights(MutableMapping[str, Tensor]):
    """Weights [S, *shape] by name, with the network's own types and layouts.

    Creating a tensor costs about 1 µs on the host, and a large network needs hundreds per draw, so tensors are created lazily. A
    pass that needs one draw gets tensors without the axis of draws directly.

    Args:
        names: Names of the weights.
        places: Place of each weight in memory.
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
        """Weights of one draw, [*shape] each. They are made once and must not be changed."""
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
