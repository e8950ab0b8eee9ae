"""Inverses, determinants and quadratic forms of symmetric matrices, with gradients in as few products as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.signatures import Function, leading_axes


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
    r"""$A^{-1}$, its diagonal and $\log\det A$ of positive definite matrices, [..., n, n], [..., n] and [...]; differentiable once.

    A matrix that is not finite or not positive definite raises `ValueError`; see `stable_cholesky`.
    """
    inverse, diagonal, log_det = _InverseAndLogDet.apply(matrix, what)
    return inverse, diagonal, log_det


def linear_and_quadratic_forms(weights: Tensor, matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    r"""$k_b^\top w_o$, [S, B, O], and $k_b^\top G_o k_b$, [S, O', B], for symmetric G; differentiable once.

    The vectors w are [S, M, O], the matrices G are [S, O', M, M], and the columns k are [S, M, B]. S is 1 for values that
    all draws share.
    """
    linear, quadratic, _ = _Forms.apply(weights, matrix, columns)
    return linear, quadratic
