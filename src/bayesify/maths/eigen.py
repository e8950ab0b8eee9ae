"""Eigenvectors of symmetric matrices, robust to rounding errors."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_eigh(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues in ascending order and eigenvectors of symmetric matrices $A = Q \Lambda Q^\top$: [..., n] and [..., n, n].

    The computation is in float64, and on the CPU if the device does not support float64. In float32 some machines'
    LAPACK does not converge for curvatures with many zero rows. If a matrix is not finite or no eigenvectors are found,
    a `ValueError` calls the matrix `what`.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{what} is not finite; check the data and the network's outputs for NaN or infinity")
    wide = (matrix.cpu() if matrix.device.type == "mps" else matrix).double()
    try:
        values, vectors = torch.linalg.eigh(wide)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        size = matrix.shape[-1]
        raise ValueError(
            f"{what} ({size} x {size}): the eigenvectors could not be computed; standardize the inputs, or leave out weights "
            "without curvature"
        ) from error
    return values.to(matrix), vectors.to(matrix)


def leading_singular(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""The r largest singular values of a matrix with their vectors: $A \approx P S Q^\top$. The results are P [m, r],
    S [r] in descending order, and the transpose of Q [r, n].

    If at most half of the values are needed, they come from the eigenvectors of the smaller of $A A^\top$ and $A^\top A$. This is
    several times faster, with an error of about the square root of the machine precision. Otherwise, or if a value is
    as small as this error, they come from a singular value decomposition.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    thin = matrix.mT if tall else matrix
    if 2 * rank <= thin.shape[0]:
        values, vectors = torch.linalg.eigh(thin @ thin.mT)
        s = values[-rank:].flip(0).clamp_min(0).sqrt()
        if s[-1] > 1e-5 * s[0]:
            left = vectors[:, -rank:].flip(1)
            right = (left.mT @ thin) / s.unsqueeze(1)
            return (right.mT, s, left.mT) if tall else (left, s, right)
    p, s, qt = torch.linalg.svd(matrix, full_matrices=False)
    return p[:, :rank], s[:rank], qt[:rank]
