"""Import of optional packages, with an error that says how to install them."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from bayesify.arguments.installing import how_to_install


def load(module: str, *, extra: str, owner: str) -> Any:
    """Import a module of an optional package. `extra` is the extra of bayesify that installs the package; `owner` is
    the caller's name in messages.

    Warnings of the package during the import are hidden, because the caller can do nothing about them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(module)
    except ImportError as error:
        raise ImportError(f"{owner}: {module.partition('.')[0]} is not installed; {how_to_install(extra)}") from error
