"""The packages that adapters stand on, imported with an error that names the extra."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def load(module: str, *, extra: str, owner: str) -> Any:
    """A module of another package.

    What the package itself announces or deprecates while it loads is not shown: the caller can do nothing about it.

    Args:
        module: Its dotted name.
        extra: The extra of bayesify that brings the package.
        owner: What needs it, for the message.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{owner}: {module.partition('.')[0]} is not installed; pip install 'bayesify[{extra}]'"
        ) from error
