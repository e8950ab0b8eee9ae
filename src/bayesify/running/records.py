"""Whether modules are what they were: types, attributes, slots, children and containers, each told by identity."""

from __future__ import annotations

import ctypes
import operator
import sys
import weakref
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from torch import nn

CALLED = ("_forward_hooks", "_forward_pre_hooks")
SLOTS = ("_parameters", "_buffers")


class Record:
    """What modules and containers are at one moment.

    Args:
        modules: Without hooks of a forward pass.
        containers: That their attributes hold.
    """

    def __init__(self, modules: list[nn.Module], containers: list[Any]) -> None:
        states = [module.__dict__ for module in modules]
        dicts = [state[key] for state in states for key in (*SLOTS, "_modules")]
        called = [state[key] for state in states for key in CALLED]
        self.modules, self._kinds = modules, list(map(type, modules))
        self._own = [module.__dict__ for module in modules if not is_torchs(type(module))]
        self._dicts, self._containers = list(filter(None, dicts)), list(filter(None, containers))
        self._empty = [one for one in (*dicts, *called, *containers) if not one]
        self._keys, self._names = _joined(self._own), _joined(self._dicts)
        self._values = self._held()  # so that nothing else comes to their addresses
        self._addresses = _addresses(self._values)
        self._contents = [entries_of(container) for container in self._containers]

    def _held(self) -> tuple[Any, ...]:
        states = [module.__dict__ for module in self.modules]
        return _joined(map(dict.values, chain(states, self._dicts)))

    def holds(self) -> bool:
        """Whether they are the same now."""
        return (
            not any(self._empty)
            and list(map(type, self.modules)) == self._kinds
            and _addresses(self._held()) == self._addresses
            and _joined(self._dicts) == self._names
            and _joined(self._own) == self._keys
            and all(map(are_same, map(entries_of, self._containers), self._contents))
        )


def _joined(parts: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(parts))


def _addresses(values: tuple[Any, ...]) -> bytes:
    """Where the entries of a tuple are, as it lies in memory: to compare these one by one takes as long again as to find them."""
    return ctypes.string_at(id(values) + tuple.__basicsize__, len(values) * tuple.__itemsize__)


def references_to(modules: list[nn.Module]) -> list[int]:
    """How often each module is held, strongly and weakly."""
    return [*map(sys.getrefcount, modules), *map(weakref.getweakrefcount, modules)]


def entries_of(container: Any) -> list[Any]:
    """Everything that a container holds, in its order."""
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    """Whether two collections hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def is_torchs(kind: type) -> bool:
    """Whether a type of modules is one of torch's own."""
    return kind.__module__.startswith("torch.nn.modules.")
