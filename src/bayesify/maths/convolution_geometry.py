"""Geometry of a convolution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Kernel geometry of a convolution in each axis, and the number of zeros that pad its input map before and after."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of output positions in each axis, for a map of the given sizes."""
        return tuple(
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, pad, d, k, s in zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )

    def padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The padded map, and the geometry without padding."""
        if not any(map(any, self.padding)):
            return x, self
        pads = [size for pair in reversed(self.padding) for size in pair]
        bare = tuple((0, 0) for _ in self.padding)
        return F.pad(x, pads), Geometry(self.kernel, self.stride, self.dilation, bare, self.groups)

    @property
    def offsets(self) -> list[Offset]:
        """Positions in the kernel, row-major."""
        return list(itertools.product(*(range(size) for size in self.kernel)))


def windows(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A view of padded maps [B, C, *n] in which each output position sees its window: [B, C, *o, *k]."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        padded = padded.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return padded
