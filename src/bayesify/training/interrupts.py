"""A way to let the current step finish after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupt() -> Iterator[threading.Event]:
    """Delay the first Ctrl-C so that a loop can finish its step and save. The first Ctrl-C only sets the event. A
    second Ctrl-C interrupts at once.

    The SIGINT handler is replaced in the main thread only. Other threads, and handlers that are not Python's own, are
    left alone.
    """
    requested = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if in_main_thread else None
    if not callable(previous):
        yield requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            signal.signal(signal.SIGINT, previous)
            previous(number, frame)
        requested.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, previous)
