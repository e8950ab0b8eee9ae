"""Parts of error messages: the name that the user probably meant, and the reason for a failure."""

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name most similar to a given name, regardless of case; `None` if no similarity reaches `cutoff`."""
    folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the closest known name, or all known names if none is close."""
    known = list(known)
    near = closest(name, known)
    return f"did you mean {near!r}?" if near is not None else f"known: {', '.join(known)}"


def reason_of(error: Exception, max_length: int = 300) -> str:
    """The type of an error and the first line of its message, as one line for a table of results."""
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return words if len(words) <= max_length else words[: max_length - 1] + "…"
