"""Inputs of the last linear layer of a network. The derivatives with respect to this layer's weights follow from these
inputs alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.jacobians.rules import Rule, with_ones
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Layer


@dataclass(frozen=True)
class Features:
    r"""Outputs $f_{bto} = \sum_j W_{oj} a_{btj} + c_o$ of a network's last layer at T positions, and the inputs $a$ of that layer.

    `place` [T K] contains, for each position and each row of W, the flat index of the corresponding number in an example's
    outputs. `place` is `None` if the outputs are ordered by position and row.
    """

    outputs: Tensor  # outputs of the network, [B, ...], with T K numbers for each example
    inputs: Tensor  # a, [B, T, d_in], in float32 or higher precision
    channels: int  # number K of rows of W
    place: Tensor | None

    def of(self, layer: Layer) -> Tensor:
        """The layer's inputs with a column of ones for the bias, [B, T, D], in the column order of `[W b]`."""
        return with_ones(self.inputs, layer)

    def at_positions(self, values: Tensor) -> Tensor:
        """Rearrange values from the shape of the outputs, [B, ...], to the shape [B, T, K], indexed by position and row of W."""
        flat = values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
        flat = flat if self.place is None else flat[:, self.place.to(flat.device)]
        return flat.reshape(len(values), -1, self.channels)

    def in_order(self, values: Tensor, dims: int = 1) -> Tensor:
        """Reorder each of the last `dims` axes, [..., T K], from position and row of W to the order of the outputs."""
        if self.place is None:
            return values
        order = self.place.argsort().to(values.device)
        for dim in range(-dims, 0):
            values = values.index_select(dim, order)
        return values

    def class_order(self, axis: int) -> Tensor | None:
        """For each position of the outputs, the index of the matching position of the layer: [T].

        The classes lie along `axis` of the outputs. The result is `None` unless the classes are the rows of W, in the same order.
        """
        shape = self.outputs.shape
        wanted = torch.arange(shape[1:].numel()).reshape(1, *shape[1:]).movedim(axis, -1).flatten(0, -2)  # [T, K]
        own = torch.arange(wanted.numel()) if self.place is None else self.place
        if wanted.shape[1] != self.channels:
            return None
        own = own.reshape(-1, self.channels)
        order = own[:, 0].argsort()[wanted[:, 0].argsort().argsort()]
        return order if torch.equal(own[order], wanted) else None


@torch.no_grad()
def read_features(runner: Runner, call: Callable[[Runner], Tensor], rule: Rule) -> Features | None:
    """Run a network once, without derivatives, and keep the inputs of its last layer.

    The network must return the layer's outputs themselves (the same memory), with axes in any order, and must not
    change them in place. The result is `None` if the layer was not called exactly once with all examples, or if the network does
    not end with this layer. `call` runs the network through a private runner and returns the outputs.
    """
    seen: list[tuple[Tensor, Tensor, int, int] | None] = []

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = isinstance(output, Tensor) and args and isinstance(args[0], Tensor)
        seen.append((args[0], output, _version(args[0]), _version(output)) if given else None)

    with torch.inference_mode(False), torch.no_grad(), runner.hooked([rule.module], watch) as own:
        outputs = call(own)
    if len(seen) != 1 or seen[0] is None:
        return None
    inputs, made, *versions = seen[0]
    if [_version(inputs), _version(made)] != versions or not len(made) == len(inputs) == len(outputs):
        return None
    if not _same_numbers(made, outputs):
        return None
    shape = (tuple(made.shape[1:]), made.stride()[1:], tuple(outputs.shape[1:]), outputs.stride()[1:])
    found = _places(*shape, outputs.storage_offset() - made.storage_offset(), rule.channel_axis)
    if found is None:
        return None
    positions = rule.positions(rule.keep(inputs), made)
    in_order = torch.equal(found, torch.arange(len(found)))
    return Features(outputs, positions, made.shape[rule.channel_axis], None if in_order else found)


def _version(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; 0 for a tensor from inference mode, which cannot be changed outside that mode."""
    return 0 if tensor.is_inference() else tensor._version


def _same_numbers(made: Tensor, outputs: Tensor) -> bool:
    """Whether two tensors have the same dtype and occupy the same memory for each example."""
    if made.dtype != outputs.dtype or made.numel() != outputs.numel() or outputs.is_conj() or outputs.is_neg():
        return False
    if made.untyped_storage().data_ptr() != outputs.untyped_storage().data_ptr():
        return False
    return len(made) < 2 or made.stride(0) == outputs.stride(0)


@lru_cache(maxsize=32)
def _places(
    made: tuple[int, ...],
    made_stride: tuple[int, ...],
    outputs: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    channel_axis: int,
) -> Tensor | None:
    """The flat index, in an example's outputs, of each number that the layer returned: [T K]. The numbers are ordered by position
    and then by channel. `None` if the outputs do not contain each number of the layer exactly once."""
    own = _addresses(made, made_stride).movedim(channel_axis if channel_axis < 0 else channel_axis - 1, -1).flatten()
    seen, order = (_addresses(outputs, stride) + offset).flatten().sort()
    at = torch.searchsorted(seen, own).clamp_max(len(seen) - 1)
    places = order[at]
    right = torch.equal(seen[at], own) and len(places.unique()) == len(own)
    return places if right else None


def _addresses(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Memory offsets of the entries of a tensor from its first entry: [*shape]."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.arange(last + 1).as_strided(shape, stride)
