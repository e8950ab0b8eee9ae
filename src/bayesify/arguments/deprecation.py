"""The warning for names and arguments that will be removed."""

import inspect
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])


def warn_deprecated(old: str, new: str, *, since: str, removed_in: str) -> None:
    """Warn that a public name or argument will be removed. The warning points to the line of the user's code that led to it.

    The warning is a `FutureWarning`, which, unlike a `DeprecationWarning`, Python shows to all users by default. The old name
    works until the version `removed_in`. A test fails if the version `removed_in` still contains this warning. `old` and `new` are
    the names as users write them, such as `"fit(rate=...)"`, and `since` is the version that first warns, such as `"0.3"`.
    """
    here = inspect.currentframe()
    frame, level = here.f_back if here else None, 2
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{old} is deprecated since bayesify {since} and will be removed in {removed_in}; use {new}",
        FutureWarning,
        stacklevel=level,
    )
