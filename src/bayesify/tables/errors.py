"""Errors in the user's data or folder, which the user can correct."""

from collections.abc import Sequence

import numpy as np

LARGEST, SMALLEST_SPREAD = 1e150, 1e-150
"""Largest number, and smallest spread of numbers, whose square float64 can hold."""


class InputError(ValueError):
    """Unusable data, options or folder; the message says what is wrong and how to correct it.

    `for_command` is the message for the command line, which names options; empty if it equals the usual message.
    """

    for_command: str = ""


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a table with two columns of the same name; the message gives their positions."""
    if len(set(names)) == len(names):
        return
    places: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(str(place + 1))
    name, found = next(entry for entry in places.items() if len(entry[1]) > 1)
    raise InputError(f"{where}: columns {' and '.join(found)} have the same name {name!r}; rename one of them")


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type if there is no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def check_magnitude(what: str, values: np.ndarray) -> None:
    """Refuse numbers [N] that are too large, or whose spread is too small, for float64 to represent their variance.

    NaN and infinite values are ignored. `what` names the numbers in messages, such as `the target 'y'`.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return
    largest = known[np.abs(known).argmax()]
    if abs(largest) > LARGEST:
        raise InputError(
            f"{what} holds {largest:g}, but numbers may be at most {LARGEST:g}; write the numbers in a larger unit"
        )
    if 0 < known.max() - known.min() < SMALLEST_SPREAD:
        raise InputError(
            f"{what} holds numbers that differ by at most {known.max() - known.min():g}, but they must differ by at least "
            f"{SMALLEST_SPREAD:g}; write the numbers in a smaller unit"
        )
