"""CUDA graphs: many launches as one, on fixed memory; what captures of draws, divergences and steps share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

WARMUP_CALLS = 3
"""Calls of a kind before it is captured: a capture costs many calls, and libraries choose their kernels in the first ones."""

Result = TypeVar("Result")


@contextmanager
def side_stream() -> Iterator[None]:
    """Run on a stream of its own, as calls before a capture must."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def watch_waits() -> Iterator[list[str]]:
    """A list that is filled, at the end, with the places where the code inside waited for the device."""
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
        elif "prototype" not in str(warning.message):  # torch says that of this mode
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def capture(
    run: Callable[[], Result], generators: Sequence[torch.Generator | None] = (), pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a function of fixed memory, which has run before on a `side_stream`; it does not run in the capture.

    Args:
        run: The function.
        generators: What it draws from, besides torch's own generator of the device.
        pool: Memory that graphs share which never run at the same time.

    Returns:
        The graph, and what the function returned: memory that every replay writes. Where it cannot be captured, generators are as
        they were.
    """
    graph = torch.cuda.CUDAGraph()
    given = [generator for generator in generators if generator is not None]
    for generator in given:
        graph.register_generator_state(generator)
    drawn = [*given, torch.cuda.default_generators[torch.cuda.current_device()]]
    before = [generator.get_state() for generator in drawn]
    gc.collect()  # a graph that dies while another one is captured would break it
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
    except BaseException:
        for generator, state in zip(drawn, before, strict=True):
            fresh = torch.Generator(generator.device)  # a state that was being captured is of no more use
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh)
        raise
    finally:
        if enabled:
            gc.enable()
    return graph, result
