"""Parts of error messages: the name that the user probably meant, and the reason for a failure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the closest known name, or all known names if none is close."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def reason_of(error: Exception, max_length: int = 300) -> str:
    """A one-line summary of an error for a table of results: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return words if len(words) <= max_length else words[: max_length - 1] + "…"
