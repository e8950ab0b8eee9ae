"""How a Laplace posterior goes to disk and comes back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laplace.covariances import (
    DiagonalCovariance,
    FullCovariance,
    MarginalCovariance,
    WeightCovariance,
)
from bayesify.laplace.curvature import DataTerm, KroneckerBlock
from bayesify.laplace.kronecker_covariance import KroneckerCovariance
from bayesify.laplace.laplace import Laplace
from bayesify.laplace.subset import Subset
from bayesify.storage.serializers import Serializer, fingerprint, register_serializer
from bayesify.subnetwork.selectors import from_indices
from bayesify.weights.catalog import catalog, group_layers


def _config(laplace: Laplace) -> dict[str, Any]:
    _, posterior = laplace.fitted()
    return {
        "likelihood": laplace.likelihood.config(),
        "covariance": laplace.covariance,
        "curvature": laplace.curvature,
        "marginal": laplace.marginal,
        "memory": laplace.memory,
        "output": laplace.output,
        "prior_precision": laplace.base_precision,
        "factor": posterior.factor,
        "data": vars(laplace.data),
        "outputs_per_example": laplace.outputs_per_example,
        "weights": list(laplace.weights),
    }


def _state(laplace: Laplace) -> dict[str, Tensor]:
    subset, posterior = laplace.fitted()
    state = {f"network.{name}": value for name, value in laplace.network.state_dict(keep_vars=True).items()}
    state |= {f"likelihood.{name}": value for name, value in laplace.likelihood.state_dict().items()}
    state |= {f"posterior.{name}": value for name, value in posterior.tensors().items()}
    return {**state, "subset": subset.flat()}


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> Laplace:
    frozen = [name for name in catalog(net).weights if name not in config["weights"]]
    modes = {name: net.get_parameter(name).requires_grad for name in catalog(net).weights}
    try:  # which weights were trainable is the stored posterior's, not that of the network given now
        for name in modes:
            net.get_parameter(name).requires_grad_(name not in frozen)
        options = {key: config[key] for key in ("covariance", "curvature", "marginal", "memory", "output")}
        selector = from_indices(state["subset"])
        made = Laplace(net, config["likelihood"], selector, prior_precision=config["prior_precision"], **options)
    finally:
        for name, mode in modes.items():
            net.get_parameter(name).requires_grad_(mode)
    made.network.load_state_dict(_under("network", state))
    made.likelihood.load_state_dict(_under("likelihood", state))
    made.data = DataTerm(**config["data"])
    made.outputs_per_example = config["outputs_per_example"]
    made.subset = Subset.of_flat(made.weights, state["subset"].cpu())
    device = next(made.network.parameters()).device
    tensors = {name: value.to(device) for name, value in _under("posterior", state).items()}
    made.posterior = _covariance(made, made.subset, tensors).rescaled(config["factor"])
    return made


def _covariance(laplace: Laplace, subset: Subset, tensors: dict[str, Tensor]) -> WeightCovariance:
    if laplace.covariance == "diagonal":
        return DiagonalCovariance(subset, tensors["curvature"], laplace.prior(subset))
    if laplace.covariance == "kronecker":
        layers = {layer.name: layer for layer in group_layers(subset.weights[name] for name in subset.names)}
        blocks = [
            KroneckerBlock(layers[name], tensors[f"inputs/{name}"], tensors[f"slopes/{name}"])
            for name in layers
            if f"inputs/{name}" in tensors
        ]
        rest = {key.removeprefix("diagonal/"): value for key, value in tensors.items() if key.startswith("diagonal/")}
        return KroneckerCovariance(subset, blocks, rest, laplace.prior(subset))
    over = Subset(laplace.weights, dict.fromkeys(laplace.weights)) if laplace.marginal else subset
    whole = FullCovariance(over, tensors["curvature"], laplace.prior(over))
    return MarginalCovariance(subset, whole) if laplace.marginal else whole


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): torch.as_tensor(value) for name, value in state.items() if name.startswith(start)}


register_serializer(
    Serializer(
        kind=Laplace,
        name="Laplace",
        config=_config,
        state=_state,
        fingerprint=lambda laplace: fingerprint(laplace.network),
        restore=_restore,
    )
)
