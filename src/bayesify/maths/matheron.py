"""Matrices augmented with small inducing matrices, and the extended Matheron rule that draws them (Ritter et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE_JITTER = 1e-9


@dataclass(frozen=True)
class Factors:
    r"""What draws share: everything that depends on Z and D only.

    With $\Psi = Z Z^\top + D^2 = L L^\top$ on each side, `reach` is $A = L^{-1} Z$ and `rest` is $B = L^{-1} D$,
    so that $A A^\top + B B^\top = I$. A leading axis G batches matrices of the same size.

    Shapes:
        row_reach: [G, M_r, d_out]; row_rest, row_tril: [G, M_r, M_r]; col_reach: [G, M_c, d_in]; col_rest,
            col_tril: [G, M_c, M_c].
    """

    row_reach: Tensor
    row_rest: Tensor
    row_tril: Tensor
    col_reach: Tensor
    col_rest: Tensor
    col_tril: Tensor


def gram(z: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\Psi = Z Z^\top + D^2$ and the D that was used, in float64 where the device has it.

    D squared is raised by a billionth of the mean diagonal of $Z Z^\top$. The augmented prior has the right
    marginal for every D, so this changes which posterior is meant, never the validity of the bound; without it a D
    that training drives to 0 leaves a Z with more rows than columns singular.

    Args:
        z: [G, M, d].
        d: Diagonal of D, [G, M].

    Returns:
        Psi [G, M, M] and D [G, M].
    """
    wide = z.double() if z.device.type != "mps" else z
    product = wide @ wide.mT
    jitter = RELATIVE_JITTER * product.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).detach()
    variance = d.to(wide).square() + jitter
    return product + torch.diag_embed(variance), variance.sqrt()


def factorize(pairs: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[Factors]:
    """Factors of many augmented matrices, with one Cholesky for all sides of the same inducing size.

    Args:
        pairs: For each batch of equal matrices: Z_r [G, M_r, d_out], Z_c [G, M_c, d_in], D_r [G, M_r], D_c [G, M_c].
    """
    sides = [side for z_r, z_c, d_r, d_c in pairs for side in ((z_r, d_r), (z_c, d_c))]
    by_size: dict[int, list[int]] = {}
    for index, (z, _) in enumerate(sides):
        by_size.setdefault(z.shape[-2], []).append(index)
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for size, members in by_size.items():
        grams = [gram(*sides[index]) for index in members]
        tril = torch.linalg.cholesky(torch.cat([psi for psi, _ in grams]))
        eye = torch.eye(size, dtype=tril.dtype, device=tril.device)
        inverse = torch.linalg.solve_triangular(tril, eye, upper=False)
        rest = inverse * torch.cat([d for _, d in grams]).unsqueeze(-2)
        kind = sides[members[0]][0].dtype
        counts = [sides[index][0].shape[0] for index in members]
        pieces = zip(*(matrix.to(kind).split(counts) for matrix in (inverse, rest, tril)), strict=True)
        for index, (part_inverse, part_rest, part_tril) in zip(members, pieces, strict=True):
            parts[index] = (part_inverse @ sides[index][0], part_rest, part_tril)
    return [Factors(*parts[index], *parts[index + 1]) for index in range(0, len(sides), 2)]


def noise_shapes(factors: Factors, num_draws: int) -> list[tuple[int, ...]]:
    """Shapes of the three noise arrays that draws of a batch take; see `conditional_draw`."""
    count, m_r, d_out = factors.row_reach.shape
    _, m_c, d_in = factors.col_reach.shape
    thin = (d_out, m_c) if d_out <= d_in else (m_r, d_in)
    return [(count, num_draws, *shape) for shape in ((d_out, d_in), (m_r, m_c), thin)]


def conditional_mean(factors: Factors, u: Tensor) -> Tensor:
    r"""$\mathbb{E}[W | U] / \sigma = A_r^\top U A_c$ for whitened U: [G, S, M_r, M_c] -> [G, S, d_out, d_in]."""
    return _fold(factors.row_reach.mT.unsqueeze(1) @ u, factors.col_reach)


def conditional_draw(factors: Factors, u: Tensor, scale: Tensor | None, noise: list[Tensor]) -> Tensor:
    r"""Draws of $W / \sigma$ given whitened U by the extended Matheron rule (eq. 11).

    $$ W / \sigma = \lambda E_1 + A_r^\top (U - \lambda \bar U) A_c, \qquad
       \bar U = A_r (E_1 A_c^\top + E_3 B_c^\top) + B_r E_2 $$

    $\bar U$ is the whitened form of eq. 36. Its two last terms have covariance
    $(I - K_c) \otimes K_r + I \otimes (I - K_r)$ with $K = A A^\top$, which is $I - K_c \otimes K_r$, all that
    must be added to the first for a unit covariance: two noise arrays do the work of the paper's three, no
    Cholesky of $Z Z^\top$ is needed, and no case is singular. Where d_in is below d_out the mirror image is used,
    whose thin array is smaller.

    Args:
        factors: See `factorize`.
        u: Whitened U, [G, S, M_r, M_c].
        scale: $\lambda$, [G]; `None` for 0, a point estimate of W given U.
        noise: $E_1$, $E_2$ and the thin $E_3$, see `noise_shapes`; overwritten where gradients are off; unused
            without a scale.

    Returns:
        [G, S, d_out, d_in].
    """
    if scale is None:
        return conditional_mean(factors, u)
    e1, e2, e3 = noise
    a_r, b_r = factors.row_reach.unsqueeze(1), factors.row_rest.unsqueeze(1)
    if e1.shape[-2] <= e1.shape[-1]:
        u_bar = a_r @ (_fold(e1, factors.col_reach.mT) + _fold(e3, factors.col_rest.mT)) + b_r @ e2
    else:
        u_bar = _fold(a_r @ e1 + b_r @ e3, factors.col_reach.mT) + _fold(e2, factors.col_rest.mT)
    factor = scale[:, None, None, None]
    left = a_r.mT @ (u - factor * u_bar)  # [G, S, d_out, M_c]
    if torch.is_grad_enabled():
        return torch.addcmul(_fold(left, factors.col_reach), factor, e1)
    flat = e1.mul_(factor).flatten(1, 2)
    return torch.baddbmm(flat, left.flatten(1, 2), factors.col_reach, out=flat).view(e1.shape)


def _fold(draws: Tensor, right: Tensor) -> Tensor:
    """[G, S, a, b] @ [G, b, c] as one product per matrix of the batch, all draws together: [G, S, a, c]."""
    return (draws.flatten(1, 2) @ right).unflatten(1, draws.shape[1:3])
