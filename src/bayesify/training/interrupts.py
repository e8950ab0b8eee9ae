"""Ctrl-C that waits for the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupt() -> Iterator[threading.Event]:
    """Delay the first Ctrl-C, which sets the event, so that a loop can finish and save. A second Ctrl-C interrupts at once.

    The SIGINT handler is replaced in the main thread only. In other threads, or if the present handler is not Python's, the handler
    is kept.
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
