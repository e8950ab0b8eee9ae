"""CUDA graphs for draws, training steps and function-space KLs. A graph replays many kernel launches as one, on fixed memory."""

import gc
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

WARMUP_CALLS = 3
"""Number of plain calls before a capture, which is expensive. Libraries choose their kernels in the first calls."""

CAPTURE_LOCK = threading.RLock()
"""Lock held during a capture, because garbage collection is then off for the whole process."""

Result = TypeVar("Result")
Made = TypeVar("Made")


@dataclass
class Kind(Generic[Made]):
    """One kind of call, and its capture if there is one."""

    state: Any  # what the capture depends on besides the kind, for example the addresses of the tensors that it reads
    calls: int = 0  # number of calls in this state
    made: Made | None = None
    refused: bool = False  # whether a capture failed
    held: object = None  # object that must live as long as this entry, such as a generator whose id is in the kind


class Captures(Generic[Made]):
    """The captures of one owner, one for each kind of call.

    A kind of call is captured after `WARMUP_CALLS` calls of this kind in the same state. If the state changes, the count starts
    again and the old graph is dropped. A failed capture is not tried again in the same state. Calls then run without a graph, and
    `reason` says why. Graphs belong to a process and to the memory of their owner, so copies and pickles of this object are
    empty.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit  # number of most recently used kinds that are kept
        self._kinds: dict[Hashable, Kind[Made]] = {}
        self.reason = ""  # why a capture failed

    def known(self, kind: Hashable) -> Kind[Made] | None:
        """The entry for a kind; the kind now counts as the most recently used one."""
        found = self._kinds.pop(kind, None)
        if found is not None:
            self._kinds[kind] = found
        return found

    def calls(self, kind: Hashable) -> int:
        """Number of calls of a kind in its current state."""
        return self._kinds[kind].calls if kind in self._kinds else 0

    def find(self, kind: Hashable, state: Any, make: Callable[[], Made], held: object = None) -> Made | None:
        """The capture for a call; `None` if the call must run without a capture. For `state` and `held` see `Kind`.

        `make` captures the call, or raises `RuntimeError`, `ValueError` or `NotImplementedError` if this is impossible.
        """
        with CAPTURE_LOCK:
            entry = self.known(kind)
            if entry is None or entry.state != state:
                entry = self._kinds[kind] = Kind(state)
            entry.calls, entry.held = entry.calls + 1, held
            if entry.made is None and not entry.refused and entry.calls > WARMUP_CALLS:
                try:
                    entry.made = make()
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    entry.refused = True
                    self.reason = self.reason or (str(error).strip().splitlines() or [type(error).__name__])[0]
            while self._limit is not None and len(self._kinds) > self._limit:
                del self._kinds[next(iter(self._kinds))]
            return entry.made

    def clear(self) -> None:
        """Forget all kinds."""
        self._kinds.clear()

    def __reduce__(self) -> tuple[type[Self], tuple[int | None]]:
        return type(self), (self._limit,)


class Captured(Generic[Result]):
    """A captured function, with the memory that its graph reads and the memory that every replay writes.

    The function reads `inputs`, which `replay` fills. The function must have run on a `side_stream` before the capture. The
    function draws random numbers from `generators` and from torch's generator of the device; if the capture fails, the states of
    these generators are restored. Graphs that never run at the same time may share a memory pool. Every replay overwrites
    `results`, which is the return value of the function.
    """

    def __init__(
        self,
        run: Callable[[], Result],
        inputs: Sequence[Tensor] = (),
        generators: Sequence[torch.Generator | None] = (),
        pool: Any = None,
    ) -> None:
        self._inputs = [tensor.detach() for tensor in inputs]
        self._graph, self.results = _capture(run, generators, pool)

    @torch.no_grad()
    def replay(self, given: Sequence[Tensor | None] = ()) -> Result:
        """Run the graph on the given inputs, where `None` means zeros. The returned results are valid until the next replay."""
        pairs = [(mine, one) for mine, one in zip(self._inputs, given, strict=True) if one is not None]
        if pairs:
            torch._foreach_copy_([mine for mine, _ in pairs], [one for _, one in pairs], non_blocking=True)
        for mine, one in zip(self._inputs, given, strict=True):
            if one is None:
                mine.zero_()
        self._graph.replay()
        return self.results

    def pool(self) -> Any:
        """Memory pool of the graph; other graphs may share it if they never run at the same time as this graph."""
        return self._graph.pool()


@contextmanager
def side_stream() -> Iterator[None]:
    """Context that runs calls on a separate stream, as is required before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def watch_waits() -> Iterator[list[str]]:
    """Yield a list that names, after the context, the places at which the code inside waited for the device."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif "prototype" not in str(warning.message):  # torch warns that this mode is a prototype
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _capture(
    run: Callable[[], Result], generators: Sequence[torch.Generator | None], pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a function as a graph. Return the graph and the function's return value; see `Captured`."""
    graph = torch.cuda.CUDAGraph()
    given = [generator for generator in generators if generator is not None]
    for generator in given:
        graph.register_generator_state(generator)
    drawn = [*given, torch.cuda.default_generators[torch.cuda.current_device()]]
    before = [generator.get_state() for generator in drawn]
    gc.collect()  # freeing a graph during another capture would break the capture
    enabled, stream = gc.isenabled(), torch.cuda.Stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
    except BaseException:
        for generator, state in zip(drawn, before, strict=True):
            fresh = torch.Generator(generator.device)  # the failed capture has made the generator's state unusable
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh)
        raise
    finally:
        if enabled:
            gc.enable()
    # Before a capture, torch sets the generators' offsets on the device to zero, on the capture's stream. A replay sets the
    # offsets on its own stream. Without this wait, a busy device could set them to zero last, and the first replay would repeat
    # old random numbers.
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result
