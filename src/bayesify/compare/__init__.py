"""Comparison of all methods on your own table. It shows which method to use and how certain this choice is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesify.compare.comparison import Comparison, compare
    from bayesify.compare.question import Question
    from bayesify.tables.errors import InputError

__all__ = ["Comparison", "InputError", "Question", "compare"]


def __getattr__(name: str) -> Any:
    # Load on demand, because the command line imports this package to show its help.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("bayesify.compare.comparison"), name)  # it imports all of these names
