"""A module's tensors in the form in which files store them, and fingerprints that compare two networks."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.weights.catalog import owner_of
from bayesify.weights.named_parameters import MASK_SUFFIX, NamedParameters


def fingerprint(module: nn.Module) -> dict[str, str]:
    """By name, the shape and type of each parameter and buffer of a network, and the class of each module."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    kinds = {f"module {path or '(root)'}": type(part).__name__ for path, part in module.named_modules()}
    return {name: describe(tensor.shape, tensor.dtype) for name, tensor in named.items()} | kinds


def describe(shape: torch.Size, dtype: torch.dtype) -> str:
    """Shape and type of a tensor as text, for a fingerprint."""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's `state_dict`, with packed masks and dotted names. Raises `TypeError` for an entry that is not a tensor."""
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"save: the state entry {name!r} has type {type(value).__name__}; only tensors can be stored"
            )
        if name.endswith(MASK_SUFFIX):  # eight entries per byte, row-major, padded with zeros
            value = torch.from_numpy(np.packbits(value.cpu().numpy()))
        state[name.replace("/", ".")] = value
    return state


def put_tensors(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the result of `tensors_of` in place. Parameters for which the state contains masks are pruned first. Raises
    `ValueError` if the state lacks an entry of the module, or has an entry that the module lacks."""
    state = dict(state)
    for path, part in module.named_modules():
        for name in part if isinstance(part, NamedParameters) else ():
            key = f"{path}.{name}{MASK_SUFFIX}"
            if key in state:
                bits = np.unpackbits(state[key].cpu().numpy(), count=part[name].numel())
                state[key] = torch.from_numpy(bits.astype(bool)).view(part[name].shape)
                part.prune(name, state[key].to(part[name].device))
    names = {name.replace("/", "."): name for name in module.state_dict()}
    missing, extra = sorted(names.keys() - state.keys()), sorted(state.keys() - names.keys())
    if missing or extra:
        raise ValueError(
            f"the file lacks the tensor {missing[0]}"
            if missing
            else f"the file has the tensor {extra[0]}, but the model does not"
        )
    module.load_state_dict({names[name]: value for name, value in state.items()})


def copy_network(net: nn.Module, owner: str, *, share_frozen: bool = False) -> nn.Module:
    """A copy of a network that shares nothing with the original or, with `share_frozen`, only the frozen parameters. Raises
    `ValueError` if a module holds a tensor that was computed from other tensors, because such a tensor cannot be copied."""
    try:
        frozen = [value for value in net.parameters() if share_frozen and not value.requires_grad]
        return copy.deepcopy(net, {id(value): value for value in frozen})
    except RuntimeError as error:
        for path, module in net.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and not value.is_leaf:
                    raise ValueError(
                        f"{owner}: {f'{path}.{name}'.lstrip('.')} was computed from other tensors, as torch.nn.utils.weight_norm, "
                        "spectral_norm and prune do, so the network cannot be copied; use torch.nn.utils.parametrizations instead, "
                        "or make the result permanent first (remove_weight_norm, remove_spectral_norm, prune.remove)"
                    ) from error
        raise


def forget_graphs(net: nn.Module) -> None:
    """Detach the computed tensors that modules keep in attributes, buffers, lists and dicts after a pass. Such tensors cannot be
    copied, and they keep the pass in memory."""

    def detached(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) and not leaf.is_leaf else leaf

    for module in net.modules():
        for key, value in list(vars(module).items()):
            if not any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in pytree.tree_leaves(value)):
                continue
            made = pytree.tree_map(detached, value)
            if isinstance(value, dict):
                value.update(made)
            elif isinstance(value, list):
                value[:] = made
            else:
                module.__dict__[key] = made


def restore_module(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module, with the values of the given state."""
    copied = copy_network(net, "load")
    put_tensors(copied, state)
    return copied


def below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state whose names start with a dotted prefix, under names without the prefix."""
    return {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}


def prefixed(**parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One state that joins the states of several parts, with their names as prefixes; the inverse of `below`."""
    return {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}


@contextmanager
def swapped(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context that replaces a module's parameters and buffers by other tensors, as `torch.func.functional_call` does."""
    places = []
    for name, value in values.items():
        owner, leaf = owner_of(module, name)
        slots: Any = owner._parameters if leaf in owner._parameters else owner._buffers
        places.append((slots, leaf, slots[leaf]))
        slots[leaf] = value
    try:
        yield
    finally:
        for slots, leaf, value in places:
            slots[leaf] = value
