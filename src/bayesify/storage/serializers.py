"""Which types can be stored: predictors by their contract, and plain modules; `save_load` does the writing and reading."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from bayesify.network import BayesianNetwork
from bayesify.predictor import Predictor

MODULE = "Module"
"""Name of a plain module in files."""
STORED: dict[str, type[Predictor]] = {}
"""Every predictor that `save` takes, by its name in files."""

Kind = TypeVar("Kind", bound=type[Predictor])


def register_predictor(kind: Kind) -> Kind:
    """Teach `save` and `load` a predictor, under the name of its class; a decorator. Subclasses are stored as it is.

    Raises:
        TypeError: If it is no `Predictor`.
        ValueError: If the name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, Predictor)):
        raise TypeError(f"register_predictor: {kind!r}; give a class that inherits from bayesify.predictor.Predictor")
    if kind.__name__ in (*STORED, MODULE):
        raise ValueError(f"register_predictor: {kind.__name__!r} is taken; give the class another name")
    STORED[kind.__name__] = kind
    return kind


def stored_name(model: Any) -> str:
    """The name under which an object is stored: that of its class, or of the nearest registered class it inherits from.

    Raises:
        TypeError: If there is none.
    """
    names = {kind: name for name, kind in STORED.items()} | {nn.Module: MODULE}
    for base in type(model).__mro__:
        if base in names:
            return names[base]
    known = ", ".join(names.values())
    raise TypeError(f"save: {type(model).__name__} cannot be stored; known: {known} (see register_predictor)")


register_predictor(BayesianNetwork)
