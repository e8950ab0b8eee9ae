"""Cholesky factors that tolerate rounding errors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from bayesify.maths.value_checks import should_check

JITTERS = (1e-7, 1e-6, 1e-5, 1e-4)
"""Multiples of the mean diagonal that are tried in turn as jitter if a factorization fails."""


def checked_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors, [..., n, n], and a flag for each matrix, [...]. The flag is true if the matrix has no factor
    because it is not positive definite or not finite.

    Some LAPACK libraries do not report NaN or infinity. These values then appear in the factor's diagonal, which is checked here.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor, (failed > 0) | ~torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all(-1)


def stable_cholesky(matrix: Tensor, what: str) -> Tensor:
    r"""Lower factors L of positive definite matrices $A = L L^\top$, with jitter only if rounding requires it: [..., n, n].

    If a matrix is not finite or not positive definite, a `ValueError` is raised. Its message calls the matrix `what`. Under
    `vmap` and during the capture of a CUDA graph, values cannot be checked. If a factor does not exist, it is then NaN.
    """
    factor, failed = checked_cholesky(matrix)
    if not should_check(failed):
        return torch.where(failed[..., None, None], torch.nan, factor)
    if not bool(failed.any()):
        return factor
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{what} is not finite; check the data and the network's outputs for NaN or infinity")
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    for jitter in JITTERS:
        factor, failed = checked_cholesky(matrix + torch.diag_embed((jitter * mean).expand(matrix.shape[:-1])))
        if not bool(failed.any()):
            warnings.warn(
                f"{what}: {jitter:g} times the mean of its diagonal was added to the diagonal, so that it could be factorized",
                stacklevel=3,
            )
            return factor
    size = matrix.shape[-1]
    raise ValueError(
        f"{what} ({size} x {size}) is not positive definite, even with {JITTERS[-1]:g} times the mean of its diagonal added to "
        "the diagonal; use float64 (net.double()), or a larger prior precision"
    )
