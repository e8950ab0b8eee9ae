"""Random numbers of a training run: one stream for data, one for the network, each of which can be set back."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_seed(seed: Any, owner: str = "fit") -> int:
    """A seed as Python's integer, so that NumPy's 1 is 1.

    Raises:
        TypeError: If it is not an integer; a boolean is none.
    """
    try:
        if isinstance(seed, (bool, np.bool_)):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"{owner}: seed={seed!r}; give an integer") from None


def derive_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose of a run, unrelated to the seeds of its other purposes: 63 bits of a SHA-256."""
    plain = (part.item() if isinstance(part, np.generic) else part for part in purpose)
    text = repr((check_seed(seed, "derive_seed"), *plain)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class DataStream:
    """torch's global random numbers as a loader sees them, apart from those that the network uses.

    Loaders shuffle and transform with the global generator. Inside `active` it is this stream's; outside it is what it was.
    A batch then does not depend on how many random numbers the network took, and skipping batches leads to the same
    next one.

    Args:
        seed: Where the stream starts.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the stream torch's global one for a while."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """What a loader yields, each item fetched inside the stream."""
        with self.active():
            iterator = iter(loader)
        while True:
            with self.active():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Start the global generators of Python and NumPy, which transforms of data may use, at a seed; set them back after."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (that one is global)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers were given, each once."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners = [loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def network_state(device: torch.device) -> Tensor:
    """State of the global generators that a network on a device uses: CPU, then the device's own."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_network_state(state: Tensor, device: torch.device) -> None:
    """Inverse of `network_state`; a state from a machine without this device sets the CPU's only."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda" and state.numel() > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)
