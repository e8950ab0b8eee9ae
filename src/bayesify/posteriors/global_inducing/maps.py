"""Linear maps inside a network: the input of each map when the network runs, and the two matrices of its regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.maths.gamma import widened
from bayesify.posteriors.global_inducing.inputs import OWNER
from bayesify.posteriors.global_inducing.likelihood import HalfPrecision
from bayesify.weights.catalog import Layer


@dataclass(frozen=True)
class LinearMap:
    """One layer `[W b]` of a network as a regression from the layer's input to pseudo-outputs."""

    layer: Layer
    hooked: str
    """Name of the module whose call reveals the layer's input."""
    features_axis: ClassVar[int] = -1
    """The axis of the pseudo-outputs along which the layer's outputs lie."""
    costly: ClassVar[bool] = False
    """Whether the matrices of the regression cost more than passing the inducing inputs through the layer."""

    def takes(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether `moments` has special products for features of a low-precision dtype."""
        return False

    @property
    def has_weight(self) -> bool:
        """Whether the posterior spans the layer's matrix, and not only its bias."""
        return not self.layer.weights[0].is_bias

    @property
    def has_bias(self) -> bool:
        """Whether the posterior spans the layer's bias."""
        return self.layer.weights[-1].is_bias

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Features [M, *positions, d], one entry for each group of the layer's outputs that has its own features."""
        return [argument(args, kwargs, 0, "input")]

    def output_shape(self, seen: list[Tensor], module: nn.Module) -> tuple[int, ...]:
        """Shape of the pseudo-outputs."""
        positions = seen[0].shape[1:-1] if self.has_weight else ()
        return (seen[0].shape[0], *positions, self.layer.rows)

    def outputs(self, module: nn.Module, seen: list[Tensor], matrix: Tensor) -> Tensor:
        r"""$A [W\ b]^\top$, of shape `output_shape`: the outputs for the features from `seen`. `matrix` is `[W b]`."""
        bias = matrix[:, -1] if self.has_bias else matrix.new_zeros(len(matrix))
        if not self.has_weight:
            return bias.expand(self.output_shape(seen, module)).clone()
        weights = matrix[:, : self.layer.weights[0].matrix_shape[1]].chunk(len(seen))
        return torch.cat([features @ part.mT for features, part in zip(seen, weights, strict=True)], -1) + bias

    def moments(
        self, module: nn.Module, seen: list[Tensor], targets: Tensor, mix: HalfPrecision
    ) -> tuple[Tensor, Tensor]:
        r"""$A^\top \Lambda A$, [G, D, D], and $A^\top \Lambda V$, [G, D, R], for targets V of shape `output_shape`."""
        parts = mix(targets).flatten(0, -2).chunk(len(seen), -1)
        ones = mix(targets.new_ones(targets.shape[0], *[1] * (targets.ndim - 1))).expand(*targets.shape[:-1], 1)
        grams, crosses = [], []
        for features, part in zip(seen, parts, strict=True):
            columns = [mix(features).flatten(0, -2)] if self.has_weight else []
            columns += [ones.flatten(0, -2)] if self.has_bias else []
            design = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
            grams.append(design.mT @ design)
            crosses.append(design.mT @ part)
        return torch.stack(grams), torch.stack(crosses)


class BilinearMap(LinearMap):
    """`nn.Bilinear`: linear in the products of its two inputs."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """All products of an entry of the first input and an entry of the second input."""
        left, right = widened(argument(args, kwargs, 0, "input1")), widened(argument(args, kwargs, 1, "input2"))
        return [(left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)]


class AttentionInput(LinearMap):
    """The projections of queries, keys and values in `nn.MultiheadAttention`. They are separate or stacked in one matrix."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The queries, keys or values. For a stacked matrix, there is one entry if all three are the same tensor."""
        names = ("query", "key", "value")
        given = [argument(args, kwargs, index, name) for index, name in enumerate(names)]
        leaf = self.layer.name.rpartition(".")[2]
        for name, tensor in zip(names, given, strict=True):
            if leaf == f"{name[0]}_proj":
                return [tensor]
        if not self.has_weight or (given[0] is given[1] and given[1] is given[2]):
            return given[:1]
        if len({tensor.shape for tensor in given}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise ValueError(
                f"{OWNER}: {self.layer.name} projects queries, keys and values of different shapes ({shapes}) by one "
                "matrix; give this layer another posterior, such as MeanField()"
            )
        return given


class AttentionOutput(LinearMap):
    """The projection at the end of `nn.MultiheadAttention`, which torch applies without calling its module."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Output of the heads, which is the module's output when the identity replaces this projection."""
        assert isinstance(module, nn.MultiheadAttention)
        slots: dict[str, Any] = module.out_proj._parameters
        kept = dict(slots)
        query = argument(args, kwargs, 0, "query")
        try:
            slots["weight"] = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
            slots["bias"] = query.new_zeros(module.embed_dim)
            heads: Tensor = module.forward(*args, **{**kwargs, "need_weights": False})[0]
        finally:
            slots.update(kept)
        return [heads]


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """An argument of a call, found by position or by name."""
    return args[index] if index < len(args) else kwargs[name]
