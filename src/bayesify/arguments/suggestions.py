"""Words for error messages: the name that was meant, and the reason of a failure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """Words for an error message: the nearest known name, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def reason_of(error: Exception, max_length: int = 300) -> str:
    """An error in a table of results: its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return words if len(words) <= max_length else words[: max_length - 1] + "…"
