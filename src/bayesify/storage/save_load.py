"""Models on disk: `save` and `load`, in safetensors with a JSON header."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify.arguments.checks import Device, checked
from bayesify.arguments.suggestions import suggest
from bayesify.maths.value_checks import find_not_finite
from bayesify.network import BayesianNetwork
from bayesify.predictor import Serializable
from bayesify.storage import tensor_files
from bayesify.storage.serializers import MODULE_NAME, STORED_CLASSES, find_stored, stored_name
from bayesify.version import __version__
from bayesify.weights.module_state import fingerprint, restore_module, tensors_of

SPARE_BYTES, SPARE_CALLS = 2**26, 20_000
"""Number of bytes of one operation, and number of operations, that are always allowed."""
ONE_CALL_BYTES_RATIO, ALL_CALLS_BYTES_RATIO = 8, 256
"""Allowed bytes in one operation and in all operations together, as multiples of the bytes of the file and the network."""
CALLS_PER_NUMBER = 20
"""Allowed number of operations for each number in the file and the network."""


@checked
def save(model: Any, path: str | Path) -> None:
    """Store a model in a safetensors file, atomically: the path always leads to the old file or to the complete new file.

    The file contains the model's tensors under their names from `named_parameters()`. Tied tensors are stored once. A JSON header
    in the metadata contains the versions of the format and the library, the model's type, its configuration (posterior, prior,
    likelihood), a fingerprint of the network (names, shapes and types of parameters and buffers), and a SHA-256 checksum. The
    file does not contain the network's code.

    Args:
        model: A predictor of a registered type, such as a `BayesianNetwork`; an estimator of `bayesify.sklearn`; or a plain module.
        path: Path of the file; its folder must exist.

    Raises:
        TypeError: If the model's type cannot be stored, or if the model's configuration is not plain data.
        ValueError: If the path cannot be a file, or a parameter is not finite. Buffers may be infinite or NaN.
        OSError: If the file cannot be written.
    """
    tensor_files.write(path, "model", *contents_of(model))


def contents_of(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a model's file; see `save`."""
    name = stored_name(model)
    plain = not isinstance(model, Serializable)
    state, tied = _once(tensors_of(model) if plain else model.state())
    wrong = find_not_finite((key, value) for key, value in state.items() if isinstance(value, nn.Parameter))
    if wrong is not None:
        raise ValueError(f"save: {wrong} is not finite; train again with a lower learning rate, or from a checkpoint")
    config, tensors = tensor_files.pack(None if plain else model.config(), "config")
    header = {
        "library_version": __version__,
        "type": name,
        "config": config,
        "fingerprint": fingerprint(model) if plain else model.fingerprint(),
        "tied": tied,
        # Buffers, such as masks, may be infinite.
        "not_finite": [key for key, value in state.items() if find_not_finite([(key, value)])],
    }
    if clash := state.keys() & tensors.keys():
        found = f"the model has a tensor called {min(clash)!r}, a name that the file format reserves"
        raise ValueError(f"save: {found}; rename the tensor")
    return header, {**state, **tensors}


@checked
def load(path: str | Path, net: nn.Module | None = None, *, map_location: Device | None = None) -> Any:
    """Load a model from a file that `save` wrote.

    Loading an untrusted file runs no code, opens no other file and builds nothing much larger than the file. The checksum guards
    against damage, not against forgery.

    Args:
        path: Path of the file.
        net: The network that the stored model was made from, or a fresh network of the same architecture; its weights do not
            matter. The network is copied, not changed. Omit `net` for a model that was not made from your own network, such as a
            `DeepGP` or an estimator.
        map_location: Device of the result; by default the device of `net`, or the CPU if `net` is not given.

    Returns:
        The saved model: an object of a registered type, such as a `BayesianNetwork`, or a copy of `net` with the stored weights.
        The model is in the mode (train or eval) of `net`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is truncated or altered, was not written by bayesify, is from a newer version, or was made from
            another network; or if its header is invalid or describes an object far larger than the file.
        TypeError: If `net` is not a module.
    """
    if isinstance(net, BayesianNetwork):
        raise TypeError("load: net= is a BayesianNetwork; give the plain network from which it was made")
    return restore(path, *tensor_files.read(path, "model"), net, map_location)


def restore(
    path: str | Path,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    net: nn.Module | None = None,
    map_location: Device | None = None,
) -> Any:
    """A model from the header and the tensors of its file; see `load`."""
    config, state = _unpack(path, header, tensors)
    name = header["type"]
    kind = find_stored(name)
    if kind is None and name != MODULE_NAME:
        raise ValueError(
            f"{path}: the file contains a {name!r}, a type that is unknown here; {suggest(name, [*STORED_CLASSES, MODULE_NAME])}"
        )
    stored = dict(header["fingerprint"])
    needs_network = kind is None or bool(stored)
    if not needs_network:
        net = nn.Identity()
    elif net is None:
        raise TypeError(f"{path}: the file contains a {name}; pass as net= the torch.nn.Module from which it was made")
    given = fingerprint(net) if needs_network else {}
    for entry in (*stored, *given):
        if stored.get(entry) != given.get(entry):
            raise ValueError(
                f"{path}: the file was made from another network: {entry} is {stored.get(entry, 'missing')} in the file and "
                f"{given.get(entry, 'missing')} in the given network; give a network of the same architecture"
            )
    if map_location is not None:
        net = copy.deepcopy(net).to(torch.device(map_location))
    try:
        with AllocationLimit([*tensors.values(), *net.parameters(), *net.buffers()]):
            if kind is None:
                return restore_module(net, state)
            restored = kind.restore(net, config, state)
    except Exception as error:  # an untrusted configuration may raise anything
        what = "does not fit this network" if needs_network else "cannot be restored"
        version = header["library_version"]
        raise ValueError(f"{path}: {what} ({_reason(error)}); it was written by bayesify {version}") from error
    if map_location is not None and isinstance(restored, nn.Module) and not needs_network:
        restored = restored.to(torch.device(map_location))
    return restored


def _unpack(path: Any, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The configuration and the model's own tensors, after checking that `save` could have written the header and tensors."""
    try:
        packed = header["config"]
        used = _references(dict(header))
        state = {name: tensor for name, tensor in tensors.items() if name not in used}
        state |= {name: state[first] for name, first in dict(header["tied"]).items()}
        expected = header.get("not_finite")  # missing in files of earlier versions
        texts = (header["type"], header["library_version"], *dict(header["fingerprint"]).values(), *(expected or ()))
        if not all(isinstance(value, str) for value in texts) or not isinstance(expected, list | None):
            raise ValueError("the type, the version, the fingerprint or a tensor's name is not a string")
        config = tensor_files.unpack(packed, tensors)
        wrong = find_not_finite((key, value) for key, value in state.items() if key not in (expected or ()))
    except Exception as error:
        raise ValueError(
            f"{path}: the header is invalid ({_reason(error)}), so the file is damaged or was edited; restore it from a copy"
        ) from error
    if expected is not None and wrong is not None:
        raise ValueError(f"{path}: {wrong} is not finite; use an earlier copy of the file")
    return config, state


def _reason(error: Exception) -> str:
    """The first two lines of an error's message; for unusual types of errors, the type comes first."""
    words = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])[:300]
    known = isinstance(error, (ValueError, RuntimeError)) and words
    return words if known else f"{type(error).__name__} {words}".strip()


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, with each tied tensor only once, and for each omitted name the name under which its tensor is stored."""
    first: dict[Any, str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        dense = tensor.layout is torch.strided  # `write` refuses all others
        place = (
            (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()) if dense else name
        )
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    return kept, tied


def _references(packed: Any) -> set[str]:
    if isinstance(packed, list):
        return set().union(*map(_references, packed))
    if isinstance(packed, dict):
        own = {packed["$tensor"]} if isinstance(packed.get("$tensor"), str) else set()
        return own.union(*map(_references, packed.values()))
    return set()


class AllocationLimit(TorchDispatchMode):
    """Raises `ValueError` before an operation whose result, computed on the meta device, is far larger than the stored tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler in the first operation, which takes seconds; nothing here is compiled.
        return False

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.at_once = SPARE_BYTES + ONE_CALL_BYTES_RATIO * size
        self.left = 8 * SPARE_BYTES + ALL_CALLS_BYTES_RATIO * size
        self.calls_left = SPARE_CALLS + CALLS_PER_NUMBER * sum(tensor.numel() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = _allocated(func, args, kwargs)
        self.left -= size
        self.calls_left -= 1
        if size > self.at_once or self.left < 0 or self.calls_left < 0:
            raise ValueError("the configuration in the file describes far more numbers than the file contains")
        return func(*args, **kwargs)


def _allocated(func: Any, args: Any, kwargs: Any) -> int:
    """Number of bytes of the new tensors that an operation returns; 0 if the size cannot be determined in advance."""
    schema = func._schema
    if all(entry.alias_info is not None for entry in schema.returns):
        return 0  # a view or an in-place operation
    args, kwargs = pytree.tree_map_only(
        Tensor,
        lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"),
        (args, dict(kwargs)),
    )
    if any(entry.name == "device" for entry in schema.arguments):
        kwargs["device"] = torch.device("meta")
    kwargs.pop("generator", None)
    try:
        made = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return 0
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor))
