"""Which types can be stored: those with the contract `Serializable`, and plain modules; `save_load` writes and reads."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from bayesify.arguments.plugins import plugins
from bayesify.network import BayesianNetwork
from bayesify.predictor import Serializable, Trainable

MODULE = "Module"
"""Name of a plain module in files."""
STORED: dict[str, type[Serializable]] = {}
"""Everything that `save` takes, by its name in files."""
MODULES_BY_KIND: dict[str, str] = {}
"""Modules that register what needs an optional package, by its name in files; imported when a file holds one. This layer knows none
of them: `bayesify.public` fills it."""

Kind = TypeVar("Kind", bound=type[Serializable])


def register_predictor(kind: Kind) -> Kind:
    """Teach `save` and `load` a predictor, or something else that is `Serializable`, under the name of its class; a decorator.

    Subclasses are stored as it is.

    Raises:
        TypeError: If it is not `Serializable`, as a `Predictor` is.
        ValueError: If the name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, Serializable)):
        raise TypeError(f"register_predictor: {kind!r}; give a class that inherits from bayesify.predictor.Predictor")
    if kind.__name__ in (*STORED, MODULE):
        raise ValueError(f"register_predictor: {kind.__name__!r} is taken; give the class another name")
    STORED[kind.__name__] = kind
    return kind


def find_stored(name: str) -> type[Serializable] | None:
    """The class that a file names, `None` where there is none. Packages that add methods by entry points are asked last.

    Raises:
        ImportError: If it needs a package that is not installed.
    """
    if name not in STORED and name in MODULES_BY_KIND:
        import_module(MODULES_BY_KIND[name])
    elif name not in STORED:
        plugins()
    return STORED.get(name)


def stored_name(model: Any) -> str:
    """The name under which an object is stored: that of its class, or of the nearest registered class it inherits from.

    Raises:
        TypeError: If there is none.
    """
    if isinstance(model, Trainable) and model.num_models is not None:
        raise TypeError(f"save: {type(model).__name__} is several models; save each of those that unstack() gives")
    names = {kind: name for name, kind in STORED.items()} | {nn.Module: MODULE}
    for base in type(model).__mro__:
        if base in names:
            return names[base]
    known = ", ".join(names.values())
    raise TypeError(f"save: {type(model).__name__} cannot be stored; known: {known} (see register_predictor)")


register_predictor(BayesianNetwork)
