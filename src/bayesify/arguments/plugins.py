"""Third-party methods: entry points of the group `bayesify.methods` in installed packages."""

import functools
import warnings
from importlib.metadata import entry_points
from typing import Any

from bayesify.arguments.suggestions import reason_of

GROUP = "bayesify.methods"


@functools.cache
def plugins() -> tuple[tuple[str, Any], ...]:
    """One pair per entry point: the text `name = module:object`, and the object that it names. The first call loads the objects.

    An entry point that cannot be loaded is skipped with a warning.
    """
    found = []
    for point in entry_points(group=GROUP):
        source = f"{point.name} = {point.value}"
        try:
            found.append((source, point.load()))
        except Exception as error:  # a third-party module may raise anything
            warnings.warn(
                f"{GROUP}: the entry point {source!r} could not be loaded and is skipped: {reason_of(error)}",
                stacklevel=2,
            )
    return tuple(found)


def plain_name(name: str) -> str:
    """The name in a normalized spelling, for comparing names and aliases."""
    return name.lower().replace("-", "_")
