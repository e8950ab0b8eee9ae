"""How a Laplace posterior goes to disk and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from bayesify.laplace.curvature import DataTerm, KroneckerBlock
from bayesify.laplace.subnetwork.selectors import from_indices
from bayesify.laplace.subset import Subset
from bayesify.weights.catalog import catalog, group_layers
from bayesify.weights.module_state import below, copy_network, with_prefix

if TYPE_CHECKING:
    from bayesify.laplace.laplace import Laplace

Fresh = TypeVar("Fresh", bound="Laplace")
FITTED = {"factor", "data", "outputs_per_example", "weights"}
"""Entries of the configuration that are no arguments of `Laplace`."""


def config_of(laplace: Laplace) -> dict[str, Any]:
    """All choices of a fitted Laplace approximation as plain data."""
    _, posterior = laplace.fitted()
    return {
        "likelihood": laplace.likelihood.config(),
        "covariance": laplace.covariance,
        "curvature": laplace.curvature,
        "num_samples": laplace.num_samples,
        "seed": laplace.seed,
        "marginal": laplace.marginal,
        "memory": laplace.memory,
        "output": laplace.output,
        "link": laplace.link,
        "temperature": laplace.temperature,
        "prior_precision": laplace.base_precision,
        "factor": posterior.factor,
        "data": vars(laplace.data),
        "outputs_per_example": laplace.outputs_per_example,
        "weights": list(laplace.weights),
    }


def state_of(laplace: Laplace) -> dict[str, Tensor]:
    """Network, likelihood, curvature and chosen weights of a fitted Laplace approximation."""
    subset, posterior = laplace.fitted()
    state = with_prefix("network", laplace.network.state_dict(keep_vars=True))
    state |= with_prefix("likelihood", laplace.likelihood.state_dict())
    return {**state, **with_prefix("posterior", posterior.tensors()), "subset": subset.flat()}


def arguments_of(net: nn.Module, config: Any, state: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of `Laplace` from `config_of` and `state_of`; weights that were frozen are, in a copy of the network."""
    net = copy_network(net, "load")
    for name in catalog(net).weights:
        net.get_parameter(name).requires_grad_(name in config["weights"])
    given = {key: value for key, value in config.items() if key not in FITTED}
    return {**given, "net": net, "subset": from_indices(state["subset"])}


def fill(laplace: Fresh, config: Any, state: dict[str, Tensor]) -> Fresh:
    """Give a fresh Laplace approximation, made with `arguments_of`, what was fitted; in place."""
    laplace.network.load_state_dict(below("network", state))
    laplace.likelihood.load_state_dict(below("likelihood", state))
    laplace.data = DataTerm(**config["data"])
    laplace.outputs_per_example = config["outputs_per_example"]
    laplace.subset = Subset.of_flat(laplace.weights, state["subset"].cpu())
    tensors = {name: value.to(laplace.device) for name, value in below("posterior", state).items()}
    found = _curvature(laplace, laplace.subset, tensors)
    laplace.posterior = laplace.covariance_from(found, laplace.subset).rescaled(config["factor"])
    return laplace


def _curvature(laplace: Laplace, subset: Subset, tensors: dict[str, Tensor]) -> Any:
    """What `WeightCovariance.tensors` was made from."""
    if laplace.covariance == "full":
        return tensors["curvature"]
    if laplace.covariance == "diagonal":
        return subset.split(tensors["curvature"])
    layers = {layer.name: layer for layer in group_layers(subset.weights[name] for name in subset.names)}
    blocks = [
        KroneckerBlock(layers[name], tensors[f"inputs/{name}"], tensors[f"slopes/{name}"])
        for name in layers
        if f"inputs/{name}" in tensors
    ]
    rest = {key.removeprefix("diagonal/"): value for key, value in tensors.items() if key.startswith("diagonal/")}
    return blocks, rest
