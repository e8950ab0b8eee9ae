"""Registry of the types that `save` and `load` can store: `Serializable` classes and plain modules."""

from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from bayesify.arguments.plugins import plugins
from bayesify.network import BayesianNetwork
from bayesify.predictor import Serializable, Trainable

MODULE_NAME = "Module"
"""Name of a plain module in files."""
STORED_CLASSES: dict[str, type[Serializable]] = {}
"""Classes that `save` accepts, by their names in files."""
MODULES_BY_KIND: dict[str, str] = {}
"""Modules that register classes with optional dependencies, by the name of the class in files. A module is imported when a file
contains its class. `bayesify.public` fills this dictionary, because `storage` may not import these modules."""

Kind = TypeVar("Kind", bound=type[Serializable])


def register_predictor(kind: Kind) -> Kind:
    """Decorator that registers a predictor, or another `Serializable` class, for `save` and `load`.

    Files refer to the class by its name. Objects of a subclass are stored under the name of the registered class.

    Raises:
        TypeError: If the class is not `Serializable`. Every `Predictor` is `Serializable`.
        ValueError: If the name is already registered.
    """
    if not (isinstance(kind, type) and issubclass(kind, Serializable)):
        raise TypeError(
            f"register_predictor: {kind!r} is not a predictor class; give a class that inherits from bayesify.predictor.Predictor"
        )
    if kind.__name__ in (*STORED_CLASSES, MODULE_NAME):
        found = f"the name {kind.__name__!r} is already registered"
        raise ValueError(f"register_predictor: {found}; give the class another name")
    STORED_CLASSES[kind.__name__] = kind
    return kind


def find_stored(name: str) -> type[Serializable] | None:
    """The class that a file names, or `None`. If the name is unknown, packages that register classes by entry points are loaded.
    Raises `ImportError` if the class needs a package that is not installed."""
    if name not in STORED_CLASSES and name in MODULES_BY_KIND:
        import_module(MODULES_BY_KIND[name])
    elif name not in STORED_CLASSES:
        plugins()
    return STORED_CLASSES.get(name)


def stored_name(model: Any) -> str:
    """The name under which an object is stored: the name of its class, or of its nearest registered base class. Raises
    `TypeError` if no base class is registered, or if the object is a stack of models."""
    if isinstance(model, Trainable) and model.num_models is not None:
        found = f"{type(model).__name__} is a stack of several models"
        raise TypeError(f"save: {found}; save each model that unstack() returns")
    names = {kind: name for name, kind in STORED_CLASSES.items()} | {nn.Module: MODULE_NAME}
    for base in type(model).__mro__:
        if base in names:
            return names[base]
    known = f"the known types are {', '.join(names.values())} (see register_predictor)"
    raise TypeError(f"save: {type(model).__name__} cannot be stored; {known}")


register_predictor(BayesianNetwork)
