"""Light copies of a network that serve pass after pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from bayesify.running.light_copies import LightCopy

MOST_FREE = 8
"""Copies of a kind that are kept: as many threads find one at the same time."""

MOST_MISSED = 8
"""Copies one after the other that did not serve again, after which none is kept: the network changes in every pass."""


class FreeCopies:
    """Light copies that no pass has at the moment.

    To see that a network and its copy are what they were takes a third of the time of another copy. A copy serves again only if
    passes have left it so and nobody holds a part of it. A copy or a pickle of this object has none.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[bool, bool], list[LightCopy]] = {}
        self._missed = -1  # a first pass may be the only one

    def __reduce__(self) -> Any:
        return FreeCopies, ()

    def take(self, network: nn.Module, evaluate: bool, owners: Collection[str] | None) -> LightCopy:
        """A copy for passes without hooks: one of those that are free, or another; see `LightCopy`."""
        free = self._free.setdefault((evaluate, owners is None), [])
        while free:
            try:
                copied = free.pop()
            except IndexError:  # another thread was faster
                break
            if copied.is_current():
                return copied
            self._missed += 1
        copied = LightCopy(network, evaluate=evaluate, hooks=False, owners=owners)
        if 0 <= self._missed < MOST_MISSED:
            copied.remember()
        return copied

    def put(self, copied: LightCopy, evaluate: bool, owners: Collection[str] | None) -> None:
        """Take back a copy after its passes."""
        free = self._free[evaluate, owners is None]
        if copied.is_untouched() and len(free) < MOST_FREE:
            free.append(copied)
            self._missed = 0
        else:
            self._missed += 1
