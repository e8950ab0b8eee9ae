"""Factors, eigenvectors, inverses and log-determinants of symmetric matrices, and quadratic forms."""

import warnings
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function, leading_axes
from bayesify.maths.value_checks import should_check


class _InverseAndLogDet(Function):
    """A^-1, its diagonal and log det A. The gradient needs two products and no derivative of a factorization."""

    @staticmethod
    def forward(matrix: Tensor, what: str) -> tuple[Tensor, Tensor, Tensor]:
        factor = stable_cholesky(matrix, what)
        inverse, log_det = inverse_from_factor(factor), 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return inverse, inverse.diagonal(dim1=-2, dim2=-1).clone(), log_det

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], matrix: Tensor, what: str) -> Any:
        return _InverseAndLogDet.apply(matrix.movedim(in_dims[0], 0), what), (0, 0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_inverse: Tensor, grad_diagonal: Tensor, grad_log_det: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        twice = grad_inverse + grad_inverse.mT
        twice.diagonal(dim1=-2, dim2=-1).add_(grad_diagonal, alpha=2)
        return torch.sub(inverse * grad_log_det[..., None, None], inverse @ twice @ inverse, alpha=0.5), None


def inverse_from_factor(factor: Tensor) -> Tensor:
    r"""$(L L^\top)^{-1}$, [..., n, n]. On CUDA it is computed by a triangular solve, which a CUDA graph can capture."""
    if not factor.is_cuda:
        return torch.cholesky_inverse(factor)
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    found: Tensor = root.mT @ root
    return found


class _Forms(Function):
    """k^T w and k^T G k for the columns k of a matrix; the backward pass uses the product G k for both gradients."""

    @staticmethod
    def forward(weights: Tensor, matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = matrix @ columns.unsqueeze(-3)  # [S, O, M, B]
        return columns.mT @ weights, (product * columns.unsqueeze(-3)).sum(-2), product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[0], inputs[2], output[2])
        ctx.shape = inputs[1].shape

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _Forms.apply(*leading_axes(info, in_dims, inputs)), (0, 0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_linear: Tensor, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor]:
        weights, columns, product = ctx.saved_tensors
        wide = columns.unsqueeze(-3)  # [S, 1, M, B]
        grad_matrix = (wide * grad.unsqueeze(-2)) @ wide.mT  # [S, O, M, M]
        through = product * (2 * grad).unsqueeze(-2)
        through = (through.sum(-3) if through.shape[-3] > 1 else through.squeeze(-3)).flatten(0, -3)
        each = weights.expand(*columns.shape[:-2], *weights.shape[-2:]).flatten(0, -3)
        through.baddbmm_(each, grad_linear.mT.flatten(0, -3))
        grad_weights = (columns @ grad_linear).sum_to_size(weights.shape)
        return grad_weights, grad_matrix.sum_to_size(ctx.shape), through.view(columns.shape)


def inverse_and_log_det(matrix: Tensor, what: str) -> tuple[Tensor, Tensor, Tensor]:
    r"""For positive definite A [..., n, n]: $A^{-1}$ [..., n, n], its diagonal [..., n] and $\log\det A$ [...]; differentiable
    once.

    A matrix that is not finite or not positive definite raises `ValueError`; see `stable_cholesky`.
    """
    inverse, diagonal, log_det = _InverseAndLogDet.apply(matrix, what)
    return inverse, diagonal, log_det


def linear_and_quadratic_forms(weights: Tensor, matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    r"""For symmetric G: $k_b^\top w_o$ [S, B, O] and $k_b^\top G_o k_b$ [S, O', B]; differentiable once.

    The vectors w are [S, M, O], the matrices G are [S, O', M, M], and the columns k are [S, M, B]. S is 1 for values that
    all draws share.
    """
    linear, quadratic, _ = _Forms.apply(weights, matrix, columns)
    return linear, quadratic


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
    `vmap` and during the capture of a CUDA graph, values cannot be checked. In these cases, a factor that does not exist is NaN.
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
                f"{what} is not positive definite, so {jitter:g} times the mean of its diagonal was added to the "
                "diagonal",
                stacklevel=3,
            )
            return factor
    size = matrix.shape[-1]
    raise ValueError(
        f"{what} ({size} x {size}) is not positive definite, even with {JITTERS[-1]:g} times the mean of its diagonal added to "
        "the diagonal; use float64 (net.double()), or a larger prior precision"
    )


def stable_eigh(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues [..., n], in ascending order, and eigenvectors [..., n, n] of symmetric matrices $A = Q \Lambda Q^\top$.

    The computation is in float64, and on the CPU if the device does not support float64. In float32 some machines'
    LAPACK does not converge for curvatures with many zero rows. If a matrix is not finite or if no eigenvectors are found, the
    function raises a `ValueError` whose message calls the matrix `what`.
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
    several times faster, with an error of about the square root of the machine precision. If more than half of the values are
    needed, or if a value is as small as this error, the values come from a singular value decomposition.
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
