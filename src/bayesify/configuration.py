"""Posteriors, priors and likelihoods from names, plain data and files."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayesify import likelihoods, posteriors, priors
from bayesify.arguments.plugins import plain_name, plugins
from bayesify.arguments.suggestions import suggest
from bayesify.likelihoods import Likelihood
from bayesify.posteriors import Posterior
from bayesify.priors import Prior
from bayesify.weights.batch_statistics import BatchStatistics
from bayesify.weights.module_state import below

KEYS = ("posterior", "prior", "likelihood", "output", "batch_statistics")
"""Keys of a whole configuration."""

CALLED_AS = {
    "swag": "baselines.SWAG",
    "vogn": "baselines.VOGN",
    "ivon": "baselines.IVON",
    **dict.fromkeys(("nng", "noisy_kfac", "noisy_natural_gradient"), "baselines.NoisyKFAC"),
    **dict.fromkeys(("hmc", "nuts"), "baselines.nuts"),
    **dict.fromkeys(("sghmc", "csghmc"), "baselines.sghmc"),
    **dict.fromkeys(("microcanonical", "mclmc", "mile"), "baselines.microcanonical"),
    **dict.fromkeys(("deep_gp", "dgp"), "deep_gp.DeepGP"),
    **dict.fromkeys(("function_space", "fsvi"), "FunctionSpaceVI"),
    **dict.fromkeys(("laplace", "subnetwork", "subnetwork_laplace"), "Laplace"),
}
"""For each method that is not a posterior, the name below `bayesify` to call. Used in messages and in the list of methods."""

Choice = Any  # a posterior, a name, a dict that maps selectors to posteriors, plain data, or a path to a JSON file
PriorChoice = Prior | str | Mapping[str, Any] | None
LikelihoodChoice = Likelihood | str | Mapping[str, Any] | None


def parse_posterior(choice: Choice) -> list[tuple[str | nn.Module | None, Posterior]]:
    """Pairs (selector, posterior), made from any form of the argument `posterior` that `bayesianize` accepts."""
    if isinstance(choice, Mapping) and not isinstance(choice.get("name"), str):
        if not choice:
            raise ValueError(
                "bayesianize: the dict of posteriors is empty; give at least one selector, such as {'*': MeanField()}"
            )
        for selector in choice:
            if not isinstance(selector, (str, nn.Module)):
                raise TypeError(
                    f"bayesianize: {selector!r} is not a selector; give a name, a glob, a class name such as 'Linear', "
                    "or a module"
                )
        return [(selector, make_posterior(entry)) for selector, entry in choice.items()]
    return [(None, make_posterior(choice))]


@dataclass(frozen=True)
class Choices:
    """Everything that a Bayesian network is made of, apart from the network itself; see `bayesianize`."""

    posteriors: list[tuple[str | nn.Module | None, Posterior]]
    likelihood: Likelihood | None
    prior: Prior
    output: str | int | None
    batch_statistics: BatchStatistics


def make_choices(
    net: nn.Module,
    posterior: Choice,
    likelihood: LikelihoodChoice = None,
    prior: PriorChoice = None,
    output: str | int | None = None,
    batch_statistics: BatchStatistics = "auto",
) -> Choices:
    """The objects that the arguments of `bayesianize` describe.

    `posterior` may be a whole configuration. Any other argument then takes precedence over the configuration's entry.
    Raises `ValueError` if a file is not JSON, or if the configuration has an unknown key.
    """
    if isinstance(posterior, (str, Path)) and str(posterior).endswith(".json"):
        posterior = read_json(posterior)
    whole = posterior if isinstance(posterior, Mapping) and "posterior" in posterior else {}
    # The key "posterior" is a selector if the network has a module of this name and no other key is in `KEYS`.
    if whole and not ("posterior" in dict(net.named_children()) and set(whole).isdisjoint(KEYS[1:])):
        for key in whole:
            if key not in KEYS:
                raise ValueError(f"bayesianize: unknown key {key!r} in the configuration; {suggest(str(key), KEYS)}")
        posterior = whole["posterior"]
        likelihood = whole.get("likelihood") if likelihood is None else likelihood
        prior = whole.get("prior") if prior is None else prior
        output = whole.get("output") if output is None else output
        batch_statistics = whole.get("batch_statistics", "auto") if batch_statistics == "auto" else batch_statistics
    chosen = parse_posterior(posterior)
    made = make_prior(prior, min(part.prior_scale for _, part in chosen))
    return Choices(chosen, make_likelihood(likelihood), made, output, batch_statistics)


def restore_choices(net: nn.Module, config: Any) -> Choices:
    """The objects that the `config()` of a Bayesian network describes. Unlike `bayesianize`, this function does not accept the
    path of a file."""
    if not isinstance(config, Mapping) or not isinstance(config.get("posterior"), Mapping):
        raise ValueError(
            "the stored configuration is not a dict with an entry 'posterior', so it does not describe a Bayesian "
            "network"
        )
    return make_choices(net, config)


def make_posterior(entry: Choice) -> Posterior:
    """A posterior made from an instance, a class, a name, or a dict with its name and arguments."""
    if isinstance(entry, Posterior):
        return entry
    if isinstance(entry, type) and issubclass(entry, Posterior):
        return entry()
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        raise TypeError(f"bayesianize: {type(entry).__name__} is not a posterior; give an instance, a name or a dict")
    if not isinstance(entry.get("name"), str):
        raise ValueError(f"bayesianize: {dict(entry)} has no 'name'; add the name of the posterior")
    made: Posterior = _construct(find_posterior(entry["name"]), entry)
    return made


def find_posterior(name: str) -> type[Posterior]:
    """The posterior class with the given name or alias, from the library or from an entry point of another package."""
    wanted = plain_name(name)
    for kind in posteriors.REGISTRY.values():
        if wanted in names_and_aliases(kind):
            return kind
    if wanted in CALLED_AS:
        raise ValueError(f"bayesianize: {name!r} is not a posterior of a network; use bayesify.{CALLED_AS[wanted]}")
    found: dict[str, type[Posterior]] = {}
    known = [*posteriors.REGISTRY, *CALLED_AS]
    for source, offer in plugins():
        theirs = offer if isinstance(offer, type) else getattr(offer, "posterior", None)  # a `Method` holds it
        names = names_and_aliases(offer)
        known += names
        if wanted not in names:
            continue
        if not (isinstance(theirs, type) and issubclass(theirs, Posterior)):
            use = f"methods.get_method({name!r}).fit(training.task.TrainingTask(...))"
            raise ValueError(f"bayesianize: {name!r} is not a posterior of a network; use bayesify.{use}")
        found[source] = theirs
    if len(found) > 1:
        raise ValueError(
            f"bayesianize: {name!r} is the name of several posteriors, {' and '.join(found)}; rename one of them"
        )
    if not found:
        raise ValueError(f"unknown method {name!r}; {suggest(wanted, known)}")
    return found.popitem()[1]


def names_and_aliases(thing: object) -> list[str]:
    """Name and aliases of a posterior class or of a method; empty for any other object."""
    names = (getattr(thing, "name", None), *getattr(thing, "aliases", ()))
    return [plain_name(name) for name in names if isinstance(name, str)]


def make_prior(entry: PriorChoice, scale: float = Posterior.prior_scale) -> Prior:
    """A prior made from an instance, a name, or a dict with its name and arguments; `None` gives `Neal(scale)`."""
    if entry is None:
        return priors.Neal(scale)
    if isinstance(entry, Prior):
        return entry
    made: Prior = _named(entry, priors.REGISTRY, "prior")
    return made


def make_likelihood(entry: LikelihoodChoice) -> Likelihood | None:
    """A likelihood made from an instance, a name, or a dict with its name and arguments; `None` stays `None`."""
    if entry is None or isinstance(entry, Likelihood):
        return entry
    made: Likelihood = _named(entry, likelihoods.REGISTRY, "likelihood")
    return made


def restore_likelihood(config: Any, state: Mapping[str, Tensor], like: Tensor) -> Likelihood:
    """A likelihood on the device of the tensor `like`, made from its configuration and from the tensors in `state` that are named
    `likelihood.*`."""
    likelihood = make_likelihood(config)
    if likelihood is None:
        raise ValueError("the stored configuration has no entry 'likelihood', so it is incomplete")
    likelihood = likelihood.to(like)
    likelihood.load_state_dict(below("likelihood", state))
    return likelihood


def _named(entry: Any, known: Mapping[str, type], what: str) -> Any:
    if isinstance(entry, type) and entry in known.values():
        return _construct(entry, {})
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise TypeError(f"bayesianize: {entry!r} is not a {what}; give an instance, a name, or a dict with a name")
    if entry["name"] not in known:
        same_task = [name for name, kind in known.items() if getattr(kind, "task", None) == entry["name"]]
        remedy = f"for {entry['name']}: {', '.join(same_task)}" if same_task else suggest(str(entry["name"]), known)
        raise ValueError(f"unknown {what} {entry['name']!r}; {remedy}")
    return _construct(known[entry["name"]], entry)


def _construct(kind: type, entry: Mapping[str, Any]) -> Any:
    arguments = {key: value for key, value in entry.items() if key != "name"}
    try:
        return kind(**arguments)
    except TypeError as error:
        reason = str(error).partition("; it takes")[0].removeprefix(f"{kind.__name__}: ")
        options = [key for key in inspect.signature(kind.__init__).parameters if key != "self"]  # type: ignore[misc]
        raise ValueError(f"{kind.__name__}: {reason}; its options are {', '.join(options) or 'none'}") from None


def read_json(path: str | Path) -> Any:
    """Plain data from a JSON file; raises `ValueError` if the file is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the path of a JSON file that configures a posterior") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not valid JSON ({error}); write the file with json.dump(bnn.config(), file)"
        ) from None
