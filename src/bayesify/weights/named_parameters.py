"""Parameters under the names of weights and layers."""

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class NamedParameters(nn.Module):
    """Parameters under dotted names, such as names of weights and layers. Torch does not allow dotted names directly.

    A parameter can be pruned. A pruned parameter stores, in one vector, the entries that a mask keeps, and `dense` puts them back
    among zeros. The mask is a buffer next to the parameter. The row-major positions of the kept entries are another buffer,
    because the gradient of a scatter by mask waits for the GPU, and a step that waits cannot be captured in a CUDA graph.
    """

    def __init__(self, values: Mapping[str, Tensor], trainable: bool = True) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(encode(name), nn.Parameter(value, requires_grad=trainable))

    def __getitem__(self, name: str) -> Tensor:
        value = self._parameters[encode(name)]
        assert value is not None
        return value

    def items(self) -> list[tuple[str, Tensor]]:
        """Pairs of name and parameter."""
        return [(decode(key), value) for key, value in self._parameters.items() if value is not None]

    def __iter__(self) -> Any:
        return (decode(key) for key in self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def values(self) -> list[Tensor]:
        """The parameters, in order."""
        return list(filter(_is_given, self._parameters.values()))

    def dense_values(self) -> list[Tensor]:
        """The parameters in their dense shapes, in order."""
        return [self.dense(name) for name in self] if self._buffers else self.values()

    def mask(self, name: str) -> Tensor | None:
        """Mask of the kept entries, in the dense shape; `None` if all entries are kept."""
        return self._buffers.get(encode(name) + MASK_SUFFIX)

    @property
    def is_pruned(self) -> bool:
        """Whether any parameter is pruned."""
        return bool(self._buffers)

    def prune(self, name: str, mask: Tensor) -> None:
        """Replace a parameter by a new one with only the entries at which the mask is true. The mask has the dense shape."""
        key, parameter = encode(name), self[name]
        kept = self.dense(name).detach()[mask]
        self._parameters[key] = nn.Parameter(kept, requires_grad=parameter.requires_grad)
        self.register_buffer(key + MASK_SUFFIX, mask)
        self.register_buffer(key + POSITIONS_SUFFIX, _positions(mask), persistent=False)

    def dense(self, name: str) -> Tensor:
        """A parameter in its dense shape."""
        return self.scatter(name, self[name])

    def scatter(self, name: str, values: Tensor) -> Tensor:
        """Put the values [*batch, stored shape] of a parameter's stored entries among zeros: [*batch, *dense shape]."""
        mask = self.mask(name)
        if mask is None:
            return values
        positions, batch = self._buffers[encode(name) + POSITIONS_SUFFIX], values.shape[:-1]
        assert positions is not None
        dense = values.new_zeros(*batch, mask.numel()).scatter(-1, positions.expand(*batch, -1), values)
        return dense.view(*batch, *mask.shape)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        theirs = {key for key in state_dict if key.startswith(prefix) and key.endswith(MASK_SUFFIX)}
        ours = {prefix + key for key in self._buffers if key.endswith(MASK_SUFFIX)}
        if theirs != ours:
            what = "pruned, but this network is not" if theirs - ours else "not pruned, but this network is"
            args[-1].append(f"{prefix[:-1]}: the state is {what}; load a pruned network's file with bayesify.load")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self:
            if (mask := self.mask(name)) is not None:
                self._buffers[encode(name) + POSITIONS_SUFFIX] = _positions(mask)


def tensors_in(module: nn.Module, *, buffers: bool = True) -> list[Tensor]:
    """Parameters and buffers of a module and its submodules. Shared tensors appear several times.

    This is faster than `parameters()`, which also collects names.
    """
    parts, found = [module], list[Tensor | None]()
    for part in parts:
        found += part._parameters.values()
        if buffers:
            found += part._buffers.values()
        parts += filter(_is_given, part._modules.values())
    return list(filter(_is_given, found))


def first_parameter(module: nn.Module) -> Tensor:
    """The first parameter of a module, found ten times as fast as with `next(module.parameters())`."""
    waiting = [module]
    while waiting:
        part = waiting.pop()
        for value in part._parameters.values():
            if value is not None:
                return value
        waiting += filter(_is_given, reversed(part._modules.values()))
    raise ValueError(f"{type(module).__name__} has no parameters; give a module with parameters")


_is_given: Any = partial(operator.is_not, None)
MASK_SUFFIX = ":mask"
"""Suffix of a mask's name, after the name of its parameter."""
POSITIONS_SUFFIX = ":positions"
"""Suffix of the name of the kept entries' positions, after the name of their parameter."""


def _positions(mask: Tensor) -> Tensor:
    """Row-major positions of a mask's true entries."""
    return mask.flatten().nonzero().squeeze(1)


def encode(name: str) -> str:
    """A dotted name as a key that torch allows."""
    return name.replace(".", "/") or "/"  # names contain no slash; a network that is one layer has the empty name


def decode(key: str) -> str:
    """Inverse of `encode`."""
    return "" if key == "/" else key.replace("/", ".")


def largest(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor | None], keep: float) -> dict[str, Tensor]:
    """Masks, by weight name, of the entries with the largest scores among all tensors together.

    Exactly `round(keep * entries)` entries, but at least one, are true. Entries that earlier pruning removed (see `masks`)
    count as entries and stay false. Raises `ValueError` if fewer entries are left than `keep` asks for.
    """
    all_left = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    left = all_left | {name: mask for name, mask in masks.items() if mask is not None}
    total = sum(score.numel() for score in scores.values())
    alive = sum(int(mask.sum()) for mask in left.values())
    wanted = max(1, round(keep * total))  # at least one, because a layer without entries could not be trained
    if wanted > alive:
        raise ValueError(
            f"prune: keep={keep}, but only {alive / total:.3g} of the parameters are left; give keep= a smaller value"
        )
    flat = torch.cat([score.masked_fill(~left[name], -torch.inf).flatten() for name, score in scores.items()])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(wanted, sorted=False).indices] = True
    parts = chosen.split([score.numel() for score in scores.values()])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}
