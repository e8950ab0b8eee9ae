"""Other people's methods: what installed packages offer by entry points of the group `bayesify.methods`."""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import entry_points
from typing import Any

from bayesify.arguments.suggestions import reason_of

GROUP = "bayesify.methods"


@functools.cache
def plugins() -> tuple[tuple[str, Any], ...]:
    """Pairs of an entry point's own words, `name = module:object`, and its object; loaded in the first call.

    An entry point that cannot be loaded is skipped with a warning.
    """
    found = []
    for point in entry_points(group=GROUP):
        source = f"{point.name} = {point.value}"
        try:
            found.append((source, point.load()))
        except Exception as error:  # whatever somebody else's module sets off
            warnings.warn(f"{GROUP}: the entry point {source!r} is skipped: {reason_of(error)}", stacklevel=2)
    return tuple(found)


def plain_name(name: str) -> str:
    """The spelling by which names and aliases are compared."""
    return name.lower().replace("-", "_")
