"""Perceptrons at point estimates, R at once by products of stacked matrices: the fast path of a `ModelStack`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.network import BayesianNetwork
from bayesify.posteriors.point import Point
from bayesify.running.generators import own_generators

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps what a user wants to be called in its passes, which products of stacked matrices would not do."""


class Perceptrons:
    r"""R networks of linear layers, activations and dropout at point estimates, without `vmap`.

    The outputs are those of the networks, and the penalty of each is $-\log p(w_r)$. A step of small networks costs the number of
    its operations, so all gradients come from one operation of autograd. Products with a transposed right factor are several
    times slower on some processors, so matrices are transposed first. On a CPU dropout takes its masks from a fixed pool at
    random places of torch's generator, because making them costs more than the rest of the step.

    Args:
        models: The networks, all alike; see `of`.
        names: Weight and bias of each linear layer in turn, by name.
        layers: The layers of one network, whose modes count.
    """

    def __init__(self, models: Sequence[BayesianNetwork], names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        self.names, self.layers = list(names), list(layers)
        sizes = models[0].posterior.sizes()
        stds = [[float(model.prior.draw(1).std[name]) for name in names] for model in models]
        self._precisions = torch.tensor([[std**-2 for std in row] for row in stds], dtype=torch.float64)  # [R, W]
        constants = [
            sum(sizes[name] * math.log(2 * math.pi * std**2) for name, std in zip(names, row, strict=True))
            for row in stds
        ]
        self._constants = 0.5 * torch.tensor(constants, dtype=torch.float64)  # [R]
        self._masks: dict[float, Tensor] = {}

    @staticmethod
    def of(models: Sequence[nn.Module], first: nn.Module) -> Perceptrons | None:
        """The fast path of some models that are alike, `None` where there is none; `first` is a copy of the first of them."""
        if type(first) is not BayesianNetwork or len(first.posteriors) != 1 or type(first.posterior) is not Point:
            return None
        network, used = first.network, first.posterior.sizes()
        linear = [(path, part) for path, part in network.named_children() if type(part) is nn.Linear]
        names = [f"{path}.{leaf}" for path, _ in linear for leaf in ("weight", "bias")]
        if type(network) is not nn.Sequential or set(used) != set(names) or any(True for _ in network.parameters()):
            return None
        if first.output is not None or first.layout.low_precision or any(map(_has_hooks, network.modules())):
            return None
        networks = [model for model in models if isinstance(model, BayesianNetwork) and model.prior.draw(1).fixed]
        if len(networks) < len(models):
            return None
        like = first.posterior.value.values()[0]
        width = 0
        for part in network:
            if type(part) is nn.Linear:
                width = part.out_features
            elif type(part) is not nn.Dropout and not _acts_on_rows(part, width, like):
                return None
        return Perceptrons(networks, names, list(network))

    def values(self, model: BayesianNetwork) -> list[Tensor]:
        """The weights of a network, in the order in which `terms` takes them."""
        assert isinstance(model.posterior, Point)
        return [model.posterior.value[name] for name in self.names]

    def take(self, x: Tensor, num_draws: int, first: Tensor) -> bool:
        """Whether rows [R, B, D] can run here, given the first weight [R, O, D]; draws differ where there is dropout."""
        drops = any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in self.layers)
        fits = x.ndim == 3 and (x.shape[0], x.shape[2]) == (first.shape[0], first.shape[2])
        alike = x.dtype == first.dtype and x.device == first.device and not x.requires_grad
        return fits and alike and not (drops and num_draws > 1) and not torch.is_autocast_enabled(x.device.type)

    def terms(self, x: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs [R, B, O] of rows [R, B, D], which get no gradients, and the penalty of each network, [R].

        Args:
            x: The rows.
            values: Weight [R, O, D] and bias [R, O] of each linear layer in turn.
        """
        outputs, squares = run_all(x, self, *values)
        return outputs, squares + self._constants.to(squares)

    def run(self, x: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Outputs [R, B, O] of rows [R, B, D], given weight and bias of each layer in turn."""
        place = 0
        for part in self.layers:
            if isinstance(part, nn.Linear):
                x = affine(x, values[place], values[place + 1])
                place += 2
            elif not isinstance(part, nn.Dropout):
                x = part(x)
            elif part.training and part.p > 0:
                x = F.dropout(x, part.p) if x.is_cuda else x * self._mask(part.p, x)
        return x

    def precisions(self, like: Tensor) -> Tensor:
        """The prior's precision of each weight in each network, [R, W]."""
        if self._precisions.dtype != like.dtype or self._precisions.device != like.device:
            self._precisions = self._precisions.to(like)
        return self._precisions

    def _mask(self, rate: float, like: Tensor) -> Tensor:
        pool = self._masks.get(rate)
        if pool is None or len(pool) < 2 * like.numel():
            numbers = torch.rand(2 * like.numel(), generator=torch.Generator().manual_seed(0))
            pool = self._masks[rate] = (numbers >= rate).to(like) / (1 - rate)
        place = int(torch.randint(len(pool) - like.numel() + 1, ()))
        return pool[place : place + like.numel()].view(like.shape)


def _has_hooks(part: nn.Module) -> bool:
    return any(vars(part)[name] for name in HOOKS)


def _acts_on_rows(part: nn.Module, width: int, like: Tensor) -> bool:
    """Whether a module without parameters gives each row [D] the same, in rows [B, D] and in stacked ones [R, B, D]."""
    if any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
        return False
    with own_generators(), torch.no_grad():
        x = torch.linspace(-3, 3, 12 * width, dtype=like.dtype, device=like.device).sin().view(3, 4, width)
        found = part(x)
        return (
            isinstance(found, Tensor)
            and found.shape == x.shape
            and torch.allclose(found, torch.stack([part(row) for row in x]))
        )


class _Run(torch.autograd.Function):
    r"""Outputs, and $\frac12 \sum_w \lVert w \rVert^2 / \sigma_w^2$ of each network, [R], with all gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, networks: Perceptrons, *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.values = [value.detach().requires_grad_() for value in values]
        ctx.precisions = networks.precisions(values[0])
        with torch.enable_grad():
            ctx.outputs = networks.run(x, ctx.values)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in values], dim=1)  # [R, W]
        return ctx.outputs.detach(), 0.5 * (norms.square() * ctx.precisions).sum(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = torch.autograd.grad(ctx.outputs, ctx.values, grads[0])
        slopes = (grads[1].unsqueeze(1) * ctx.precisions).unbind(1)
        for grad, value, slope in zip(found, ctx.values, slopes, strict=True):
            grad.addcmul_(value.detach(), slope.view(-1, *[1] * (value.ndim - 1)))
        return None, None, *found


class _Affine(torch.autograd.Function):
    """x W^T + b for R stacked matrices [R, O, D] and biases [R, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None, torch.bmm(grad.mT, x), grad.sum(1)


run_all: Callable[..., tuple[Tensor, Tensor]] = _Run.apply
affine: Callable[..., Tensor] = _Affine.apply
