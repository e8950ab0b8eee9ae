"""Draws of many matrices by the extended Matheron rule on a GPU in three launches, without storing the noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths import fused_draws
from bayesify.maths.autograd_functions import Function, gradients_again
from bayesify.maths.fused_draws import ALIGNMENT_NUMBERS, Joined, Place, kernel_normals, on_device
from bayesify.maths.matheron import Factors, draw_group
from bayesify.maths.philox import ROUNDS

MAX_INDUCING_SIZE = 64
"""Maximum number of rows or columns of U that fit into a program's registers."""

BLOCK, PART = 64, 16
"""Number of rows of a matrix that a program processes, and number of rows of U whose parts a program sums."""

CHUNK, PROGRAMS, MAX_PARTS = 512, 4096, 128
"""Limits on the division of work. `CHUNK` is the minimum number of columns per program. If more than `PROGRAMS` programs would be
needed, each takes more columns. `MAX_PARTS` is the approximate maximum number of parts of a matrix."""


@lru_cache(maxsize=16)
def has_products(device: torch.device) -> bool:
    """Whether kernels can multiply matrices on a device. NVIDIA GPUs support products in tf32 and bfloat16 from compute
    capability 8."""
    if device.type != "cuda":  # Triton's interpreter
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


class Shape(NamedTuple):
    """Number of columns that a kernel processes at a time, and, for kernels that loop over rows, the number of rows."""

    step: int
    tall: int


SHAPES = {False: Shape(32, 32), True: Shape(64, 64)}
"""Shapes for products in float32 and in bfloat16, tuned on an H200."""

OPTIONS = {"num_warps": 4, "num_stages": 1}
"""Options of all kernels with noise. Loads are not prefetched, because the extra memory made kernels three times slower."""


@dataclass(frozen=True)
class Matrix:
    """One matrix `[W b]` in the layout that kernels read (columns in memory order), together with its noise $[E_3 E]$.
    $E_3$ has `thin` columns.

    Three integers locate the noise in the stream: the index of its first number, the distance between draws, and the distance
    between rows. All three are multiples of four.
    """

    outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # sizes and strides of W, and of b, in the network
    lookup: bool  # whether W is an embedding table, whose rows are the columns of the matrix
    ratio: float  # prior standard deviation of b divided by the prior standard deviation of W
    shape: tuple[int, int, int, int]  # d_out, d_in, M_r, M_c
    noise: tuple[int, int, int]
    balanced: bool = False  # whether a kernel's first axis of positions belongs to the rows

    @property
    def positions(self) -> int:
        """Number of kernel positions in a row if W is stored with channels last in memory; otherwise 1."""
        return positions_outside(*self.outputs[0], self.balanced)


def positions_outside(size: tuple[int, ...], stride: tuple[int, ...], balanced: bool) -> int:
    """Number of kernel positions in a row of the matrix if a weight of this size and stride is stored with channels last in
    memory; otherwise 1."""
    return math.prod(size[2 + balanced :]) if len(size) > 2 and stride[1] == 1 else 1


def _columns(rest: Tensor, count: int) -> Tensor:
    return F.pad(rest, (0, count - rest.shape[-1])) if rest.shape[-1] < count else rest[..., :count]


class MatheronPlan:
    r"""Memory layout of many matrices and their factors for kernels; see `matheron.conditional_draw`.

    The kernels read a table that has one row per matrix and these columns:

    - size of the matrix (d_out, d_in) and of U (M_r, M_c);
    - offset and row length of $A_r$, offset and row length of $[B_c A_c]$, and offset of U;
    - first quad of the noise, quads between draws, quads between rows (a quad is four numbers);
    - number of columns of W, offset of the draws of W, and distance between rows of W (an embedding table's rows are the matrix's
      columns);
    - offset of the draws of b, number of entries in a draw of W, and number of entries in a draw of b;
    - index of the matrix's first part, number of its parts (a part is a range of columns in a block of rows), and whether W is an
      embedding table.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],  # all matrices, in groups of equal size
        counts: Sequence[int],  # number of matrices in each group
        stack: tuple[int, int, int] | None,  # rows, outputs and inputs to which a stack of factors is padded
        thin: int,  # number of columns of E_3 in the noise, and of B_c before A_c; a multiple of four
        num_draws: int,
        antithetic: bool,  # whether every second draw uses the negative noise of the draw before it
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.matrices, self.thin = matrices, thin
        self.num_draws, self.antithetic, self.dtype, self.device = num_draws, antithetic, dtype, device
        self.size = max(16, 1 << (max(max(matrix.shape[2:]) for matrix in matrices) - 1).bit_length())
        self.lookups = any(one.lookup for one in matrices)
        self.drawn = Joined(
            [((num_draws, *size), (math.prod(size), *stride)) for one in matrices for size, stride in one.outputs]
        )
        sides = [(m_r, d_out, m_c, thin + d_in) for d_out, d_in, m_r, m_c in (one.shape for one in matrices)]
        if stack is not None:
            sides = [(stack[0], stack[1], stack[0], thin + stack[2])] * len(matrices)
        self.places = []  # of both sides: first number and row length of each matrix
        for at in (0, 2):
            firsts = accumulate((side[at] * side[at + 1] for side in sides), initial=0)
            self.places.append([(first, side[at + 1]) for first, side in zip(firsts, sides, strict=False)])
        self.starts = list(accumulate((num_draws * one.shape[2] * one.shape[3] for one in matrices), initial=0))
        self.orders = self._orders([len(matrices)] if stack else counts, stack[2] if stack else None)
        self._tables()
        self.ratios = torch.tensor([one.ratio for one in matrices], dtype=torch.float32).to(device)
        self.gaps = torch.zeros(ALIGNMENT_NUMBERS, dtype=dtype, device=device)

    def _orders(self, counts: Sequence[int], length: int | None) -> list[Tensor | None]:
        """For each group, the column index of $A_c$ at each memory position, [G, 1, d_in]; `None` if columns are in memory
        order."""
        found: list[Tensor | None] = []
        for first, last in pairwise(accumulate(counts, initial=0)):
            members = self.matrices[first:last]
            if all(one.positions == 1 for one in members):
                found.append(None)
                continue
            rows = []
            for one in members:
                width, at = math.prod(one.outputs[0][0]) // one.shape[0], torch.arange(length or one.shape[1])
                at[:width] = at[:width].view(-1, one.positions).T.reshape(-1)
                rows.append(at)
            found.append(torch.stack(rows)[:, None].to(self.device))
        return found

    def _tables(self) -> None:
        """Make the kernels' tables; see the class. Each program of a kernel processes one part, one block of rows or one block of
        columns."""
        table: list[list[int]] = []
        units: list[tuple[int, ...]] = []
        blocks: list[tuple[int, ...]] = []
        columns: dict[int, list[tuple[int, int]]] = {shape.step: [] for shape in SHAPES.values()}
        place = 0
        entries = self.num_draws * sum(
            d_out * (self.thin + d_in) for d_out, d_in, *_ in (one.shape for one in self.matrices)
        )
        least = max(CHUNK, ALIGNMENT_NUMBERS * (entries // (BLOCK * ALIGNMENT_NUMBERS * PROGRAMS)))
        for at, one in enumerate(self.matrices):
            (d_out, d_in, *_), outputs = one.shape, len(one.outputs)
            start, bias = self.drawn.starts[place], self.drawn.starts[place + outputs - 1]
            place += outputs
            width = math.prod(one.outputs[0][0]) // d_out
            count, length = -(-d_out // BLOCK), self.thin + d_in
            chunk = max(least, -(-length * count // (MAX_PARTS * ALIGNMENT_NUMBERS)) * ALIGNMENT_NUMBERS)
            pieces = [(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]
            table.append(
                [
                    *one.shape, *self.places[0][at], *self.places[1][at], self.starts[at], *(n // 4 for n in one.noise),
                    width, start, d_out if one.lookup else width, bias, d_out * width, d_out,
                    len(units), count * len(pieces), int(one.lookup),
                ]
            )  # fmt: skip
            blocks += [(at, block, len(units) + block * len(pieces), len(pieces)) for block in range(count)]
            units += [(at, block, *piece) for block in range(count) for piece in pieces]
            for step, found in columns.items():
                found += [(at, block) for block in range(-(-length // step))]
        self.table = torch.tensor(table, dtype=torch.int64).to(self.device)
        self.units, self.blocks = (torch.tensor(part, dtype=torch.int32).to(self.device) for part in (units, blocks))
        self.columns = {step: torch.tensor(part, dtype=torch.int32).to(self.device) for step, part in columns.items()}

    def operands(self, blocks: Sequence[Factors]) -> tuple[Tensor, Tensor]:
        """Two flat tensors: $A_r$ of all matrices, and $[B_c A_c]$ of all matrices, with columns in memory order."""
        stack = blocks[0].stack
        if stack is not None:
            rows, rests, reaches = [stack.row_reach], [stack.col_rest], [stack.col_reach]
        else:
            rows = [part for block in blocks for part in block.row_reach]
            reaches = [part for block in blocks for part in block.col_reach]
            rests = [part for block in blocks for part in block.col_rest.split(block.counts)]
        cols = []
        for rest, reach, order in zip(rests, reaches, self.orders, strict=True):
            inside = reach if order is None else reach.gather(-1, order.expand_as(reach))
            cols.append(torch.cat([_columns(rest, self.thin), inside], -1))
        row_side, col_side = (
            parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            for parts in (rows, cols)
        )
        return row_side, col_side

    def _space(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _kind(self, low: bool, block: int = BLOCK) -> tuple[Any, ...]:
        """Compile-time arguments of kernels that generate noise, beginning with the number of columns of $E_3$."""
        kind = (low, self.antithetic, ROUNDS, fused_draws.HAS_FAST_SINES, self.lookups)
        return self.thin, self.size, block, SHAPES[low].step, *kind

    def draw(
        self, low: bool, seed: Tensor, rows: Tensor, cols: Tensor, start: Tensor, size: Tensor
    ) -> tuple[Sequence[Place], list[Tensor]]:
        """Draws of each W and b. For the backward pass, the result also contains the matrices i and $A_r o$ of `GroupDraw`, in
        the layout of `start`.

        If `low` is true, products with matrices as large as W use bfloat16. `rows` and `cols` are the results of `operands`;
        `start` concatenates the matrices V, [S, M_r, M_c] each, and `size` holds the scale s of each matrix (see `GroupDraw`).
        """
        from bayesify.maths import matheron_kernels as kernels

        parts = self._space(len(self.units) * self.num_draws * self.size**2)
        inner, reached = torch.empty_like(start), torch.empty_like(start)
        out = torch.empty(self.drawn.total, dtype=self.dtype, device=self.device)
        grid = (len(self.units), self.num_draws)
        with on_device(self.device):
            kernels.reach_kernel[grid](
                self.units, self.table, rows, cols, seed, parts, self.num_draws, *self._kind(low), **OPTIONS
            )
            kernels.inner_kernel[(len(self.table), self.num_draws, self.size // PART)](
                self.table, start, size, parts, inner, reached, self.num_draws, self.size, PART
            )
            kernels.matheron_kernel[grid](
                self.units, self.table, rows, cols, size, self.ratios, inner, seed, out,
                *self._kind(low), **OPTIONS,
            )  # fmt: skip
        return self.drawn.places(out), [inner, reached]

    def gradients(
        self, low: bool, grads: Sequence[Tensor | None], seed: Tensor, saved: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients with respect to the factors, to `start` and to `size`, computed from the gradients with respect to the draws;
        see `GroupDraw`."""
        from bayesify.maths import matheron_kernels as kernels

        rows, cols, start, size, inner, reached = saved
        draws, count, columns = self.num_draws, len(self.units), self.columns[SHAPES[low].step]
        given = self.drawn.join(grads, self.gaps)
        parts, sums = self._space(count * draws * self.size**2), self._space(count * draws)
        sides = self._space(count * draws * 2 * BLOCK * self.size)
        to_rows, to_cols = torch.zeros_like(rows), cols.new_zeros(draws, len(cols))
        to_start, to_size = torch.empty_like(start), self._space(len(size), draws * (self.size // PART))
        with on_device(self.device):
            kernels.through_kernel[(count, draws)](
                self.units, self.table, rows, cols, self.ratios, seed, given, parts, sides, sums, draws,
                *self._kind(low), **OPTIONS,
            )  # fmt: skip
            kernels.settle_kernel[(len(self.table), draws, self.size // PART)](
                self.table, parts, sums, reached, to_start, to_size, draws, self.size, PART
            )
            kernels.row_kernel[(len(self.blocks),)](
                self.blocks, self.table, size, inner, to_start, sides, to_rows, draws, self.size, BLOCK
            )
            kernels.column_kernel[(len(columns), draws)](
                columns, self.table, rows, size, self.ratios, inner, to_start, seed, given, to_cols, len(cols),
                *self._kind(low, SHAPES[low].tall), **OPTIONS,
            )  # fmt: skip
        return to_rows, to_cols.sum(0) if draws > 1 else to_cols[0], to_start, to_size.sum(1)

    def reference(self, seed: Tensor, rows: Tensor, cols: Tensor, start: Tensor, size: Tensor) -> list[Tensor]:
        """The draws, computed matrix by matrix with operations that torch differentiates."""
        draws = self.num_draws
        halves = (draws + 1) // 2 if self.antithetic else draws
        ends = (one.noise[0] + (halves - 1) * one.noise[1] + one.noise[2] * one.shape[0] for one in self.matrices)
        stream = kernel_normals(max(ends), seed)
        found = []
        for at, one in enumerate(self.matrices):
            d_out, d_in, m_r, m_c = one.shape
            first, step, length = one.noise
            half = stream.as_strided((halves, d_out, length), (step, length, 1), first)
            noise = torch.stack([half, -half], 1).flatten(0, 1)[:draws] if self.antithetic else half
            row, both = (
                flat.as_strided((1, height, width), (0, place[at][1], 1), place[at][0])
                for flat, height, width, place in zip(
                    (rows, cols), (m_r, m_c), (d_out, self.thin + d_in), self.places, strict=True
                )
            )
            begun = start[self.starts[at] : self.starts[at + 1]].view(1, draws, m_r, m_c)
            parts = both[..., self.thin :], begun, size[at].view(1, 1, 1, 1), both[..., :m_c]
            wide, thin = noise[None, ..., self.thin : self.thin + d_in], noise[None, ..., :m_c]
            drawn = draw_group(row, *parts, wide, thin)[0]  # [S, d_out, d_in]
            split = math.prod(one.outputs[0][0]) // d_out
            weight = drawn[..., :split].unflatten(-1, (one.positions, -1)).mT.flatten(-2)
            weight = weight.mT if one.lookup else weight
            if one.balanced:
                c_out, c_in, *k = one.outputs[0][0]
                weight = weight.reshape(draws, c_out, k[0], c_in, *k[1:]).transpose(2, 3)
            found.append(weight.reshape(draws, *one.outputs[0][0]))
            if len(one.outputs) > 1:
                found.append((drawn[..., split:] * one.ratio).reshape(draws, *one.outputs[1][0]))
        return found


class MatheronDraw(Function):
    """Draws of W and b for each matrix in a plan. The backward pass generates the noise again."""

    @staticmethod
    def forward(ctx: Any, plan: MatheronPlan, low: bool, seed: Tensor, *given: Tensor) -> Any:
        """See `MatheronPlan.draw`."""
        ctx.plan, ctx.low = plan, low
        draws, kept = plan.draw(low, seed, *given)
        ctx.save_for_backward(seed, *given, *kept)
        return tuple(flat.as_strided(size, stride, start) for flat, size, stride, start in draws)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """See `MatheronPlan.gradients`."""
        seed, *saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, None, *ctx.plan.gradients(ctx.low, grads, seed, saved)
        # Gradients that will be differentiated again need operations that torch knows.
        again = gradients_again(ctx.plan.reference(seed, *saved[:4]), saved[:4], grads)
        return None, None, None, *again
