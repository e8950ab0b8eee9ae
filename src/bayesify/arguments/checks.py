"""Checks that the arguments of public calls have the annotated types and ranges.

`@checked` on a function, a method or a class (its `__init__`) compares the arguments with the annotations. A wrong argument raises
an error such as `InducingWeights: rows=0; give at least 1`. Annotations such as `Positive` and `Count`, which are
defined below, give ranges.
"""

import functools
import inspect
import numbers
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.arguments.suggestions import closest

MAX_FLOAT32 = 3.4e38
"""Largest magnitude that float32 holds; larger numbers become infinite."""
FINITE_WORDS = "a finite number, at most 3.4e38"
MAX_COUNT = 10**9
"""Largest allowed count of stored objects or of sequential steps."""


class BadArgument(ValueError, TypeError):
    """An argument's value has the wrong type or is out of range."""


@dataclass(frozen=True)
class Range:
    """The range of numbers that an annotation allows; `None` means no limit."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __repr__(self) -> str:
        """The text shows only the limits that are set, because `help` prints it for every argument with a range."""
        return f"Range({', '.join(f'{name}={limit}' for name, limit in vars(self).items() if limit is not None)})"

    def words(self, value: Any, kind: str) -> str | None:
        """The part of the error message that says which values are valid; `None` if the value is in range."""
        number = isinstance(value, numbers.Real)
        if (self.least, self.below) == (0, 1) and not (number and 0 <= value < 1):
            return f"{kind} of at least 0 and below 1"
        if (self.above, self.below) == (0, 1) and not (number and 0 < value < 1):
            return f"{kind} strictly between 0 and 1"
        if self.least is not None and not (number and value >= self.least):
            return f"{kind} of at least {self.least}"
        if self.above is not None and not (number and value > self.above):
            return f"a positive {kind.split()[-1]}" if self.above == 0 else f"{kind} above {self.above}"
        if self.most is not None and not (number and value <= self.most):
            return f"{kind} of at most {self.most:,}"
        if self.below is not None and not (number and value < self.below):
            return f"{kind} below {self.below:,}"
        return None


def _device_words(value: Any) -> str | None:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return "a device such as 'cpu' or 'cuda:0'"
    return None


def _inputs_words(value: Any) -> str | None:
    if isinstance(value, np.ndarray):
        return "a tensor, made by torch.from_numpy"
    plain = isinstance(value, str | bytes | os.PathLike | numbers.Number | types.FunctionType | type)
    if value is None or plain or type(value) is object or (isinstance(value, list | tuple | Mapping) and not value):
        return "inputs of the network: a tensor, or a tuple or dict of tensors"
    return None


def _budget_words(value: Any) -> str | None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    fits = value is None or isinstance(value, str) or (whole and value >= 1)
    return None if fits else "a positive number of bytes, or text such as '1GiB'"


Budget = Annotated[Any, _budget_words]
"""Memory budget: bytes, a string such as `"1GiB"`, or `None` for the default."""
Inputs = Annotated[Any, _inputs_words]
"""Inputs of a network."""
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
"""A number from 0 to 1, both included."""
Probability = Annotated[float, Range(least=0, below=1)]
"""A number from 0 to 1, with 0 included and 1 excluded."""
Level = Annotated[float, Range(above=0, below=1)]
"""A number strictly between 0 and 1."""
Count = Annotated[int, Range(least=1, most=MAX_COUNT)]
CountOrZero = Annotated[int, Range(least=0, most=MAX_COUNT)]
DataCount = Annotated[int, Range(least=1)]
"""Number of examples, without an upper limit, because examples need not be in memory."""
Memory = Annotated[int, lambda value: None if value >= 1 else "a positive number of bytes"]
Seed = Annotated[int, Range(least=0, below=2**63)]
Axis = Annotated[int, Range(least=-8, most=8)]
Index = Annotated[int, Range(least=-(2**31), below=2**31)]
Device = Annotated[str | torch.device, _device_words]


@dataclass(frozen=True)
class _Refused:
    """The reason why a value is refused: a description of the valid values, and whether the value has the right type."""

    words: str
    kind_fits: bool = False


Taker = Callable[[Any], Any]
"""Returns the accepted value, with integers and flags converted to Python's `int` and `bool`, or `_Refused`."""
T = TypeVar("T")
_ROOMS = ("priors", "likelihoods", "subnetwork")
"""Packages that messages name, because other packages have classes or functions of the same name."""
_NAMES_ELSEWHERE = {
    "learning_rate": ("lr", "step_size"),
    "epochs": ("n_epochs", "num_epochs", "max_epochs"),
    "validation": ("val_loader", "valid_loader", "validation_loader", "validation_data"),
    "progress": ("verbose",),
    "kl_weight": ("beta", "temperature"),
    "num_draws": ("n_samples", "num_samples", "samples", "S"),
    "seed": ("random_state",),
    "noise": ("sigma",),
    "init_std": ("sigma", "std"),
    "std": ("sigma",),
    "net": ("model", "network"),
    "bnn": ("model", "network"),
    "patience": ("early_stopping",),
}
"""Our argument names, each with the names that other libraries use for the same argument."""


def checked(thing: T) -> T:
    """Decorator that compares the arguments of a function, or of a class's `__init__`, with their annotations.

    It checks the types `bool`, `int`, `float`, `str`, `Literal`, tensors, generators, functions, paths, classes, sequences and
    mappings (including their entries). For the annotation `bool`, numbers such as 0 and 1 are refused. For the annotation `int`,
    a value must work with `operator.index`; booleans and tensors are refused. For the annotation `float`, a value must be a real
    number in the range of float32. Other annotations (`Any`, type variables, protocols) accept everything. Inside a function
    compiled by `torch.compile`, nothing is checked.
    """
    if isinstance(thing, type):
        if "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__)  # type: ignore[misc]
        return thing
    function: Any = thing
    plan: list[tuple[str, Taker | None]] | None = None
    by_name: dict[str, Taker] = {}
    names: set[str] = set()  # all argument names; empty if the function has **kwargs

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if plan is None:
            plan = _plan(function, by_name, names)
        values = None
        for index, value in enumerate(args[: len(plan)]):
            name, take = plan[index]
            if take is not None and (taken := take(value)) is not value:
                values = list(args) if values is None else values
                values[index] = _answer(function, args, name, value, taken)
        for name, value in kwargs.items():
            known = by_name.get(name)
            if known is None and names and name not in names:
                raise TypeError(_unknown(_owner(function, args), name, names))
            if known is not None and (taken := known(value)) is not value:
                kwargs[name] = _answer(function, args, name, value, taken)
        return function(*(args if values is None else values), **kwargs)

    return call  # type: ignore[return-value]


def refuse(owner: str, name: str, value: Any, words: str) -> BadArgument:
    """The error for a refused value, `Owner: name=value; give words`, where `words` describes the valid values."""
    return BadArgument(f"{owner}: {name}={shown(value)}; give {words}")


def shown(value: Any) -> str:
    """Text that represents a value in a message. A tensor is represented by its shape, and long text is shortened."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} {list(value.shape)}"
    if callable(value) or isinstance(value, nn.Module):
        return getattr(value, "__name__", type(value).__name__)
    try:
        text = repr(value)
    except Exception:  # a user's class may raise anything
        text = type(value).__name__
    text = type(value).__name__ if " object at 0x" in text else text
    return text if len(text) <= 60 else text[:59] + "…"


def _answer(function: Any, args: tuple[Any, ...], name: str, value: Any, taken: Any) -> Any:
    if not isinstance(taken, _Refused):
        return taken
    owner, words = _owner(function, args), taken.words
    if isinstance(value, nn.Module) and owner.startswith("subnetwork."):
        words += f"; give the network to Laplace: Laplace(net, likelihood, subset={owner}(...))"
    raise refuse(owner, name, value, words)


def _owner(function: Any, args: tuple[Any, ...]) -> str:
    """Name of a function in error messages."""
    whose, _, what = function.__qualname__.rpartition(".")
    if whose and args:
        whose = type(args[0]).__name__ if not isinstance(args[0], type) else args[0].__name__
    owner = whose if what == "__init__" else f"{whose}.{what}" if whose else what
    room = next((part for part in function.__module__.split(".") if part in _ROOMS), None)
    return f"{room}.{owner}" if room else owner


def _unknown(owner: str, name: str, names: set[str]) -> str:
    """Message for an unknown argument: the argument that the user probably meant, or all arguments."""
    elsewhere = (own for own, others in _NAMES_ELSEWHERE.items() if name in others and own in names)
    meant = next(elsewhere, None) or closest(name, names, cutoff=0.6)
    remedy = f"use {meant} instead" if meant else f"it takes {', '.join(sorted(names - {'self'}))}"
    return f"{owner}: got an unexpected keyword argument {name!r}; {remedy}"


def _plan(function: Any, by_name: dict[str, Taker], accepted: set[str]) -> list[tuple[str, Taker | None]]:
    names = dict(vars(sys.modules[function.__module__]))
    plan: list[tuple[str, Taker | None]] = []
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted.update(parameter.name for parameter in parameters)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        take = _taker(_evaluate(parameter.annotation, names))
        if take is not None:
            by_name[parameter.name] = take
        if parameter.kind is not parameter.KEYWORD_ONLY:
            plan.append((parameter.name, take))
    return plan


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except (NameError, TypeError, AttributeError):  # an annotation uses a name imported under TYPE_CHECKING
        return Any


def _taker(annotation: Any) -> Taker | None:
    """A function that checks values against an annotation; `None` if the annotation accepts everything."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin is Annotated:
        return _with_conditions(_taker(parts[0]), parts[1:])
    if origin in (Union, types.UnionType):
        return _any_of([_taker(part) for part in parts])
    if origin is Literal:
        return _choice(parts)
    kind = origin if origin is not None else annotation
    if kind is Callable:
        return lambda value: value if callable(value) else _Refused("a function")
    if kind is Iterable:
        return _iterable
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return _collection("a dictionary", "value", Mapping, _taker(parts[1]) if len(parts) == 2 else None)
    if kind in (Sequence, list, tuple):
        return _collection("a list", "entry", Sequence | np.ndarray, _taker(parts[0]) if parts else None)
    says_nothing = kind in (object, Any, inspect.Parameter.empty) or getattr(kind, "_is_protocol", False)
    if not isinstance(kind, type) or says_nothing:
        return None
    words = f"a {kind.__name__}" if kind.__name__[0] not in "AEIOU" else f"an {kind.__name__}"
    words = _WORDS.get(kind, words + vars(kind).get("remedy", ""))
    return lambda value: value if isinstance(value, kind) else _Refused(words)


_WORDS: dict[type, str] = {
    Tensor: "a tensor",
    np.ndarray: "an array",
    nn.Module: "a torch.nn.Module",
    torch.Generator: "a torch.Generator",
}


def _whole(value: Any) -> Any:
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_ | Tensor):
        with suppress(TypeError):
            return operator.index(value)
    return _Refused("an integer")


def _real(value: Any) -> Any:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        return _Refused("a number")
    if not -MAX_FLOAT32 <= float(value) <= MAX_FLOAT32:
        return _Refused(FINITE_WORDS)
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    return value if isinstance(value, bool) else _Refused("True or False")


def _none(value: Any) -> Any:
    return None if value is None else _Refused("None")


_SIMPLE: dict[Any, Taker] = {
    int: _whole,
    float: _real,
    bool: _flag,
    str: lambda value: value if isinstance(value, str) else _Refused("a string"),
    Path: lambda value: value if isinstance(value, os.PathLike) else _Refused("a path"),
    type(None): _none,
    None: _none,
}


def _iterable(value: Any) -> Any:
    fits = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not fits or isinstance(value, str | bytes | Mapping | Tensor | np.ndarray):
        return _Refused("batches, such as a DataLoader")
    return value


def _choice(parts: tuple[Any, ...]) -> Taker:
    words = " or ".join(filter(None, (", ".join(map(repr, parts[:-1])), repr(parts[-1]))))
    return lambda value: (
        value if any(type(value) is type(part) and value == part for part in parts) else _Refused(words)
    )


def _any_of(takers: list[Taker | None]) -> Taker | None:
    known = [take for take in takers if take is not None]
    if len(known) < len(takers):
        return None

    def take(value: Any) -> Any:
        if value is None and _none in known:
            return None
        refusals = []
        for one in known:
            taken = one(value)
            if not isinstance(taken, _Refused):
                return taken
            refusals.append(taken)
        near = [refused for refused in refusals if refused.kind_fits] or refusals
        words = dict.fromkeys(refused.words for refused in near if refused.words != "None")
        return _Refused(" or ".join(words), near is not refusals)

    return take


def _with_conditions(base: Taker | None, conditions: tuple[Any, ...]) -> Taker | None:
    kind = "an integer" if base is _whole else "a number"
    ranges = [functools.partial(one.words, kind=kind) for one in conditions if isinstance(one, Range)]
    tests = [*ranges, *(one for one in conditions if not isinstance(one, Range) and callable(one))]

    def take(value: Any) -> Any:
        taken = value if base is None else base(value)
        if isinstance(taken, _Refused):
            number = value if taken.words == FINITE_WORDS else None
            words = ranges[0](number) if ranges else None
            return _Refused(words or taken.words, taken.kind_fits)
        for test in tests:
            if (words := test(taken)) is not None:
                return _Refused(words, True)
        return taken

    return take


def _collection(words: str, part: str, kind: Any, entry: Taker | None) -> Taker:
    def take(value: Any) -> Any:
        fits = isinstance(value, kind) and not isinstance(value, str | bytes)
        # An object that no entry can be: its refusal describes the entries.
        entries = (value.values() if isinstance(value, Mapping) else value) if fits else [object()]
        taken = () if entry is None else map(entry, entries)
        refused = next((one for one in taken if isinstance(one, _Refused)), None)
        if refused is not None:
            return _Refused(f"{words}, each {part} {refused.words}", fits and refused.kind_fits)
        return value if fits else _Refused(words)

    return take
