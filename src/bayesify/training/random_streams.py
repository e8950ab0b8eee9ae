"""Random streams of a training run: one for data and one for the network. The state of each stream can be restored."""

from __future__ import annotations  # annotations that name numpy.random would load it

import functools
import hashlib
import json
import random
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.arguments.checks import checked


@checked
def derive_seed(seed: int, *purpose: object) -> int:
    """Seed for one purpose of a run: 63 bits of a SHA-256 hash. Seeds for different purposes are independent."""
    plain = (part.item() if isinstance(part, np.generic) else part for part in purpose)
    text = repr((seed, *plain)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def iterate_seeded(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a loader with a random stream of its own, separate from the network's random numbers.

    Loaders shuffle and transform with torch's global generator. While an item is fetched, the global generator follows this
    stream; afterwards, it is restored to its previous state. Batches therefore do not depend on how many random numbers the
    network has used. If batches are skipped, the next batch is the same as if the skipped batches had been used.
    """
    state = torch.Generator().manual_seed(seed).get_state()
    iterator: Iterator[Any] | None = None
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            iterator = iter(loader) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield item


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, and restore them afterwards. Data transforms may use these generators."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global generator)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


class PlainGenerator:
    """Generator of NumPy or Python whose state is a tensor of bytes, as in torch."""

    def __init__(self, source: np.random.BitGenerator | np.random.RandomState | random.Random) -> None:
        self._source = source

    def get_state(self) -> Tensor:
        """State that determines the following random numbers."""
        source = self._source
        if isinstance(source, random.Random):
            state: Any = source.getstate()
        else:
            state = source.get_state(legacy=False) if isinstance(source, np.random.RandomState) else source.state
        text = json.dumps(state, default=lambda values: values.tolist())
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """Inverse of `get_state`."""
        plain = json.loads(bytes(state.tolist()))
        if isinstance(self._source, random.Random):
            version, words, gauss = plain
            self._source.setstate((version, tuple(words), gauss))
        elif isinstance(self._source, np.random.RandomState):
            plain["state"]["key"] = np.array(plain["state"]["key"], np.uint32)
            self._source.set_state(plain)
        else:
            self._source.state = plain


def loader_generators(loader: Any) -> list[torch.Generator | PlainGenerator]:
    """Generators of torch, NumPy and Python to which a loader, its samplers, its dataset or their functions refer, each listed
    once.

    The search covers attributes, lists, dicts, closures, and module globals that functions and methods use. It visits at most
    1,000 objects and no container with more than 100 entries.
    """
    found: list[torch.Generator | PlainGenerator] = []
    seen: dict[int, Any] = {}
    waiting = [loader]
    while waiting and len(seen) < 1000:
        one = waiting.pop(0)
        if id(one) in seen or isinstance(one, (type, Tensor, torch.nn.Module, types.ModuleType, random.SystemRandom)):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Generator):
            found.append(one)
        elif isinstance(one, np.random.Generator):
            waiting.append(one.bit_generator)
        elif isinstance(one, (np.random.BitGenerator, np.random.RandomState, random.Random)):
            found.append(PlainGenerator(one))
        else:
            waiting += _parts(one)
    return found


@contextmanager
def loader_generators_kept(loader: Any) -> Iterator[None]:
    """Context that restores the states of the `loader_generators` at its end."""
    generators = loader_generators(loader)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _parts(one: Any) -> list[Any]:
    numpy = np.random  # NumPy loads this module on first use
    kinds = (torch.Generator, numpy.Generator, numpy.BitGenerator, numpy.RandomState, random.Random)
    if isinstance(one, (list, tuple, dict)):
        return list(one.values() if isinstance(one, dict) else one) if len(one) <= 100 else []
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, functools.partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, types.FunctionType):
        named = (one.__globals__.get(name) for name in one.__code__.co_names)
        held = [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]  # skips empty cells
        return [*held, *(one.__defaults__ or ()), *(value for value in named if isinstance(value, kinds))]
    own = [part for name, part in getattr(one, "__dict__", {}).items() if name != "_iterator"]
    for kind in type(one).__mro__:
        if kind.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "typing", "abc", "collections"):
            own += (getattr(one, name, None) for name in kind.__dict__.get("__slots__", ()))
            own += (part for part in vars(kind).values() if isinstance(part, (types.FunctionType, *kinds)))
    return own


def set_network_state(state: Tensor, device: torch.device) -> None:
    """Set the global generators from the concatenated `generator_states`. The device's state may be missing."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda" and state.numel() > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)
