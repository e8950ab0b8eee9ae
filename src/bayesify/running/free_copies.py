"""Light copies of a network that serve pass after pass."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from bayesify.running.light_copies import KnownModules, LightCopy

MAX_FREE_COPIES = 8
"""Copies of a kind that are kept, so that as many threads find one at the same time."""

MOST_MISSED = 8
"""After this many copies in a row that did not serve again, no copy is kept: the network changes in every pass."""


class FreeCopies:
    """Light copies of one network that no pass has at the moment, for single passes in the network's own mode.

    A copy serves again if the network is what it was when the copy was made, and if the pass has left nothing in the copy that
    had to be given back to the network. Checking both costs less than another copy. Such a pass stands for a call of the network
    itself, and whatever a network keeps of itself outlives a call. So it makes no difference whether other code still holds a
    module of the copy, for example as the key of a dictionary: for a plain network that key would be the same in every call too.
    Predictions keep nothing of a pass, and each gets a new copy. A copy or a pickle of this object has no light copies.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[bool, bool], list[LightCopy]] = {}
        self._missed = -1  # a first pass may be the only one
        self.known = KnownModules()

    def __reduce__(self) -> tuple[type[FreeCopies], tuple[()]]:
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
        copied = LightCopy(network, evaluate=evaluate, hooks=False, owners=owners, known=self.known)
        if 0 <= self._missed < MOST_MISSED:
            copied.remember()
        return copied

    def put(self, copied: LightCopy, evaluate: bool, owners: Collection[str] | None, *, unchanged: bool) -> None:
        """Take back a copy after its pass, with what `LightCopy.write_back` said."""
        free = self._free[evaluate, owners is None]
        if unchanged and len(free) < MAX_FREE_COPIES:
            free.append(copied)
            self._missed = 0
        else:
            self._missed += 1
