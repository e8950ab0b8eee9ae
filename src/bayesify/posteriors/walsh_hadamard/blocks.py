"""Matrices of any size that consist of square Walsh-Hadamard blocks, and weights that multiply inputs by these blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import Randomness
from bayesify.maths.walsh_hadamard import materialize, multiply
from bayesify.transforms import next_power_of_two
from bayesify.weights.structured import LocalWeight, StructuredWeight


@dataclass(frozen=True)
class Blocks:
    """A cover of a matrix by K square blocks of size D. D is a power of two. Block entries outside the matrix are cut
    off.

    The shorter side of the matrix is padded to D, and the longer side is split into blocks. If the matrix has a single row or
    column of n entries, one block of at least n entries covers it. The entries of this block are read row by row.
    """

    rows: int  # number of rows of the matrix
    cols: int  # number of columns of the matrix
    size: int  # size D of a block
    count: int  # number of blocks K
    along: Literal[
        "rows", "cols", "entries"
    ]  # the side that is a stack of blocks; "entries" for a single row or column

    @classmethod
    def cover(cls, rows: int, cols: int) -> Self:
        """The blocks that cover a matrix."""
        if min(rows, cols) == 1:
            return cls(rows, cols, next_power_of_two(math.isqrt(rows * cols - 1) + 1), 1, "entries")
        size = next_power_of_two(min(rows, cols))
        return cls(rows, cols, size, -(-max(rows, cols) // size), "rows" if rows >= cols else "cols")

    def assemble(self, blocks: Tensor) -> Tensor:
        """Assemble the matrix from its blocks: [..., K, D, D] -> [..., rows, cols]."""
        if self.along == "entries":
            flat = blocks.flatten(-3)[..., : self.rows * self.cols]
            found: Tensor = flat.unflatten(-1, (self.rows, self.cols))
            return found
        whole = blocks.flatten(-3, -2) if self.along == "rows" else blocks.movedim(-3, -2).flatten(-2)
        return whole[..., : self.rows, : self.cols]

    def disassemble(self, matrix: Tensor) -> Tensor:
        """Split a matrix into blocks, with zeros outside the matrix: [rows, cols] -> [K, D, D]."""
        size, count = self.size, self.count
        if self.along == "entries":
            return F.pad(matrix.reshape(-1), (0, size * size - matrix.numel())).view(1, size, size)
        tall, wide = (count * size, size) if self.along == "rows" else (size, count * size)
        padded = F.pad(matrix, (0, wide - self.cols, 0, tall - self.rows))
        if self.along == "rows":
            return padded.view(count, size, size)
        return padded.view(size, count, size).movedim(1, 0)

    def multiply(self, x: Tensor, left: Tensor, g: Tensor, right: Tensor) -> Tensor:
        """x W^T without forming W: [..., cols] -> [..., rows]. The factors are [K, D], and g may be [..., K, D]."""
        wide = self.size if self.along == "rows" else self.size * self.count
        if self.cols < wide:
            x = F.pad(x, (0, wide - self.cols))
        if self.along == "rows":
            y = multiply(x.unsqueeze(-2), left, g, right).flatten(-2)
        else:
            y = multiply(x.unflatten(-1, (self.count, self.size)), left, g, right)
            y = y.sum(-2) if self.count > 1 else y.squeeze(-2)
        return y[..., : self.rows] if y.shape[-1] > self.rows else y


class WalshHadamardWeight(StructuredWeight):
    r"""A drawn weight $S_1 H \operatorname{diag}(g) H S_2$ in blocks. `F.linear` multiplies by this weight in O(D log D) without
    forming the matrix.

    Shapes:
        left, g, right: [K, D]; there may be a leading axis of draws.
    """

    def __new__(cls, left: Tensor, g: Tensor, right: Tensor, blocks: Blocks) -> Self:
        return cls.wrap((*g.shape[:-2], blocks.rows, blocks.cols), g, (left, g, right), (blocks,))

    def materialize(self) -> Tensor:
        found: Tensor = self.static_[0].assemble(materialize(*self.components_))
        return found


@WalshHadamardWeight.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, WalshHadamardWeight) or isinstance(x, StructuredWeight) or _gains_by_forming(x, weight):
        return NotImplemented
    return _finish(weight.static_[0].multiply(x, *weight.components_), bias)


def _gains_by_forming(x: Tensor, weight: WalshHadamardWeight) -> bool:
    """Whether it is faster to materialize W. With autocast on a GPU and many input rows it is, because tensor cores are faster
    than memory-bound transforms."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    return x.is_cuda and torch.is_autocast_enabled("cuda") and rows >= weight.static_[0].size


def _finish(y: Tensor, bias: Tensor | None) -> Tensor:
    y = y if bias is None else y + bias
    if torch.is_autocast_enabled(y.device.type):
        return y.to(torch.get_autocast_dtype(y.device.type))
    return y


class LocalWalshHadamardWeight(LocalWeight):
    r"""A Walsh-Hadamard weight with a separate g for each example. All positions of an example, and all calls of the layer, use
    the same g.

    $g_b = \mu + s \circ (\epsilon_b + N \epsilon_b)$ for the b-th example along the first axis of the input. Each example's
    output has the same distribution as with a shared g, but the gradient has less variance. The joint distribution over examples
    is lost, so only the training objective uses this weight. Outside `F.linear`, or if the rows of a layer's input are not the
    examples of the batch, all examples share one draw of the weight.

    Shapes:
        left, mean, std, right: [K, D]; lower: [K, D, D], or [K, 0, 0] for a diagonal $\Sigma$. There may be a leading
            axis of draws.
    """

    drawn_: Tensor

    def __new__(
        cls,
        left: Tensor,
        mean: Tensor,
        std: Tensor,
        lower: Tensor,
        right: Tensor,
        blocks: Blocks,
        noise: Randomness,
        name: str = "",
    ) -> Self:
        shape = (*mean.shape[:-2], blocks.rows, blocks.cols)
        return cls.wrap(shape, mean, (left, mean, std, lower, right), (blocks, noise, name))

    def draw(self) -> Tensor:
        return self.assemble(self.draw_g(self.components_[1].shape))

    def assemble(self, g: Tensor) -> Tensor:
        """The matrix for each g in [..., K, D]."""
        found: Tensor = self.static_[0].assemble(materialize(self.components_[0], g, self.components_[-1]))
        return found

    def draw_g(self, shape: Sequence[int]) -> Tensor:
        """Draws of g with a shape that ends in [K, D]."""
        _, mean, std, lower, _ = self.components_
        noise = self.normal(shape, mean)
        if lower.shape[-1]:
            noise = noise + (lower @ noise.unsqueeze(-1)).squeeze(-1)
        return torch.addcmul(mean, std, noise)

    def by_example(self) -> Tensor:
        """The g of each example in a pass, [B, K, D]."""
        if not self.used_:
            self.drawn_, self.used_ = self.draw_g((self.examples_, *self.components_[1].shape)), True
        return self.drawn_


@LocalWalshHadamardWeight.rule(F.linear)
def _local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, LocalWalshHadamardWeight) or isinstance(x, StructuredWeight) or x.ndim < 2:
        return NotImplemented
    if not weight.is_local(x):
        return NotImplemented
    (left, mean, _, _, right), blocks = weight.components_, weight.static_[0]
    between = (1,) * (x.ndim - 2)
    if blocks.along == "entries":
        drawn = weight.assemble(weight.by_example())  # [B, rows, cols]
        y = (drawn.view(x.shape[0], *between, *drawn.shape[1:]) @ x.unsqueeze(-1)).squeeze(-1)
        return _finish(y, bias)
    g = weight.by_example().view(x.shape[0], *between, *mean.shape)
    return _finish(blocks.multiply(x, left, g, right), bias)
