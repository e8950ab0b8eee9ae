"""Inducing inputs of a network: how they are checked, described as plain data, and stored as parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.arguments.checks import MAX_COUNT, refuse
from bayesify.weights.named_parameters import NamedParameters

OWNER = "GlobalInducing"


def check_inputs(inputs: Any) -> Any:
    """Check the inducing inputs, and return detached copies in the form that the posterior stores.

    Inputs are a tensor, a tuple or list of positional inputs, or a dict of keyword inputs. A shape (a list of integers, or
    `{"shape": ..., "dtype": ...}`) can replace a tensor, and a count can replace all inputs. Inputs must be finite, not empty,
    and of equal length.
    """
    if isinstance(inputs, bool) or inputs is None or isinstance(inputs, (str, bytes)):
        raise TypeError(f"{OWNER}: inputs={inputs!r}; give inputs of the network, such as rows of the training data")
    if isinstance(inputs, int):
        if not 1 <= inputs <= MAX_COUNT:
            raise refuse(OWNER, "inputs", inputs, f"an integer of at least 1 and at most {MAX_COUNT:,}")
        return inputs
    if _is_shape(inputs) or not isinstance(inputs, (Mapping, tuple, list)):
        return _check_entry(inputs, "inputs")
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    kept = {str(key): _check_entry(value, f"inputs {key!r}") for key, value in items}
    lengths = {len(entry) if isinstance(entry, Tensor) else _sizes(entry)[0] for entry in kept.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"{OWNER}: inputs= has tensors with {sorted(lengths)} examples; give every tensor the same number of "
            "examples, at least one"
        )
    return kept if isinstance(inputs, Mapping) else list(kept.values())


def _is_shape(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {"shape", "dtype"}
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(size, int) for size in value)


def _sizes(shape: Any) -> list[int]:
    return list(shape["shape"] if isinstance(shape, Mapping) else shape)


def _check_entry(value: Any, what: str) -> Any:
    if _is_shape(value):
        sizes = _sizes(value)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{OWNER}: inputs have shape {sizes}; give at least one inducing input, and no empty axis")
        return {"shape": sizes, "dtype": str(value["dtype"])} if isinstance(value, Mapping) else sizes
    if not isinstance(value, Tensor):
        arrays = hasattr(value, "__array__")
        hint = "for example with torch.from_numpy(...)" if arrays else "such as rows of the training data"
        raise TypeError(f"{OWNER}: {what} have type {type(value).__name__}; give tensors, {hint}")
    if value.ndim == 0 or value.numel() == 0:
        raise ValueError(f"{OWNER}: {what} have shape {tuple(value.shape)}; give at least one inducing input")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        place = (~torch.isfinite(value)).nonzero()[0].tolist()
        raise ValueError(f"{OWNER}: {what} hold {value[tuple(place)].item()} at index {place}; give finite numbers")
    return value.detach().clone()


def describe_inputs(inputs: Any) -> Any:
    """Plain description of the shapes and dtypes of inputs. The values are in the posterior's state."""

    def describe(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        sizes = list(entry.shape)
        dtype = str(entry.dtype).removeprefix("torch.")
        return sizes if entry.is_floating_point() else {"shape": sizes, "dtype": dtype}

    return pytree.tree_map(describe, inputs, is_leaf=_is_shape)


class InducingInputs(nn.Module):
    """Inducing inputs as parameters. Inputs that are not floating point, such as words and masks, stay fixed.

    The inputs come from `check_inputs`. A shape is replaced by a tensor of standard normal numbers, or of zeros if the dtype is
    not floating point. If only a count is given, the network's first layer gives the width of an input.
    """

    def __init__(self, inputs: Any, network: nn.Module, like: Tensor) -> None:
        super().__init__()
        if isinstance(inputs, int):
            inputs = [inputs, _first_width(network)]
        single = isinstance(inputs, Tensor) or _is_shape(inputs)
        self.keys = list(inputs) if isinstance(inputs, Mapping) and not single else None
        entries = [inputs] if single else list(inputs.values() if isinstance(inputs, Mapping) else inputs)
        made = [_start(entry, like) for entry in entries]
        learned = {f"input {index}": value for index, value in enumerate(made) if value.is_floating_point()}
        self.learned = NamedParameters(learned)
        for index, value in enumerate(made):
            if not value.is_floating_point():
                self.register_buffer(f"fixed_{index}", value)
        self.count = len(made)
        self.num_points = len(made[0])

    def entries(self) -> list[Tensor]:
        """The inputs in order."""
        fixed = [self._buffers.get(f"fixed_{index}") for index in range(self.count)]
        return [self.learned[f"input {index}"] if value is None else value for index, value in enumerate(fixed)]

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Positional and keyword inputs of the network. If `dtype` is given, floating-point inputs are cast to it."""
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
        f"{OWNER}: inputs= is a number, but the network's first layer is not linear; give the inducing inputs "
        "themselves, such as examples of the training data, or their shape"
    )


def first_examples(loader: Iterable[Any], count: int) -> tuple[Any, Tensor]:
    """Collect the inputs and targets of the first examples of a loader. The inputs are a tensor, a tuple or list of tensors, or a
    dict."""
    inputs: list[Any] = []
    targets: list[Tensor] = []
    for x, y in loader:
        inputs.append(x)
        targets.append(y)
        if sum(map(len, targets)) >= count:
            break
    found = sum(map(len, targets))
    if found < count:
        raise ValueError(
            f"{OWNER}: points={count}, but the loader has only {found} examples; give points= a smaller value"
        )
    return _joined(inputs, count), torch.cat(targets)[:count]


def _joined(parts: list[Any], count: int) -> Any:
    """All batches joined, cut to the first `count` examples. Torch's pytree functions fail here: they treat a Hugging Face batch
    as a leaf."""
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts], count) for key in parts[0]}
    if isinstance(parts[0], (tuple, list)):
        return [_joined(list(entry), count) for entry in zip(*parts, strict=True)]
    return torch.cat(parts)[:count]
