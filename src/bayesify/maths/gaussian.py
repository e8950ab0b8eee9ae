"""Diagonal Gaussians: draws and the sums their KL needs, with gradients written out to save passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Draw(torch.autograd.Function):
    """Draws of a diagonal Gaussian, its summed second moment, and its summed log standard deviation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        std = log_std.exp()
        return torch.addcmul(mean, std, noise), *_sums(mean, std, log_std), std

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        mean, _, noise = inputs
        ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(mean, output[3], noise)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_draws, grad_square, grad_log, _ = grads
        mean, std, noise = ctx.saved_tensors
        through_mean = grad_draws[0] if grad_draws.shape[0] == 1 else grad_draws.sum(0)
        through_std = grad_draws[0] * noise[0] if grad_draws.shape[0] == 1 else (grad_draws * noise).sum(0)
        grad_mean = torch.addcmul(through_mean, mean, 2 * grad_square)
        grad_log_std = through_std.addcmul_(std, 2 * grad_square).mul_(std).add_(grad_log)
        return grad_mean, grad_log_std, None


class _Moments(torch.autograd.Function):
    """Mean and variance of a diagonal Gaussian, its summed second moment, and its summed log standard deviation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance = (2 * log_std).exp_()
        return mean.view_as(mean), variance, _dot(mean) + variance.sum(), log_std.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_mean, grad_variance, grad_square, grad_log = grads
        mean, variance = ctx.saved_tensors
        through_log = (grad_variance + grad_square).mul_(variance).mul_(2).add_(grad_log)
        return torch.addcmul(grad_mean, mean, 2 * grad_square), through_log


def _sums(mean: Tensor, std: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    return _dot(mean) + _dot(std), log_std.sum()


def _dot(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return torch.dot(flat, flat)


def draw_diagonal(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Reparameterised draws $m + s \epsilon$ of $\mathcal{N}(m, \operatorname{diag}(s^2))$.

    Args:
        mean: m, any shape.
        log_std: log s, the same shape.
        noise: $\epsilon$, [S, *shape]; without gradients it may be overwritten.

    Returns:
        Draws [S, *shape], $\mathbb{E} \lVert w \rVert^2$ and $\sum \log s$.
    """
    if torch.is_grad_enabled():
        draws, square, log_det, _ = _Draw.apply(mean, log_std, noise)
        return draws, square, log_det
    std = log_std.exp()
    return torch.addcmul(mean, std, noise, out=noise), *_sums(mean, std, log_std)


def diagonal_moments(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Mean and variance $s^2$ for use elsewhere, with $\mathbb{E} \lVert w \rVert^2$ and $\sum \log s$."""
    mean_out, variance, square, log_det = _Moments.apply(mean, log_std)
    return mean_out, variance, square, log_det
