"""The one list of methods: what `bayesianize`, the command line, the estimators and configuration files know by name."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bayesify.arguments.suggestions import suggest


@dataclass(frozen=True)
class Method:
    """One method as a user chooses it.

    Args:
        name: The name in code, configuration files and on the command line.
        title: A short name for tables and figures.
        paper: Author and year of the source.
        cost: Parameters it stores, relative to P weights, in words.
        posterior: The class that `bayesianize` takes for this name; `None` for methods that are not posteriors of a network.
        fit: A function that trains it on a `training.task.TrainingTask`. `None` for posteriors, which all train alike.
        used_as: What to call in code, below `bayesify`, for methods that are not posteriors of a network.
        options: Arguments of the posterior, or of the recipe, that suit small problems, for demo and comparison.
        aliases: Other names by which it is known in papers.
        slow: Whether it exceeds the demo's time budget for one method.
        extra: The module that an optional dependency provides, if the method needs one.
        trials: Options among which validation data may choose, the usual ones first.
        is_point: Whether its weights, or most of them, are point estimates: its training is the search for the maximum a posteriori
            already, and one before it would make the members of an ensemble alike.
        is_chain: Whether it is a Markov chain: its steps are draws, it weighs no rows, and it is too slow to be run several times.
        tunes_prior: Whether what it returns has `tune_prior_precision(loader)`, which needs no further training.
        starts_at_point: Whether its recipe first trains by `training.maximum_a_posteriori.train_point`.
        make: What its recipe trains by `fit`, a function of the same problem: a `Trainable` that a `ModelStack` takes. `None` for
            other recipes.
        draws_in_steps: Whether its recipe takes `num_draws`, the draws of the weights in a training step.
        starts_at_rows: Name of an option that takes rows of the training data, where a number of them is given.
        cost_rank: Place among methods from cheap to dear, from 1, by what is trained and stored; those without one come after.
        portfolio_place: Place in the list of what a comparison runs by default, which differ in kind and are cheap enough for many
            splits; `None` for others.
        max_layer_weights: Weights of one layer above which it is too large.
        max_weights: Weights in all above which it is too slow.
        demo_options: Options on one problem of the demonstration, by the problem's name.
        demo_epochs: How many times as many epochs it needs on one problem of the demonstration, by the problem's name.
    """

    name: str
    title: str
    paper: str
    cost: str
    posterior: type | None = None
    fit: Callable[..., Any] | None = None
    used_as: str = "bayesianize"
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    slow: bool = False
    extra: str | None = None
    trials: tuple[Mapping[str, Any], ...] = ()
    is_point: bool = False
    is_chain: bool = False
    tunes_prior: bool = False
    starts_at_point: bool = False
    make: Callable[..., Any] | None = None
    draws_in_steps: bool = False
    starts_at_rows: str | None = None
    cost_rank: int | None = None
    portfolio_place: int | None = None
    max_layer_weights: int | None = None
    max_weights: int | None = None
    demo_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    demo_epochs: Mapping[str, float] = field(default_factory=dict)

    @property
    def learns_noise(self) -> bool:
        """Whether it learns noise soundly; under a point estimate it would shrink to what a network that fits every row leaves."""
        return self.fit is None and not self.is_point

    @property
    def option_names(self) -> tuple[str, ...] | None:
        """Names of what its posterior takes, or its recipe after the problem; `None` where it takes any."""
        takes = [*inspect.signature(self.fit or self.posterior).parameters.values()][self.fit is not None :]  # type: ignore[arg-type]
        return None if any(each.kind is each.VAR_KEYWORD for each in takes) else tuple(each.name for each in takes)

    @property
    def status(self) -> str:
        """`"ready"`, or what has to be installed first."""
        if self.extra is None or find_spec(self.extra) is not None:
            return "ready"
        return f"needs {self.extra}"


class _Methods(UserDict[str, Method]):
    """Methods by name. The packages that register are read when the list is first looked at, not with this module: the command line
    knows its options without them. Whichever was read first, posteriors come first, then the packages in the order of `HOMES`."""

    HOMES = ("posteriors", "baselines", "deep_gp", "function_space", "laplace")

    def __init__(self) -> None:
        self._found: dict[str, Method] = {}

    @property
    def data(self) -> dict[str, Method]:  # type: ignore[override]
        import_module("bayesify.public")
        return self._found

    def add(self, method: Method) -> None:
        for name in (method.name, *method.aliases):
            if any(name == other.name or name in other.aliases for other in self._found.values()):
                raise ValueError(f"register: {name!r} is taken; give the method another name")
        self._found = dict(
            sorted([*self._found.items(), (method.name, method)], key=lambda entry: self._rank(entry[1]))
        )

    def _rank(self, method: Method) -> int:
        home = getattr(method.posterior or method.fit, "__module__", "").split(".")
        known = home[0] == "bayesify" and home[1] in self.HOMES
        return self.HOMES.index(home[1]) if known else len(self.HOMES)


METHODS = _Methods()
"""Every method by name."""


def register(method: Method) -> Method:
    """Add a method to the registry.

    Raises:
        ValueError: If the name or an alias is taken.
    """
    METHODS.add(method)
    return method


def get_method(name: str) -> Method:
    """A method by name or alias.

    Raises:
        ValueError: If there is none; the message suggests the nearest name.
    """
    wanted = name.lower().replace("-", "_")
    for method in METHODS.values():
        if wanted == method.name or wanted in {alias.lower().replace("-", "_") for alias in method.aliases}:
            return method
    raise ValueError(f"unknown method {name!r}; {suggest(wanted, METHODS)}")
