"""Diagonal Gaussians: draws and their KL, with hand-written gradients that save passes over memory."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function
from bayesify.maths.value_checks import transforming

UNIT_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""Differential entropy of a standard normal number, in nats."""


class _Draw(Function):
    """Draws of many diagonal Gaussians and their summed KL to zero-mean priors, computed for all Gaussians together."""

    @staticmethod
    def forward(ctx: Any, prior_stds: list[float], noise: list[Tensor], *parameters: Tensor) -> Any:
        count = len(prior_stds)
        means, log_stds = list(parameters[:count]), list(parameters[count:])
        stds = list(torch._foreach_exp(log_stds))
        if noise[0].shape[0] > 1:
            drawn = [torch.addcmul(*parts) for parts in zip(means, stds, noise, strict=True)]
        else:
            noise = [part.squeeze(0) for part in noise]
            drawn = [draw.unsqueeze(0) for draw in torch._foreach_addcmul(means, stds, noise)]
        ctx.prior_stds = prior_stds
        ctx.save_for_backward(*means, *log_stds, *stds, *noise)
        return *drawn, diagonal_kl(prior_stds, means, log_stds, stds)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        count, saved = len(ctx.prior_stds), ctx.saved_tensors  # read once, because checkpointing provides them once
        means, log_stds, stds, noise = (list(saved[place * count : (place + 1) * count]) for place in range(4))
        if torch.is_grad_enabled():  # for second derivatives, because saved values would count as constant
            stds = list(torch._foreach_exp(log_stds))
        through = [torch.zeros_like(n) if g is None else g for g, n in zip(grads[:-1], noise, strict=True)]
        if noise[0].ndim == means[0].ndim:
            through = [grad.view_as(part) for grad, part in zip(through, noise, strict=True)]
            slopes = list(torch._foreach_mul(through, noise))
        else:
            slopes = [(grad * part).sum(0) for grad, part in zip(through, noise, strict=True)]
            through = [grad.sum(0) for grad in through]
        return None, None, *_with_kl(ctx.prior_stds, means, stds, through, slopes, grads[-1])


def _with_kl(
    prior_stds: list[float],
    means: list[Tensor],
    stds: list[Tensor],
    through: list[Tensor],
    slopes: list[Tensor],
    grad_kl: Tensor | None,
) -> list[Tensor]:
    r"""Gradients with respect to all means, then all log stds, including the KL's gradients.

    `slopes` are gradients with respect to the standard deviations s. The function overwrites `slopes`.

    $$ \bar m = \text{through} + \overline{\mathrm{KL}}\, m / \sigma^2, \qquad
       \overline{\log s} = (\text{slopes} + \overline{\mathrm{KL}}\, s / \sigma^2)\, s - \overline{\mathrm{KL}} $$
    """
    if grad_kl is None:
        torch._foreach_mul_(slopes, stds)
        return [*through, *slopes]
    precisions = [std**-2 for std in prior_stds]
    if grad_kl.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        weight = float(grad_kl)  # no wait on a CPU, and a scalar factor saves passes over memory
        for slope, std, precision in zip(slopes, stds, precisions, strict=True):
            slope.add_(std, alpha=weight * precision)
            torch.addcmul(-grad_kl, slope, std, out=slope)
        pulls = [torch.add(g, m, alpha=weight * p) for g, m, p in zip(through, means, precisions, strict=True)]
        return [*pulls, *slopes]
    pulls = list(torch._foreach_mul(means, precisions))
    torch._foreach_mul_(pulls, grad_kl)
    torch._foreach_add_(pulls, through)
    shrink = torch._foreach_mul(stds, precisions)
    torch._foreach_mul_(shrink, grad_kl)
    torch._foreach_add_(slopes, shrink)
    torch._foreach_mul_(slopes, stds)
    torch._foreach_add_(slopes, grad_kl, alpha=-1)
    return [*pulls, *slopes]


def diagonal_kl(prior_stds: list[float], means: list[Tensor], log_stds: list[Tensor], stds: list[Tensor]) -> Tensor:
    """Sum of the KLs of many diagonal Gaussians to zero-mean priors, a scalar in nats."""
    scales = [math.sqrt(0.5) / std for std in (*prior_stds, *prior_stds)]
    norms, logs = torch._foreach_norm([*means, *stds]), [log_std.sum() for log_std in log_stds]
    constant = sum(mean.numel() * (math.log(std) - 0.5) for mean, std in zip(means, prior_stds, strict=True))
    if norms[0].device.type == "cpu" and not torch.compiler.is_compiling():
        values = torch.stack([*norms, *logs]).tolist()  # Python is faster than torch calls for so few numbers
        scaled = [scale * norm for scale, norm in zip(scales, values, strict=False)]
        return norms[0].new_tensor(sum(norm * norm for norm in scaled) - sum(values[len(scales) :]) + constant)
    squares = torch.stack(torch._foreach_mul(norms, scales)).square()
    return squares.sum() - torch.stack(logs).sum() + constant


class _Moments(Function):
    """Means and variances of many diagonal Gaussians, and their summed KL to zero-mean priors."""

    @staticmethod
    def forward(ctx: Any, prior_stds: list[float], *parameters: Tensor) -> Any:
        count = len(prior_stds)
        means, log_stds = list(parameters[:count]), list(parameters[count:])
        stds = list(torch._foreach_exp(log_stds))
        ctx.prior_stds = prior_stds
        ctx.save_for_backward(*means, *log_stds, *stds)
        kl = diagonal_kl(prior_stds, means, log_stds, stds)
        return *(mean.view_as(mean) for mean in means), *torch._foreach_mul(stds, stds), kl

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        count, saved = len(ctx.prior_stds), ctx.saved_tensors
        means, log_stds, stds = (list(saved[place * count : (place + 1) * count]) for place in range(3))
        if torch.is_grad_enabled():
            stds = list(torch._foreach_exp(log_stds))
        given = [torch.zeros_like(m) if g is None else g for g, m in zip(grads[:-1], [*means, *means], strict=True)]
        slopes = list(torch._foreach_mul(given[count:], stds))
        torch._foreach_mul_(slopes, 2.0)
        return None, *_with_kl(ctx.prior_stds, means, stds, given[:count], slopes, grads[-1])


def _joined(means: list[Tensor], log_stds: list[Tensor], prior_stds: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Means and standard deviations of Gaussians as vectors [P], and their KL, computed by operations that `vmap` and autograd
    support."""
    mean, log_std = (torch.cat([value.flatten() for value in values]) for values in (means, log_stds))
    std, counts = log_std.exp(), tuple(value.numel() for value in means)
    scales = _repeated(tuple(prior_stds), counts, mean.dtype, mean.device)
    constant = sum(count * (math.log(prior) - 0.5) for count, prior in zip(counts, prior_stds, strict=True))
    return mean, std, (torch.addcmul(std.square(), mean, mean) * scales - log_std).sum() + constant


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([value.numel() for value in like], -1)
    return [part.unflatten(-1, value.shape) for part, value in zip(parts, like, strict=True)]


@lru_cache(maxsize=64)
def _repeated(stds: tuple[float, ...], counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""The numbers $1 / 2\sigma^2$ of all entries, [P], where $\sigma$ is an entry's prior standard deviation."""
    with torch.inference_mode(False):
        scales = torch.tensor([0.5 / std**2 for std in stds], dtype=dtype, device=device)
        return scales.repeat_interleave(torch.tensor(counts, device=device))


def draw_diagonals(
    means: list[Tensor], log_stds: list[Tensor], noise: list[Tensor], prior_stds: list[float]
) -> tuple[list[Tensor], Tensor]:
    r"""Draws $m + s \epsilon$ of many $\mathcal{N}(m, \operatorname{diag}(s^2))$, and their KL to zero-mean priors.

    The mean m and log s of a Gaussian have the same shape. Noise and draws are [S, *shape], and the KL is a scalar in nats.
    """
    if transforming():
        mean, std, kl = _joined(means, log_stds, prior_stds)
        return _split(torch.addcmul(mean, std, torch.cat([part.flatten(1) for part in noise], -1)), means), kl
    *draws, kl = _Draw.apply(prior_stds, noise, *means, *log_stds)
    return draws, kl


def diagonal_moments(
    means: list[Tensor], log_stds: list[Tensor], prior_stds: list[float]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    r"""m and $s^2$ of many $\mathcal{N}(m, \operatorname{diag}(s^2))$, and their KL to zero-mean priors; see `draw_diagonals`."""
    if transforming():
        _, std, kl = _joined(means, log_stds, prior_stds)
        return means, _split(std.square(), means), kl
    *moments, kl = _Moments.apply(prior_stds, *means, *log_stds)
    return moments[: len(means)], moments[len(means) :], kl


def standard_kl(std: Tensor, mean: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    r"""KL of independent Gaussians to standard normals, $\sum_i n_i (\tfrac12 (m_i^2 + s_i^2 - 1) - \log s_i)$, a scalar.

    The forward and backward passes use few operations, because launching an operation on a GPU takes longer than
    computing it. Means are 0 by default. The factors n (`counts`) are 1 by default and get no gradient.
    """
    found: Tensor = _StandardKL.apply(std, mean, counts)
    return found


class _StandardKL(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(std: Tensor, mean: Tensor | None, counts: Tensor | None) -> Tensor:
        negative = torch.addcmul(std.log(), std, std, value=-0.5) + 0.5
        if mean is not None:
            negative = torch.addcmul(negative, mean, mean, value=-0.5)
        return -(negative if counts is None else negative * counts).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        std, mean, counts = ctx.saved_tensors
        weight = grads[0] if counts is None else grads[0] * counts
        return (std - 1 / std) * weight, None if mean is None else mean * weight, None
