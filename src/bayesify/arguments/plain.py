"""Conversion between plain data for files and dataclasses that contain arrays, numbers and strings."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np


class Plain:
    """Base of dataclasses whose fields are plain data, arrays, other `Plain` dataclasses, or tuples of these."""

    def config(self) -> dict[str, Any]:
        """All fields as plain data."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def restore(cls, config: Mapping[str, Any]) -> Self:
        """The dataclass that `config` describes.

        Values whose annotation is a number, string, array, tuple or `Plain` dataclass are converted to that type; all other values
        stay unchanged. A field that has a default may be missing, as in a file of an earlier version.
        """
        kinds, found = get_type_hints(cls), {}
        for entry in fields(cls):  # type: ignore[arg-type]
            optional = entry.default is not MISSING or entry.default_factory is not MISSING
            if entry.name in config or not optional:
                found[entry.name] = _restored(kinds[entry.name], config[entry.name])
        return cls(**found)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Plain):
        return value.config()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _restored(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:  # tuple[kind, ...]
        return tuple(_restored(get_args(kind)[0], entry) for entry in value)
    if isinstance(kind, type) and issubclass(kind, Plain):
        return kind.restore(value)
    if kind is np.ndarray:
        return np.array(value)
    return kind(value) if kind in (bool, int, float, str) else value
