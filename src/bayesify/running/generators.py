"""torch's global random generators, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_IN_USE = threading.RLock()


@contextmanager
def own_generators(devices: Iterable[torch.device | int] = ()) -> Iterator[None]:
    """torch's global generators for this thread alone, set back at the end; a second thread that asks for them waits.

    Two trainings at once would otherwise take each other's random numbers. Predictions with a generator of their own never
    come here.
    """
    with _IN_USE, torch.random.fork_rng(devices=list(devices)):
        yield
