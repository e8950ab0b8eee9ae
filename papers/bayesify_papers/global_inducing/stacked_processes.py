"""Deep Gaussian processes of one shape side by side, trained as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.deep_gp import DeepGP
from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.constraints import positive, tril
from bayesify.maths.kernels import squared_exponential_matrix
from bayesify.maths.noise import standard_normal
from bayesify.maths.positive_definite import inverse_and_log_det, quadratic_forms

Conditional = tuple[int, Tensor, Tensor, Tensor]
"""A layer's number, U [R, M, D], w [R, M, O] and G [R, O or 1, M, M]; see `bayesify.deep_gp.layers.Conditional`."""


class StackedProcesses(nn.Module):
    """R deep Gaussian processes with squared exponential kernels and Gaussian noise; the bound is `DeepGP.elbo` with one draw.

    The processes lend their parameters; `hand_back` gives them the trained ones.

    Args:
        models: Of equal depth, widths, number and kind of inducing points.

    Raises:
        ValueError: If a kernel is another one, or there is no model.
    """

    def __init__(self, models: Sequence[DeepGP]) -> None:
        super().__init__()
        if not models or any(model.kernel != "squared_exponential" for model in models):
            raise ValueError("StackedProcesses: give at least one process, all with the squared exponential kernel")
        self.models = list(models)
        first = models[0]
        self.depth, self.is_global, self.jitter = len(first.layers), first.inducing == "global", first.jitter
        self.values = nn.ParameterDict()
        for name, parameter in first.named_parameters():
            stacked = torch.stack([dict(model.named_parameters())[name].detach() for model in models])
            self.values[_key(name)] = nn.Parameter(stacked, requires_grad=parameter.requires_grad)
        for name, _ in first.named_buffers():
            self.register_buffer(_key(name), torch.stack([dict(model.named_buffers())[name] for model in models]))

    @torch.no_grad()
    def hand_back(self) -> list[DeepGP]:
        """The processes with their trained parameters."""
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.copy_(self.values[_key(name)][index])
        return self.models

    def _of(self, layer: int, name: str) -> Tensor:
        return self.values[_key(f"layers.{layer}.{name}")].double()

    # -- layers ----------------------------------------------------------------------------------------------------

    def _kernel(self, layer: int, x: Tensor, other: Tensor) -> Tensor:
        scale = positive(self._of(layer, "kernel.raw_lengthscale")).unsqueeze(-2)
        log_variance = 2 * positive(self._of(layer, "kernel.raw_amplitude")).log()[:, None, None]
        return squared_exponential_matrix(x / scale, other / scale, log_variance)

    def _covariance(self, layer: int, inputs: Tensor) -> Tensor:
        kernel = self._kernel(layer, inputs, inputs)
        diagonal = kernel.diagonal(dim1=-2, dim2=-1)
        return kernel + torch.diag_embed((self.jitter * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))

    def _skip(self, layer: int, x: Tensor) -> Tensor | float:
        matrix = getattr(self, _key(f"layers.{layer}.skip_matrix"), None)
        return 0.0 if matrix is None else x @ matrix.to(x.dtype)

    def _factorize(self, layer: int, covariance: Tensor) -> tuple[Tensor, Tensor]:
        factor = stable_cholesky(covariance, f"the kernel matrix of layer {layer + 1}")
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return factor, torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)

    def _regress(self, layer: int, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C^-1 [R, M, M], C^-1 V [R, M, O] and the KL [R], from K."""
        targets, log_precision = self._of(layer, "pseudo_outputs"), self._of(layer, "log_precision")
        noise = (-log_precision).exp()
        what = f"the kernel matrix of layer {layer + 1}"
        inverse, log_det = inverse_and_log_det(covariance + torch.diag_embed(noise), what)
        weights = inverse @ targets
        trace = (inverse.diagonal(dim1=-2, dim2=-1) * noise).sum(-1)
        shared = trace - targets.shape[-2] + log_det + log_precision.sum(-1)
        return inverse, weights, 0.5 * (targets.shape[-1] * shared + (weights * (covariance @ weights)).sum((-1, -2)))

    def _global(self, generator: torch.Generator | None) -> tuple[list[Conditional], Tensor]:
        below = self.values["inducing_inputs"].double()
        total: Tensor = below.new_zeros(len(below))
        parts: list[Conditional] = []
        for layer in range(self.depth - 1):
            covariance = self._covariance(layer, below)
            inverse, _, kl = self._regress(layer, covariance)
            factor, root = self._factorize(layer, covariance)
            targets = self._of(layer, "pseudo_outputs")
            size = (*targets.shape[:2], 2 * targets.shape[2])
            first, second = standard_normal(math.prod(size), factor, generator).view(size).chunk(2, dim=-1)
            spread = (-0.5 * self._of(layer, "log_precision")).exp().unsqueeze(-1)
            values = first + factor.mT @ (inverse @ (targets - factor @ first - spread * second))
            parts.append((layer, below, root.mT @ values, (root.mT @ root).unsqueeze(-3)))
            below, total = self._skip(layer, below) + factor @ values, total + kl
        last = self.depth - 1
        inverse, weights, kl = self._regress(last, self._kernel(last, below, below))
        return [*parts, (last, below, weights, inverse.unsqueeze(-3))], total + kl

    def _local(self) -> tuple[list[Conditional], Tensor]:
        parts: list[Conditional] = []
        total = self.values[_key("likelihood.raw_noise")].new_zeros((), dtype=torch.float64)
        for layer in range(self.depth):
            inputs, mean, raw = (self._of(layer, name) for name in ("inducing_inputs", "mean_value", "raw_diagonal"))
            _, root = self._factorize(layer, self._covariance(layer, inputs))
            lower, size = self._of(layer, "lower"), raw.shape[-1]
            counts = torch.arange(size, device=raw.device)
            rows = F.softplus(raw).repeat_interleave(counts, dim=-1, output_size=lower.shape[-1])
            factor = tril(lower * rows, raw)  # [R, O, M, M]
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))
            squares = factor.square().sum((-1, -2, -3)) + mean.square().sum((-1, -2))
            total = total + 0.5 * (squares - mean[0].numel()) - log_det
            spread = factor.mT @ root.unsqueeze(-3)
            reduction = (root.mT @ root).unsqueeze(-3) - spread.mT @ spread
            parts.append((layer, inputs, root.mT @ mean, reduction))
        return parts, total

    # -- the bound -------------------------------------------------------------------------------------------------

    def _moments(self, part: Conditional, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean, with the skip function, and variance of a layer at inputs [R, B, D]: [R, B, O], and O or 1 variances."""
        layer, inputs, weights, reduction = part
        cross = self._kernel(layer, inputs, x)  # [R, M, B]
        variance = positive(self._of(layer, "kernel.raw_amplitude")).square()[:, None, None]
        variance = (variance - quadratic_forms(reduction, cross).mT).clamp_min(0)
        return cross.mT @ weights + self._skip(layer, x), variance

    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        num_data: int,
        num_draws: int = 1,
        kl_weight: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Evidence lower bound of each process in nats, [R], from batches [R, B, ...].

        Raises:
            ValueError: If `num_draws` is not 1.
        """
        if num_draws != 1:
            raise ValueError(f"StackedProcesses: num_draws={num_draws}; only 1 is known here")
        parts, kl = self._global(generator) if self.is_global else self._local()
        values = x.double()
        for part in parts[:-1]:
            mean, variance = self._moments(part, values)
            noise = standard_normal(mean.numel(), mean, generator).view(mean.shape)
            values = mean + variance.clamp_min(1e-12).sqrt() * noise
        mean, variance = self._moments(parts[-1], values)
        noise = positive(self.values[_key("likelihood.raw_noise")].double())[:, None, None]
        misfit = ((mean - y).square() + variance) / noise + (2 * math.pi * noise).log()
        return -0.5 * num_data / x.shape[1] * misfit.sum((-1, -2)) - kl_weight * kl


def _key(name: str) -> str:
    return name.replace(".", "_")
