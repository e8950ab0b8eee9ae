"""How a convolution reads its map."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """How a convolution without padding reads its map, and the zeros around the map.

    Args:
        kernel: Sizes of the kernel.
        stride: In each axis.
        dilation: In each axis.
        padding: Zeros before and after the map, in each axis.
        groups: Groups of channels.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Positions of the output in each axis, for a map of the given sizes."""
        return tuple(
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, pad, d, k, s in zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )

    def padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The map with its zeros around it, and the geometry without them."""
        if not any(map(any, self.padding)):
            return x, self
        pads = [size for pair in reversed(self.padding) for size in pair]
        bare = tuple((0, 0) for _ in self.padding)
        return F.pad(x, pads), Geometry(self.kernel, self.stride, self.dilation, bare, self.groups)

    @property
    def offsets(self) -> list[Offset]:
        """Positions in the kernel, row-major."""
        return list(itertools.product(*(range(size) for size in self.kernel)))
