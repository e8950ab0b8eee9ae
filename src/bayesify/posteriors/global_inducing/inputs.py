"""Inducing inputs of a network: as the user gives them, as plain data, and as parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import MAX_COUNT, refuse
from bayesify.weights.named_parameters import NamedParameters

OWNER = "GlobalInducing"


def check_inputs(inputs: Any) -> Any:
    """Inducing inputs in the form that the posterior keeps, detached and copied.

    Args:
        inputs: A tensor, a tuple or list of positional inputs, a dict of keyword inputs, or a plain description of
            them: a count, or the shape of a tensor (a list of integers, or `{"shape": ..., "dtype": ...}`).

    Raises:
        ValueError: If the inputs are empty, hold NaN or infinity, or have different lengths.
        TypeError: If the inputs have another type.
    """
    if isinstance(inputs, bool) or inputs is None or isinstance(inputs, (str, bytes)):
        raise TypeError(f"{OWNER}: inputs={inputs!r}; give inputs of the network, such as rows of the training data")
    if isinstance(inputs, int):
        if not 1 <= inputs <= MAX_COUNT:
            raise refuse(OWNER, "inputs", inputs, f"an integer of at least 1 and at most {MAX_COUNT:,}")
        return inputs
    if _is_shape(inputs):
        return _check_shape(inputs)
    if isinstance(inputs, Mapping):
        kept: Any = {str(key): _check_entry(value, f"inputs {key!r}") for key, value in inputs.items()}
        entries = list(kept.values())
    elif isinstance(inputs, (tuple, list)):
        kept = entries = [_check_entry(value, f"inputs {index}") for index, value in enumerate(inputs)]
    else:
        return _check_entry(inputs, "inputs")
    lengths = {_shape_of(entry)[0] for entry in entries}
    if len(lengths) != 1:
        raise ValueError(
            f"{OWNER}: inputs have {sorted(lengths)} examples; give equally many of each input, and at least one"
        )
    return kept


def _is_shape(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {"shape", "dtype"}
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(size, int) for size in value)


def _check_shape(value: Any) -> Any:
    sizes = list(value["shape"] if isinstance(value, Mapping) else value)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{OWNER}: inputs have shape {sizes}; give at least one inducing input, and no empty axis")
    return {"shape": sizes, "dtype": str(value["dtype"])} if isinstance(value, Mapping) else sizes


def _check_entry(value: Any, what: str) -> Any:
    if _is_shape(value):
        return _check_shape(value)
    if not isinstance(value, Tensor):
        hint = (
            "for example with torch.from_numpy(...)"
            if hasattr(value, "__array__")
            else "such as rows of the training data"
        )
        raise TypeError(f"{OWNER}: {what} are {type(value).__name__}; give tensors, {hint}")
    if value.ndim == 0 or value.numel() == 0:
        raise ValueError(f"{OWNER}: {what} have shape {tuple(value.shape)}; give at least one inducing input")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        place = (~torch.isfinite(value)).nonzero()[0].tolist()
        raise ValueError(f"{OWNER}: {what} hold {value[tuple(place)].item()} at index {place}; give finite numbers")
    return value.detach().clone()


def _shape_of(entry: Any) -> list[int]:
    if isinstance(entry, Tensor):
        return list(entry.shape)
    return list(entry["shape"] if isinstance(entry, Mapping) else entry)


def describe_inputs(inputs: Any) -> Any:
    """Plain data that describe the shapes and types of inputs. The posterior's state holds the values."""
    if isinstance(inputs, int) or _is_shape(inputs):
        return inputs
    if isinstance(inputs, Mapping):
        return {key: describe_inputs(value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [describe_inputs(value) for value in inputs]
    sizes = list(inputs.shape)
    if inputs.is_floating_point():
        return sizes
    return {"shape": sizes, "dtype": str(inputs.dtype).removeprefix("torch.")}


class InducingInputs(nn.Module):
    """Inducing inputs as parameters. Inputs that are not floating point, such as words and masks, stay fixed.

    Args:
        inputs: Result of `check_inputs`. Shapes become standard normal numbers, or zeros if the type is not floating point.
        network: The network, whose first layer gives the width of an input if only a count is known.
        like: A tensor with the type and device of floating-point inputs.

    Raises:
        ValueError: If only a count is given and the width of an input is not known.
    """

    def __init__(self, inputs: Any, network: nn.Module, like: Tensor) -> None:
        super().__init__()
        if isinstance(inputs, int):
            inputs = [inputs, _first_width(network)]
        single = isinstance(inputs, Tensor) or _is_shape(inputs)
        self.keys = list(inputs) if isinstance(inputs, Mapping) and not single else None
        entries = [inputs] if single else list(inputs.values() if isinstance(inputs, Mapping) else inputs)
        made = [_start(entry, like) for entry in entries]
        self.learned = NamedParameters(
            {f"input {index}": value for index, value in enumerate(made) if value.is_floating_point()}
        )
        for index, value in enumerate(made):
            if not value.is_floating_point():
                self.register_buffer(f"fixed_{index}", value)
        self.count = len(made)
        self.num_points = len(made[0])

    def entries(self) -> list[Tensor]:
        """The inputs in order."""
        found = []
        for index in range(self.count):
            fixed = self._buffers.get(f"fixed_{index}")
            found.append(self.learned[f"input {index}"] if fixed is None else fixed)
        return found

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Positional and keyword inputs of the network. With `dtype`, floating-point inputs are cast to this type."""
        entries = [entry.to(dtype) if dtype and entry.is_floating_point() else entry for entry in self.entries()]
        return (tuple(entries), {}) if self.keys is None else ((), dict(zip(self.keys, entries, strict=True)))


def _start(entry: Any, like: Tensor) -> Tensor:
    if isinstance(entry, Tensor):
        return entry.to(like.device, like.dtype if entry.is_floating_point() else None).clone()
    if isinstance(entry, Mapping):
        return torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=like.device)
    return torch.randn(entry, dtype=like.dtype, device=like.device)


def _first_width(network: nn.Module) -> int:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if not list(module.children()) and list(module.named_parameters(recurse=False)):
            break
        if any(value is None for value in module._parameters.values()):
            break
    raise ValueError(
        f"{OWNER}: inputs is a count, but the network's first layer is not linear; give the inducing inputs themselves, such as "
        "examples of the training data, or their shape"
    )


def first_examples(loader: Iterable[Any], count: int) -> tuple[Any, Tensor]:
    """Inputs and targets of the first examples of a loader.

    Args:
        loader: Batches (inputs, targets). Inputs are a tensor, a tuple or list of tensors, or a dict.
        count: Number of examples.

    Raises:
        ValueError: If the loader has fewer examples.
    """
    inputs: list[Any] = []
    targets: list[Tensor] = []
    found = 0
    for x, y in loader:
        inputs.append(x)
        targets.append(y)
        found += len(y)
        if found >= count:
            break
    if found < count:
        raise ValueError(f"{OWNER}: points={count}, but the loader has {found} examples; ask for fewer")

    def join(parts: list[Any]) -> Any:
        if isinstance(parts[0], Mapping):
            return {key: join([part[key] for part in parts]) for key in parts[0]}
        if isinstance(parts[0], (tuple, list)):
            return [join(list(entry)) for entry in zip(*parts, strict=True)]
        return torch.cat(parts)[:count]

    return join(inputs), torch.cat(targets)[:count]
