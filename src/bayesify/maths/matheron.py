"""Matrices augmented with small inducing matrices, and the extended Matheron rule that draws them (Ritter et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.matheron_draws import Group, StackDraw, draw_group, draw_low, side_by_side, whole
from bayesify.maths.signatures import known_signature, leading_axes
from bayesify.maths.value_checks import transforming

RELATIVE_JITTER = 1e-12

LARGEST_STACK = 2**23
"""Numbers of all Z of a side, filled up to the largest, above which each group has enough work for a GPU by itself."""

STACKS_ON = ("cuda",)
"""Kinds of devices on which a launch costs more than small products."""


@dataclass(frozen=True)
class Stack:
    """Factors of all matrices of all blocks in one tensor each, filled up with zeros to M inducing rows and columns.

    Shapes:
        row_reach: [L, M, D_out]; col_reach: [L, M, D_in]; col_rest: [L, M, M].
    """

    row_reach: Tensor
    col_reach: Tensor
    col_rest: Tensor
    groups: list[Group]


@dataclass(frozen=True)
class Factors:
    r"""What draws share: everything that depends on Z and D only, for L matrices with inducing matrices of one size.

    With $\Psi = Z Z^\top + D^2 = L L^\top$ on each side, `reach` is $A = L^{-1} Z$ and `rest` is $B = L^{-1} D$, so that
    $A A^\top + B B^\top = I$. Matrices of equal size stand together: a group of G of them has one entry in the lists.

    Shapes:
        row_reach: a list of [G, M_r, d_out]; col_reach: a list of [G, M_c, d_in].
        row_rest, row_tril: [L, M_r, M_r]; col_rest, col_tril: [L, M_c, M_c].
        stack: The same of all blocks together, where they were factorized so.
    """

    row_reach: list[Tensor]
    row_rest: Tensor
    row_tril: Tensor
    col_reach: list[Tensor]
    col_rest: Tensor
    col_tril: Tensor
    stack: Stack | None = None

    @property
    def counts(self) -> list[int]:
        """Matrices in each group."""
        return [reach.shape[0] for reach in self.row_reach]


@dataclass(frozen=True)
class Augmented:
    """What factors are made of: L matrices with inducing matrices of one size, in groups of equal matrices.

    Args:
        z_row: Z_r of each group, [G, M_r, d_out].
        z_col: Z_c of each group, [G, M_c, d_in].
        d_row: Diagonals of D_r, [L, M_r].
        d_col: Diagonals of D_c, [L, M_c].
    """

    z_row: Sequence[Tensor]
    z_col: Sequence[Tensor]
    d_row: Tensor
    d_col: Tensor


def factorize(blocks: Sequence[Augmented], *, stack: bool = False) -> list[Factors]:
    """Factors of augmented matrices; one Cholesky for all sides of one size, on a GPU for all sides of all blocks.

    D squared is raised by 1e-12 of the largest diagonal entry of Z Z^T. The augmented prior has the right marginal for every
    D, so this changes which posterior is meant, never the validity of the bound; without it a D that training drives to
    0 leaves a Z with more rows than columns singular. Factors are computed in float64 where the device has it.

    Args:
        blocks: The matrices.
        stack: Whether small matrices on a GPU are multiplied all at once too, for one draw with gradients.
    """
    if stack and _stack_pays(blocks):
        return _factorize_stack(blocks)
    sides = [side for block in blocks for side in ((block.z_row, block.d_row), (block.z_col, block.d_col))]
    sizes = [d.shape[-1] for _, d in sides]
    # A GPU takes as long for one small matrix as for many: those of other sizes are filled up with an identity.
    filled = [max(sizes)] * len(sizes) if sides[0][1].is_cuda else sizes
    found: list[tuple[Tensor, ...]] = [()] * len(sides)
    for size in dict.fromkeys(filled):
        members = [at for at, other in enumerate(filled) if other == size]
        d = torch.cat([_filled(sides[at][1], size, 1.0, axes=1) for at in members])
        inverse, root, tril = _Triangles.apply(d, *(z for at in members for z in sides[at][0]))
        parts = [part.to(d.dtype) for part in (inverse, inverse * root.unsqueeze(-2), tril)]
        for at, *cut in zip(
            members, *(part.split([len(sides[at][1]) for at in members]) for part in parts), strict=True
        ):
            found[at] = tuple(part[:, : sizes[at], : sizes[at]] for part in cut)
    results = []
    for at, block in enumerate(blocks):
        (row_inverse, row_rest, row_tril), (col_inverse, col_rest, col_tril) = found[2 * at : 2 * at + 2]
        counts = [z.shape[0] for z in block.z_row]
        row_reach = [part @ z for part, z in zip(row_inverse.split(counts), block.z_row, strict=True)]
        col_reach = [part @ z for part, z in zip(col_inverse.split(counts), block.z_col, strict=True)]
        results.append(Factors(row_reach, row_rest, row_tril, col_reach, col_rest, col_tril))
    return results


def _stack_pays(blocks: Sequence[Augmented]) -> bool:
    """Whether the matrices stand in several groups and fill up few numbers; those with more rows than columns need float64."""
    z = [part for block in blocks for part in (*block.z_row, *block.z_col)]
    count = sum(len(block.d_row) for block in blocks)
    filled = count * max(part.shape[-2] for part in z) * max(part.shape[-1] for part in z)
    return (
        len(z) > 2
        and z[0].device.type in STACKS_ON
        and filled <= LARGEST_STACK
        and all(part.shape[-2] <= part.shape[-1] for part in z)
    )


def _factorize_stack(blocks: Sequence[Augmented]) -> list[Factors]:
    """`factorize` with all matrices in one tensor for each side."""
    size = max(max(block.d_row.shape[-1], block.d_col.shape[-1]) for block in blocks)
    sides = [[z for block in blocks for z in block.z_row], [z for block in blocks for z in block.z_col]]
    stacked = [_Stacked.apply(size, *side) for side in sides]
    d = torch.cat(
        [
            _filled(part, size, 1.0, axes=1)
            for block in zip(*((b.d_row, b.d_col) for b in blocks), strict=True)
            for part in block
        ]
    )
    inverse, root, tril = _Triangles.apply(d, *stacked)
    count = len(stacked[0])
    row_inverse, col_inverse = inverse.to(d.dtype).split(count)
    rests, trils = ((part.to(d.dtype)).split(count) for part in (inverse * root.unsqueeze(-2), tril))
    ends = list(accumulate((z.shape[0] for z in sides[0]), initial=0))
    groups = [
        Group(first, last, *row.shape[1:], *col.shape[1:])
        for first, last, row, col in zip(ends, ends[1:], *sides, strict=False)
    ]
    stack = Stack(row_inverse @ stacked[0], col_inverse @ stacked[1], rests[1], groups)
    counts = [len(block.d_row) for block in blocks]
    found, rest = [], iter(groups)
    for block, *parts in zip(blocks, *(part.split(counts) for part in (*rests, *trils)), strict=True):
        m_r, m_c = block.d_row.shape[-1], block.d_col.shape[-1]
        row_rest, col_rest, row_tril, col_tril = (
            part[:, :m, :m] for part, m in zip(parts, (m_r, m_c, m_r, m_c), strict=True)
        )
        own = [next(rest) for _ in block.z_row]
        row_reach = [stack.row_reach[group.first : group.last, :m_r, : group.outputs] for group in own]
        col_reach = [stack.col_reach[group.first : group.last, :m_c, : group.inputs] for group in own]
        found.append(Factors(row_reach, row_rest, row_tril, col_reach, col_rest, col_tril, stack))
    return found


@known_signature
class _Stacked(torch.autograd.Function):
    """Groups [G, m, d] in one tensor [L, M, D], filled up with zeros."""

    @staticmethod
    def forward(ctx: Any, size: int, *groups: Tensor) -> Tensor:
        ctx.shapes = [group.shape for group in groups]
        made = groups[0].new_zeros(sum(map(len, groups)), size, max(group.shape[-1] for group in groups))
        for part, group in zip(_cut(made, ctx.shapes), groups, strict=True):
            part.copy_(group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_cut(grads[0], ctx.shapes)


def _cut(stacked: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The groups of a stack."""
    parts = stacked.split([shape[0] for shape in shapes])
    return [part[:, : shape[1], : shape[2]] for part, shape in zip(parts, shapes, strict=True)]


def _filled(value: Tensor, size: int, fill: float = 0.0, axes: int = 2) -> Tensor:
    """The same with its last axes filled up to a size."""
    rest = size - value.shape[-1]
    return F.pad(value, (0, rest) * axes, value=fill) if rest else value


@known_signature
class _Triangles(torch.autograd.Function):
    r"""$P = L^{-1}$ and $L$ of $\Psi = Z Z^\top + D^2 = L L^\top$, each [..., L, M, M], and $D$ as it was raised, [..., L, M].

    With $\Phi$ the lower triangle whose diagonal is halved, $dL = L\, \Phi(P\, d\Psi\, P^\top)$ and $dP = -P\, dL\, P$, so that
    $\bar\Psi = P^\top \Phi(L^\top \bar L - \bar P P^\top) P$, its symmetric part: products in place of triangular solves.
    """

    @staticmethod
    def forward(d: Tensor, *z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if d.device.type != "mps" else d.dtype
        products = []
        for group in z:
            # With more rows than columns only D keeps Psi from being singular, and float32 would drown it in rounding.
            exact = group.to(wide) if group.shape[-2] > group.shape[-1] else group
            products.append(_filled((exact @ exact.mT).to(wide), d.shape[-1]))
        product = torch.cat(products, -3)
        jitter = RELATIVE_JITTER * product.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        variance = d.to(wide).square() + jitter
        # No check here: it would wait for the device. A failure is NaN, which the bound reports with the weight's name.
        tril, _ = torch.linalg.cholesky_ex(product + torch.diag_embed(variance))
        eye = torch.eye(d.shape[-1], dtype=wide, device=d.device)
        return torch.linalg.solve_triangular(tril, eye, upper=False), variance.sqrt(), tril

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> Any:
        return _Triangles.apply(*leading_axes(info, in_dims, given)), (0, 0, 0)

    @staticmethod
    def backward(ctx: Any, grad_inverse: Tensor | None, grad_root: Tensor | None, grad_tril: Tensor | None) -> Any:
        inverse, root, tril, d, *z = ctx.saved_tensors
        inner = torch.zeros_like(inverse) if grad_inverse is None else -grad_inverse @ inverse.mT
        if grad_tril is not None:
            inner = inner + tril.mT @ grad_tril
        twice = inverse.mT @ (inner.tril() + inner.tril(-1).mT) @ inverse  # gradient by Psi and its transpose
        by_variance = twice.diagonal(dim1=-2, dim2=-1)
        grad_d = d.to(twice) * (by_variance if grad_root is None else by_variance + grad_root / root)
        found = []
        for part, group in zip(twice.split([group.shape[-3] for group in z], -3), z, strict=True):
            rows = group.shape[-2]
            found.append(part[..., :rows, :rows].to(group.dtype) @ group)
        return grad_d.to(d.dtype), *found


def noise_shapes(factors: Factors, num_draws: int) -> list[tuple[int, ...]]:
    """Shapes of the noise that draws take: $E_2$ of all matrices, then $E_1$ and $E_3$ of each group."""
    count, m_r, _ = factors.row_rest.shape
    m_c = factors.col_rest.shape[-1]
    shapes: list[tuple[int, ...]] = [(count, num_draws, m_r, m_c)]
    for row, col in zip(factors.row_reach, factors.col_reach, strict=True):
        shapes.append((row.shape[0], num_draws, row.shape[-1], col.shape[-1]))
        shapes.append((row.shape[0], num_draws, row.shape[-1], m_c))
    return shapes


def conditional_mean(factors: Factors, u: Tensor) -> list[Tensor]:
    r"""$\mathbb{E}[W | U] / \sigma = A_r^\top U A_c$ for whitened U: [L, S, M_r, M_c] -> [G, S, d_out, d_in] of each group."""
    groups = zip(factors.row_reach, factors.col_reach, u.split(factors.counts), strict=True)
    return [_fold(row.mT.unsqueeze(1) @ part, col) for row, col, part in groups]


def conditional_draw(
    factors: Factors, u: Tensor, scale: Tensor, sigma: Tensor, noise: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    r"""Draws of W given whitened U by the extended Matheron rule (eq. 11).

    $$ W = \sigma [\lambda E_1 + A_r^\top (U - \lambda \bar U) A_c], \qquad
       \bar U = A_r (E_1 A_c^\top + E_3 B_c^\top) + B_r E_2 $$

    $\bar U$ is the whitened form of eq. 36. Its two last terms have covariance $(I - K_c) \otimes K_r + I \otimes (I - K_r)$
    with $K = A A^\top$, which is $I - K_c \otimes K_r$, all that must be added to the first for a unit covariance: two noise
    arrays do the work of the paper's three, no Cholesky of $Z Z^\top$ is needed, and no case is singular.

    Args:
        factors: See `factorize`.
        u: Whitened U, [L, S, M_r, M_c].
        scale: $\lambda$, [L].
        sigma: $\sigma$, [L], or [L, S] where draws differ in it.
        noise: See `noise_shapes`; overwritten where gradients are off.
        dtype: In which the products with matrices of the weights' size take their numbers, summed in float32. Without gradients it
            is that of the draws too.

    Returns:
        [G, S, d_out, d_in] of each group.
    """
    base, amplitude = start_and_size(factors, u, scale, sigma, noise[0])
    parts = (part.split(factors.counts) for part in (base, amplitude, factors.col_rest))
    groups = zip(factors.row_reach, factors.col_reach, *parts, noise[1::2], noise[2::2], strict=True)

    if torch.is_grad_enabled() and not transforming():
        return [StackDraw.apply(dtype, [whole(*group[:2])], *group)[0] for group in groups]
    return side_by_side(draw_group if dtype is None else partial(draw_low, dtype), groups)


def conditional_draws(
    blocks: Sequence[tuple[Factors, Tensor, Any, Tensor, Sequence[Tensor]]], dtype: torch.dtype | None = None
) -> list[list[Tensor]]:
    r"""`conditional_draw` of every block, by products of all matrices at once where they were factorized as a stack.

    Args:
        blocks: Factors, whitened U, $\lambda$ (`None` for 0, where W is its mean), $\sigma$ and noise of each.
        dtype: See `conditional_draw`.
    """
    if blocks[0][2] is None:
        return [conditional_mean(part, u * sigma.reshape(len(sigma), -1, 1, 1)) for part, u, _, sigma, _ in blocks]
    stack = blocks[0][0].stack
    if stack is None:
        return [conditional_draw(*block, dtype) for block in blocks]
    size = stack.col_rest.shape[-1]
    starts, amplitudes = zip(*(start_and_size(*block[:4], block[4][0]) for block in blocks), strict=True)
    filled = [F.pad(start, (0, size - start.shape[-1], 0, size - start.shape[-2])) for start in starts]
    wides, thins = ([part for *_, noise in blocks for part in noise[begin::2]] for begin in (1, 2))
    drawn = iter(
        StackDraw.apply(
            dtype,
            stack.groups,
            stack.row_reach,
            stack.col_reach,
            torch.cat(filled),
            torch.cat(amplitudes),
            stack.col_rest,
            *wides,
            *thins,
        )
    )
    return [[next(drawn) for _ in factors.counts] for factors, *_ in blocks]


def start_and_size(factors: Factors, u: Tensor, scale: Tensor, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\sigma (U - \lambda B_r E_2)$, [L, S, M_r, M_c], and $\sigma \lambda$, [L, S or 1, 1, 1]."""
    sigma = sigma.reshape(sigma.shape[0], -1, 1, 1)
    amplitude = scale.view(-1, 1, 1, 1) * sigma
    return sigma * u - amplitude * (factors.row_rest.unsqueeze(1) @ noise), amplitude


def _fold(draws: Tensor, right: Tensor) -> Tensor:
    """[G, S, a, b] @ [G, b, c] as one product per matrix, all draws together: [G, S, a, c]."""
    return (draws.flatten(1, 2) @ right).unflatten(1, draws.shape[1:3])
