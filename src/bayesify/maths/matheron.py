"""Matrices augmented with small inducing matrices, and the extended Matheron rule that draws them (Ritter et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def factorize(z_row: Sequence[Tensor], z_col: Sequence[Tensor], d_row: Tensor, d_col: Tensor) -> Factors:
    """Factors of L augmented matrices; one Cholesky for both sides of all of them where U is square.

    D squared is raised by 1e-12 of the mean diagonal of Z Z^T. The augmented prior has the right marginal for every
    D, so this changes which posterior is meant, never the validity of the bound; without it a D that training drives to
    0 leaves a Z with more rows than columns singular. Factors are computed in float64 where the device has it.

    Args:
        z_row: Z_r of each group, [G, M_r, d_out].
        z_col: Z_c of each group, [G, M_c, d_in].
        d_row: Diagonals of D_r, [L, M_r].
        d_col: Diagonals of D_c, [L, M_c].
    """
    counts = [z.shape[0] for z in z_row]
    if d_row.shape[-1] == d_col.shape[-1]:
        inverse, rest, tril = _triangles([*z_row, *z_col], torch.cat((d_row, d_col)))
        sides = [part.split(d_row.shape[0]) for part in (inverse, rest, tril)]
        (row_inverse, col_inverse), (row_rest, col_rest), (row_tril, col_tril) = sides
    else:
        row_inverse, row_rest, row_tril = _triangles(z_row, d_row)
        col_inverse, col_rest, col_tril = _triangles(z_col, d_col)
    row_reach = [part @ z for part, z in zip(row_inverse.split(counts), z_row, strict=True)]
    col_reach = [part @ z for part, z in zip(col_inverse.split(counts), z_col, strict=True)]
    return Factors(row_reach, row_rest, row_tril, col_reach, col_rest, col_tril)


def _triangles(z: Sequence[Tensor], d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""$L^{-1}$, $L^{-1} D$ and $L$ of $Z Z^\top + D^2$, each [L, M, M]."""
    kind = d.dtype
    wide = torch.float64 if d.device.type != "mps" else kind
    products = []
    for group in z:
        # With more rows than columns only D keeps Psi from being singular, and float32 would drown it in rounding.
        exact = group.to(wide) if group.shape[-2] > group.shape[-1] else group
        products.append((exact @ exact.mT).to(wide))
    product = torch.cat(products)
    jitter = RELATIVE_JITTER * product.detach().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    variance = d.to(wide).square() + jitter
    # No check here: it would wait for the device. A failure is NaN, which the bound reports with the weight's name.
    tril, _ = torch.linalg.cholesky_ex(product + torch.diag_embed(variance))
    eye = torch.eye(d.shape[-1], dtype=wide, device=d.device)
    inverse = torch.linalg.solve_triangular(tril, eye, upper=False)
    rest = inverse * variance.sqrt().unsqueeze(-2)
    return inverse.to(kind), rest.to(kind), tril.to(kind)


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
    factors: Factors, u: Tensor, scale: Tensor, sigma: Tensor, noise: Sequence[Tensor]
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

    Returns:
        [G, S, d_out, d_in] of each group.
    """
    sigma = sigma.reshape(sigma.shape[0], -1, 1, 1)
    amplitude = scale.view(-1, 1, 1, 1) * sigma
    base = sigma * u - amplitude * (factors.row_rest.unsqueeze(1) @ noise[0])
    parts = (part.split(factors.counts) for part in (base, amplitude, factors.col_rest))
    result = []
    for index, (row, col, start, size, rest) in enumerate(
        zip(factors.row_reach, factors.col_reach, *parts, strict=True)
    ):
        wide, thin = noise[1 + 2 * index], noise[2 + 2 * index]
        wide, thin = (wide * size, thin * size) if torch.is_grad_enabled() else (wide.mul_(size), thin.mul_(size))
        outer = torch.baddbmm(thin.flatten(1, 2) @ rest.mT, wide.flatten(1, 2), col.mT).view(thin.shape)
        inner = start - row.unsqueeze(1) @ outer  # [G, S, M_r, M_c]
        left = (row.mT.unsqueeze(1) @ inner).flatten(1, 2)  # [G, S d_out, M_c]
        flat = wide.flatten(1, 2)
        drawn = torch.baddbmm(flat, left, col) if torch.is_grad_enabled() else flat.baddbmm_(left, col)
        result.append(drawn.view(wide.shape))
    return result


def _fold(draws: Tensor, right: Tensor) -> Tensor:
    """[G, S, a, b] @ [G, b, c] as one product per matrix, all draws together: [G, S, a, c]."""
    return (draws.flatten(1, 2) @ right).unflatten(1, draws.shape[1:3])
