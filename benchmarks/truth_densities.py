"""log p(y, w) of the networks of `benchmarks.truth_problems` and its gradient, written out for many weights at once.

All networks are linear in fixed features or have one form: rows or patches of the input, a linear map, tanh, a linear map. Without
autograd, a gradient takes a fraction of the time. It is also an independent check of the samplers' densities.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.likelihoods import Gaussian
from benchmarks.truth_problems import Problem

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]


def slope_of(problem: Problem, scale: Tensor) -> Slope:
    """Function from positions z [C, P], weights in units of `scale` [P], to log p(z, y) [C] without constants and its gradient."""
    if problem.features is not None:
        return _linear_slope(problem, problem.features(problem.x).to(scale), scale)
    first, *_, last = problem.network(0)  # type: ignore[misc]
    rows = problem.x[:, None]  # [N, places, inputs]
    if isinstance(first, nn.Conv2d):
        rows = F.unfold(problem.x, first.kernel_size).transpose(1, 2)  # type: ignore[arg-type]
    (num_rows, places, width), hidden, outputs = rows.shape, first.weight.shape[0], last.weight.shape[0]
    rows = rows.reshape(num_rows * places, width).to(scale)
    sizes = [hidden * width, hidden, outputs * hidden * places, outputs]

    def slope(position: Tensor) -> tuple[Tensor, Tensor]:
        chains = len(position)
        weight, bias, head, shift = (position * scale).split(sizes, dim=1)
        inner = torch.baddbmm(bias[:, None], rows.expand(chains, -1, -1), weight.view(chains, hidden, width).mT).tanh_()
        units = inner.view(chains, num_rows, places, hidden).transpose(2, 3).reshape(chains, num_rows, -1)
        head = head.view(chains, outputs, -1)
        density, pull = _data_term(problem, torch.baddbmm(shift[:, None], units, head.mT))  # [C], [C, N, O]
        back = torch.bmm(pull, head).view(chains, num_rows, hidden, places).transpose(2, 3).reshape(inner.shape)
        back = back * (1 - inner.square())
        parts = (back.mT @ rows, back.sum(1), pull.mT @ units, pull.sum(1))
        total = torch.cat([part.reshape(chains, -1) for part in parts], dim=1) * scale - position
        return density - 0.5 * position.square().sum(1), total

    return slope


def _linear_slope(problem: Problem, features: Tensor, scale: Tensor) -> Slope:
    """`slope_of` of a linear model with features [N, P]."""

    def slope(position: Tensor) -> tuple[Tensor, Tensor]:
        density, pull = _data_term(problem, ((position * scale) @ features.T).unsqueeze(-1))
        return density - 0.5 * position.square().sum(1), pull[..., 0] @ features * scale - position

    return slope


def _data_term(problem: Problem, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y | outputs [C, N, O]) up to a constant, [C], and its gradient with respect to the outputs, [C, N, O]."""
    if problem.is_classification:
        known = F.one_hot(problem.y, outputs.shape[-1]).to(outputs)
        logs = outputs.log_softmax(-1)
        return (logs * known).sum((1, 2)), known - logs.exp()
    targets = problem.y.to(outputs).view(1, -1, 1)
    if isinstance(problem.likelihood, Gaussian):
        error = (targets - outputs) / float(problem.likelihood.noise)
        return -0.5 * float(problem.likelihood.noise) * error.square().sum((1, 2)), error
    mean, free = outputs.split(1, dim=-1)
    log_variance = free.clamp(-20, 20)
    error = (targets - mean) * (-log_variance).exp()
    squared = error * (targets - mean)
    slopes = torch.cat((error, 0.5 * (squared - 1) * (free == log_variance)), dim=-1)
    return -0.5 * (squared + log_variance + math.log(2 * math.pi)).sum((1, 2)), slopes
