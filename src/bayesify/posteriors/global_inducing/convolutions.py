"""Convolutions inside a network as regressions on patches. The patches are never extracted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayesify.maths.convolution_geometry import Geometry
from bayesify.maths.convolution_moments import convolution_moments
from bayesify.maths.patch_products import patch_products
from bayesify.posteriors.global_inducing.inputs import OWNER
from bayesify.posteriors.global_inducing.likelihood import HalfPrecision
from bayesify.posteriors.global_inducing.maps import LinearMap, argument


class Convolution(LinearMap):
    """A convolution over any number of axes. Pseudo-outputs are maps, [M, c_out, *o], and all positions share the precision."""

    features_axis: ClassVar[int] = 1
    costly: ClassVar[bool] = True

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The map over which the kernel moves. Padding with values other than zero is already applied."""
        assert isinstance(module, _ConvNd)
        x: Tensor = argument(args, kwargs, 0, "input")
        if x.ndim != len(module.kernel_size) + 2:
            raise ValueError(
                f"{OWNER}: {self.layer.name} gets an input of shape {tuple(x.shape)}, which has no axis of examples; "
                "the layers must keep the examples along the first axis"
            )
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        return [x]

    def geometry(self, module: nn.Module) -> Geometry:
        """Geometry of the kernel over the map that `seen` returns."""
        assert isinstance(module, _ConvNd)
        twice = list(module._reversed_padding_repeated_twice)
        pairs = [(twice[i], twice[i + 1]) for i in range(0, len(twice), 2)][::-1]
        if module.padding_mode != "zeros":
            pairs = [(0, 0)] * len(pairs)
        return Geometry(module.kernel_size, module.stride, module.dilation, tuple(pairs), module.groups)

    def output_shape(self, seen: list[Tensor], module: nn.Module) -> tuple[int, ...]:
        """Shape of the outputs: [M, c_out, *o], or [M, c_out] if the posterior spans only the bias."""
        positions = self.geometry(module).outputs(seen[0].shape[2:]) if self.has_weight else ()
        return (seen[0].shape[0], self.layer.rows, *positions)

    def outputs(self, module: nn.Module, seen: list[Tensor], matrix: Tensor) -> Tensor:
        """The convolution of the map from `seen`, plus the bias if the posterior spans it: [M, c_out, *o]."""
        bias = matrix[:, -1] if self.has_bias else None
        if not self.has_weight:
            assert bias is not None
            return bias.expand(self.output_shape(seen, module)).clone()
        x, geometry = self.geometry(module).padded(seen[0])
        columns = matrix[:, : self.layer.weights[0].matrix_shape[1]]
        kernel = self._moving(columns.unflatten(-1, (-1, math.prod(geometry.kernel)))).unflatten(-1, geometry.kernel)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel) - 1]
        made: Tensor = convolve(x, kernel, bias, geometry.stride, 0, geometry.dilation, geometry.groups)
        return made

    def _moving(self, kernel: Tensor) -> Tensor:
        """The kernel, [c_out, c_in / g, K], in the form in which it moves over the map from `seen`."""
        return kernel

    def takes(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether the type is bfloat16 and the convolution has one group of channels."""
        return dtype == torch.bfloat16 and self.has_weight and self.geometry(module).groups == 1

    def moments(
        self, module: nn.Module, seen: list[Tensor], targets: Tensor, mix: HalfPrecision
    ) -> tuple[Tensor, Tensor]:
        """See `maths.convolution_moments`."""
        ones = mix(targets.new_ones(targets.shape[0]))
        if not self.has_weight:
            return ones.square().sum().view(1, 1, 1), (ones @ mix(targets)).view(1, 1, -1)
        geometry, column = self.geometry(module), ones if self.has_bias else None
        if seen[0].dtype == torch.bfloat16 and mix.numbers is not None:
            found = patch_products(seen[0], targets, geometry, mix.numbers, self.has_bias)
        elif mix.numbers is not None:
            found = convolution_moments(seen[0], targets, geometry, column, mix.numbers)
        else:
            found = convolution_moments(mix(seen[0]), mix(targets), geometry, column)
        return self._arrange(geometry, *found)

    def _arrange(self, geometry: Geometry, gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices, with kernel positions in the order of the layer's columns."""
        return gram, cross


class TransposedConvolution(Convolution):
    """A transposed convolution. It is a convolution of the flipped kernel with the map, with zeros between the map's entries."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The map with zeros between and around its entries."""
        assert isinstance(module, _ConvTransposeNd)
        if len(args) > 1 or kwargs.get("output_size") is not None:
            raise ValueError(
                f"{OWNER}: {self.layer.name} is called with an output_size, which is not supported; use output_padding, "
                "or give this layer another posterior"
            )
        x: Tensor = argument(args, kwargs, 0, "input")
        sizes = [s * (n - 1) + 1 for s, n in zip(module.stride, x.shape[2:], strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        index = (slice(None), slice(None), *(slice(None, None, s) for s in module.stride))
        spread[index] = x
        pads: list[tuple[int, int]] = []
        for axis, (k, d) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
            around = d * (k - 1) - int(module.padding[axis])
            pads.append((around, around + module.output_padding[axis]))
        return [F.pad(spread, [size for pair in reversed(pads) for size in pair])]

    def geometry(self, module: nn.Module) -> Geometry:
        """Geometry with stride 1 over the map that `seen` returns."""
        assert isinstance(module, _ConvTransposeNd)
        axes = len(module.kernel_size)
        return Geometry(module.kernel_size, (1,) * axes, module.dilation, ((0, 0),) * axes, module.groups)

    def _moving(self, kernel: Tensor) -> Tensor:
        """The kernel, flipped along every axis."""
        return kernel.flip(-1)

    def _arrange(self, geometry: Geometry, gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices, with kernel positions in reverse order."""
        positions = math.prod(geometry.kernel)
        order = torch.arange(gram.shape[-1], device=gram.device)
        columns = gram.shape[-1] - self.has_bias
        order[:columns] = order[:columns].view(-1, positions).flip(1).flatten()
        return gram[:, order][:, :, order], cross[:, order]
