"""What goes wrong with data or a folder that the user can mend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGEST, SMALLEST_SPREAD = 1e150, 1e-150
"""Numbers whose squares, and spreads whose squares, float64 still holds."""


class InputError(ValueError):
    """Data, options or a folder that cannot be worked with; the message names the thing and the remedy.

    `for_command` is the message with options of the command line, where an estimator's message has none.
    """

    for_command: str = ""


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a table that has two columns of one name.

    Raises:
        InputError: With the places of both.
    """
    if len(set(names)) == len(names):
        return
    places: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(str(place + 1))
    name, found = next(entry for entry in places.items() if len(entry[1]) > 1)
    raise InputError(f"{where}: columns {' and '.join(found)} are both called {name!r}; rename one of them")


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def check_magnitude(what: str, values: np.ndarray) -> None:
    """Refuse numbers whose variance float64 cannot hold.

    Args:
        what: What messages call them, with the remedy's object, such as `the target 'y'`.
        values: Numbers, NaN and infinite ones aside, [N].

    Raises:
        InputError: If one is larger than `LARGEST`, or all differ by less than `SMALLEST_SPREAD`.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return
    largest = known[np.abs(known).argmax()]
    if abs(largest) > LARGEST:
        raise InputError(f"{what} holds {largest:g}, and numbers are taken up to {LARGEST:g}; give it in a larger unit")
    if 0 < known.max() - known.min() < SMALLEST_SPREAD:
        raise InputError(
            f"{what} holds numbers that differ by {known.max() - known.min():g} at most, less than {SMALLEST_SPREAD:g}; give it "
            "in a smaller unit"
        )
