"""Random numbers of a training run: one stream for data, one for the network, each of which can be set back."""

from __future__ import annotations

import hashlib
import json
import operator
import random
import types
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


class NumpyGenerator:
    """A generator of NumPy with the state of one of torch: bytes in a tensor.

    Args:
        bits: Its source of bits.
    """

    def __init__(self, bits: np.random.BitGenerator) -> None:
        self._bits = bits

    def get_state(self) -> Tensor:
        """All that decides what comes next."""
        text = json.dumps(self._bits.state, default=lambda values: values.tolist())
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """Inverse of `get_state`."""
        self._bits.state = json.loads(bytes(state.tolist()))


def loader_generators(loader: Any) -> list[torch.Generator | NumpyGenerator]:
    """The generators of torch and NumPy that a loader, its samplers and its dataset hold, each once.

    Attributes, lists and dicts are looked through, 1,000 objects at most and no container of more than 100.
    """
    found: list[torch.Generator | NumpyGenerator] = []
    seen: dict[int, Any] = {}
    waiting = [loader]
    while waiting and len(seen) < 1000:
        one = waiting.pop(0)
        if id(one) in seen or isinstance(one, (type, Tensor, torch.nn.Module, types.FunctionType, types.ModuleType)):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Generator):
            found.append(one)
        elif isinstance(one, np.random.Generator):
            found.append(NumpyGenerator(one.bit_generator))
        elif isinstance(one, (list, tuple, dict)):
            parts = one.values() if isinstance(one, dict) else one
            waiting += parts if len(one) <= 100 else ()
        else:
            waiting += (part for name, part in getattr(one, "__dict__", {}).items() if name != "_iterator")
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
