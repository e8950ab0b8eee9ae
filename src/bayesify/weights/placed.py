"""Drawn weights side by side in memory, each of which becomes a tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

from torch import Tensor

from bayesify.maths.fused_draws import Place, Places


class PlacedWeights(MutableMapping[str, Tensor]):
    """Weights [S, *shape] by name, as the network has them in type and layout.

    To make a tensor takes the host a microsecond, of which a draw of a large network takes hundreds; a pass that needs one draw
    gets it without the axis of draws at once.

    Args:
        names: Of the weights.
        places: Where each is.
    """

    def __init__(self, names: Sequence[str], places: Sequence[Place]) -> None:
        self._places = dict(zip(names, places, strict=True))
        self._values: dict[str, Tensor | Place] = dict(self._places)
        self._joined = places if isinstance(places, Places) else None
        self._draws: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        if isinstance(value, tuple):
            flat, size, stride, start = value
            value = self._values[name] = flat.as_strided(size, stride, start)
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._values[name] = value
        self._places.pop(name, None)
        self._joined = None
        self._draws.clear()

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._joined = None
        self._draws.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def places(self) -> dict[str, Place] | None:
        """Where the weights are, by name; `None` where one was put in another one's place."""
        return self._places if self._places.keys() == self._values.keys() else None

    def at(self, index: int) -> Mapping[str, Tensor]:
        """One draw, [*shape] each, made once: not to be changed."""
        if index in self._draws:
            return self._draws[index]
        if self._joined is not None:
            found = self._draws[index] = dict(zip(self._values, self._joined.at(index), strict=True))
            return found
        found = {}
        for name, value in self._values.items():
            if isinstance(value, tuple):
                flat, size, stride, start = value
                found[name] = flat.as_strided(size[1:], stride[1:], start + index % size[0] * stride[0])
            else:
                found[name] = value[index]
        self._draws[index] = found
        return found
