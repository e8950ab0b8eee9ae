"""Matrices augmented with small inducing matrices, and draws of them by the extended Matheron rule (Ritter et al. 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.autograd_functions import Function, gradients_again, leading_axes
from bayesify.maths.value_checks import transforming

RELATIVE_JITTER = 1e-12

MAX_STACK_NUMBERS = 2**23
"""If all Z of a side, padded to the largest Z, have more numbers than this, each group is large enough to keep a GPU busy."""

STACKS_ON = ("cuda",)
"""Device types on which a launch costs more than small products."""

PIECE = 256
"""Approximate length of the pieces into which `_outer` cuts long rows on these devices."""

MIN_PIECES, MAX_CUT_PRODUCT_NUMBERS = 4, 2**18
"""Limits of `_outer`. Rows with fewer pieces are not cut, and products with more numbers keep a GPU busy without cuts."""


@dataclass(frozen=True)
class Stack:
    """The factors of all matrices in all blocks. Each kind of factor is one tensor, padded with zeros to M inducing rows and
    columns."""

    row_reach: Tensor  # [L, M, D_out]
    col_reach: Tensor  # [L, M, D_in]
    col_rest: Tensor  # [L, M, M]


@dataclass(frozen=True)
class Factors:
    r"""Quantities of L matrices whose inducing matrices have the same size. All draws share these quantities, because they depend
    only on Z and D.

    For the rows and for the columns, $\Psi = Z Z^\top + D^2 = L L^\top$, `reach` is $A = L^{-1} Z$ and `rest` is $B = L^{-1} D$,
    so that $A A^\top + B B^\top = I$. Matrices of equal size form a group. The lists `row_reach` and `col_reach` have one entry
    per group; G is the number of matrices in the group.
    """

    row_reach: list[Tensor]  # [G, M_r, d_out] each
    row_rest: Tensor  # [L, M_r, M_r]
    row_tril: Tensor
    col_reach: list[Tensor]  # [G, M_c, d_in] each
    col_rest: Tensor  # [L, M_c, M_c]
    col_tril: Tensor
    stack: Stack | None = None  # the factors of all blocks together, if they were factorized as a stack

    @property
    def counts(self) -> list[int]:
        """Number of matrices in each group."""
        return list(map(len, self.row_reach))


@dataclass(frozen=True)
class Augmented:
    """Parameters of L matrices whose inducing matrices have the same size; matrices of equal size form a group."""

    z_row: Sequence[Tensor]  # Z_r of each group, [G, M_r, d_out]
    z_col: Sequence[Tensor]  # Z_c of each group, [G, M_c, d_in]
    d_row: Tensor  # diagonals of D_r, [L, M_r]
    d_col: Tensor  # diagonals of D_c, [L, M_c]


def factorize(blocks: Sequence[Augmented], *, stack: bool = False) -> list[Factors]:
    r"""Factors of augmented matrices. One Cholesky call factorizes all $\Psi$ of the same size; on a GPU, one call factorizes all
    $\Psi$.

    $D^2$ is increased by 1e-12 times the largest diagonal entry of Z Z^T. The augmented prior has the right marginal
    for every D, so the bound remains valid; only the posterior family changes. Without this increase, a D that training
    drives to 0 would make $\Psi$ singular if Z has more rows than columns. Factors are computed in float64 if the
    device supports it. If `stack` is true, products of small matrices on a GPU are also computed in one call. This is faster for
    one draw with gradients.
    """
    if stack and blocks[0].d_row.device.type in STACKS_ON and _stack_pays(blocks):
        return _factorize_stack(blocks)
    zs: list[Sequence[Tensor]] = []
    ds: list[Tensor] = []
    for block in blocks:
        zs += block.z_row, block.z_col
        ds += block.d_row, block.d_col
    sizes = [d.shape[-1] for d in ds]
    # A GPU takes as long for one small matrix as for many, so smaller matrices are padded with an identity.
    largest = max(sizes) if ds[0].is_cuda else 0
    by_size: dict[int, list[int]] = {}
    for at, size in enumerate(sizes):
        by_size.setdefault(largest or size, []).append(at)
    found: list[tuple[Tensor, Tensor, Tensor]] = [(ds[0], ds[0], ds[0])] * len(ds)  # overwritten
    for size, members in by_size.items():
        d = torch.cat([_filled(ds[at], size, 1.0, axes=1) for at in members]) if len(members) > 1 else ds[members[0]]
        inverse, root, tril = _Triangles.apply(d, *chain.from_iterable(map(zs.__getitem__, members)))
        inverse, rest, tril = inverse.to(d.dtype), (inverse * root.unsqueeze(-2)).to(d.dtype), tril.to(d.dtype)
        first = 0
        for at in members:
            last, m = first + len(ds[at]), sizes[at]
            found[at] = inverse[first:last, :m, :m], rest[first:last, :m, :m], tril[first:last, :m, :m]
            first = last
    results = []
    for at, block in enumerate(blocks):
        (row_inverse, row_rest, row_tril), (col_inverse, col_rest, col_tril) = found[2 * at : 2 * at + 2]
        row_reach, col_reach = _reach(row_inverse, block.z_row), _reach(col_inverse, block.z_col)
        results.append(Factors(row_reach, row_rest, row_tril, col_reach, col_rest, col_tril))
    return results


def _reach(inverse: Tensor, z: Sequence[Tensor]) -> list[Tensor]:
    """Matrices A = L^-1 Z of each group."""
    if len(z) == 1:
        return [_times_long(inverse, z[0])]
    return [_times_long(part, group) for part, group in zip(inverse.split(list(map(len, z))), z, strict=True)]


def _is_cut(rows: Tensor) -> bool:
    """Whether `_outer` cuts these rows into pieces."""
    if rows.device.type not in STACKS_ON or rows.shape[-1] < MIN_PIECES * PIECE:
        return False
    return rows.shape[:-1].numel() * rows.shape[-2] <= MAX_CUT_PRODUCT_NUMBERS


def _pieces(rows: Tensor) -> Tensor:
    """Rows [..., m, d] cut into K pieces of equal length, the last one padded with zeros: [..., K, m, d / K]."""
    length = rows.shape[-1]
    pieces = length // PIECE
    size = -(-length // pieces)
    filled = F.pad(rows, (0, pieces * size - length)) if pieces * size > length else rows
    return filled.reshape(*rows.shape[:-1], pieces, size).movedim(-2, -3)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """The product `left @ right.mT` of [..., m, d] and [..., m, d].

    For small m, a GPU computes one product with very few programs, each of which sums over all of d. Long rows are therefore cut
    into pieces whose products run at the same time.
    """
    if not _is_cut(left):
        return left @ right.mT
    first = _pieces(left)
    second = first if right is left else _pieces(right)
    product: Tensor = (first @ second.mT).sum(-3)
    return product


class _TimesLong(Function):
    """The product [..., m, m] @ [..., m, d] for long d, in full precision. Its gradient with respect to the first factor is a
    product `_outer`."""

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        with torch.autocast(left.device.type, enabled=False):
            return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> Any:
        return _TimesLong.apply(*leading_axes(info, in_dims, given)), 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        left, right = ctx.saved_tensors
        by_left, by_right = ctx.needs_input_grad
        return _outer(grads[0], right) if by_left else None, left.mT @ grads[0] if by_right else None


def _times_long(left: Tensor, right: Tensor) -> Tensor:
    """The product [..., m, m] @ [..., m, d]."""
    found: Tensor = _TimesLong.apply(left, right) if _is_cut(right) else left @ right
    return found


def _stack_pays(blocks: Sequence[Augmented]) -> bool:
    """Whether a stack is worthwhile: there are several groups, padding adds few numbers, and no matrix needs float64. A
    matrix with more rows than columns needs float64."""
    z = [part for block in blocks for part in (*block.z_row, *block.z_col)]
    count = sum(len(block.d_row) for block in blocks)
    filled = count * max(part.shape[-2] for part in z) * max(part.shape[-1] for part in z)
    return len(z) > 2 and filled <= MAX_STACK_NUMBERS and all(part.shape[-2] <= part.shape[-1] for part in z)


def _factorize_stack(blocks: Sequence[Augmented]) -> list[Factors]:
    size = max(max(block.d_row.shape[-1], block.d_col.shape[-1]) for block in blocks)
    sides = [[z for block in blocks for z in block.z_row], [z for block in blocks for z in block.z_col]]
    stacked = [_Stacked.apply(size, *side) for side in sides]
    ds = [block.d_row for block in blocks] + [block.d_col for block in blocks]
    d = torch.cat([_filled(part, size, 1.0, axes=1) for part in ds])
    inverse, root, tril = _Triangles.apply(d, *stacked)
    count = len(stacked[0])
    row_inverse, col_inverse = inverse.to(d.dtype).split(count)
    rests, trils = ((part.to(d.dtype)).split(count) for part in (inverse * root.unsqueeze(-2), tril))
    stack = Stack(_times_long(row_inverse, stacked[0]), _times_long(col_inverse, stacked[1]), rests[1])
    row_reaches, col_reaches = (
        iter(_cut(reach, [z.shape for z in side]))
        for reach, side in zip((stack.row_reach, stack.col_reach), sides, strict=True)
    )
    counts = [len(block.d_row) for block in blocks]
    found = []
    for block, *parts in zip(blocks, *(part.split(counts) for part in (*rests, *trils)), strict=True):
        m_r, m_c = block.d_row.shape[-1], block.d_col.shape[-1]
        row_rest, col_rest, row_tril, col_tril = (
            part[:, :m, :m] for part, m in zip(parts, (m_r, m_c, m_r, m_c), strict=True)
        )
        row_reach, col_reach = ([next(reaches) for _ in block.z_row] for reaches in (row_reaches, col_reaches))
        found.append(Factors(row_reach, row_rest, row_tril, col_reach, col_rest, col_tril, stack))
    return found


class _Stacked(Function):
    """Groups [G, m, d] in one tensor [L, M, D], padded with zeros."""

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
    parts = stacked.split([shape[0] for shape in shapes])
    return [part[:, : shape[1], : shape[2]] for part, shape in zip(parts, shapes, strict=True)]


def _filled(value: Tensor, size: int, fill: float = 0.0, axes: int = 2) -> Tensor:
    rest = size - value.shape[-1]
    return F.pad(value, (0, rest) * axes, value=fill) if rest else value


class _Triangles(Function):
    r"""The matrices $P = L^{-1}$ and $L$, each [..., L, M, M], where $\Psi = Z Z^\top + D^2 = L L^\top$, and the increased $D$,
    [..., L, M].

    Let $\Phi$ take the lower triangle of a matrix and halve its diagonal. Then $dL = L\, \Phi(P\, d\Psi\, P^\top)$ and
    $dP = -P\, dL\, P$. Hence $\bar\Psi$ is the symmetric part of $P^\top \Phi(L^\top \bar L - \bar P P^\top) P$, which
    needs matrix products but no triangular solves.
    """

    @staticmethod
    def forward(d: Tensor, *z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if d.device.type != "mps" else d.dtype
        products = []
        for group in z:
            # With more rows than columns, only D keeps Psi nonsingular, and D would be lost in float32 rounding.
            exact = group.to(wide) if group.shape[-2] > group.shape[-1] else group
            product = _outer(exact, exact).to(wide)
            products.append(product if product.shape[-1] == d.shape[-1] else _filled(product, d.shape[-1]))
        product = torch.cat(products, -3)
        jitter = RELATIVE_JITTER * product.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        variance = d.to(wide).square() + jitter
        # No check here, because it would wait for the device. A failure gives NaN, which the bound reports with the weight's name.
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
        twice = inverse.mT @ (inner.tril() + inner.tril(-1).mT) @ inverse  # gradient of Psi plus its transpose
        by_variance = twice.diagonal(dim1=-2, dim2=-1)
        grad_d = d.to(twice) * (by_variance if grad_root is None else by_variance + grad_root / root)
        found = []
        first = 0
        for group in z:
            count, rows = group.shape[-3:-1]
            found.append(twice.narrow(-3, first, count)[..., :rows, :rows].to(group.dtype) @ group)
            first += count
        return grad_d.to(d.dtype), *found


def noise_shapes(factors: Factors, num_draws: int) -> list[tuple[int, ...]]:
    """Shapes of the noise of draws: $E_2$ of all matrices, then $E_1$ and $E_3$ of each group."""
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
    factors: Factors,
    u: Tensor,
    scale: Tensor | None,
    sigma: Tensor,
    noise: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    r"""Draws of W by the extended Matheron rule (equation 11), given whitened U.

    $$ W = \sigma [\lambda E_1 + A_r^\top (U - \lambda \bar U) A_c], \qquad
       \bar U = A_r (E_1 A_c^\top + E_3 B_c^\top) + B_r E_2 $$

    $\bar U$ is the whitened form of equation 36. The last two terms of $\bar U$ have covariance $(I - K_c) \otimes K_r + I
    \otimes (I - K_r)$ with $K = A A^\top$. This covariance equals $I - K_c \otimes K_r$. The first term adds the covariance $K_c
    \otimes K_r$, so $\bar U$ has unit covariance. Besides $E_1$, two noise arrays are therefore enough, whereas the paper uses
    three. The rule needs no Cholesky factor of $Z Z^\top$, so it also works if $Z Z^\top$ is singular.

    Whitened U is [L, S, M_r, M_c]. The scales $\lambda$ are [L]; `None` stands for 0, and each draw of W is then its conditional
    mean. The prior standard deviations $\sigma$ are [L], or [L, S] if
    they differ between draws. The draws of each group are [G, S, d_out, d_in]. The noise, with the shapes of `noise_shapes`, is
    overwritten if gradients are off. In products with matrices as large as W, the operands have the given dtype, and the sums are
    in float32. If gradients are off, draws also have this dtype.
    """
    if scale is None:
        return conditional_mean(factors, u * sigma.reshape(len(sigma), -1, 1, 1))
    base, amplitude = start_and_size(factors, u, scale, sigma, noise[0])
    counts = factors.counts
    cut = base.split(counts), amplitude.split(counts), factors.col_rest.split(counts)
    groups = zip(factors.row_reach, factors.col_reach, *cut, noise[1::2], noise[2::2], strict=True)
    if torch.is_grad_enabled() and not transforming():
        return [GroupDraw.apply(dtype, *group) for group in groups]
    draw = draw_group if dtype is None else partial(draw_low, dtype)
    return [draw(*group) for group in groups]


def start_and_size(factors: Factors, u: Tensor, scale: Tensor, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    r"""The start $\sigma (U - \lambda B_r E_2)$, [L, S, M_r, M_c], and the size $\sigma \lambda$, [L, S or 1, 1, 1]."""
    sigma = sigma.reshape(sigma.shape[0], -1, 1, 1)
    amplitude = scale.view(-1, 1, 1, 1) * sigma
    return sigma * u - amplitude * (factors.row_rest.unsqueeze(1) @ noise), amplitude


def _fold(draws: Tensor, right: Tensor) -> Tensor:
    """[G, S, a, b] @ [G, b, c] -> [G, S, a, c], with one product per matrix for all draws."""
    return torch.unflatten(draws.flatten(1, 2) @ right, 1, draws.shape[1:3])


def draw_group(
    row: Tensor, col: Tensor, start: Tensor, size: Tensor, rest: Tensor, wide: Tensor, thin: Tensor
) -> Tensor:
    """Draws of one group (see `conditional_draw`), computed with operations that torch differentiates."""
    keep = torch.is_grad_enabled()
    wide, thin = (wide * size, thin * size) if keep else (wide.mul_(size), thin.mul_(size))
    outer = torch.baddbmm(thin.flatten(1, 2) @ rest.mT, wide.flatten(1, 2), col.mT).view(thin.shape)
    inner = start - row.unsqueeze(1) @ outer  # [G, S, M_r, M_c]
    left = (row.mT.unsqueeze(1) @ inner).flatten(1, 2)  # [G, S d_out, M_c]
    flat = wide.flatten(1, 2)
    return (torch.baddbmm(flat, left, col) if keep else flat.baddbmm_(left, col)).view(wide.shape)


class GroupDraw(Function):
    r"""Draws of one group with hand-written gradients.

    Let $E$ be noise of the same size as W, and let s be its scale. With $o = E A_c^\top + E_3 B_c^\top$, $i = V - s A_r
    o$ for the start V, and $l = A_r^\top i$, draws are $W = s E + l A_c$. The gradient $\bar W$ gives $\bar l = \bar W
    A_c^\top$, $\bar i = A_r \bar l$, $\bar o = - A_r^\top s \bar i$, and $\bar A_c = l^\top \bar W + \bar o^\top E$,
    $\bar A_r = i \bar l^\top - s \bar i o^\top$, $\bar B_c = \bar o^\top E_3$, $\bar s = \langle \bar W, E \rangle -
    \langle \bar i, A_r o \rangle$. These gradients take three products with matrices as large as W instead of four. The noise E
    is kept for the backward pass, because $\bar A_c$ and $\bar s$ are products with E. If the products have another dtype, a copy
    of E in that dtype is kept too.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, *given: Tensor) -> Tensor:
        """Draws [G, S, d_out, d_in], from the arguments of `draw_group`; `wide` is $E$, and `thin` is $E_3$."""
        row, col, start, size, rest, wide, thin = given
        low, right = (_rounded(value, dtype or col.dtype) for value in (wide.flatten(1, 2), col))
        outer = torch.baddbmm(_times(low, right.mT), thin.flatten(1, 2), rest.mT).view(thin.shape)
        reached = row.unsqueeze(1) @ outer
        inner = torch.addcmul(start, reached, size, value=-1)
        left = _rounded((row.mT.unsqueeze(1) @ inner).flatten(1, 2), right.dtype)  # [G, S d_out, M_c]
        ctx.save_for_backward(*given, low, right, outer, reached, inner, left)
        return _times(left, right).view(wide.shape).addcmul_(wide, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """See the class."""
        saved = ctx.saved_tensors  # read once, because checkpointing provides them once
        if torch.is_grad_enabled():  # the gradients will be differentiated again
            return None, *gradients_again([draw_group(*saved[:7])], saved[:5], grads), None, None
        with torch.autocast(saved[0].device.type, enabled=False):
            return None, *_gradients(grads[0], saved), None, None


def _gradients(grad: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients with respect to the arguments `row`, `col`, `start`, `size` and `rest` of `draw_group`; see `GroupDraw`."""
    row, _, _, size, _, wide, thin, low, right, outer, reached, inner, left = saved
    given = _rounded(grad.flatten(1, 2), right.dtype)
    through_left = _times(given, right.mT).view(thin.shape)
    through_inner = row.unsqueeze(1) @ through_left
    scaled = through_inner * -size
    through_outer = (row.mT.unsqueeze(1) @ scaled).flatten(1, 2)
    by_row = inner @ through_left.mT  # [G, S, M_r, d_out]
    by_row.flatten(0, 1).baddbmm_(scaled.flatten(0, 1), outer.flatten(0, 1).mT)
    by_col = _times(left.mT, given) + _times(_rounded(through_outer, right.dtype).mT, low)
    by_size = (grad * wide).sum((-2, -1), keepdim=True) - (through_inner * reached).sum((-2, -1), keepdim=True)
    by_rest = through_outer.mT @ thin.flatten(1, 2)
    return by_row.sum(1), by_col, through_inner, by_size.sum_to_size(size.shape), by_rest


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Batched product [G, a, b] @ [G, b, c], summed in float32 or wider."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.bmm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def draw_low(
    dtype: torch.dtype, row: Tensor, col: Tensor, start: Tensor, size: Tensor, rest: Tensor, wide: Tensor, thin: Tensor
) -> Tensor:
    """Draws of one group in a low-precision dtype; see `conditional_draw`."""
    low = torch.mul(wide, size, out=_aligned(wide, dtype))
    flat, right = low.flatten(1, 2), _rounded(col, dtype)
    outer = torch.baddbmm(_times(flat, right.mT), thin.mul_(size).flatten(1, 2), rest.mT).view(thin.shape)
    left = (row.mT.unsqueeze(1) @ (start - row.unsqueeze(1) @ outer)).flatten(1, 2).to(dtype)
    return flat.baddbmm_(left, right).view(wide.shape)


def _aligned(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty tensor of the same shape, with rows aligned to eight numbers, because products of unaligned rows use slow kernels."""
    *shape, size = like.shape
    return torch.empty(*shape, -(-size // 8) * 8, dtype=dtype, device=like.device)[..., :size]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else _aligned(value, dtype).copy_(value)
