"""Inverses, determinants and quadratic forms of symmetric matrices, with gradients in as few products as it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.signatures import known_signature, leading_axes


@known_signature
class _InverseAndLogDet(torch.autograd.Function):
    """A^-1 and log det A; the gradient needs two products and no derivative of a factorization."""

    @staticmethod
    def forward(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
        factor = stable_cholesky(matrix, what)
        return inverse_from_factor(factor), 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], matrix: Tensor, what: str) -> Any:
        return _InverseAndLogDet.apply(matrix.movedim(in_dims[0], 0), what), (0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_inverse: Tensor, grad_log_det: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        middle = inverse @ (0.5 * (grad_inverse + grad_inverse.mT)) @ inverse
        return torch.addcmul(-middle, inverse, grad_log_det[..., None, None]), None


def inverse_from_factor(factor: Tensor) -> Tensor:
    r"""$(L L^\top)^{-1}$, [..., n, n]; on CUDA by a triangular solve, which a graph can capture."""
    if not factor.is_cuda:
        return torch.cholesky_inverse(factor)
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return root.mT @ root


@known_signature
class _QuadraticForms(torch.autograd.Function):
    """k^T G k for the columns k of a matrix; the product G k serves the gradient too."""

    @staticmethod
    def forward(matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        product = matrix @ columns.unsqueeze(-3)  # [S, O, M, B]
        return (product * columns.unsqueeze(-3)).sum(-2), product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], output[1])
        ctx.shape = inputs[0].shape

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _QuadraticForms.apply(*leading_axes(info, in_dims, inputs)), (0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        columns, product = ctx.saved_tensors
        wide = columns.unsqueeze(-3)  # [S, 1, M, B]
        grad_matrix = (wide * grad.unsqueeze(-2)) @ wide.mT  # [S, O, M, M]
        grad_columns = 2 * (product * grad.unsqueeze(-2)).sum(-3)
        return grad_matrix.sum_to_size(ctx.shape), grad_columns.sum_to_size(columns.shape)


def inverse_and_log_det(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    r"""$A^{-1}$ and $\log\det A$ of positive definite matrices, [..., n, n] -> [..., n, n], [...]; differentiable once.

    Args:
        matrix: A.
        what: What it is, for warnings and errors.

    Raises:
        ValueError: If it is not positive definite, or not finite.
    """
    inverse, log_det = _InverseAndLogDet.apply(matrix, what)
    return inverse, log_det


def quadratic_forms(matrix: Tensor, columns: Tensor) -> Tensor:
    r"""$k_b^\top G_o k_b$ for symmetric G; differentiable once.

    Args:
        matrix: G, [S, O, M, M], or [1, O, M, M] where all draws share it.
        columns: $k_b$, [S, M, B], or [1, M, B].

    Returns:
        [S, O, B].
    """
    result: Tensor = _QuadraticForms.apply(matrix, columns)[0]
    return result
