"""Dataclasses of arrays, numbers and texts as plain data, for files, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np


class Plain:
    """Base of dataclasses whose fields are plain data, arrays, tuples of these, or such dataclasses themselves."""

    def config(self) -> dict[str, Any]:
        """As plain data."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def restore(cls, config: Mapping[str, Any]) -> Self:
        """From `config`: numbers, texts, arrays, tuples and dataclasses become what annotations say, all else stays as it is.

        Fields that an earlier version did not write have their defaults.
        """
        kinds = get_type_hints(cls)
        known = [entry.name for entry in fields(cls) if entry.name in config]  # type: ignore[arg-type]
        return cls(**{name: _restored(kinds[name], config[name]) for name in known})


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
