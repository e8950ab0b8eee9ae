"""Light copies of a network that later passes can reuse."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from bayesify.running.light_copies import KnownModules, LightCopy

MAX_FREE_COPIES = 8
"""Maximum number of free copies of each kind, and so the number of threads that can reuse a copy at the same time."""

MAX_MISSED_COPIES = 8
"""After this many consecutive copies that could not be reused, no copy is kept, because the network changes in every pass."""


class FreeCopies:
    """Light copies of one network that no pass is using, for single passes in the network's own mode.

    A copy is reused if the network is unchanged since the copy was made, and if the pass left nothing in the copy that had to be
    written back. Checking both conditions costs less than making another copy. Other code may still hold a module of the copy,
    for example as a dictionary key. Even then a reuse is correct, because with a plain network the key would also be the same in
    every call. Each prediction gets a new copy and keeps nothing of its passes. Copies and pickles of this object contain no
    light copies.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[bool, bool], list[LightCopy]] = {}
        self._missed = -1  # -1, because the first pass, which may be the only one, keeps no copy
        self.known = KnownModules()

    def __reduce__(self) -> tuple[type[FreeCopies], tuple[()]]:
        return FreeCopies, ()

    def take(self, network: nn.Module, evaluate: bool, owners: Collection[str] | None) -> LightCopy:
        """A free or new copy, for passes without hooks; see `LightCopy`."""
        free = self._free.setdefault((evaluate, owners is None), [])
        while free:
            try:
                copied = free.pop()
            except IndexError:  # another thread took the last copy
                break
            if copied.is_current():
                return copied
            self._missed += 1
        copied = LightCopy(network, evaluate=evaluate, hooks=False, owners=owners, known=self.known)
        if 0 <= self._missed < MAX_MISSED_COPIES:
            copied.remember()
        return copied

    def put(self, copied: LightCopy, evaluate: bool, owners: Collection[str] | None, *, unchanged: bool) -> None:
        """Return a copy after its pass; `unchanged` is the result of `LightCopy.write_back`."""
        free = self._free[evaluate, owners is None]
        if unchanged and len(free) < MAX_FREE_COPIES:
            free.append(copied)
            self._missed = 0
        else:
            self._missed += 1
