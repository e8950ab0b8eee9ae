"""Models on disk: `save` and `load`, in safetensors with a JSON header."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.network import BayesianNetwork, bayesianize
from bayesify.registry import suggest
from bayesify.running.runner import evaluating
from bayesify.storage import tensor_files
from bayesify.storage.serializers import (
    SERIALIZERS,
    Serializer,
    describe,
    fingerprint,
    register_serializer,
    serializer_for,
)
from bayesify.version import __version__
from bayesify.weights.named_parameters import MASK, NamedParameters


def save(model: Any, path: str | Path) -> None:
    """Store a model in a safetensors file, so that the path holds either the old file or the whole new one.

    The file has the model's tensors, under `named_parameters()` names, tied ones once, and in its metadata a JSON header:
    versions of format and library, the model's type, its configuration (posterior, prior, likelihood), a fingerprint of
    the network (names, shapes and types of parameters and buffers), and a SHA-256 of it all. The network's code is not
    in it.

    Args:
        model: A `BayesianNetwork` or anything else with `.predict` that is registered, or a plain module.
        path: Where to write; its folder must exist.

    Raises:
        TypeError: If this type cannot be stored, or its configuration is not plain data.
        ValueError: If the path cannot be written.
    """
    serializer = serializer_for(model)
    state, tied = _once(serializer.state(model))
    config, tensors = tensor_files.pack(serializer.config(model), "config")
    header = {
        "library_version": __version__,
        "type": serializer.name,
        "config": config,
        "fingerprint": serializer.fingerprint(model),
        "tied": tied,
    }
    clash = state.keys() & tensors.keys()
    if clash:
        raise ValueError(f"save: the model has a tensor called {min(clash)!r}, a name that the file needs; rename it")
    tensor_files.write(path, "model", header, {**state, **tensors})


def load(path: str | Path, net: nn.Module | None = None, *, map_location: str | torch.device | None = None) -> Any:
    """A model from a file that `save` made.

    Args:
        path: The file.
        net: The network that the stored model was made from, or a fresh one of the same architecture; its weights do not matter. It
            is copied, not changed. Not needed for a model without a network of the user's, such as a `DeepGP`.
        map_location: Device of the result; that of `net` if left out, the CPU without one.

    Returns:
        What was saved: a `BayesianNetwork`, a copy of `net` with the stored weights, or another registered type; in the
        mode (train or eval) of `net`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is cut short, altered, not ours, from a newer version, or made from another network.
        TypeError: If `net` is not a module.
    """
    if isinstance(net, BayesianNetwork):
        raise TypeError("load: net is a BayesianNetwork; give the plain network that it was made from")
    if net is not None and not isinstance(net, nn.Module):
        raise TypeError(f"load: net is {type(net).__name__}; give the torch.nn.Module that the model was made from")
    header, tensors = tensor_files.read(path, "model")
    if header["type"] not in SERIALIZERS:
        raise ValueError(
            f"{path}: holds a {header['type']!r}, which is unknown here; {suggest(header['type'], SERIALIZERS)}"
        )
    if not SERIALIZERS[header["type"]].needs_network:
        net = nn.Identity()
    elif net is None:
        raise TypeError(f"{path}: holds a {header['type']}; give the torch.nn.Module that it was made from")
    else:
        _check_fingerprint(path, header["fingerprint"], fingerprint(net))
    config = tensor_files.unpack(header["config"], tensors)
    state = {name: tensor for name, tensor in tensors.items() if not _refers(header["config"], name)}
    state |= {name: state[first] for name, first in header["tied"].items()}
    if map_location is not None:
        net = copy.deepcopy(net).to(torch.device(map_location))
    try:
        restored = SERIALIZERS[header["type"]].restore(net, config, state)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"{path}: does not fit this network ({error}); it was written by bayesify {header['library_version']}"
        ) from error
    if map_location is not None and not SERIALIZERS[header["type"]].needs_network:
        restored = restored.to(torch.device(map_location))
    return restored


def _check_fingerprint(path: str | Path, stored: Mapping[str, str], given: Mapping[str, str]) -> None:
    for name in (*stored, *given):
        if stored.get(name) != given.get(name):
            raise ValueError(
                f"{path}: was made from another network: {name} is {stored.get(name, 'missing')} in the file and "
                f"{given.get(name, 'missing')} in the network given; give the same architecture"
            )


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without repeats, and for each repeated name the name it is stored under."""
    first: dict[Any, str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    return kept, tied


def _refers(packed: Any, name: str) -> bool:
    """Whether packed data points to a tensor."""
    if isinstance(packed, list):
        return any(_refers(entry, name) for entry in packed)
    if isinstance(packed, dict):
        return packed.get("$tensor") == name or any(_refers(entry, name) for entry in packed.values())
    return False


# -- Bayesian networks and plain modules -------------------------------------------------------------------------------


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's state; a slash in a name, which stands for a dot of the network's names, becomes that dot."""
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"save: the state {name!r} is {type(value).__name__}; only tensors can be stored")
        state[name.replace("/", ".")] = _pack_bits(value) if name.endswith(MASK) else value
    return state


def _pack_bits(mask: Tensor) -> Tensor:
    """A mask with eight entries to a byte, row-major, filled up with zeros."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def _unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    bits = np.unpackbits(packed.cpu().numpy(), count=shape.numel())
    return torch.from_numpy(bits.astype(bool)).view(shape)


def _prune_alike(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Prune the parameters of a fresh module for which a state holds masks, and unpack these masks in the state."""
    for path, part in module.named_modules():
        if isinstance(part, NamedParameters):
            for name in part:
                key = f"{path}.{name}{MASK}"
                if key in state:
                    mask = _unpack_bits(state[key], part[name].shape)
                    part.prune(name, mask.to(part[name].device))
                    state[key] = mask


def _put(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    names = {name.replace("/", "."): name for name in module.state_dict()}
    missing, extra = sorted(names.keys() - state.keys()), sorted(state.keys() - names.keys())
    if missing or extra:
        raise ValueError(f"the file lacks {missing[0]}" if missing else f"the file has {extra[0]}, the model does not")
    module.load_state_dict({names[name]: value for name, value in state.items()})


@torch.no_grad()
def _bayesian_fingerprint(bnn: BayesianNetwork) -> dict[str, str]:
    with evaluating(bnn.network):  # a posterior that runs the network leaves its buffers alone
        drawn = bnn.draw(1, generator=torch.Generator().manual_seed(0)).weights
    result = fingerprint(bnn.network)
    for name, weight in bnn.weights.items():
        for alias in (name, *weight.aliases):
            result[alias] = describe(weight.shape, drawn[name].dtype)
    return result


def _restore_bayesian(net: nn.Module, config: Any, state: dict[str, Tensor]) -> BayesianNetwork:
    with torch.random.fork_rng(devices=[]):  # posteriors that start at random do not move the caller's generator
        bnn = bayesianize(net, config)
    _prune_alike(bnn, state)
    _put(bnn, state)
    return bnn


def restore_module(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with the given state, every entry of it."""
    copied = copy.deepcopy(net)
    _put(copied, state)
    return copied


register_serializer(
    Serializer(
        kind=BayesianNetwork,
        name="BayesianNetwork",
        config=BayesianNetwork.config,
        state=_tensors_of,
        fingerprint=_bayesian_fingerprint,
        restore=_restore_bayesian,
    )
)
register_serializer(
    Serializer(
        kind=nn.Module,
        name="Module",
        config=lambda module: None,
        state=_tensors_of,
        fingerprint=fingerprint,
        restore=lambda net, config, state: restore_module(net, state),
    )
)
