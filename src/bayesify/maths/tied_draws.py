"""Draws of many Gaussian matrices with low-rank standard deviations on a GPU in one launch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.maths import fused_draws
from bayesify.maths.fused_draws import ALIGNMENT_NUMBERS, Joined, Place, first_tiles, offset, on_device, tile_owners
from bayesify.maths.philox import ROUNDS

BLOCK, CHUNK = 32, 64
"""Number of rows or columns whose factors' gradients a program computes, and number of their entries per iteration."""

FACTORS_PER_PROGRAM = 512
"""Number of factors that a program makes positive."""


class TiedPlan:
    r"""Memory layout of many matrices `[W b]` for kernels, with $s_{ij} = \sum_k u_{ik} v_{jk}$; see `KTied`.

    The kernels read a table that has one row per matrix and these columns:

    - offsets of the mean, the raw row factors and the raw column factors from `base`, in elements;
    - number of entries, number of columns; first tile of noise, number of tiles per draw;
    - number of columns of W, offset of the draws of W, distance between rows, number of positions per channel, distance between
      channels, distance between positions;
    - offset of the draws of b, number of entries in a draw of W, and number of entries in a draw of b;
    - offsets of the gradients with respect to the mean, the row factors and the column factors;
    - number of row factors, number of column factors.
    """

    def __init__(
        self,
        means: Sequence[Tensor],  # mean M of each matrix, [rows, cols]
        raw_rows: Sequence[Tensor],  # raw row factors of each matrix, [rows, rank]
        raw_cols: Sequence[Tensor],  # raw column factors of each matrix, [cols, rank]
        outputs: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],  # sizes and strides of W and of b
        lookups: Sequence[bool],  # whether W is an embedding table, whose rows are the columns of the matrix
        prior_stds: Sequence[Sequence[float]],  # prior standard deviations of W and of b for each matrix
        num_draws: int,
        antithetic: bool,  # whether every second draw uses the negative noise of the draw before it
        dtype: torch.dtype,  # data type of the draws
    ) -> None:
        self.num_draws, self.antithetic, self.dtype = num_draws, antithetic, dtype
        self.device, self.rank = means[0].device, raw_rows[0].shape[1]
        self.base = torch.zeros(4, device=self.device)
        layouts = [((num_draws, *size), (math.prod(size), *stride)) for pair in outputs for size, stride in pair]
        self.drawn = Joined(layouts)
        self.means, self.factors = (
            Joined([(tuple(part.shape), part.stride()) for part in parts]) for parts in (means, [*raw_rows, *raw_cols])
        )
        tiles, first = first_tiles([mean.numel() for mean in means], num_draws, antithetic)
        rows, place = [], 0
        for at, (mean, row, col, pair) in enumerate(zip(means, raw_rows, raw_cols, outputs, strict=True)):
            start, bias = self.drawn.starts[place], self.drawn.starts[place + len(pair) - 1]
            place += len(pair)
            width, steps = _steps(*pair[0], mean.shape[0], lookups[at])
            rows.append(
                [
                    *(offset(part, self.base) for part in (mean, row, col)),
                    mean.numel(), mean.shape[1], first[at], tiles[at], width, start, *steps, bias,
                    mean.shape[0] * width, mean.shape[0], self.means.starts[at],
                    *self.factors.starts[at :: len(means)], row.numel(), col.numel(),
                ]
            )  # fmt: skip
        self.owners = tile_owners(tiles, self.device)
        self.sides = self._blocks([mean.shape for mean in means], BLOCK)
        self.numbers = self._blocks(
            [(row.numel(), col.numel()) for row, col in zip(raw_rows, raw_cols, strict=True)], FACTORS_PER_PROGRAM
        )
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        pairs = [[stds[0] ** -2, stds[-1] ** -2] for stds in prior_stds]
        self.precisions = torch.tensor(pairs, dtype=torch.float32).to(self.device)
        self.constant = sum(
            math.prod(size) * (math.log(std) - 0.5)
            for pair, stds in zip(outputs, prior_stds, strict=True)
            for (size, _), std in zip(pair, stds, strict=True)
        )
        self.gaps = torch.zeros(ALIGNMENT_NUMBERS, dtype=dtype, device=self.device)

    def _blocks(self, sizes: Sequence[Sequence[int]], block: int) -> Tensor:
        """For each block of factors: the index of its matrix, its kind (0 for row factors, 1 for column factors), and its index
        among the blocks of this kind: [blocks, 3]."""
        found = [
            (at, side, number)
            for at, pair in enumerate(sizes)
            for side, size in enumerate(pair)
            for number in range(-(-size // block))
        ]
        return torch.tensor(found, dtype=torch.int32).to(self.device)

    def _positive(self) -> Tensor:
        """The factors as positive numbers, in the layout of their gradients."""
        from bayesify.maths.tied_kernels import positive_kernel

        factors = torch.empty(self.factors.total, dtype=torch.float32, device=self.device)
        positive_kernel[(len(self.numbers),)](self.numbers, self.table, self.base, factors, FACTORS_PER_PROGRAM)
        return factors

    def draw(self, seed: Tensor) -> tuple[Sequence[Place], Tensor]:
        """Draws [S, *shape] of each W and b, and the KL, a scalar; without gradients."""
        from bayesify.maths.tied_kernels import tied_draw_kernel

        out = torch.empty(self.drawn.total, dtype=self.dtype, device=self.device)
        parts = torch.empty(len(self.owners), dtype=torch.float32, device=self.device)
        with on_device(self.device):
            tied_draw_kernel[(len(self.owners),)](
                self.owners, self.table, self.precisions, self.base, self._positive(), seed, out, parts, self.num_draws,
                self.antithetic, self.rank, ROUNDS, fused_draws.HAS_FAST_SINES, num_warps=fused_draws.WARPS_PER_TILE,
            )  # fmt: skip
        return self.drawn.places(out), parts.sum().add_(self.constant)

    def gradients(self, seed: Tensor, grads: Sequence[Tensor | None], grad_kl: Tensor | None) -> list[Tensor]:
        """Gradients with respect to all means, row factors and column factors, in this order, from those with respect to the
        draws and the KL."""
        from bayesify.maths.tied_kernels import factor_kernel, tied_gradient_kernel

        joined = self.drawn.join(grads, self.gaps)
        to_mean, to_std, to_factors = (
            torch.empty(part.total, dtype=torch.float32, device=self.device)
            for part in (self.means, self.means, self.factors)
        )
        weight = torch.zeros((), device=self.device) if grad_kl is None else grad_kl
        with on_device(self.device):
            factors = self._positive()
            tied_gradient_kernel[(len(self.owners),)](
                self.owners, self.table, self.precisions, self.base, factors, seed, joined, weight, to_mean, to_std, self.num_draws,
                self.antithetic, self.rank, ROUNDS, fused_draws.HAS_FAST_SINES, num_warps=fused_draws.WARPS_PER_TILE,
            )  # fmt: skip
            factor_kernel[(len(self.sides), self.rank)](
                self.sides, self.table, self.base, factors, to_std, to_factors, self.rank, BLOCK, CHUNK
            )
        return [*self.means.views(to_mean), *self.factors.views(to_factors)]


def _steps(size: tuple[int, ...], stride: tuple[int, ...], rows: int, lookup: bool) -> tuple[int, list[int]]:
    if lookup:
        return size[0], [stride[1], 1, stride[0], 0]
    width = math.prod(size) // rows
    if len(size) > 2 and stride[1] == 1 and width > 1:  # channels last: positions vary more slowly than channels
        return width, [stride[0], math.prod(size[2:]), 1, size[1]]
    return width, [width, 1, 1, 0]
