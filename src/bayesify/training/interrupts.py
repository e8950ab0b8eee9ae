"""Ctrl-C that waits for the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Context manager that delays the first Ctrl-C, so that a loop can finish its step and save; a second one interrupts at once.

    It replaces the SIGINT handler in the main thread only. In other threads, or if the present handler is not Python's, it does
    nothing.

    Attributes:
        requested: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> DelayedInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            self._previous(number, frame)
        self.requested = True

    def _restore(self) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def __exit__(self, *error: object) -> None:
        self._restore()
