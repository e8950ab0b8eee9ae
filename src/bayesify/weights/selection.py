"""Selectors, which assign weights to posteriors."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from bayesify.arguments.suggestions import suggest
from bayesify.weights.catalog import Catalog, Weight


def select(
    network: nn.Module, catalog: Catalog, selectors: list[str | nn.Module | None]
) -> tuple[list[tuple[str | None, list[Weight]]], dict[str, str]]:
    """Give each weight to the first selector that matches it.

    A selector is a dotted name of a module or parameter, a glob over dotted names whose `*` crosses dots, the name of a
    module's class or of one of its bases, a module object, or `None` for everything. If a module matches, the selector gets all
    weights of the module and its submodules. Scale and shift of normalization layers stay point estimates unless the selector
    names them or matches nothing else. Frozen parameters always stay point estimates. Raises `ValueError` if a selector gets no
    weight.

    The result has pairs of a selector and its weights, in the order of the selectors. It also has a mapping from the name of each
    remaining weight to the reason why the weight stays a point estimate.
    """
    free = catalog.trainable
    taken: list[tuple[str | None, list[Weight]]] = []
    modules = dict(network.named_modules(remove_duplicate=False))
    for selector in selectors:
        matched, asked = _match(selector, modules, catalog)
        found = [weight for name, weight in free.items() if name in matched]
        wanted = [weight for weight in found if weight.kind != "norm" or weight.name in asked]
        if not wanted and selector is not None and all(catalog.weights[name].kind == "norm" for name in matched):
            wanted = found
        if not wanted:
            raise ValueError(_why_empty(selector, matched, catalog, modules))
        for weight in wanted:
            del free[weight.name]
        taken.append((_label(selector, modules), wanted))
    left = dict(catalog.refused)
    for name, weight in free.items():
        norm = weight.kind == "norm"
        left[name] = "normalization layer; name it to include it" if norm else "no selector matches it"
    return taken, left


def _match(
    selector: str | nn.Module | None, modules: Mapping[str, nn.Module], catalog: Catalog
) -> tuple[set[str], set[str]]:
    """Names of the weights that a selector matches, and of the weights that it names directly."""
    first = {alias: weight.name for weight in catalog.weights.values() for alias in (weight.name, *weight.aliases)}
    if selector is None:
        return set(catalog.weights), set()
    glob = isinstance(selector, str) and any(character in selector for character in "*?[")
    if isinstance(selector, nn.Module):
        hits = {path for path, module in modules.items() if module is selector}
        if not hits:
            raise ValueError(
                f"bayesianize: the selector {type(selector).__name__} is not a module of this network; give one of its modules, or "
                "a name"
            )
    elif glob:
        hits = {path for path in modules if path and fnmatchcase(path, selector)}
    else:
        kinds = {path: [base.__name__ for base in type(module).__mro__[:-2]] for path, module in modules.items()}
        hits = {path for path, names in kinds.items() if path == selector or selector in names}
    matched, asked = set(), set()
    for alias, name in first.items():
        parents = [alias[:cut] for cut in range(len(alias)) if alias[cut] == "."] + [""]
        named = isinstance(selector, str) and (fnmatchcase(alias, selector) if glob else alias == selector)
        if named or not hits.isdisjoint(parents):
            matched.add(name)
        if not glob and (named or alias.rpartition(".")[0] in hits):
            asked.add(name)
    return matched, asked


def _label(selector: str | nn.Module | None, modules: Mapping[str, nn.Module]) -> str | None:
    if isinstance(selector, nn.Module):
        return next(path for path, module in modules.items() if module is selector)
    return selector


def _why_empty(
    selector: str | nn.Module | None, matched: set[str], catalog: Catalog, modules: Mapping[str, nn.Module]
) -> str:
    label = _label(selector, modules)
    if selector is None:
        kinds = {weight.kind for weight in catalog.trainable.values()}
        if kinds == {"norm"}:
            return "bayesianize: only normalization layers have weights here; name them in a selector to include them"
        name, reason = next(iter(catalog.refused.items()))
        return f"bayesianize: no parameter can get a posterior; {name}: {reason}; change this for one parameter or more"
    if not matched:
        known = dict.fromkeys([*filter(None, modules), *catalog.weights, *(type(m).__name__ for m in modules.values())])
        return f"bayesianize: selector {label!r} matches no weight; {suggest(str(label), known)}"
    refused = [name for name in matched if name in catalog.refused]
    if len(refused) == len(matched):
        reason = catalog.refused[refused[0]]
        return f"bayesianize: selector {label!r} matches only {refused[0]}: {reason}; change this or drop the selector"
    return f"bayesianize: selector {label!r} gets no weight, because earlier selectors took them all; put it first or drop it"
