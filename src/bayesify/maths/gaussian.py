"""Diagonal Gaussians: draws and the sums their KL needs, with gradients written out to save passes over memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class _Draw(torch.autograd.Function):
    """Draws of many diagonal Gaussians and their summed KL to zero-mean priors, in a few calls for all of them."""

    @staticmethod
    def forward(ctx: Any, prior_stds: list[float], noise: list[Tensor], *parameters: Tensor) -> Any:
        count = len(prior_stds)
        means, log_stds = list(parameters[:count]), list(parameters[count:])
        stds = list(torch._foreach_exp(log_stds))
        ctx.prior_stds = prior_stds
        ctx.save_for_backward(*means, *stds, *noise)
        return *_combine(means, stds, noise), _kl(prior_stds, means, log_stds, stds)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        count = len(ctx.prior_stds)
        saved, grad_kl = ctx.saved_tensors, grads[-1]
        means, stds, noise = saved[:count], saved[count : 2 * count], saved[2 * count :]
        through = [torch.zeros_like(n) if g is None else g for g, n in zip(grads[:-1], noise, strict=True)]
        if noise[0].shape[0] == 1:
            noise = [part.squeeze(0) for part in noise]
            through = [grad.squeeze(0) for grad in through]
            slopes = list(torch._foreach_mul(through, noise))
        else:
            slopes = [(grad * part).sum(0) for grad, part in zip(through, noise, strict=True)]
            through = [grad.sum(0) for grad in through]
        if grad_kl is None:
            torch._foreach_mul_(slopes, list(stds))
            return None, None, *through, *slopes
        precisions = [std**-2 for std in ctx.prior_stds]
        pulls = torch._foreach_mul(list(means), precisions)
        torch._foreach_mul_(pulls, grad_kl)
        torch._foreach_add_(pulls, through)
        # d KL / d log s = s^2 / sigma^2 - 1, and d w / d log s = s * noise.
        shrink = torch._foreach_mul(list(stds), precisions)
        torch._foreach_mul_(shrink, grad_kl)
        torch._foreach_add_(slopes, shrink)
        torch._foreach_mul_(slopes, list(stds))
        torch._foreach_add_(slopes, grad_kl, alpha=-1)
        return None, None, *pulls, *slopes


def _combine(means: list[Tensor], stds: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
    """mean + std * noise, [S, *shape] each."""
    if noise[0].shape[0] > 1:
        return [torch.addcmul(*parts) for parts in zip(means, stds, noise, strict=True)]
    flat = [part.squeeze(0) for part in noise]
    return [draw.unsqueeze(0) for draw in torch._foreach_addcmul(means, stds, flat)]


def _kl(prior_stds: list[float], means: list[Tensor], log_stds: list[Tensor], stds: list[Tensor]) -> Tensor:
    total = sum(mean.numel() for mean in means)
    scales = [math.sqrt(0.5) / std for std in prior_stds]
    norms = torch._foreach_mul(torch._foreach_norm([*means, *stds]), [*scales, *scales])
    logs = torch.stack([log_std.sum() for log_std in log_stds]).sum()
    constant = sum(mean.numel() * math.log(std) for mean, std in zip(means, prior_stds, strict=True)) - 0.5 * total
    return torch.stack(norms).square().sum() - logs + constant


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


def _dot(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return torch.dot(flat, flat)


def draw_diagonals(
    means: list[Tensor], log_stds: list[Tensor], noise: list[Tensor], prior_stds: list[float]
) -> tuple[list[Tensor], Tensor]:
    r"""Draws $m + s \epsilon$ of many $\mathcal{N}(m, \operatorname{diag}(s^2))$, and their KL to zero-mean priors.

    Args:
        means: m of each, any shape.
        log_stds: log s of each, the same shapes.
        noise: $\epsilon$ of each, [S, *shape].
        prior_stds: $\sigma$ of each.

    Returns:
        Draws [S, *shape] of each, and a scalar in nats.
    """
    *draws, kl = _Draw.apply(prior_stds, noise, *means, *log_stds)
    return draws, kl


def diagonal_moments(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Mean and variance $s^2$ for use elsewhere, with $\mathbb{E} \lVert w \rVert^2$ and $\sum \log s$."""
    mean_out, variance, square, log_det = _Moments.apply(mean, log_std)
    return mean_out, variance, square, log_det
