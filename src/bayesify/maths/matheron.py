"""Matrices augmented with small inducing matrices, and the extended Matheron rule that draws them (Ritter et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.signatures import known_signature, leading_axes
from bayesify.maths.value_checks import transforming

RELATIVE_JITTER = 1e-12


@dataclass(frozen=True)
class Factors:
    r"""What draws share: everything that depends on Z and D only, for L matrices with inducing matrices of one size.

    With $\Psi = Z Z^\top + D^2 = L L^\top$ on each side, `reach` is $A = L^{-1} Z$ and `rest` is $B = L^{-1} D$, so that
    $A A^\top + B B^\top = I$. Matrices of equal size stand together: a group of G of them has one entry in the lists.

    Shapes:
        row_reach: a list of [G, M_r, d_out]; col_reach: a list of [G, M_c, d_in].
        row_rest, row_tril: [L, M_r, M_r]; col_rest, col_tril: [L, M_c, M_c].
    """

    row_reach: list[Tensor]
    row_rest: Tensor
    row_tril: Tensor
    col_reach: list[Tensor]
    col_rest: Tensor
    col_tril: Tensor

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


def factorize(blocks: Sequence[Augmented]) -> list[Factors]:
    """Factors of augmented matrices; one Cholesky for all sides of one size, on a GPU for all sides of all blocks.

    D squared is raised by 1e-12 of the largest diagonal entry of Z Z^T. The augmented prior has the right marginal for every
    D, so this changes which posterior is meant, never the validity of the bound; without it a D that training drives to
    0 leaves a Z with more rows than columns singular. Factors are computed in float64 where the device has it.
    """
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

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> Any:
        return _Triangles.apply(*leading_axes(info, in_dims, given)), (0, 0, 0)

    @staticmethod
    def backward(ctx: Any, grad_inverse: Tensor, grad_root: Tensor, grad_tril: Tensor) -> Any:
        inverse, root, tril, d, *z = ctx.saved_tensors
        inner = tril.mT @ grad_tril - grad_inverse @ inverse.mT
        twice = inverse.mT @ (inner.tril() + inner.tril(-1).mT) @ inverse  # gradient by Psi and its transpose
        grad_d = d.to(twice) * (twice.diagonal(dim1=-2, dim2=-1) + grad_root / root)
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
    sigma = sigma.reshape(sigma.shape[0], -1, 1, 1)
    amplitude = scale.view(-1, 1, 1, 1) * sigma
    base = sigma * u - amplitude * (factors.row_rest.unsqueeze(1) @ noise[0])
    parts = (part.split(factors.counts) for part in (base, amplitude, factors.col_rest))
    groups = zip(factors.row_reach, factors.col_reach, *parts, noise[1::2], noise[2::2], strict=True)

    if torch.is_grad_enabled() and not transforming():
        return [_GroupDraw.apply(dtype, *group) for group in groups]
    if dtype is not None:
        return [_draw_low(dtype, *group) for group in groups]
    return [_draw_group(*group)[0] for group in groups]


def _draw_group(
    row: Tensor,
    col: Tensor,
    start: Tensor,
    size: Tensor,
    rest: Tensor,
    wide: Tensor,
    thin: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Draws of one group, see `conditional_draw`, and what they are made of."""
    keep = torch.is_grad_enabled()
    wide, thin = (wide * size, thin * size) if keep else (wide.mul_(size), thin.mul_(size))
    if dtype is not None:
        low, right = _rounded(wide, dtype), _rounded(col, dtype)
        outer = torch.baddbmm(_times(low.flatten(1, 2), right.mT), thin.flatten(1, 2), rest.mT).view(thin.shape)
        inner = start - row.unsqueeze(1) @ outer
        left = row.mT.unsqueeze(1) @ inner
        drawn = _times(left.flatten(1, 2).to(dtype), right).view(wide.shape).add_(wide)
        return drawn, low, thin, outer, inner, left
    outer = torch.baddbmm(thin.flatten(1, 2) @ rest.mT, wide.flatten(1, 2), col.mT).view(thin.shape)
    inner = start - row.unsqueeze(1) @ outer  # [G, S, M_r, M_c]
    left = row.mT.unsqueeze(1) @ inner  # [G, S, d_out, M_c]
    flat = wide.flatten(1, 2)
    drawn = torch.baddbmm(flat, left.flatten(1, 2), col) if keep else flat.baddbmm_(left.flatten(1, 2), col)
    return drawn.view(wide.shape), wide, thin, outer, inner, left


@known_signature
class _GroupDraw(torch.autograd.Function):
    r"""Draws of one group with their gradients written out: three products with matrices of the weights' size in place of four.

    With w = `wide` the noise of W and $\bar W$ the gradient of W, that of the noise's size is
    $(\langle \bar W, w \rangle + \langle \bar o, o \rangle)$ over the size, o = `outer`: no other matrix of the
    weights' size is formed for it.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, *given: Tensor) -> Tensor:
        with torch.enable_grad():  # only so that the noise is kept
            drawn, *made = [part.detach() for part in _draw_group(*(part.detach() for part in given), dtype=dtype)]
        ctx.save_for_backward(*given, *made)
        ctx.dtype = dtype
        return drawn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row, col, start, size, rest, wide0, thin0, wide, thin, outer, inner, left = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            drawn = _draw_group(row, col, start, size, rest, wide0, thin0)[0]
            found = torch.autograd.grad(drawn, (row, col, start, size, rest), grads[0], create_graph=True)
            return None, *found, None, None
        dtype = ctx.dtype or col.dtype
        grad, right, narrow = (_rounded(part, dtype) for part in (grads[0].flatten(1, 2), col, left.flatten(1, 2)))
        through_left = _times(grad, right.mT).view(left.shape)
        through_inner = row.unsqueeze(1) @ through_left
        through_outer = row.mT.unsqueeze(1) @ through_inner  # with the opposite sign
        flat = through_outer.flatten(1, 2)
        grad_col = _times(narrow.mT, grad).sub_(_times(flat.mT.to(dtype), wide.flatten(1, 2)))
        grad_row = (inner @ through_left.mT - through_inner @ outer.mT).sum(1)
        grad_rest = flat.mT @ thin.flatten(1, 2)
        # Sums over each draw where the sizes differ between draws.
        sums = (grads[0] * wide).sum((-2, -1), keepdim=True) - (through_outer * outer).sum((-2, -1), keepdim=True)
        by_size = (sums / size).sum_to_size(size.shape)
        return None, grad_row, grad_col, through_inner, by_size, -grad_rest, None, None


def _times(left: Tensor, right: Tensor) -> Tensor:
    """A product for each matrix, summed in float32 where the numbers have less: [G, a, b] @ [G, b, c]."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.bmm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def _draw_low(
    dtype: torch.dtype, row: Tensor, col: Tensor, start: Tensor, size: Tensor, rest: Tensor, wide: Tensor, thin: Tensor
) -> Tensor:
    """Draws of one group in a type of low precision; see `conditional_draw`."""
    low = torch.mul(wide, size, out=_aligned(wide, dtype))
    flat, right = low.flatten(1, 2), _rounded(col, dtype)
    outer = torch.baddbmm(_times(flat, right.mT), thin.mul_(size).flatten(1, 2), rest.mT).view(thin.shape)
    left = (row.mT.unsqueeze(1) @ (start - row.unsqueeze(1) @ outer)).flatten(1, 2).to(dtype)
    return flat.baddbmm_(left, right).view(wide.shape)


def _aligned(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of a tensor's shape whose rows start at multiples of eight numbers: products of others take slow kernels."""
    *shape, size = like.shape
    return torch.empty(*shape, -(-size // 8) * 8, dtype=dtype, device=like.device)[..., :size]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type, its rows aligned."""
    return value if value.dtype == dtype else _aligned(value, dtype).copy_(value)


def _fold(draws: Tensor, right: Tensor) -> Tensor:
    """[G, S, a, b] @ [G, b, c] as one product per matrix, all draws together: [G, S, a, c]."""
    return (draws.flatten(1, 2) @ right).unflatten(1, draws.shape[1:3])
