"""The list of all methods. A method either is a posterior of a network or has its own training function."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from bayesify import posteriors
from bayesify.arguments.installing import how_to_install
from bayesify.arguments.plugins import GROUP, plain_name, plugins
from bayesify.arguments.suggestions import suggest
from bayesify.baselines.from_task import fit_hmc, fit_microcanonical, fit_sghmc, fit_swag, natural_gradient_fit
from bayesify.baselines.ivon import IVON
from bayesify.baselines.noisy_kfac import NoisyKFAC
from bayesify.baselines.vogn import VOGN
from bayesify.configuration import CALLED_AS, names_and_aliases
from bayesify.deep_gp.from_task import fit_deep_gp, make_deep_gp
from bayesify.function_space.from_task import fit_function_space
from bayesify.laplace.from_task import fit_laplace, fit_subnetwork
from bayesify.posteriors import MatrixNormal, MeanField, Posterior
from bayesify.predictor import Predictor, Trainable


@dataclass(frozen=True)
class Method:
    """A method that a user can choose by name, with its properties.

    Args:
        name: The name in code, in configuration files and on the command line.
        title: A short name for tables and figures.
        paper: Author and year of the source.
        cost: Number of stored parameters for P weights, as text.
        posterior: The class that `bayesianize` takes for this name; `None` for methods that are not posteriors of a network.
        fit: A function that trains the method from a `TrainingTask`. `None` for posteriors, which all train the same way.
        options: Arguments of the posterior, or of `fit`, that suit small networks.
        aliases: Other names of the method in papers.
        slow: Whether a step is slow. A slow method takes fewer steps by default.
        extra: The module of an optional dependency, if the method needs one.
        is_point: Whether most or all weights are point estimates. If so, training itself is a search for the maximum a
            posteriori. No other search for the maximum precedes training, because it would make the members of an ensemble alike.
        is_chain: Whether the method is a Markov chain. A chain's steps are draws, and a chain is too slow to run several times.
        starts_at_point: Whether `fit` first calls `training.task.train_point`.
        make: A function that makes the `Trainable` that `fit` trains, for methods that `ModelStack` accepts.
        draws_in_steps: Whether `fit` takes `num_draws`, the number of weight draws per training step.
        starts_at_rows: Name of the option that gives the inducing inputs, for methods whose inducing inputs start at rows of the
            training data.
    """

    name: str
    title: str
    paper: str
    cost: str
    posterior: type[Posterior] | None = None
    fit: Callable[..., Predictor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    slow: bool = False
    extra: str | None = None
    is_point: bool = False
    is_chain: bool = False
    starts_at_point: bool = False
    make: Callable[..., Trainable] | None = None
    draws_in_steps: bool = False
    starts_at_rows: str | None = None

    @classmethod
    def of_posterior(cls, kind: type[Posterior]) -> Method:
        """The method for a posterior class, with the properties that the class declares."""
        named = ("name", "paper", "cost", "aliases", "slow", "is_point", "starts_at_rows")
        declared = {key: getattr(kind, key) for key in named}
        return cls(title=kind.title or kind.__name__, posterior=kind, options=kind.small_options, **declared)

    @property
    def used_as(self) -> str:
        """The attribute of `bayesify` that a user calls in code, as text."""
        if self.posterior is not None:
            return "bayesianize"
        return CALLED_AS.get(self.name, f"methods.get_method({self.name!r}).fit")

    @property
    def learns_noise(self) -> bool:
        """Whether the method can learn the noise. A point estimate cannot learn it, because the learned noise variance would
        shrink to that of the training residuals."""
        return self.fit is None and not self.is_point

    @property
    def option_names(self) -> tuple[str, ...] | None:
        """Names of the options, other than the task, that the posterior or `fit` accepts; `None` if every option is accepted."""
        function: Callable[..., Any] | None = self.fit or self.posterior
        takes = [] if function is None else [*inspect.signature(function).parameters.values()]
        takes = takes[self.fit is not None :]
        return None if any(each.kind is each.VAR_KEYWORD for each in takes) else tuple(each.name for each in takes)

    @property
    def status(self) -> str:
        """`"ready"`, or what has to be installed first."""
        if self.extra is None or find_spec(self.extra) is not None:
            return "ready"
        return f"needs {self.extra}"

    @property
    def remedy(self) -> str:
        """How to install the optional dependency; empty if the method has none."""
        return how_to_install("reference") if self.extra == "pyro" else f"install {self.extra}" if self.extra else ""


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *map(Method.of_posterior, posteriors.REGISTRY.values()),
        Method("swag", "SWAG", "Maddox et al. 2019", "(K + 2) P", fit=fit_swag, options={"learning_rate": 1e-3},
               starts_at_point=True),
        Method("vogn", "VOGN", "Khan et al. 2018", "2 P", fit=natural_gradient_fit(VOGN, MeanField, antithetic=True),
               options={"learning_rate": 1.0}, slow=True, draws_in_steps=True),
        Method("ivon", "IVON", "Shen et al. 2024", "2 P", fit=natural_gradient_fit(IVON, MeanField, decay=0.9),
               options={"learning_rate": 1.0}, draws_in_steps=True),
        Method("nng", "Noisy natural gradient", "Zhang et al. 2018", "P + (d_out^2 + d_in^2) / 2 per layer",
               fit=natural_gradient_fit(NoisyKFAC, MatrixNormal, antithetic=True), options={"learning_rate": 0.3},
               aliases=("noisy_kfac", "noisy_natural_gradient"), slow=True, draws_in_steps=True),
        Method("hmc", "Hamiltonian Monte Carlo", "Hoffman & Gelman 2014", "K P", fit=fit_hmc, aliases=("nuts",), slow=True,
               extra="pyro", is_chain=True),
        Method("microcanonical", "Microcanonical sampling", "Sommer et al. 2025; Robnik et al. 2025", "K P", fit=fit_microcanonical,
               aliases=("mclmc", "mile"), slow=True, is_chain=True),
        Method("sghmc", "Cyclical SGHMC", "Chen et al. 2014; Zhang et al. 2020", "K P", fit=fit_sghmc, aliases=("csghmc",),
               starts_at_point=True),
        Method("deep_gp", "Deep Gaussian process", "Ober & Aitchison 2021", "M (D + sum of widths) + M per layer",
               fit=fit_deep_gp, make=make_deep_gp, options={"learning_rate": 0.02}, aliases=("dgp",), slow=True,
               draws_in_steps=True),
        Method("function_space", "Function-space VI", "Rudner et al. 2021", "2 P", fit=fit_function_space, aliases=("fsvi",)),
        Method("laplace", "Laplace", "MacKay 1992; Immer et al. 2021", "P + P (P + 1) / 2, or Kronecker", fit=fit_laplace,
               starts_at_point=True),
        Method("subnetwork", "Subnetwork Laplace", "Daxberger et al. 2021", "P + S (S + 1) / 2 for S chosen weights",
               fit=fit_subnetwork, aliases=("subnetwork_laplace",), starts_at_point=True),
    )
}  # fmt: skip
"""The library's methods by name; `all_methods` adds the methods of other packages."""


def all_methods() -> dict[str, Method]:
    """All methods by name: the library's methods, and those that other packages register as entry points in the group
    `bayesify.methods`.

    An entry point's object is a `Method` or a subclass of `Posterior`. Any other object is skipped with a warning.

    Raises:
        ValueError: If the name or an alias of an entry point's method already belongs to another method.
    """
    return {**METHODS, **_other_methods()}


def get_method(name: str) -> Method:
    """A method by name or alias.

    Raises:
        ValueError: If no method has this name. The message suggests the nearest name.
    """
    wanted = plain_name(name)
    method = _find(METHODS, wanted) or _find(_other_methods(), wanted)
    if method is not None:
        return method
    raise ValueError(f"unknown method {name!r}; {suggest(wanted, all_methods())}")


@functools.cache
def _other_methods() -> dict[str, Method]:
    found: dict[str, Method] = {}
    owners = {name: f"bayesify's {method.name!r}" for method in METHODS.values() for name in names_and_aliases(method)}
    for source, thing in plugins():
        if isinstance(thing, type) and issubclass(thing, Posterior) and hasattr(thing, "name"):
            thing = Method.of_posterior(thing)
        if not isinstance(thing, Method):
            words = f"{type(thing).__name__} is neither a Method nor a subclass of Posterior with a name"
            warnings.warn(f"{GROUP}: the entry point {source!r} is skipped, because {words}", stacklevel=3)
            continue
        for name in names_and_aliases(thing):
            if name in owners:
                raise ValueError(
                    f"{GROUP}: the name {name!r} of the entry point {source!r} already belongs to {owners[name]}; "
                    "rename one of them"
                )
            owners[name] = f"the entry point {source!r}"
        found[thing.name] = thing
    return found


def _find(known: Mapping[str, Method], wanted: str) -> Method | None:
    return next((method for method in known.values() if wanted in names_and_aliases(method)), None)
